// See step.h.
#include "step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

namespace imbrex::test {
namespace {

// The arrays of a batch whose requests have these numbers of query tokens, the last of their keys.
struct Arrays {
  std::vector<int32_t> starts{0}, lens, table;
  std::vector<int64_t> slots;
  Batch batch;

  Arrays(const QuirkStep& step, bool all_tokens) {
    size_t width = 1;
    for (const auto& of_request : step.pages) width = std::max(width, of_request.size());
    for (size_t r = 0; r < step.requests.size(); ++r) {
      const auto [own, keys] = step.requests[r];
      const int count = all_tokens ? keys : own;
      starts.push_back(starts.back() + count), lens.push_back(keys);
      table.insert(table.end(), step.pages[r].begin(), step.pages[r].end());
      table.resize((r + 1) * width, -1);
      const int block = step.spec.block_size;
      for (int j = keys - count; j < keys; ++j)
        slots.push_back(all_tokens && j >= keys - own ? -1 : int64_t(step.pages[r][size_t(j / block)]) * block + j % block);
    }
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(lens.size()), int64_t(width)});
    batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {starts.back()});
  }
};

std::vector<float> last_tokens(const QuirkStep& step, const std::vector<std::vector<float>>& all, size_t width, bool all_tokens) {
  std::vector<float> result;
  for (size_t r = 0; r < step.requests.size(); ++r) {
    const auto [own, keys] = step.requests[r];
    const int count = all_tokens ? keys : own;
    result.insert(result.end(), all[r].begin() + std::ptrdiff_t(size_t(keys - count) * width), all[r].end());
  }
  return result;
}

void poison(const TensorView& t) { std::memset(t.data, 0xFF, size_t(t.num_elements() * size_of(t.dtype))); }

}  // namespace

QuirkStep::QuirkStep(Requests r, int num_q_heads, int num_kv_heads, int head_dim) : requests(std::move(r)) {
  spec = {.num_q_heads = num_q_heads, .num_kv_heads = num_kv_heads, .head_dim_qk = head_dim, .head_dim_v = head_dim, .block_size = 16};
  std::mt19937 random(11);
  int32_t next = 0;
  size_t tokens = 0;
  for (const auto& [own, count] : requests) {
    auto& of_request = pages.emplace_back();
    while (int(of_request.size()) * spec.block_size < count) of_request.push_back(next++);
    keys.push_back(eighths(random, size_t(count * num_kv_heads * head_dim)));
    values.push_back(eighths(random, size_t(count * num_kv_heads * head_dim)));
    tokens += size_t(own);
  }
  q = eighths(random, tokens * size_t(num_q_heads * head_dim));
}

void QuirkStep::equal_logits() { std::fill(q.begin(), q.end(), 0.f); }

QuirkResult QuirkStep::expected() const {
  QuirkResult result;
  const size_t dim = size_t(spec.head_dim_qk), heads = size_t(spec.num_q_heads), kv_heads = size_t(spec.num_kv_heads);
  const double scale = spec.score.scale > 0 ? double(spec.score.scale) : 1 / std::sqrt(double(dim));
  size_t token = 0;
  for (size_t r = 0; r < requests.size(); ++r)
    for (int i = 0; i < requests[r].first; ++i, ++token)
      for (size_t h = 0; h < heads; ++h) {
        double sum = sinks.empty() ? 0 : std::exp(double(sinks[h]));
        std::vector<double> row(dim, 0);
        bool any = false;
        for (int j = 0; j < requests[r].second; ++j) {
          if (sees ? !sees(int(r), i, j) : j > context(int(r)) + i) continue;
          any = true;
          const size_t at = (size_t(j) * kv_heads + h * kv_heads / heads) * dim;
          double logit = 0;
          for (size_t d = 0; d < dim; ++d) logit += double(q[(token * heads + h) * dim + d]) * double(keys[r][at + d]);
          logit *= scale;
          if (bend) logit = bend(logit, int(h), int(r), i, j);
          sum += std::exp(logit);
          for (size_t d = 0; d < dim; ++d) row[d] += std::exp(logit) * double(values[r][at + d]);
        }
        for (double x : row) result.out.push_back(any ? x / sum : 0);
        result.lse.push_back(any ? std::log(sum) : -std::numeric_limits<double>::infinity());
      }
  return result;
}

