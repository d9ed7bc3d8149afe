// KvCache checks and KvAllocation: the memory of a paged KV cache on the host, in any physical order of its dimensions.
#include "imbrex/kv_cache.h"

#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <string>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {

namespace {

// The error codes of one tensor's rules, such as "kv_cache.k.dtype".
struct PartCodes {
  const char *missing, *dtype, *rank, *block_size, *num_heads, *head_dim, *packed_bytes, *packed_stride, *strides;
};
struct ScaleCodes {
  const char *unexpected, *dtype, *size, *device, *value;
};
constexpr PartCodes kKeyCodes{"kv_cache.k.missing",      "kv_cache.k.dtype",         "kv_cache.k.rank",
                              "kv_cache.k.block_size",   "kv_cache.k.num_heads",     "kv_cache.k.head_dim",
                              "kv_cache.k.packed_bytes", "kv_cache.k.packed_stride", "kv_cache.k.strides"};
constexpr PartCodes kValueCodes{"kv_cache.v.missing",      "kv_cache.v.dtype",         "kv_cache.v.rank",
                                "kv_cache.v.block_size",   "kv_cache.v.num_heads",     "kv_cache.v.head_dim",
                                "kv_cache.v.packed_bytes", "kv_cache.v.packed_stride", "kv_cache.v.strides"};
constexpr PartCodes kRopeCodes{"kv_cache.k_rope.missing",    "kv_cache.k_rope.dtype",     "kv_cache.k_rope.rank",
                               "kv_cache.k_rope.block_size", "kv_cache.k_rope.num_heads", "kv_cache.k_rope.head_dim",
                               "kv_cache.k_rope.rank",       "kv_cache.k_rope.rank",      "kv_cache.k_rope.strides"};
// Scales that are stored with the tokens have one code for all rules.
constexpr const char* kScale = "kv_cache.scale";
constexpr PartCodes kStoredScaleCodes{kScale, kScale, kScale, kScale, kScale, kScale, kScale, kScale, kScale};
constexpr ScaleCodes kKeyScaleCodes{"kv_cache.k_scale.unexpected", "kv_cache.k_scale.dtype", "kv_cache.k_scale.size",
                                    "kv_cache.k_scale.device", "kv_cache.k_scale.value"};
constexpr ScaleCodes kValueScaleCodes{"kv_cache.v_scale.unexpected", "kv_cache.v_scale.dtype", "kv_cache.v_scale.size",
                                      "kv_cache.v_scale.device", "kv_cache.v_scale.value"};
constexpr ScaleCodes kRopeScaleCodes{"kv_cache.k_rope_scale.unexpected", "kv_cache.k_rope_scale.dtype", "kv_cache.k_rope_scale.size",
                                     "kv_cache.k_rope_scale.device", "kv_cache.k_rope_scale.value"};

const PartCodes& codes_of(KvPart part) {
  switch (part) {
    case KvPart::k: return kKeyCodes;
    case KvPart::v: return kValueCodes;
    case KvPart::k_rope: return kRopeCodes;
    default: return kStoredScaleCodes;
  }
}

// Refuses strides of 0, by which two elements would share an address.
void check_strides(const TensorView& t, const char* code) {
  for (int d = 0; d < t.rank; ++d) check(t.size(d) <= 1 || t.stride(d) > 0, code, "stride of dimension {} of {} is {}", d, t, t.stride(d));
  check(t.is_addressable(), code, "the strides of {} reach past 63 bits", t);
}

void check_tensor(const TensorView& t, const KvLayout& wanted, const AttentionSpec& spec, const PartCodes& codes) {
  if (t.empty()) fail(codes.missing, "expected a tensor for {}, got none", spec.str());
  const int rank = int(wanted.dims.size());
  check(t.dtype == wanted.dtype, codes.dtype, "expected {}, got {}", to_string(wanted.dtype), t);
  check(t.rank == rank, codes.rank, "expected {} dimensions, got {}", rank, t);
  for (int d = 0; d < rank; ++d) {
    const int64_t size = wanted.sizes[size_t(d)];
    switch (wanted.dims[size_t(d)]) {
      case 't': check(t.size(d) == size, codes.block_size, "expected {} tokens in a block, got {}", size, t); break;
      case 'h': check(t.size(d) == size, codes.num_heads, "expected {} heads, got {}", size, t); break;
      case 'd': check(t.size(d) == size, codes.head_dim, "expected head dimension {}, got {}", size, t); break;
      case 'x':
        check(t.size(d) == size, codes.packed_bytes, "expected {} bytes for {}, got {}", size, wanted.piece, t);
        check(t.stride(d) == 1, codes.packed_stride, "expected the bytes of {} in one piece, got stride {} in {}", wanted.piece,
              t.stride(d), t);
        break;
      default: break;  // blocks or rows, of which the cache says how many there are
    }
  }
  check_strides(t, codes.strides);
}

// A caller may give values that are a part of the keys as that view of k, and as nothing else.
void check_values_in_keys(const TensorView& v, const TensorView& k, const AttentionSpec& spec) {
  if (v.empty()) return;
  bool same = v.data == k.data && v.dtype == k.dtype && v.device == k.device && v.rank == k.rank;
  for (int d = 0; same && d < k.rank; ++d)
    same = v.size(d) == (d + 1 < k.rank ? k.size(d) : spec.head_dim_v) && (v.size(d) == 1 || v.stride(d) == k.stride(d));
  check(same, "kv_cache.v.unexpected", "expected no v, since values are the first {} elements of the rows of k {}, got {}", spec.head_dim_v,
        k, v);
}

void check_scale(const TensorView& scale, const TensorView& t, const AttentionSpec& spec, const ScaleCodes& codes) {
  if (scale.empty()) return;
  check(!codec_of(spec).scales_inside, codes.unexpected, "expected none, since each record has its own scales, got {}", scale);
  check(is_fp8(spec.kv_dtype), codes.unexpected, "a scale is given for {} elements, only fp8 has one", to_string(spec.kv_dtype));
  check(scale.dtype == DType::f32, codes.dtype, "expected f32, got {}", scale);
  check(scale.rank == 1 && (scale.size(0) == 1 || scale.size(0) == spec.num_kv_heads), codes.size, "expected [1] or [{}], got {}",
        spec.num_kv_heads, scale);
  const bool host = scale.device.type == DeviceType::cpu;
  check(host || scale.device == t.device, codes.device, "expected a scale on the host or on {}, got {}", t.device, scale);
  if (!host) return;
  for (int64_t h = 0; h < scale.size(0); ++h) {
    const float value = scale.as<const float>()[h * scale.stride(0)];
    check(std::isfinite(value) && value > 0, codes.value, "expected a finite positive scale, got {} at {}", value, h);
  }
}

}  // namespace

