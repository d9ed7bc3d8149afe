// Kernels may run several kv heads of an item together where the heads of a token are neighbours in memory: not a bit depends on it, nor on
// how keys are read.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "imbrex/select.h"

namespace imbrex {
namespace {

struct Layer {
  const char* name;
  AttentionSpec spec;
  std::vector<int32_t> query_lens, lens;
};

AttentionSpec spec_of(int q_heads, int kv_heads, int dim_qk, int dim_v, int block_size, DType kv = DType::bf16) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .kv_dtype = kv,
          .block_size = block_size,
          .mask = {},
          .score = {}};
}

// Enough requests that a thread has tasks left when all heads are one.
const std::vector<int32_t> kOnes{1, 1, 1, 1, 1, 1}, kLens{300, 1, 260, 128, 129, 17};

std::vector<Layer> layers() {
  std::vector<Layer> all{
      {"plain", spec_of(8, 4, 32, 32, 16), kOnes, kLens},
      {"pages_of_one", spec_of(8, 4, 128, 128, 1), kOnes, kLens},
      {"odd_pages", spec_of(12, 4, 96, 40, 24), kOnes, kLens},
      {"dims_no_tile_has", spec_of(12, 6, 72, 80, 128), kOnes, kLens},
      {"e4m3", spec_of(16, 4, 128, 64, 32, DType::fp8_e4m3), kOnes, kLens},
      {"e5m2", spec_of(2, 2, 80, 64, 16, DType::fp8_e5m2), kOnes, kLens},
      {"verify", spec_of(16, 4, 64, 64, 16), {4, 3, 1, 4, 2, 4}, kLens},
      {"many_heads", spec_of(24, 24, 64, 64, 16), kOnes, kLens},
      {"window", spec_of(16, 8, 64, 64, 16), kOnes, kLens},
      {"sinks_and_cap", spec_of(16, 8, 64, 64, 16), kOnes, kLens},
  };
  all[0].lens[2] = 4200;  // sums are folded
  all[6].lens[1] = 3;
  all[8].spec.mask.window_left = 99;
  all[9].spec.score.sinks = true, all[9].spec.score.soft_cap = 20.f;
  return all;
}

// The same numbers in whatever order they lie, each made of 32 random bits.
template <class Element, class Make>
void fill(const TensorView& t, std::mt19937& random, Make make) {
  uint32_t bits = random();
  const int64_t width = t.size(3), step = t.stride(3);
  for (int64_t i = 0; i < t.size(0); ++i)
    for (int64_t j = 0; j < t.size(1); ++j)
      for (int64_t k = 0; k < t.size(2); ++k) {
        Element* at = t.as<Element>() + i * t.stride(0) + j * t.stride(1) + k * t.stride(2);
        for (int64_t d = 0; d < width; ++d, at += step) *at = make(bits = bits * 1664525u + 1013904223u);
      }
}

struct Result {
  std::vector<float> out, lse;
};

Result run(const Layer& layer, const Backend& backend, const DeviceInfo& device, const char* order, ParallelFor threads = {}) {
  const AttentionSpec& spec = layer.spec;
  std::mt19937 random(7);
  std::vector<int32_t> starts{0}, indptr{0}, indices;
  for (size_t r = 0; r < layer.lens.size(); ++r) {
    starts.push_back(starts.back() + layer.query_lens[r]);
    for (int b = 0; b * spec.block_size < layer.lens[r]; ++b) indices.push_back(int32_t(indices.size()));
    indptr.push_back(int32_t(indices.size()));
  }
  std::shuffle(indices.begin(), indices.end(), random);
  const KvAllocation allocation(spec, 1, int64_t(indices.size()), order);
  const KvCache cache = allocation.layer(0);
  for (const TensorView* t : {&cache.k, &cache.v}) {
    if (spec.kv_dtype == DType::bf16) {
      fill<uint16_t>(*t, random, [](uint32_t bits) { return uint16_t((bits >> 16 & 0x8000) | 0x3f00 | (bits >> 20 & 0xff)); });
    } else {
      fill<uint8_t>(*t, random, [](uint32_t bits) { return uint8_t((bits >> 24 & 0x80) | 0x30 | (bits >> 20 & 0xf)); });
    }
  }
  const int64_t tokens = starts.back();
  std::vector<uint16_t> q(size_t(tokens * spec.num_q_heads * spec.head_dim_qk));
  for (uint16_t& x : q) x = uint16_t((random() & 0x8000) | 0x3f00 | (random() & 0x7f));
  std::vector<float> sinks(size_t(spec.num_q_heads), 0.5f);
  Result result{std::vector<float>(size_t(tokens * spec.num_q_heads * spec.head_dim_v)),
                std::vector<float>(size_t(tokens * spec.num_q_heads))};

  const auto plan = backend.plan(spec, device, {.limits = {}, .threads = threads});
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = layer.lens;
  batch.kv_indptr = TensorView::contiguous(indptr.data(), DType::i32, {int64_t(indptr.size())});
  batch.kv_indices = TensorView::contiguous(indices.data(), DType::i32, {int64_t(indices.size())});
  plan->update(batch);
  Inputs in{.q = TensorView::contiguous(q.data(), DType::bf16, {tokens, spec.num_q_heads, spec.head_dim_qk}), .kv = cache};
  if (spec.score.sinks) in.sinks = TensorView::contiguous(sinks.data(), DType::f32, {int64_t(sinks.size())});
  plan->run(in, {.out = TensorView::contiguous(result.out.data(), DType::f32, {tokens, spec.num_q_heads, spec.head_dim_v}),
                 .lse = TensorView::contiguous(result.lse.data(), DType::f32, {tokens, spec.num_q_heads})});
  return result;
}

TEST(PlanHeads, TogetherOrApartIsTheSame) {
  const DeviceInfo probed = probe_cpu();
  ThreadPool pool(2);
  int runs = 0;
  struct Target {
    const char* backend;
    CpuIsa isa;
  };
  for (const auto& [name, isa] : {Target{"cpu_avx512", CpuIsa::avx512},
                                  {"cpu_avx512", CpuIsa::avx512_bf16},
                                  {"cpu_amx", CpuIsa::amx_emulated},
                                  {"cpu_amx", CpuIsa::amx}}) {
    DeviceInfo device = probed;
    device.isa = isa;
    if (isa > probed.isa) continue;
    for (const Layer& layer : layers()) {
      const Backend& backend = *find_backend(name);
      if (!backend.unsupported(layer.spec, device).empty()) continue;
      SCOPED_TRACE(std::string(name) + " on " + to_string(isa) + ", " + layer.name);
      const Result apart = run(layer, backend, device, "lhbtd");
      for (const ParallelFor& threads : {ParallelFor{}, pool.parallel_for()}) {
        const Result together = run(layer, backend, device, "lbthd", threads);
        EXPECT_EQ(apart.out, together.out);
        EXPECT_EQ(apart.lse, together.lse);
      }
      ++runs;
    }
  }
  if (runs == 0) GTEST_SKIP() << "AVX-512 is needed";
}

}  // namespace
}  // namespace imbrex
