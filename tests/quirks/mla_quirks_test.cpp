// What other engines once got wrong about latent attention. See attention_quirks_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "imbrex/mla.h"
#include "mla/backend.h"
#include "quirks/step.h"

namespace imbrex::test {
namespace {

struct MlaQuirk {
  MlaSpec spec{.num_heads = 3, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 16, .v_dim = 24};
  QuirkStep::Requests requests{{1, 70}, {120, 130}, {3, 33}, {0, 0}};
  std::vector<std::vector<int32_t>> pages{{12, 10, 6, 4, 2}, {13, 11, 9, 7, 5, 3, 1, 14, 16}, {0, 15, 8}, {}};
  std::vector<float> sinks{0.5f, -1.f, 2.f};
};

// Results by the definition: keys and values of all heads are made of the latents.
std::vector<double> expected_of(const MlaQuirk& quirk, const std::vector<std::vector<float>>& latents,
                                const std::vector<std::vector<float>>& ropes, const std::vector<float>& q, const std::vector<float>& kv_b) {
  const MlaSpec& s = quirk.spec;
  std::vector<double> result;
  size_t token = 0;
  for (size_t r = 0; r < quirk.requests.size(); ++r) {
    const auto [own, keys] = quirk.requests[r];
    for (int i = 0; i < own; ++i, ++token)
      for (int h = 0; h < s.num_heads; ++h) {
        const auto weight = [&](int row, int l) {
          return double(kv_b[size_t((h * (s.qk_nope_dim + s.v_dim) + row) * s.kv_lora_rank + l)]);
        };
        const auto product = [&](int row, int j) {
          double sum = 0;
          for (int l = 0; l < s.kv_lora_rank; ++l) sum += weight(row, l) * double(latents[r][size_t(j * s.kv_lora_rank + l)]);
          return sum;
        };
        double sum = std::exp(double(quirk.sinks[size_t(h)]));
        std::vector<double> row(size_t(s.v_dim), 0);
        for (int j = 0; j <= keys - own + i; ++j) {
          const size_t query = (token * size_t(s.num_heads) + size_t(h)) * size_t(s.qk_dim());
          double logit = 0;
          for (int d = 0; d < s.qk_nope_dim; ++d) logit += double(q[query + size_t(d)]) * product(d, j);
          for (int d = 0; d < s.qk_rope_dim; ++d)
            logit += double(q[query + size_t(s.qk_nope_dim + d)]) * double(ropes[r][size_t(j * s.qk_rope_dim + d)]);
          const double factor = std::exp(logit / std::sqrt(double(s.qk_dim())));
          sum += factor;
          for (int d = 0; d < s.v_dim; ++d) row[size_t(d)] += factor * product(s.qk_nope_dim + d, j);
        }
        for (double x : row) result.push_back(x / sum);
      }
  }
  return result;
}

// FlashInfer-MLA and FlashMLA read outside of the cache where pages of requests alternate or slots fall (SGLang's own table of 2026-05-27),
// and vLLM's path with partial results of context-parallel ranks leaves out sinks.
TEST(MlaQuirks, PagesMayFallAndAlternateAndASinkIsCountedOnce) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    MlaQuirk quirk;
    MlaSpec& spec = quirk.spec;
    spec.dtype = spec.kv_dtype = dtype;
    spec.sinks = true;
    std::mt19937 random(9);
    std::vector<std::vector<float>> latents, ropes;
    int64_t tokens = 0;
    for (const auto& [own, keys] : quirk.requests) {
      latents.push_back(eighths(random, size_t(keys * spec.kv_lora_rank)));
      ropes.push_back(eighths(random, size_t(keys * spec.qk_rope_dim)));
      tokens += own;
    }
    const std::vector<float> q = eighths(random, size_t(tokens * spec.num_heads * spec.qk_dim()));
    const std::vector<float> weight = eighths(random, size_t(spec.num_heads * (spec.qk_nope_dim + spec.v_dim) * spec.kv_lora_rank), 0.25f);
    const std::vector<double> wanted = expected_of(quirk, latents, ropes, q, weight);
    const auto compute = [&](const std::unique_ptr<MlaPlan>& plan, const std::string& where) {
      const KvAllocation memory(spec.latent_spec(), 1, 17);
      MlaInputs in;
      in.kv = memory.layer(0);
      std::memset(in.kv.k.data, 0xFF, size_t(in.kv.k.num_elements() * size_of(in.kv.k.dtype)));
      // A step that takes `all` keys of the requests, or those of the step.
      const auto step = [&](bool all, auto run) {
        std::vector<int32_t> starts{0}, lens, table;
        std::vector<int64_t> slots;
        std::vector<float> c, rope;
        for (size_t r = 0; r < quirk.requests.size(); ++r) {
          const auto [own, keys] = quirk.requests[r];
          const int count = all ? keys : own;
          starts.push_back(starts.back() + count), lens.push_back(keys);
          table.insert(table.end(), quirk.pages[r].begin(), quirk.pages[r].end());
          table.resize((r + 1) * 9, -1);
          for (int j = keys - count; j < keys; ++j)
            slots.push_back(all && j >= keys - own ? -1 : int64_t(quirk.pages[r][size_t(j / 16)]) * 16 + j % 16);
          c.insert(c.end(), latents[r].end() - count * spec.kv_lora_rank, latents[r].end());
          rope.insert(rope.end(), ropes[r].end() - count * spec.qk_rope_dim, ropes[r].end());
        }
        const int64_t rows = starts.back();
        Batch batch;
        batch.query_start_loc = starts, batch.seq_lens = lens;
        batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(lens.size()), 9});
        batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {rows});
        const Elements new_latents(dtype, c, {rows, spec.kv_lora_rank}), new_ropes(dtype, rope, {rows, spec.qk_rope_dim});
        plan->update(batch);
        plan->write_kv(in.kv, new_latents.view, new_ropes.view);
        run();
      };
      step(true, [] {});
      step(false, [&] {
        const Elements queries(dtype, q, {tokens, spec.num_heads, spec.qk_dim()});
        const Elements kv_b(dtype, weight, {spec.num_heads, spec.qk_nope_dim + spec.v_dim, spec.kv_lora_rank});
        const Elements sinks(DType::f32, quirk.sinks, {spec.num_heads});
        const Elements out(DType::f32, std::vector<float>(wanted.size(), -7.f), {tokens, spec.num_heads, spec.v_dim});
        in.q = queries.view, in.kv_b = kv_b.view, in.sinks = sinks.view;
        plan->run(in, {.out = out.view, .lse = {}});
        for (size_t n = 0; n < wanted.size(); ++n)
          ASSERT_NEAR(out.at(n), wanted[n], dtype == DType::f32 ? 2e-5 : 2e-2) << where << ", " << n;
      });
    };
    const int runs = for_each_cpu_target<MlaFamily>(spec, [&](const BackendOf<MlaFamily>& backend, const DeviceInfo& device) {
      const std::string where = target_name(backend, device);
      compute(backend.plan(spec, device, {}), where);
      const auto* const composite = dynamic_cast<const MlaCompositeBackend*>(&backend);
      for (const bool expand : {false, true}) {
        if (composite == nullptr) break;
        MlaParts parts = composite->parts(spec, device, {});
        parts.expand = expand, parts.chunk_keys = 48;
        compute(make_mla_plan(spec, device, {}, std::move(parts)), where + (expand ? ", keys expanded" : ", in latent space"));
      }
    });
    EXPECT_GE(runs, 2);
  }
}

}  // namespace
}  // namespace imbrex::test
