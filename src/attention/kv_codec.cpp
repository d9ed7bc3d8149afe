// The table of cache formats (see kv_codec.h), and what follows from a row of it.
#include "attention/kv_codec.h"

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "imbrex/error.h"

namespace imbrex {
namespace {

constexpr size_t kMostCodecs = 16;

struct Table {
  std::array<const KvCodec*, kMostCodecs> codecs{&kStridedCodec, &kAmxPackedCodec, &kLatentCodec, &kDsMlaCodec, &kLatentRopeCodec};
  std::array<KvFormat, kMostCodecs> formats{KvFormat::strided, KvFormat::amx_packed, KvFormat::latent, KvFormat::fp8_ds_mla,
                                            KvFormat::latent_rope};
  size_t size = 5;
};
Table& table() {
  static Table all;
  return all;
}

// The first `size` elements of each row of `t`.
TensorView narrowed(TensorView t, int64_t size) {
  if (!t.empty()) t.sizes[size_t(t.rank - 1)] = size;
  return t;
}

}  // namespace

int64_t KvLayout::bytes() const {
  int64_t count = size_of(dtype);
  for (size_t d = 0; d < dims.size(); ++d) count = checked_mul("kv_cache.size.overflow", count, sizes[d]);
  return count;
}

bool is_kv_format(KvFormat format) { return size_t(format) < table().size; }

const KvCodec& codec_of(KvFormat format) {
  check(is_kv_format(format), "spec.kv_format", "{} is no KV format", int(format));
  return *table().codecs[size_t(format)];
}

std::span<const KvFormat> kv_formats() { return std::span(table().formats).first(table().size); }

std::string kv_format_names() {
  std::string names;
  for (const KvFormat format : kv_formats()) {
    if (!names.empty()) names += format == kv_formats().back() ? " or " : ", ";
    names += to_string(format);
  }
  return names;
}

std::optional<KvFormat> find_kv_format(std::string_view name) {
  for (const KvFormat format : kv_formats())
    if (name == to_string(format)) return format;
  return std::nullopt;
}

KvFormat add_kv_codec(const KvCodec& codec) {
  Table& all = table();
  check(all.size < kMostCodecs, "kv_codec.full", "expected {} KV formats at most, {} is one more", kMostCodecs, codec.name);
  const auto format = KvFormat(all.size);
  all.codecs[all.size] = &codec, all.formats[all.size] = format;
  ++all.size;
  return format;
}

const char* to_string(KvFormat format) { return is_kv_format(format) ? codec_of(format).name : "unknown"; }

bool fits(AttentionSpec spec, KvFormat format, int block_size) {
  spec.kv_format = format;
  spec.block_size = block_size;
  try {
    spec.validate();
  } catch (const Error&) {
    return false;
  }
  return true;
}

int block_size_in(KvFormat format, int least) {
  const int unit = codec_of(format).block_unit;
  return (least + unit - 1) / unit * unit;
}

int64_t block_bytes(const AttentionSpec& spec) {
  int64_t bytes = 0;
  for (const KvPart part : kKvParts)
    if (const auto layout = codec_of(spec).layout(spec, part)) bytes += layout->bytes();
  return bytes;
}

int64_t AttentionSpec::kv_bytes_per_token() const { return block_bytes(*this) / std::max(block_size, 1); }

const char* to_string(KvPart part) {
  constexpr std::array kNames = {"k", "v", "k_scale", "v_scale", "k_rope"};
  return kNames[size_t(part)];
}

const TensorView& part_of(const KvCache& cache, KvPart part) {
  switch (part) {
    case KvPart::k: return cache.k;
    case KvPart::v: return cache.v;
    case KvPart::k_scale: return cache.k_scale;
    case KvPart::v_scale: return cache.v_scale;
    case KvPart::k_rope: break;
  }
  return cache.k_rope;
}
TensorView& part_of(KvCache& cache, KvPart part) { return const_cast<TensorView&>(part_of(std::as_const(cache), part)); }

KvCache with_values(const AttentionSpec& spec, const KvCache& cache) {
  if (!codec_of(spec).values_in_keys) return cache;
  KvCache both = cache;
  both.v = narrowed(cache.k, spec.head_dim_v), both.v_scale = cache.k_scale;
  return both;
}

float scale_of_head(const TensorView& scales, DType dtype, int head) {
  if (!is_fp8(dtype) || scales.empty()) return 1.f;
  return scales.as<const float>()[scales.size(0) == 1 ? 0 : head * scales.stride(0)];
}

void check_element_type(const AttentionSpec& spec) {
  const DType type = spec.kv_dtype;
  check(is_fp8(type) || type == DType::f32 || type == DType::bf16 || type == DType::f16, "spec.kv_dtype",
        "expected f32, bf16, f16, fp8_e4m3 or fp8_e5m2, got {}", to_string(type));
}

}  // namespace imbrex
