// A user of the installed package: selects a backend, writes four tokens into a paged cache, attends to them, checks the result.
#include <cmath>
#include <cstdio>
#include <vector>

#include "imbrex/imbrex.hpp"

int main() {
  using namespace imbrex;
  const int heads = 4, kv_heads = 2, dim = 64, tokens = 4;
  AttentionSpec spec{
      .num_q_heads = heads, .num_kv_heads = kv_heads, .head_dim_qk = dim, .head_dim_v = dim, .q_dtype = DType::f32, .kv_dtype = DType::f32};
  const DeviceInfo cpu = probe_cpu();
  const Selection selection = select(spec, cpu);
  if (selection.backend == nullptr) {
    std::printf("no backend:\n%s\n", selection.str().c_str());
    return 1;
  }

  // Keys are equal, so that token t sees the mean of the values 1 .. t + 1.
  std::vector<float> q(tokens * heads * dim, 1.f), k(tokens * kv_heads * dim, 1.f), v(k.size()), out(q.size(), -1.f);
  for (size_t i = 0; i < v.size(); ++i) v[i] = float(1 + i / (kv_heads * dim));
  std::vector<int32_t> query_start_loc{0, tokens}, seq_lens{tokens}, blocks{3};
  std::vector<int64_t> slots;
  append_slots(blocks, spec.block_size, 0, tokens, slots);

  const KvAllocation cache(spec, 1, 8);
  const auto plan = selection.backend->plan(spec, cpu, {});
  plan->update({.query_start_loc = query_start_loc,
                .seq_lens = seq_lens,
                .block_table = TensorView::contiguous(blocks.data(), DType::i32, {1, 1}),
                .slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {tokens})});
  plan->write_kv(cache.layer(0), TensorView::contiguous(k.data(), DType::f32, {tokens, kv_heads, dim}),
                 TensorView::contiguous(v.data(), DType::f32, {tokens, kv_heads, dim}));
  plan->run({.q = TensorView::contiguous(q.data(), DType::f32, {tokens, heads, dim}), .kv = cache.layer(0)},
            {.out = TensorView::contiguous(out.data(), DType::f32, {tokens, heads, dim})});

  for (size_t i = 0; i < out.size(); ++i) {
    const float expected = 1.f + float(i / (heads * dim)) / 2.f;
    if (!(std::fabs(out[i] - expected) < 1e-5f)) {
      std::printf("out[%zu] is %g, expected %g\n", i, out[i], expected);
      return 1;
    }
  }
  std::printf("consumer: %s computed %d tokens on %s\n", std::string(selection.backend->name()).c_str(), tokens, cpu.str().c_str());
}