void KvCache::validate(const AttentionSpec& spec) const {
  const KvCodec& codec = codec_of(spec);
  for (const KvPart part : kKvParts) {
    const TensorView& t = part_of(*this, part);
    if (const auto layout = codec.layout(spec, part))
      check_tensor(t, *layout, spec, codes_of(part));
    else if (part == KvPart::v)
      check_values_in_keys(t, k, spec);
    else
      continue;
    if (part == KvPart::k || t.empty()) continue;
    check(k.device == t.device, "kv_cache.device", "expected k and {} on one device, got {} and {}", to_string(part), k, t);
    check(k.size(0) == t.size(0), "kv_cache.num_blocks.differ", "expected as many blocks (or rows) of k as of {}, got {} and {}",
          to_string(part), k, t);
  }
  check(k.size(0) >= 0 && k.size(0) <= std::numeric_limits<int32_t>::max(), "kv_cache.num_blocks.range",
        "expected a number of blocks (or rows) that an i32 can count, got {}", k);
  if (!codec.layout(spec, KvPart::k_scale)) check_scale(k_scale, k, spec, kKeyScaleCodes);
  if (codec.layout(spec, KvPart::k_rope)) {
    check_scale(k_rope_scale, k_rope, spec, kRopeScaleCodes);
    check(k_scale.empty() == k_rope_scale.empty(), "kv_cache.k_rope_scale.alone",
          "expected both k_scale and k_rope_scale or none, got {} and {}", k_scale, k_rope_scale);
  } else {
    check(k_rope.empty(), "kv_cache.k_rope.unexpected", "expected no k_rope for kv_format {}, got {}", codec.name, k_rope);
    check(k_rope_scale.empty(), kRopeScaleCodes.unexpected, "expected no k_rope_scale for kv_format {}, got {}", codec.name, k_rope_scale);
  }
  if (codec.layout(spec, KvPart::v_scale)) return;
  check(!codec.values_in_keys || v_scale.empty(), kValueScaleCodes.unexpected,
        "expected no v_scale, since values are a part of the keys and have k_scale, got {}", v_scale);
  check_scale(v_scale, v, spec, kValueScaleCodes);
}

