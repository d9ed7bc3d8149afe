// KvCache checks and KvAllocation: the memory of a paged KV cache on the host, in any physical order of its dimensions.
#include "imbrex/kv_cache.h"

#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <string>

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {

namespace {

// The error codes of one tensor's rules, which begin with "kv_cache.k" or "kv_cache.v".
struct SideCodes {
  const char *missing, *dtype, *rank, *block_size, *num_heads, *head_dim, *packed_bytes, *packed_stride, *strides;
  const char *scale_unexpected, *scale_dtype, *scale_size, *scale_device, *scale_value;
};
constexpr SideCodes kKeyCodes{
    "kv_cache.k.missing",     "kv_cache.k.dtype",        "kv_cache.k.rank",          "kv_cache.k.block_size", "kv_cache.k.num_heads",
    "kv_cache.k.head_dim",    "kv_cache.k.packed_bytes", "kv_cache.k.packed_stride", "kv_cache.k.strides",    "kv_cache.k_scale.unexpected",
    "kv_cache.k_scale.dtype", "kv_cache.k_scale.size",   "kv_cache.k_scale.device",  "kv_cache.k_scale.value"};
constexpr SideCodes kValueCodes{
    "kv_cache.v.missing",     "kv_cache.v.dtype",        "kv_cache.v.rank",          "kv_cache.v.block_size", "kv_cache.v.num_heads",
    "kv_cache.v.head_dim",    "kv_cache.v.packed_bytes", "kv_cache.v.packed_stride", "kv_cache.v.strides",    "kv_cache.v_scale.unexpected",
    "kv_cache.v_scale.dtype", "kv_cache.v_scale.size",   "kv_cache.v_scale.device",  "kv_cache.v_scale.value"};

// Refuses strides of 0, by which two elements would share an address.
void check_strides(const TensorView& t, const char* code) {
  for (int d = 0; d < t.rank; ++d) check(t.size(d) <= 1 || t.stride(d) > 0, code, "stride of dimension {} of {} is {}", d, t, t.stride(d));
  check(t.is_addressable(), code, "the strides of {} reach past 63 bits", t);
}

void check_side(const TensorView& t, const AttentionSpec& spec, int head_dim, const SideCodes& codes) {
  if (t.empty()) fail(codes.missing, "expected a tensor for {}, got none", spec.str());
  const bool packed = spec.kv_format == KvFormat::amx_packed, ragged = !packed && spec.block_size == 0;
  const DType dtype = packed ? DType::u8 : spec.kv_dtype;
  const int rank = packed || ragged ? 3 : 4, head = packed || ragged ? 1 : 2;
  check(t.dtype == dtype, codes.dtype, "expected {}, got {}", to_string(dtype), t);
  check(t.rank == rank, codes.rank, "expected {} dimensions, got {}", rank, t);
  if (rank == 4) check(t.size(1) == spec.block_size, codes.block_size, "expected {} tokens in a block, got {}", spec.block_size, t);
  check(t.size(head) == spec.num_kv_heads, codes.num_heads, "expected {} heads, got {}", spec.num_kv_heads, t);
  if (packed) {
    const int64_t bytes = packed_block_bytes(spec.block_size, head_dim, spec.kv_dtype);
    check(t.size(2) == bytes, codes.packed_bytes, "expected {} bytes for a head's block, got {}", bytes, t);
    check(t.stride(2) == 1, codes.packed_stride, "expected the bytes of a head's block in one piece, got stride {} in {}", t.stride(2), t);
  } else {
    check(t.size(head + 1) == head_dim, codes.head_dim, "expected head dimension {}, got {}", head_dim, t);
  }
  check_strides(t, codes.strides);
}

void check_scale(const TensorView& scale, const TensorView& t, const AttentionSpec& spec, const SideCodes& codes) {
  if (scale.empty()) return;
  check(is_fp8(spec.kv_dtype), codes.scale_unexpected, "a scale is given for {} elements, only fp8 has one", to_string(spec.kv_dtype));
  check(scale.dtype == DType::f32, codes.scale_dtype, "expected f32, got {}", scale);
  check(scale.rank == 1 && (scale.size(0) == 1 || scale.size(0) == spec.num_kv_heads), codes.scale_size, "expected [1] or [{}], got {}",
        spec.num_kv_heads, scale);
  const bool host = scale.device.type == DeviceType::cpu;
  check(host || scale.device == t.device, codes.scale_device, "expected a scale on the host or on {}, got {}", t.device, scale);
  if (!host) return;
  for (int64_t h = 0; h < scale.size(0); ++h) {
    const float value = scale.as<const float>()[h * scale.stride(0)];
    check(std::isfinite(value) && value > 0, codes.scale_value, "expected a finite positive scale, got {} at {}", value, h);
  }
}

}  // namespace

void KvCache::validate(const AttentionSpec& spec) const {
  check_side(k, spec, spec.head_dim_qk, kKeyCodes);
  check_side(v, spec, spec.head_dim_v, kValueCodes);
  check(k.device == v.device, "kv_cache.device", "expected k and v on one device, got {} and {}", k, v);
  check(k.size(0) == v.size(0), "kv_cache.num_blocks.differ", "expected as many blocks (or rows) of k as of v, got {} and {}", k, v);
  check(k.size(0) >= 0 && k.size(0) <= std::numeric_limits<int32_t>::max(), "kv_cache.num_blocks.range",
        "expected a number of blocks (or rows) that an i32 can count, got {}", k);
  check_scale(k_scale, k, spec, kKeyCodes);
  check_scale(v_scale, v, spec, kValueCodes);
}

int64_t packed_block_bytes(int block_size, int head_dim, DType kv_dtype) {
  check(block_size > 0 && block_size % 16 == 0, "kv_cache.packed.block_size", "expected a multiple of 16, got {}", block_size);
  check(head_dim > 0, "kv_cache.packed.head_dim", "expected 1 or more, got {}", head_dim);
  check(kv_dtype == DType::bf16 || is_fp8(kv_dtype), "kv_cache.packed.dtype", "expected bf16 or fp8, got {}", to_string(kv_dtype));
  const int64_t padded_dim = (int64_t(head_dim) + 31) / 32 * 32;
  return checked_mul("kv_cache.size.overflow", int64_t(block_size) * size_of(kv_dtype), padded_dim);
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

void check_order(std::string_view order, bool packed) {
  std::string seen;
  for (char c : order) {
    check(std::string_view("lbhtd").find(c) != std::string_view::npos, "kv_cache.order.letter", "expected letters of lbhtd, got \"{}\"",
          order);
    check(seen.find(c) == std::string::npos, "kv_cache.order.twice", "'{}' appears twice in \"{}\"", c, order);
    seen += c;
  }
  for (char c : std::string_view(packed ? "lbh" : "lbhtd"))
    check(seen.find(c) != std::string::npos, "kv_cache.order.missing", "'{}' is missing in \"{}\"", c, order);
}

// View with logical dimensions named by `logical` ("lbthd"), whose strides follow the physical order. Bytes go to `bytes`.
TensorView ordered_view(DType dtype, std::string_view logical, const std::array<int64_t, 5>& sizes, std::string_view order,
                        int64_t& bytes) {
  TensorView view;
  view.dtype = dtype;
  view.rank = int(logical.size());
  view.sizes = sizes;
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const size_t d = logical.find(order[i]);
    if (d == std::string_view::npos) continue;
    view.strides[d] = stride;
    stride = checked_mul("kv_cache.size.overflow", stride, sizes[d]);
  }
  bytes = checked_mul("kv_cache.size.overflow", stride, size_of(dtype));
  return view;
}

}  // namespace

