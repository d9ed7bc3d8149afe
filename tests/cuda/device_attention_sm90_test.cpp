// The wgmma prefill kernel against the reference backend, straight through its parameters: masks, score mods, pages, types.
#include <cmath>
#include <random>

#include "core/float_types.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/attention/kv_side.h"
#include "cuda/driver/module.h"
#include "gpu.h"
#include "imbrex/schedule.h"
#include "imbrex/select.h"

namespace imbrex::cuda::test {
namespace {

struct Problem {
  const char* name;
  AttentionSpec spec;
  int reqs, q_len, seq_len;
};

struct Dims {
  int qk, v;
  Dims(int both) : qk(both), v(both) {}
  Dims(int of_qk, int of_v) : qk(of_qk), v(of_v) {}
};

AttentionSpec spec_of(int q_heads, int kv_heads, Dims dims, int page, Mask mask = {}, ScoreMod score = {}, DType type = DType::bf16) {
  return {.num_q_heads = q_heads,
          .num_kv_heads = kv_heads,
          .head_dim_qk = dims.qk,
          .head_dim_v = dims.v,
          .q_dtype = type,
          .kv_dtype = type,
          .block_size = page,
          .mask = mask,
          .score = score};
}

const Problem kProblems[] = {
    {"mha_page16", spec_of(4, 4, 128, 16), 3, 300, 300},
    {"chunked_page16", spec_of(8, 2, 128, 16), 2, 200, 777},
    {"full_page64", spec_of(8, 2, 128, 64, {.causal = false}), 2, 333, 333},
    {"full_page8", spec_of(4, 1, 128, 8, {.causal = false}), 1, 70, 130},
    {"window_page128", spec_of(4, 1, 128, 128, {.window_left = 99}), 2, 257, 600},
    {"window_both", spec_of(4, 1, 64, 32, {.causal = false, .window_left = 40, .window_right = 20}), 1, 400, 400},
    {"chunk", spec_of(4, 2, 128, 16, {.chunk = 100}), 2, 350, 450},
    {"page256", spec_of(2, 1, 128, 256), 2, 300, 700},
    {"ragged", spec_of(4, 1, 128, 0), 2, 300, 300},
    {"dim64", spec_of(4, 4, 64, 16), 1, 500, 500},
    {"dim64_full_page48", spec_of(8, 2, 64, 48, {.causal = false}), 3, 100, 333},
    {"dim64_soft_cap", spec_of(8, 2, 64, 16, {}, {.soft_cap = 5.f}), 1, 300, 300},
    {"dim96", spec_of(4, 1, 96, 16), 2, 300, 400},
    {"dim72", spec_of(4, 2, 72, 16), 2, 300, 400},
    {"dim80_full_page64", spec_of(2, 2, 80, 64, {.causal = false}), 2, 150, 333},
    {"dim112_soft_cap", spec_of(4, 1, 112, 16, {}, {.soft_cap = 5.f}), 1, 300, 500},
    {"dim40", spec_of(4, 4, 40, 16), 1, 300, 500},
    {"dim192", spec_of(4, 2, 192, 16), 2, 300, 400},
    {"dim224_window", spec_of(2, 1, 224, 16, {.window_left = 99}), 1, 300, 400},
    {"page1", spec_of(8, 2, 128, 1), 2, 300, 700},
    {"page1_dim64", spec_of(8, 2, 64, 1, {.causal = false}), 2, 200, 333},
    {"page1_dim256", spec_of(4, 2, 256, 1), 2, 300, 400},
    {"page4_window", spec_of(8, 2, 128, 4, {.window_left = 99}), 2, 257, 600},
    {"page12_dim72", spec_of(4, 2, 72, 12), 1, 200, 450},
    {"dim96_ragged", spec_of(2, 2, 96, 0, {.causal = false}), 2, 150, 333},
    {"dim192_and_128", spec_of(4, 4, {192, 128}, 16), 2, 300, 400},
    {"dim192_and_128_full_page24", spec_of(2, 1, {192, 128}, 24, {.causal = false, .window_left = 70}), 1, 200, 600},
    {"dim256", spec_of(4, 1, 256, 16), 2, 300, 400},
    {"dim256_soft_cap", spec_of(4, 2, 256, 64, {.window_left = 150}, {.soft_cap = 5.f}), 1, 300, 500},
    {"dim256_full_page64", spec_of(2, 2, 256, 64, {.causal = false}), 1, 129, 200},
    {"group64", spec_of(64, 1, 128, 16), 1, 40, 90},
    {"f16", spec_of(8, 2, 128, 16, {}, {}, DType::f16), 1, 300, 300},
    {"soft_cap", spec_of(8, 2, 128, 16, {}, {.soft_cap = 5.f}), 1, 300, 300},
    {"sinks", spec_of(8, 2, 64, 16, {.window_left = 127}, {.sinks = true}), 1, 300, 300},
    {"alibi", spec_of(8, 2, 128, 16, {}, {.alibi = true}), 1, 300, 300},
    {"head_scales", spec_of(8, 2, 128, 16, {}, {.head_scales = true}), 1, 200, 200},
    {"one_token", spec_of(8, 2, 128, 16), 5, 1, 129},
};

class DeviceAttentionSm90 : public Gpu, public testing::WithParamInterface<Problem> {
 protected:
  std::vector<uint16_t> random(size_t n, DType type) {
    std::vector<uint16_t> values(n);
    std::normal_distribution<float> normal;
    for (uint16_t& v : values) v = type == DType::bf16 ? float_to_bf16(normal(random_)) : float_to_f16(normal(random_));
    return values;
  }
  std::mt19937 random_{5};
};

TEST_P(DeviceAttentionSm90, AgreesWithTheReference) {
  if (device.sm != 90) GTEST_SKIP() << "needs sm_90, this is sm_" << device.sm;
  const AttentionSpec& spec = GetParam().spec;
  const int reqs = GetParam().reqs, q_len = GetParam().q_len, seq_len = GetParam().seq_len;
  ASSERT_TRUE(attention_sm90_refusals(spec).empty());
  const int page = std::max(spec.block_size, 1), pages = (seq_len + page - 1) / page, heads = spec.num_q_heads;
  const int qk = spec.head_dim_qk, dim = spec.head_dim_v;
  const int64_t tokens = int64_t(reqs) * q_len, rows = spec.block_size == 0 ? int64_t(reqs) * seq_len : int64_t(reqs * pages + 2) * page;
  std::vector<int32_t> query_start{0}, seq_lens(size_t(reqs), seq_len), table, start_loc{0};
  for (int r = 0; r < reqs; ++r) {
    query_start.push_back(query_start.back() + q_len);
    start_loc.push_back(start_loc.back() + seq_len);
    for (int b = 0; b < pages; ++b) table.push_back(reqs * pages + 1 - (r * pages + b));  // backwards; pages 0 and 1 are free
  }

  // Rows that no request owns are NaN.
  const uint16_t nan = spec.q_dtype == DType::bf16 ? 0x7fc0 : 0x7e00;
  std::vector<uint16_t> q = random(size_t(tokens * heads * qk), spec.q_dtype), k(size_t(rows * spec.num_kv_heads * qk), nan),
                        v(size_t(rows * spec.num_kv_heads * dim), nan);
  for (int r = 0; r < reqs; ++r)
    for (int j = 0; j < seq_len; ++j) {
      const int64_t row = spec.block_size == 0 ? start_loc[size_t(r)] + j : int64_t(table[size_t(r * pages + j / page)]) * page + j % page;
      for (std::vector<uint16_t>* side : {&k, &v}) {
        const auto values = random(side->size() / size_t(rows), spec.q_dtype);
        std::copy(values.begin(), values.end(), side->begin() + row * int64_t(values.size()));
      }
    }
  std::vector<float> per_head(static_cast<size_t>(heads));
  for (int h = 0; h < heads; ++h) per_head[size_t(h)] = 0.05f * float(h + 1);

  const auto head_vector = [&](bool wanted) {
    return wanted ? TensorView::contiguous(per_head.data(), DType::f32, {heads}) : TensorView{};
  };
  const auto kv_view = [&](std::vector<uint16_t>& side, int dims) {
    return spec.block_size == 0 ? TensorView::contiguous(side.data(), spec.kv_dtype, {rows, spec.num_kv_heads, dims})
                                : TensorView::contiguous(side.data(), spec.kv_dtype, {rows / page, page, spec.num_kv_heads, dims});
  };
  Batch batch{.query_start_loc = query_start, .seq_lens = seq_lens};
  if (spec.block_size == 0) {
    batch.kv_start_loc = TensorView::contiguous(start_loc.data(), DType::i32, {reqs + 1});
  } else {
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {reqs, pages});
  }
  Inputs in{.q = TensorView::contiguous(q.data(), spec.q_dtype, {tokens, heads, qk}), .kv = {.k = kv_view(k, qk), .v = kv_view(v, dim)}};
  in.sinks = head_vector(spec.score.sinks);
  in.alibi_slopes = head_vector(spec.score.alibi);
  in.head_scales = head_vector(spec.score.head_scales);
  std::vector<float> expected(size_t(tokens * heads * dim)), expected_lse(size_t(tokens * heads));
  const auto reference = find_backend("reference")->plan(spec, probe_cpu(), {});
  reference->update(batch);
  reference->run(in, {.out = TensorView::contiguous(expected.data(), DType::f32, {tokens, heads, dim}),
                      .lse = TensorView::contiguous(expected_lse.data(), DType::f32, {tokens, heads})});

