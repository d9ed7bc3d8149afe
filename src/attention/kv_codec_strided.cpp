// KvFormat::strided, KvFormat::latent and KvFormat::latent_rope: an element wherever the strides of its tensor say.
#include "attention/kv_codec.h"

#include <cstring>

#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

// Rows of `dim` elements of kv_dtype.
KvLayout rows_of(const AttentionSpec& spec, int64_t dim) {
  if (spec.block_size == 0) return {.dtype = spec.kv_dtype, .dims = "rhd", .sizes = {1, spec.num_kv_heads, dim}, .piece = {}};
  return {.dtype = spec.kv_dtype, .dims = "bthd", .sizes = {1, spec.block_size, spec.num_kv_heads, dim}, .piece = {}};
}

std::optional<KvLayout> strided_layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k && part != KvPart::v) return std::nullopt;
  return rows_of(spec, part == KvPart::k ? spec.head_dim_qk : spec.head_dim_v);
}

std::optional<KvLayout> latent_layout(const AttentionSpec& spec, KvPart part) {
  return part == KvPart::k ? strided_layout(spec, part) : std::nullopt;
}

int rope_dim(const AttentionSpec& spec) { return spec.head_dim_qk - spec.head_dim_v; }

std::optional<KvLayout> latent_rope_layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k && part != KvPart::k_rope) return std::nullopt;
  return rows_of(spec, part == KvPart::k ? spec.head_dim_v : rope_dim(spec));
}

// The index of a row's first element, and the distance from one element to the next.
struct RowPlace {
  int64_t first, stride;
};
RowPlace find_row(const AttentionSpec& spec, const TensorView& t, KvPlace at) {
  if (spec.block_size == 0) return {at.block * t.strides[0] + at.head * t.strides[1], t.strides[2]};
  return {at.block * t.strides[0] + at.offset * t.strides[1] + at.head * t.strides[2], t.strides[3]};
}

void store_elements(const AttentionSpec& spec, const TensorView& t, const TensorView& scales, KvPlace place, int count, const KvRow& row) {
  const RowPlace to = find_row(spec, t, place);
  const float scale = scale_of_head(scales, t.dtype, place.head);
  const int64_t size = size_of(t.dtype);
  for (int d = 0; d < count; ++d) {
    const int64_t target = to.first + d * to.stride, from = row.first + d * row.stride;
    if (row.dtype == t.dtype) {  // bits as they are: an fp8 source has the scale in it
      std::memcpy(t.as<char>() + target * size, static_cast<const char*>(row.data) + from * size, size_t(size));
    } else {
      store_from_float(t.data, t.dtype, target, load_as_float(row.data, row.dtype, from) / scale);
    }
  }
}

void encode_strided(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, const KvRow& row) {
  part == KvPart::k ? store_elements(spec, cache.k, cache.k_scale, place, spec.head_dim_qk, row)
                    : store_elements(spec, cache.v, cache.v_scale, place, spec.head_dim_v, row);
}

void encode_latent_rope(const AttentionSpec& spec, const KvCache& cache, KvPart, KvPlace place, const KvRow& row) {
  store_elements(spec, cache.k, cache.k_scale, place, spec.head_dim_v, row);
  KvRow behind = row;
  behind.first += spec.head_dim_v * row.stride;
  store_elements(spec, cache.k_rope, cache.k_rope_scale, place, rope_dim(spec), behind);
}

void load_elements(const AttentionSpec& spec, const TensorView& t, const TensorView& scales, KvPlace place, int count, double* row) {
  const RowPlace from = find_row(spec, t, place);
  const double scale = scale_of_head(scales, t.dtype, place.head);
  load_as_doubles(t.data, t.dtype, from.first, from.stride, {row, size_t(count)});
  for (int d = 0; d < count; ++d) row[d] *= scale;
}

void decode_strided(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, double* row) {
  part == KvPart::k ? load_elements(spec, cache.k, cache.k_scale, place, spec.head_dim_qk, row)
                    : load_elements(spec, cache.v, cache.v_scale, place, spec.head_dim_v, row);
}

void decode_latent(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, double* row) {
  load_elements(spec, cache.k, cache.k_scale, place, part == KvPart::k ? spec.head_dim_qk : spec.head_dim_v, row);
}

void decode_latent_rope(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace place, double* row) {
  load_elements(spec, cache.k, cache.k_scale, place, spec.head_dim_v, row);
  if (part == KvPart::k) load_elements(spec, cache.k_rope, cache.k_rope_scale, place, rope_dim(spec), row + spec.head_dim_v);
}

void check_latent(const AttentionSpec& spec) {
  check_element_type(spec);
  check(spec.head_dim_v <= spec.head_dim_qk, "spec.head_dim_v.latent",
        "expected at most head_dim_qk {}, of which values are a part, got {}", spec.head_dim_qk, spec.head_dim_v);
}

void check_latent_rope(const AttentionSpec& spec) {
  check_latent(spec);
  check(rope_dim(spec) > 0, "spec.head_dim_v.latent_rope", "expected less than head_dim_qk {}, or kv_format latent, got {}",
        spec.head_dim_qk, spec.head_dim_v);
}

}  // namespace

const KvCodec kStridedCodec{.name = "strided",
                            .strided = true,
                            .values_in_keys = false,
                            .scales_inside = false,
                            .ragged = true,
                            .block_unit = 1,
                            .preferred = nullptr,
                            .check = check_element_type,
                            .layout = strided_layout,
                            .encode = encode_strided,
                            .decode = decode_strided};

const KvCodec kLatentCodec{.name = "latent",
                           .strided = true,
                           .values_in_keys = true,
                           .scales_inside = false,
                           .ragged = true,
                           .block_unit = 1,
                           .preferred = nullptr,
                           .check = check_latent,
                           .layout = latent_layout,
                           .encode = encode_strided,
                           .decode = decode_latent};

const KvCodec kLatentRopeCodec{.name = "latent_rope",
                               .strided = false,
                               .values_in_keys = true,
                               .scales_inside = false,
                               .ragged = true,
                               .block_unit = 1,
                               .preferred = nullptr,
                               .check = check_latent_rope,
                               .layout = latent_rope_layout,
                               .encode = encode_latent_rope,
                               .decode = decode_latent_rope};

}  // namespace imbrex
