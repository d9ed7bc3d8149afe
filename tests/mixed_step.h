#pragma once
// One step of requests of any lengths with all that a plan is called with, in f32 and small: for tests of what plans refuse, keep and
// compute. The tensors of layers may be those of any device whose memory is the host's.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "imbrex/backend.h"

namespace imbrex::test {

using Requests = std::vector<std::pair<int, int>>;  // query tokens and keys of each

inline AttentionSpec mixed_spec(int block_size, bool custom = false) {
  return {.num_q_heads = 4,
          .num_kv_heads = 2,
          .head_dim_qk = 16,
          .head_dim_v = 8,
          .q_dtype = DType::f32,
          .kv_dtype = DType::f32,
          .block_size = block_size,
          .mask = {.custom = custom},
          .score = {}};
}

struct MixedStep {
  AttentionSpec spec;
  std::vector<int32_t> starts{0}, lens, table, key_starts{0};
  std::vector<int64_t> slots;
  std::vector<uint8_t> mask;
  std::vector<float> q, k, v, new_k, new_v, out, lse;
  int num_blocks = 0;
  Batch batch;
  Inputs in;
  Outputs outputs;
  TensorView new_keys, new_values;

  explicit MixedStep(const AttentionSpec& s, const Requests& requests, unsigned seed = 1, Device device = {}) : spec(s) {
    const int block = s.block_size > 0 ? s.block_size : 1;
    int width = 1;
    for (const auto& [q_len, seq_len] : requests) width = std::max(width, (seq_len + block - 1) / block);
    std::mt19937 random(seed);
    for (const auto& [q_len, seq_len] : requests) {
      starts.push_back(starts.back() + q_len);
      lens.push_back(seq_len);
      key_starts.push_back(key_starts.back() + seq_len);
      const size_t row = table.size();
      table.resize(row + size_t(width), -1);
      for (int b = 0; b * block < seq_len; ++b) table[row + size_t(b)] = num_blocks++;
      for (int j = seq_len - q_len; j < seq_len; ++j) slots.push_back(int64_t(table[row + size_t(j / block)]) * block + j % block);
      for (int i = 0; i < q_len * seq_len && s.mask.custom; ++i) mask.push_back(random() % 3 != 0);
    }
    const int64_t reqs = int64_t(lens.size()), tokens = starts.back(), rows = s.block_size > 0 ? num_blocks : key_starts.back();
    const auto fill = [&](std::vector<float>& x, int64_t count) {
      x.resize(size_t(count) + 1);  // never empty, so that there is an address
      for (float& f : x) f = float(random() % 2001) / 1000 - 1;
    };
    const auto floats = [&](std::vector<float>& x, std::initializer_list<int64_t> sizes) {
      TensorView t = TensorView::contiguous(nullptr, DType::f32, sizes, device);
      fill(x, t.num_elements());
      t.data = x.data();
      return t;
    };
    const int64_t kv = s.num_kv_heads, heads = s.num_q_heads, qk = s.head_dim_qk, dv = s.head_dim_v;
    in.kv.k = s.block_size > 0 ? floats(k, {rows, block, kv, qk}) : floats(k, {rows, kv, qk});
    in.kv.v = s.block_size > 0 ? floats(v, {rows, block, kv, dv}) : floats(v, {rows, kv, dv});
    in.q = floats(q, {tokens, heads, qk});
    new_keys = floats(new_k, {tokens, kv, qk}), new_values = floats(new_v, {tokens, kv, dv});
    outputs = {floats(out, {tokens, heads, dv}), floats(lse, {tokens, heads})};
    batch.query_start_loc = starts, batch.seq_lens = lens;
    if (s.block_size > 0) {
      batch.block_table = TensorView::contiguous(table.data(), DType::i32, {reqs, width});
      if (tokens > 0) batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {tokens});
    } else {
      batch.kv_start_loc = TensorView::contiguous(key_starts.data(), DType::i32, {reqs + 1});
    }
    if (!mask.empty()) batch.custom_mask = TensorView::contiguous(mask.data(), DType::u8, {int64_t(mask.size())});
  }
  MixedStep(const MixedStep&) = delete;
  MixedStep& operator=(const MixedStep&) = delete;

  // Runs a plan that has been updated with this step, and returns its output.
  std::vector<float> run(const Plan& plan, Stream stream = nullptr) {
    std::fill(out.begin(), out.end(), -7.f);
    std::fill(lse.begin(), lse.end(), -7.f);
    plan.run(in, outputs, stream);
    std::vector<float> results = out;
    results.insert(results.end(), lse.begin(), lse.end());
    return results;
  }
};

}  // namespace imbrex::test