  const Sm90Tiles tiles = attention_sm90_tiles(spec);
  Schedule schedule_;
  schedule(batch, spec.mask,
           {.tile_q = tiles.item_rows() / spec.group_size(), .tile_kv = tiles.keys, .split_kv = 4096 * tiles.keys, .split_max_q = 1},
           schedule_);
  const std::vector<PlanCounts> counts{
      {.num_work = int(schedule_.work.size()), .num_merges = 0, .num_tokens = int(tokens), .num_reqs = reqs, .heads_together = 2}};
  std::vector<long> block_start;
  for (int r = 0; r < reqs; ++r) block_start.push_back(spec.block_size == 0 ? start_loc[size_t(r)] : long(r) * pages);
  const DeviceBuffer q_there = upload(q), k_there = upload(k), v_there = upload(v), work = upload(schedule_.work), count = upload(counts),
                     starts = upload(query_start), lens = upload(seq_lens), ids = upload(table), first = upload(block_start),
                     task = upload(std::vector<int>{0}), vectors = upload(per_head),
                     out = upload(std::vector<float>(expected.size(), -1.f)), lse = upload(std::vector<float>(expected_lse.size(), -1.f));
  const KvCache cache{.k = on_device(in.kv.k, k_there), .v = on_device(in.kv.v, v_there)};
  AttentionMaps maps;
  ASSERT_TRUE(attention_sm90_maps(spec, on_device(in.q, q_there), cache, maps));
  AttentionParams a{};
  a.q = q_there.as<char>();
  a.q_token_stride = long(heads) * qk * 2;
  a.q_head_stride = long(qk) * 2;
  a.out = out.as<char>();
  a.out_token_stride = long(heads) * dim * 4;
  a.out_head_stride = long(dim) * 4;
  a.lse = lse.as<float>();
  a.lse_token_stride = heads;
  a.lse_head_stride = 1;
  a.k = kv_side(cache.k, {}, spec);
  a.v = kv_side(cache.v, {}, spec);
  a.query_start = starts.as<int>();
  a.seq_lens = lens.as<int>();
  a.block_ids = ids.as<int>();
  a.block_start = first.as<long>();
  a.work = work.as<WorkItem>();
  a.counts = count.as<PlanCounts>();
  a.next_task = task.as<int>();
  a.num_kv_heads = a.kv_heads_now = spec.num_kv_heads;
  a.scale = spec.scale();
  a.soft_cap = spec.score.soft_cap;
  a.window_left = spec.mask.window_left;
  a.window_right = spec.mask.window_right;
  a.chunk = spec.mask.chunk;
  a.head_scales = a.alibi_slopes = a.sinks = vectors.as<float>();
  const auto module = Module::load(context, attention_sm90_key(arch_of(device), spec, DType::f32));
  // Twice: the counter of tasks must be back at zero.
  for (int i = 0; i < 2; ++i) {
    module->kernel("attention_sm90")
        .launch({.grid_x = unsigned(device.num_workers / tiles.cluster * tiles.cluster),
                 .threads = tiles.threads(),
                 .cluster = unsigned(tiles.cluster)},
                stream.get(), a, maps.q, maps.k, maps.v);
  }
  const std::vector<float> actual = download<float>(out), actual_lse = download<float>(lse);
  EXPECT_EQ(download<int>(task)[0], 0);
  double worst = 0, worst_lse = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::fabs(double(actual[i]) - expected[i]) / (0.3 + std::fabs(expected[i]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  for (size_t i = 0; i < expected_lse.size(); ++i) {
    const double error = std::fabs(double(actual_lse[i]) - expected_lse[i]);
    worst_lse = std::isnan(error) ? INFINITY : std::max(worst_lse, error);
  }
  EXPECT_LT(worst, spec.q_dtype == DType::bf16 ? 1.5e-2 : 2e-3);  // weights are rounded to 8 bits, or to 11
  EXPECT_LT(worst_lse, 2e-5);
}

INSTANTIATE_TEST_SUITE_P(Problems, DeviceAttentionSm90, testing::ValuesIn(kProblems), [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace imbrex::cuda::test
