#pragma once
// A small layer of latent attention and a step of it, for the tests here.
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "conformance/host_tensor.h"
#include "imbrex/mla.h"

namespace imbrex::test {

inline constexpr MlaSpec kSmall{
    .num_heads = 2, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 24, .dtype = DType::f32, .kv_dtype = DType::f32};

// One step with all that a plan is called with; request r has block r of 64 tokens.
struct MlaStep {
  MlaSpec spec;
  std::vector<int32_t> starts{0}, lens, table;
  std::vector<int64_t> slots;
  std::vector<HostTensor> owned;
  Batch batch;
  MlaInputs in;
  MlaOutputs out;
  TensorView latent, rope;

  MlaStep(MlaSpec s, std::vector<std::pair<int, int>> requests, int rows = 0) : spec(s) {
    spec.block_size = 64;
    owned.reserve(8);
    for (const auto& [q_len, seq_len] : requests) {
      const int block = int(table.size());
      starts.push_back(starts.back() + q_len);
      lens.push_back(seq_len);
      table.push_back(block);
      for (int j = seq_len - q_len; j < seq_len; ++j) slots.push_back(block * 64 + j);
    }
    const int64_t reqs = int64_t(lens.size()), tokens = std::max(starts.back(), rows);
    slots.resize(size_t(tokens), -1);
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {reqs, 1});
    batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {tokens});
    in.q = make(spec.dtype, {tokens, spec.num_heads, spec.q_dim()});
    if (!spec.absorbed) in.kv_b = make(spec.dtype, {spec.num_heads, spec.qk_nope_dim + spec.v_dim, spec.kv_lora_rank});
    in.kv.k = make(spec.kv_dtype, {reqs, 64, 1, spec.latent_dim()});
    out.out = make(spec.dtype, {tokens, spec.num_heads, spec.out_dim()});
    out.lse = make(DType::f32, {tokens, spec.num_heads});
    latent = make(spec.dtype, {tokens, spec.kv_lora_rank});
    if (spec.qk_rope_dim > 0) rope = make(spec.dtype, {tokens, spec.qk_rope_dim});
  }

  TensorView make(DType dtype, std::vector<int64_t> sizes) {
    HostTensor& t = owned.emplace_back(HostTensor::make(dtype, std::move(sizes)));
    for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, double((i * 7919 + int64_t(owned.size()) * 31) % 201) / 100 - 1);
    return t.view();
  }
  const HostTensor& output() const { return owned[spec.absorbed ? 2 : 3]; }
  void call(const MlaPlan& plan) const {
    plan.write_kv(in.kv, latent, rope);
    plan.run(in, out);
  }
};

}  // namespace imbrex::test
