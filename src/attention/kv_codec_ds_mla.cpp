// KvFormat::fp8_ds_mla: a token's latent in e4m3 with a scale for each 128 elements, and its rope part in bf16, in one record of 656 bytes.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "attention/ds_mla.h"
#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

void check_ds_mla(const AttentionSpec& spec) {
  check(spec.kv_dtype == DType::fp8_e4m3, "spec.kv_dtype.ds_mla", "expected fp8_e4m3 for fp8_ds_mla, got {}", to_string(spec.kv_dtype));
  check(spec.num_kv_heads == 1 && spec.head_dim_qk == kDsMlaLatent + kDsMlaRope && spec.head_dim_v == kDsMlaLatent, "spec.ds_mla",
        "expected 1 kv head with keys of {} and values of {} dimensions, got {} with {} and {}", kDsMlaLatent + kDsMlaRope, kDsMlaLatent,
        spec.num_kv_heads, spec.head_dim_qk, spec.head_dim_v);
  check(spec.block_size > 0, "spec.block_size.ds_mla", "expected 1 or more for fp8_ds_mla, got {}", spec.block_size);
}

std::optional<KvLayout> ds_mla_layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k) return std::nullopt;
  return KvLayout{.dtype = DType::u8, .dims = "btx", .sizes = {1, spec.block_size, kDsMlaBytes}, .piece = "a token's record"};
}

char* record_of(const KvCache& cache, KvPlace at) {
  return cache.k.as<char>() + at.block * cache.k.stride(0) + at.offset * cache.k.stride(1);
}

void encode_ds_mla(const AttentionSpec&, const KvCache& cache, KvPart, KvPlace at, const KvRow& row) {
  std::array<float, kDsMlaLatent + kDsMlaRope> x;
  for (int d = 0; d < kDsMlaLatent + kDsMlaRope; ++d) x[size_t(d)] = load_as_float(row.data, row.dtype, row.first + d * row.stride);
  char* const record = record_of(cache, at);
  for (int g = 0; g < kDsMlaGroups; ++g) {
    const float* const group = x.data() + ptrdiff_t(g) * kDsMlaGroup;
    unsigned largest = 0;
    for (int d = 0; d < kDsMlaGroup; ++d) largest = std::max(largest, ds_mla_magnitude(std::bit_cast<unsigned>(group[d])));
    const float scale = std::bit_cast<float>(ds_mla_scale(largest));
    std::memcpy(record + kDsMlaScalesAt + ptrdiff_t(4) * g, &scale, 4);
    for (int d = 0; d < kDsMlaGroup; ++d) store_from_float(record, DType::fp8_e4m3, g * kDsMlaGroup + d, group[d] / scale);
  }
  for (int d = 0; d < kDsMlaRope; ++d) store_from_float(record + kDsMlaRopeAt, DType::bf16, d, x[kDsMlaLatent + size_t(d)]);
}

void decode_ds_mla(const AttentionSpec&, const KvCache& cache, KvPart part, KvPlace at, double* row) {
  const char* const record = record_of(cache, at);
  for (int d = 0; d < kDsMlaLatent; ++d) {
    float scale = 0;
    std::memcpy(&scale, record + kDsMlaScalesAt + ptrdiff_t(4) * (d / kDsMlaGroup), 4);
    row[d] = double(scale) * load_as_double(record, DType::fp8_e4m3, d);
  }
  for (int d = 0; part == KvPart::k && d < kDsMlaRope; ++d) row[kDsMlaLatent + d] = load_as_double(record + kDsMlaRopeAt, DType::bf16, d);
}

}  // namespace

const KvCodec kDsMlaCodec{.name = "fp8_ds_mla",
                          .strided = false,
                          .values_in_keys = true,
                          .scales_inside = true,
                          .ragged = false,
                          .block_unit = 1,
                          .preferred = nullptr,
                          .check = check_ds_mla,
                          .layout = ds_mla_layout,
                          .encode = encode_ds_mla,
                          .decode = decode_ds_mla};

}  // namespace imbrex
