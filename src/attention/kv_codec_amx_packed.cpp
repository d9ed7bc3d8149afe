// KvFormat::amx_packed: tiles as the AMX unit reads them; docs/kv-formats.md has the formulas and pictures.
#include <cstring>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

constexpr int kPackedTokens = 16, kPackedDims = 32;  // tokens, dims

int64_t padded_dims(int head_dim) { return (int64_t(head_dim) + kPackedDims - 1) / kPackedDims * kPackedDims; }

void check_packed(const AttentionSpec& spec) {
  check_element_type(spec);
  check(spec.block_size > 0 && spec.block_size % kPackedTokens == 0, "spec.block_size.packed",
        "expected a multiple of 16 for amx_packed, got {}", spec.block_size);
  check(is_fp8(spec.kv_dtype) || spec.kv_dtype == DType::bf16, "spec.kv_dtype.packed", "expected bf16 or fp8 for amx_packed, got {}",
        to_string(spec.kv_dtype));
}

std::optional<KvLayout> packed_layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k && part != KvPart::v) return std::nullopt;
  const int64_t bytes = packed_block_bytes(spec.block_size, part == KvPart::k ? spec.head_dim_qk : spec.head_dim_v, spec.kv_dtype);
  return KvLayout{.dtype = DType::u8, .dims = "bhx", .sizes = {1, spec.num_kv_heads, bytes}, .piece = "a head's block"};
}

// Position of an element within a head's block of keys.
int64_t packed_key_position(int64_t dims, int64_t token, int64_t d) {
  return ((token / 16 * (dims / 32) + d / 32) * 16 + d % 32 / 2) * 32 + token % 16 * 2 + d % 2;
}
// Position of an element within a head's block of values. A block whose size is 16 modulo 32 ends with half a group: tiles of 8 rows.
int64_t packed_value_position(int64_t dims, int64_t block_size, int64_t token, int64_t d) {
  const int64_t group = token / 32 * 32;
  if (group + 32 > block_size) return group * dims + d / 16 * 256 + (token - group) / 2 * 32 + d % 16 * 2 + token % 2;
  return (token / 32 * (dims / 16) + d / 16) * 512 + token % 32 / 2 * 32 + d % 16 * 2 + token % 2;
}

// The elements of one token in a head's block.
class PackedTiles {
 public:
  PackedTiles(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place)
      : keys_(part == KvPart::k),
        dtype_(spec.kv_dtype),
        dim_(keys_ ? spec.head_dim_qk : spec.head_dim_v),
        block_size_(spec.block_size),
        token_(place.offset) {
    const TensorView& t = keys_ ? cache.k : cache.v;
    bytes_ = t.as<char>() + place.block * t.stride(0) + place.head * t.stride(1);
  }
  int dim() const { return dim_; }
  char* bytes() const { return bytes_; }
  // The index of element d. Where elements have one byte, two rows of a tile share 64 bytes: one has the even bytes, one the odd ones.
  int64_t at(int64_t d) const {
    const int64_t dims = padded_dims(dim_),
                  e = keys_ ? packed_key_position(dims, token_, d) : packed_value_position(dims, block_size_, token_, d);
    return size_of(dtype_) == 1 ? e / 64 * 64 + e % 32 * 2 + e % 64 / 32 : e;
  }

 private:
  bool keys_;
  DType dtype_;
  int dim_;
  int64_t block_size_, token_;
  char* bytes_;
};

float packed_scale(const AttentionSpec& spec, const KvCache& cache, KvPart part, int head) {
  return scale_of_head(part == KvPart::k ? cache.k_scale : cache.v_scale, spec.kv_dtype, head);
}

void encode_packed(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, const KvRow& row) {
  const PackedTiles tiles(spec, cache, part, place);
  const float scale = packed_scale(spec, cache, part, place.head);
  const int64_t size = size_of(spec.kv_dtype);
  for (int64_t d = 0; d < padded_dims(tiles.dim()); ++d) {
    const int64_t from = row.first + d * row.stride;
    char* const to = tiles.bytes() + tiles.at(d) * size;
    if (d >= tiles.dim()) {
      std::memset(to, 0, size_t(size));
    } else if (row.dtype == spec.kv_dtype) {
      std::memcpy(to, static_cast<const char*>(row.data) + from * size, size_t(size));
    } else {
      store_from_float(to, spec.kv_dtype, 0, load_as_float(row.data, row.dtype, from) / scale);
    }
  }
}

void decode_packed(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, double* row) {
  const PackedTiles tiles(spec, cache, part, place);
  const double scale = packed_scale(spec, cache, part, place.head);
  for (int d = 0; d < tiles.dim(); ++d) row[d] = scale * load_as_double(tiles.bytes(), spec.kv_dtype, tiles.at(d));
}

}  // namespace

int64_t packed_block_bytes(int block_size, int head_dim, DType kv_dtype) {
  check(block_size > 0 && block_size % kPackedTokens == 0, "kv_cache.packed.block_size", "expected a multiple of 16, got {}", block_size);
  check(head_dim > 0, "kv_cache.packed.head_dim", "expected 1 or more, got {}", head_dim);
  check(kv_dtype == DType::bf16 || is_fp8(kv_dtype), "kv_cache.packed.dtype", "expected bf16 or fp8, got {}", to_string(kv_dtype));
  return checked_mul("kv_cache.size.overflow", int64_t(block_size) * size_of(kv_dtype), padded_dims(head_dim));
}

const KvCodec kAmxPackedCodec{.name = "amx_packed",
                              .strided = false,
                              .values_in_keys = false,
                              .scales_inside = false,
                              .ragged = false,
                              .block_unit = kPackedTokens,
                              .preferred = "the AMX backend reads it without rearranging",
                              .check = check_packed,
                              .layout = packed_layout,
                              .encode = encode_packed,
                              .decode = decode_packed};

}  // namespace imbrex