namespace {

constexpr int64_t kHugePage = int64_t(2) << 20, kPage = 4096;

int64_t round_up(int64_t bytes, int64_t unit) {
  int64_t sum = 0;
  check(!__builtin_add_overflow(bytes, unit - 1, &sum), "kv_cache.size.overflow", "{} bytes rounded up to {} do not fit 63 bits", bytes,
        unit);
  return sum / unit * unit;
}

// Zeroed pages that start at a huge page's boundary.
std::shared_ptr<void> map_memory(int64_t bytes) {
  const int64_t length = round_up(bytes, kPage), reserved = round_up(length + kPage, kPage) + kHugePage;
  void* base = mmap(nullptr, size_t(reserved), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(base != MAP_FAILED, "kv_cache.size.memory", "the system has no {} bytes for a KV cache", bytes);
  char* const first = static_cast<char*>(base);
  char* const begin = first + (kHugePage - int64_t(reinterpret_cast<uintptr_t>(first) % kHugePage)) % kHugePage;
  if (begin > first) munmap(first, size_t(begin - first));
  munmap(begin + length, size_t(first + reserved - (begin + length)));
  madvise(begin, size_t(length), MADV_HUGEPAGE);  // a system without huge pages says no, which only costs speed
  return {begin, [length](void* p) { munmap(p, size_t(length)); }};
}

// `dims` are those of the format's keys. An order does not name x, which is innermost.
void check_order(std::string_view order, std::string_view dims) {
  constexpr std::string_view kLetters = "lbhtd";
  std::string seen;
  for (char c : order) {
    check(kLetters.find(c) != std::string_view::npos, "kv_cache.order.letter", "expected letters of lbhtd, got \"{}\"", order);
    check(seen.find(c) == std::string::npos, "kv_cache.order.twice", "'{}' appears twice in \"{}\"", c, order);
    seen += c;
  }
  for (char c : kLetters)
    check((c != 'l' && dims.find(c) == std::string_view::npos) || seen.find(c) != std::string::npos, "kv_cache.order.missing",
          "'{}' is missing in \"{}\"", c, order);
}

// The view of a tensor of all layers, whose strides follow the physical order. `bytes` receives its size.
TensorView ordered_view(const KvLayout& layout, int64_t num_layers, int64_t num_blocks, std::string_view order, int64_t& bytes) {
  TensorView view{.dtype = layout.dtype, .rank = int(layout.dims.size()) + 1};
  view.sizes = {num_layers, num_blocks};
  for (size_t d = 1; d < layout.dims.size(); ++d) view.sizes[d + 1] = layout.sizes[d];
  const std::string logical = "l" + std::string(layout.dims), physical = std::string(order) + "x";
  int64_t stride = 1;
  for (size_t i = physical.size(); i-- > 0;) {
    const size_t d = logical.find(physical[i]);
    if (d == std::string::npos) continue;
    view.strides[d] = stride;
    stride = checked_mul("kv_cache.size.overflow", stride, view.sizes[d]);
  }
  bytes = checked_mul("kv_cache.size.overflow", stride, size_of(layout.dtype));
  return view;
}

}  // namespace

KvAllocation::KvAllocation(const AttentionSpec& spec, int num_layers, int64_t num_blocks, std::string_view order,
                           const DeviceStream* stream)
    : spec_(spec), num_layers_(num_layers), num_blocks_(num_blocks) {
  spec.validate();
  const KvCodec& codec = codec_of(spec);
  check(spec.block_size > 0, "kv_cache.size.ragged", "a spec without blocks (block_size 0) has no cache to allocate");
  check(num_layers > 0, "kv_cache.size.num_layers", "expected 1 or more layers, got {}", num_layers);
  check(num_blocks > 0 && num_blocks <= std::numeric_limits<int32_t>::max(), "kv_cache.size.num_blocks",
        "expected 1 to {} blocks (block ids are i32), got {}", std::numeric_limits<int32_t>::max(), num_blocks);
  check_order(order, codec.layout(spec, KvPart::k)->dims);
  std::array<int64_t, kKvParts.size()> begins{};
  for (size_t i = 0; i < kKvParts.size(); ++i) {
    const auto layout = codec.layout(spec, kKvParts[i]);
    if (!layout) continue;
    int64_t bytes = 0;
    part_of(all_, kKvParts[i]) = ordered_view(*layout, num_layers, num_blocks, order, bytes);
    begins[i] = round_up(bytes_, kPage);
    check(!__builtin_add_overflow(begins[i], bytes, &bytes_) && bytes_ < std::numeric_limits<int64_t>::max() - 4 * kHugePage,
          "kv_cache.size.overflow", "{} bytes and {} more of a cache do not fit 63 bits", begins[i], bytes);
  }
  const bool host = stream == nullptr || stream->device().type == DeviceType::cpu;
  if (host) {
    memory_ = map_memory(bytes_);
  } else {
    memory_ = stream->allocate(bytes_);
    stream->fill(memory_.get(), 0, bytes_);
  }
  for (size_t i = 0; i < kKvParts.size(); ++i) {
    TensorView& t = part_of(all_, kKvParts[i]);
    if (t.rank == 0) continue;
    if (!host) t.device = stream->device();
    t.data = static_cast<char*>(memory_.get()) + begins[i];
  }
}

KvCache KvAllocation::layer(int index) const {
  check(index >= 0 && index < num_layers_, "kv_cache.layer", "expected a layer from 0 to {}, got {}", num_layers_ - 1, index);
  KvCache one;
  for (const KvPart part : kKvParts)
    if (const TensorView& t = part_of(all_, part); !t.empty()) part_of(one, part) = t.select(0, index);
  return one;
}

}  // namespace imbrex
