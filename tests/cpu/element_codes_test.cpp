// Every code of every element type comes through attention as the number it stands for, as a key and as a value, with few rows and many.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

constexpr int kDim = 64;

struct Codes {
  std::vector<uint8_t> keys, values;  // all codes one after the other; keys up to a million, as logits may be
  int rows = 0;
};

Codes codes_of(DType type) {
  const int count = size_of(type) == 1 ? 256 : 65536;
  Codes all{std::vector<uint8_t>(size_t(count) * size_of(type)), {}, count / kDim};
  for (int code = 0; code < count; ++code) std::memcpy(&all.keys[size_t(code) * size_of(type)], &code, size_of(type));
  all.values = all.keys;
  for (int code = 0; code < count; ++code)
    if (!(std::abs(load_as_float(all.keys.data(), type, code)) <= 1e6f))
      std::memset(&all.keys[size_t(code) * size_of(type)], 0, size_of(type));
  return all;
}

// Up to the rounding of a softmax over one key; `absolute` is for its logarithm.
bool close(float x, float y, float absolute = 0.f) { return x == y || std::abs(x - y) <= absolute + 1e-6f * std::abs(y); }

// One request for each row of codes: its only key and value. Query head h is 1 in dim h, so that its LSE is the key's number there.
void expect_all_codes(const Backend& backend, const DeviceInfo& device, DType type, int heads) {
  const AttentionSpec spec{.num_q_heads = heads,
                           .num_kv_heads = 1,
                           .head_dim_qk = kDim,
                           .head_dim_v = kDim,
                           .q_dtype = type == DType::f16 ? DType::f16 : DType::bf16,
                           .kv_dtype = type,
                           .block_size = 16,
                           .mask = {},
                           .score = {.scale = 1.f}};
  if (!backend.unsupported(spec, device).empty()) return;
  SCOPED_TRACE(std::string(backend.name()) + " on " + to_string(device.isa) + ", " + to_string(type) + ", heads: " + std::to_string(heads));
  const Codes codes = codes_of(type);
  const KvAllocation allocation(spec, 1, codes.rows, "lbhtd");
  const KvCache cache = allocation.layer(0);
  const size_t row_bytes = size_t(kDim) * size_of(type);
  std::vector<int32_t> starts{0}, lens, indptr{0}, indices;
  for (int r = 0; r < codes.rows; ++r) {
    std::memcpy(cache.k.as<uint8_t>() + r * cache.k.stride(0) * int64_t(size_of(type)), &codes.keys[r * row_bytes], row_bytes);
    std::memcpy(cache.v.as<uint8_t>() + r * cache.v.stride(0) * int64_t(size_of(type)), &codes.values[r * row_bytes], row_bytes);
    starts.push_back(r + 1), lens.push_back(1), indptr.push_back(r + 1), indices.push_back(r);
  }
  const uint16_t one = spec.q_dtype == DType::f16 ? 0x3c00 : 0x3f80;
  std::vector<uint16_t> q(size_t(codes.rows) * heads * kDim);
  for (int i = 0; i < codes.rows * heads; ++i) q[size_t(i) * kDim + i % heads] = one;
  std::vector<float> out(size_t(codes.rows) * heads * kDim), lse(size_t(codes.rows) * heads);
  const auto plan = backend.plan(spec, device, {.limits = {.max_num_reqs = codes.rows}});
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  batch.kv_indptr = TensorView::contiguous(indptr.data(), DType::i32, {int64_t(indptr.size())});
  batch.kv_indices = TensorView::contiguous(indices.data(), DType::i32, {int64_t(indices.size())});
  plan->update(batch);
  plan->run({.q = TensorView::contiguous(q.data(), spec.q_dtype, {codes.rows, heads, kDim}), .kv = cache},
            {.out = TensorView::contiguous(out.data(), DType::f32, {codes.rows, heads, kDim}),
             .lse = TensorView::contiguous(lse.data(), DType::f32, {codes.rows, heads})});
  int wrong = 0;
  std::vector<float> values(kDim);
  for (int r = 0; r < codes.rows; ++r) {
    for (int d = 0; d < kDim; ++d) values[size_t(d)] = load_as_float(codes.values.data(), type, r * kDim + d);
    for (int h = 0; h < heads; ++h) {
      const float key = load_as_float(codes.keys.data(), type, r * kDim + h), got = lse[size_t(r) * heads + h];
      if (!close(got, key, 2e-7f) && ++wrong < 5) ADD_FAILURE() << "key " << r * kDim + h << " is " << got << ", not " << key;
      const float* const row = &out[(size_t(r) * heads + h) * kDim];
      for (int d = 0; d < kDim; ++d) {
        const float value = values[size_t(d)], x = row[d];
        if (x == value) continue;
        const bool right = std::isnan(value) ? std::isnan(x) : close(x, value);
        if (!right && ++wrong < 5) ADD_FAILURE() << "value " << r * kDim + d << " is " << x << ", not " << value;
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(ElementCodes, AllAreRead) {
  const DeviceInfo probed = probe_cpu();
  for (const auto& [name, isa] : {std::pair{"cpu_generic", CpuIsa::generic},
                                  {"cpu_generic", CpuIsa::avx2},
                                  {"cpu_avx512", CpuIsa::avx512},
                                  {"cpu_avx512", CpuIsa::avx512_bf16}}) {
    DeviceInfo device = probed;
    device.isa = isa;
    if (isa > probed.isa) continue;
    for (const DType type : {DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2})
      for (const int heads : {4, 64}) expect_all_codes(*find_backend(name), device, type, heads);
  }
}

}  // namespace
}  // namespace imbrex