KvAllocation::KvAllocation(const AttentionSpec& spec, int num_layers, int64_t num_blocks, std::string_view order,
                           const DeviceStream* stream)
    : spec_(spec), num_layers_(num_layers), num_blocks_(num_blocks) {
  spec.validate();
  const bool packed = spec.kv_format == KvFormat::amx_packed;
  check(spec.block_size > 0, "kv_cache.size.ragged", "a spec without blocks (block_size 0) has no cache to allocate");
  check(num_layers > 0, "kv_cache.size.num_layers", "expected 1 or more layers, got {}", num_layers);
  check(num_blocks > 0 && num_blocks <= std::numeric_limits<int32_t>::max(), "kv_cache.size.num_blocks",
        "expected 1 to {} blocks (block ids are i32), got {}", std::numeric_limits<int32_t>::max(), num_blocks);
  check_order(order, packed);
  int64_t k_bytes = 0, v_bytes = 0;
  if (packed) {
    // The bytes of a head's block stay together, innermost ('x').
    const std::string with_bytes = std::string(order) + "x";
    const int64_t k_block = packed_block_bytes(spec.block_size, spec.head_dim_qk, spec.kv_dtype);
    const int64_t v_block = packed_block_bytes(spec.block_size, spec.head_dim_v, spec.kv_dtype);
    k_ = ordered_view(DType::u8, "lbhx", {num_layers, num_blocks, spec.num_kv_heads, k_block}, with_bytes, k_bytes);
    v_ = ordered_view(DType::u8, "lbhx", {num_layers, num_blocks, spec.num_kv_heads, v_block}, with_bytes, v_bytes);
  } else {
    k_ = ordered_view(spec.kv_dtype, "lbthd", {num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim_qk}, order,
                      k_bytes);
    v_ =
        ordered_view(spec.kv_dtype, "lbthd", {num_layers, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim_v}, order, v_bytes);
  }
  const int64_t v_begin = round_up(k_bytes, kPage);
  check(!__builtin_add_overflow(v_begin, v_bytes, &bytes_) && bytes_ < std::numeric_limits<int64_t>::max() - 4 * kHugePage,
        "kv_cache.size.overflow", "{} bytes of keys and {} of values do not fit 63 bits", k_bytes, v_bytes);
  if (stream != nullptr && stream->device().type != DeviceType::cpu) {
    memory_ = stream->allocate(bytes_);
    stream->fill(memory_.get(), 0, bytes_);
    k_.device = v_.device = stream->device();
  } else {
    memory_ = map_memory(bytes_);
  }
  k_.data = memory_.get();
  v_.data = static_cast<char*>(memory_.get()) + v_begin;
}

KvCache KvAllocation::layer(int index) const {
  check(index >= 0 && index < num_layers_, "kv_cache.layer", "expected a layer from 0 to {}, got {}", num_layers_ - 1, index);
  return {.k = k_.select(0, index), .v = v_.select(0, index), .k_scale = {}, .v_scale = {}};
}

}  // namespace imbrex