QuirkResult QuirkStep::run(const Backend& backend, const DeviceInfo& device) const {
  int32_t blocks = 1;
  for (const auto& of_request : pages)
    for (int32_t page : of_request) blocks = std::max(blocks, page + 1);
  const KvAllocation memory(spec, 1, blocks);
  Inputs in;
  in.kv = memory.layer(0);
  poison(in.kv.k), poison(in.kv.v);
  float scales[2] = {k_scale, v_scale};
  if (is_fp8(spec.kv_dtype)) {
    in.kv.k_scale = TensorView::contiguous(&scales[0], DType::f32, {1});
    in.kv.v_scale = TensorView::contiguous(&scales[1], DType::f32, {1});
  }
  const int64_t heads = spec.num_q_heads, kv_heads = spec.num_kv_heads, dim = spec.head_dim_qk;
  const auto write = [&](const Plan& plan, bool all_tokens) {
    const size_t width = size_t(kv_heads * dim);
    const std::vector<float> k = last_tokens(*this, keys, width, all_tokens), v = last_tokens(*this, values, width, all_tokens);
    const int64_t tokens = int64_t(k.size() / width);
    const Elements new_k(spec.q_dtype, k, {tokens, kv_heads, dim}), new_v(spec.q_dtype, v, {tokens, kv_heads, dim});
    const std::vector<unsigned char> before_k = new_k.bytes, before_v = new_v.bytes;
    plan.write_kv(in.kv, new_k.view, new_v.view);
    EXPECT_TRUE(new_k.bytes == before_k && new_v.bytes == before_v) << backend.name() << " changes the keys and values that it is given";
  };
  {
    AttentionSpec plain = spec;  // of the steps before, of which the cache is all that is left
    plain.mask.custom = plain.mask.positions = false;
    const Arrays past(*this, true);
    PlanOptions all;
    all.limits.max_num_tokens = past.starts.back();
    const auto plan = backend.plan(plain, device, all);
    plan->update(past.batch);
    write(*plan, true);
  }
  Arrays own(*this, false);
  std::vector<uint8_t> mask_bytes = mask;
  if (spec.mask.custom) own.batch.custom_mask = TensorView::contiguous(mask_bytes.data(), DType::u8, {int64_t(mask.size())});
  own.batch.positions = positions;
  const auto plan = make_plan ? make_plan(backend, spec, device, options) : backend.plan(spec, device, options);
  const std::vector<int32_t> table = own.table;
  const std::vector<int64_t> slots = own.slots;
  plan->update(own.batch);
  write(*plan, false);
  const int64_t tokens = own.starts.back();
  const Elements queries(spec.q_dtype, q, {tokens, heads, dim});
  in.q = queries.view;
  std::vector<float> sink_values = sinks, slope_values = slopes, out(size_t(tokens * heads * dim), -7.f), lse(size_t(tokens * heads), -7.f);
  if (!sinks.empty()) in.sinks = TensorView::contiguous(sink_values.data(), DType::f32, {heads});
  if (!slopes.empty()) in.alibi_slopes = TensorView::contiguous(slope_values.data(), DType::f32, {heads});
  plan->run(in, {.out = TensorView::contiguous(out.data(), DType::f32, {tokens, heads, dim}),
                 .lse = TensorView::contiguous(lse.data(), DType::f32, {tokens, heads})});
  EXPECT_TRUE(own.table == table && own.slots == slots && mask_bytes == mask) << backend.name() << " changes the arrays of a batch";
  return {{out.begin(), out.end()}, {lse.begin(), lse.end()}};
}

void QuirkStep::check() const {
  const QuirkResult wanted = expected();
  const bool fp8 = is_fp8(spec.kv_dtype);
  int runs = 0, reduced = 0;
  struct Kind {
    DType dtype;
    KvFormat format;
  };
  for (const auto& [dtype, format] :
       {Kind{DType::f32, KvFormat::strided}, {DType::bf16, KvFormat::strided}, {DType::bf16, KvFormat::amx_packed}}) {
    QuirkStep step = *this;
    step.spec.q_dtype = dtype, step.spec.kv_format = format;
    if (!fp8) step.spec.kv_dtype = dtype;
    const bool exact = dtype == DType::f32;
    for_each_cpu_target<AttentionFamily>(step.spec, [&](const Backend& backend, const DeviceInfo& device) {
      const QuirkResult got = step.run(backend, device);
      const std::string where = target_name(backend, device) + " " + step.spec.str();
      ++(exact ? runs : reduced);
      double worst = 0;
      for (size_t n = 0; n < got.out.size(); ++n) {
        const double error = std::fabs(got.out[n] - wanted.out[n]);
        worst = std::max(worst, std::isfinite(error) ? error : 1e30);
      }
      EXPECT_LE(worst, exact ? 2e-5 : 1.5e-2) << where;
      for (size_t n = 0; n < got.lse.size(); ++n) {
        if (std::isinf(wanted.lse[n]))
          ASSERT_EQ(got.lse[n], wanted.lse[n]) << where << ", row " << n;
        else
          ASSERT_NEAR(got.lse[n], wanted.lse[n], exact ? 2e-5 : 5e-3) << where << ", row " << n;
      }
    });
  }
  EXPECT_GE(runs + reduced, 3);
}

}  // namespace imbrex::test
