// What the host side of write_kv and copy_blocks hands to their kernels, and what it refuses. On the fake driver.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "cuda/attention/write_kv.h"
#include "cuda/driver/memory.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/ops/copy_blocks.h"
#include "cuda/ops/merge_results.h"
#include "cuda/params.h"
#include "expect_error.h"
#include "gpu/kernel_cache.h"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code;

constexpr Device kGpu{DeviceType::cuda, 0};

// Addresses that nobody follows.
void* at(int64_t address) { return reinterpret_cast<void*>(address); }

template <class Params>
Params params_of(const fake::Launch& launch) {
  Params params;
  EXPECT_EQ(launch.params.size(), sizeof params);
  std::memcpy(&params, launch.params.data(), sizeof params);
  return params;
}

struct Problem {
  AttentionSpec spec{.num_q_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 32, .kv_dtype = DType::fp8_e4m3};
  KvCache cache{.k = TensorView::contiguous(at(1 << 20), DType::fp8_e4m3, {10, 16, 2, 64}, kGpu),
                .v = TensorView::contiguous(at(1 << 24), DType::fp8_e4m3, {10, 16, 2, 32}, kGpu),
                .k_scale = {},
                .v_scale = {}};
  TensorView k = TensorView::contiguous(at(1 << 26), DType::bf16, {5, 2, 64}, kGpu);
  TensorView v = TensorView::contiguous(at(1 << 27), DType::bf16, {5, 2, 32}, kGpu);
  TensorView slots = TensorView::contiguous(at(1 << 28), DType::i64, {5}, kGpu);
};

class WriteKvLaunch : public testing::Test {
 protected:
  WriteKvLaunch() {
    const KernelKey key = write_kv_key("sm_90a", p.spec, p.spec.q_dtype);
    gpu::store_cached(gpu::kernel_cache_folder(), cache_name(key), {.binary = "not looked at", .log = ""});
    writer.emplace(context, "sm_90a", p.spec);
    state().launches.clear();
    state().params_bytes = sizeof(WriteKvParams);
  }
  std::string code(int tokens = 5) {
    return error_code([&] { writer->run(p.cache, p.k, p.v, {.slots = p.slots, .num_tokens = tokens, .reach = {}}, nullptr); });
  }
  fake::Launch launch(int tokens = 5) {
    writer->run(p.cache, p.k, p.v, {.slots = p.slots, .num_tokens = tokens, .reach = {}}, nullptr);
    return state().launches.back();
  }
  Problem p;
  std::shared_ptr<const Context> context = Context::of_device(0);
  CurrentContext scope{*context};
  std::optional<WriteKv> writer;
};

TEST_F(WriteKvLaunch, TheKeyIsMadeOfTheSpec) {
  EXPECT_EQ(write_kv_key("sm_80", p.spec, p.spec.q_dtype).str(),
            "write_kv.cu for sm_80 (kFrom 2, kTo 3, kDimK 64, kDimV 32, kBlockSize 16)");
}

TEST_F(WriteKvLaunch, StridesGoInBytes) {
  const fake::Launch l = launch();
  EXPECT_EQ(l.entry, "write_kv");
  EXPECT_EQ(l.grid_x, 5u);
  EXPECT_EQ(l.threads, unsigned(kWriteKvThreads));
  const auto w = params_of<WriteKvParams>(l);
  EXPECT_EQ(w.k.data, at(1 << 20));
  EXPECT_EQ(w.k.block_stride, 16 * 2 * 64);
  EXPECT_EQ(w.k.token_stride, 2 * 64);
  EXPECT_EQ(w.v.head_stride, 32);
  EXPECT_EQ(w.v.dim_stride, 1);
  EXPECT_EQ(w.k.scales, nullptr);
  EXPECT_EQ(w.k.scale, 1.f);
  EXPECT_EQ(w.new_k.token_stride, 2 * 64 * 2);
  EXPECT_EQ(w.new_v.head_stride, 32 * 2);
  EXPECT_EQ(w.num_tokens, 5);
  EXPECT_EQ(w.num_kv_heads, 2);
  EXPECT_EQ(w.slot_stride, 1);
  launch(0);
  EXPECT_EQ(state().launches.size(), 1u) << "no tokens, no launch";
}

// The limit of a plan may be 16384 tokens where a graph has rows for 16, or a replay one token in rows for 4000.
TEST_F(WriteKvLaunch, InAGraphRowsAndAThousandBlocksBoundTheGrid) {
  const int now = 5;
  p.slots = TensorView::contiguous(at(1 << 28), DType::i64, {16384}, kGpu);
  const auto launch_for = [&](int64_t rows_of_k, int64_t rows_of_v) {
    p.k = TensorView::contiguous(at(1 << 26), DType::bf16, {rows_of_k, 2, 64}, kGpu);
    p.v = TensorView::contiguous(at(1 << 27), DType::bf16, {rows_of_v, 2, 32}, kGpu);
    writer->run(p.cache, p.k, p.v, {.slots = p.slots, .num_tokens = 5, .reach = {}, .captured_tokens = 16384, .now = &now}, nullptr);
    const auto w = params_of<WriteKvParams>(state().launches.back());
    EXPECT_EQ(w.num_tokens_now, &now);
    return std::pair(state().launches.back().grid_x, w.num_tokens);
  };
  EXPECT_EQ(launch_for(16, 20), std::pair(16u, 16));
  EXPECT_EQ(launch_for(20, 5), std::pair(5u, 5));
  EXPECT_EQ(launch_for(4000, 4000), std::pair(1024u, 4000));
  EXPECT_EQ(launch_for(20000, 20000), std::pair(1024u, 16384));
}

TEST_F(WriteKvLaunch, TheEntryFollowsTypeAndAlignment) {
  p.k.strides[1] = 65;  // heads of 130 bytes
  EXPECT_EQ(launch().entry, "write_kv_strided");
  p.k.strides[1] = 72;
  EXPECT_EQ(launch().entry, "write_kv");
  p.v.strides[2] = 2;
  EXPECT_EQ(launch().entry, "write_kv_strided");
  p.k = TensorView::contiguous(at(1 << 26), DType::fp8_e4m3, {5, 2, 64}, kGpu);
  p.v = TensorView::contiguous(at(1 << 27), DType::fp8_e4m3, {5, 2, 32}, kGpu);
  EXPECT_EQ(launch().entry, "copy_kv");
  p.cache.k.data = at((1 << 20) + 4);
  EXPECT_EQ(launch().entry, "copy_kv_strided");
}

TEST_F(WriteKvLaunch, ScalesOfAllHeadsMayBeOnTheHost) {
  float host[2] = {0.5f, 2};
  p.cache.k_scale = TensorView::contiguous(host, DType::f32, {1});
  p.cache.v_scale = TensorView::contiguous(at(1 << 29), DType::f32, {2}, kGpu);
  const auto w = params_of<WriteKvParams>(launch());
  EXPECT_EQ(w.k.scales, nullptr);
  EXPECT_EQ(w.k.scale, 0.5f);
  EXPECT_EQ(w.v.scales, at(1 << 29));
  EXPECT_EQ(w.v.scale_stride, 1);
  p.cache.k_scale = TensorView::contiguous(host, DType::f32, {2});
  EXPECT_EQ(code(), "cuda.scales");
  p.cache.k_scale = TensorView::contiguous(at(1 << 29), DType::f32, {1}, kGpu);
  EXPECT_EQ(params_of<WriteKvParams>(launch()).k.scale_stride, 0);
}

TEST_F(WriteKvLaunch, RefusesWhatDoesNotFit) {
  EXPECT_EQ(code(6), "write_kv.k");
  p.v.dtype = DType::f16;
  EXPECT_EQ(code(), "write_kv.v");
  p = {}, p.k.device = {};
  EXPECT_EQ(code(), "write_kv.k");
  p = {}, p.slots.dtype = DType::i32;
  EXPECT_EQ(code(), "write_kv.slot_mapping");
  p = {}, p.slots.device = {};
  EXPECT_EQ(code(), "write_kv.slot_mapping");
  p = {}, p.cache.k.device = p.cache.v.device = {DeviceType::cuda, 1};
  EXPECT_EQ(code(), "write_kv.device");
  p = {}, p.cache.k.sizes[1] = 8;
  EXPECT_EQ(code(), "kv_cache.k.block_size");
  p = {}, p.spec.block_size = 0;
  EXPECT_EQ(error_code([&] { WriteKv(context, "sm_90a", p.spec); }), "write_kv.ragged");
  EXPECT_TRUE(state().launches.empty());
}

class CopyBlocksLaunch : public WriteKvLaunch {
 protected:
  CopyBlocksLaunch() {
    gpu::store_cached(gpu::kernel_cache_folder(), cache_name(copy_blocks_key("sm_90a")), {.binary = "not looked at", .log = ""});
    copier.emplace(context, "sm_90a");
    state().params_bytes = sizeof(CopyBlocksParams);
  }
  std::string copy_code(std::vector<BlockCopy> copies) {
    return error_code([&] { copier->copy(p.spec, p.cache, copies, nullptr); });
  }
  std::optional<CopyBlocks> copier;
};

TEST_F(CopyBlocksLaunch, ABlockInOnePieceIsCopiedWithTheWidestAccess) {
  copier->copy(p.spec, p.cache, std::vector<BlockCopy>{{1, 2}, {3, 4}}, nullptr);
  ASSERT_EQ(state().launches.size(), 1u);
  EXPECT_EQ(state().launches[0].entry, "copy_blocks_16");
  EXPECT_EQ(state().launches[0].grid_x, 2u);
  EXPECT_EQ(state().launches[0].grid_y, 1u);
  const auto c = params_of<CopyBlocksParams>(state().launches[0]);
  EXPECT_EQ(c.k.piece_bytes, 16 * 2 * 64);
  EXPECT_EQ(c.v.block_stride, 16 * 2 * 32);
  EXPECT_EQ(c.k.sizes[0] * c.k.sizes[1] * c.k.sizes[2], 1u);
  EXPECT_EQ(c.copies[1].from, 3);
  EXPECT_EQ(c.copies[1].to, 4);
}

// Values that are a part of the keys go with them, and nothing else is given to the kernels.
TEST_F(CopyBlocksLaunch, LatentValuesAreKeys) {
  p.spec.kv_format = KvFormat::latent;
  p.cache.v = {};
  copier->copy(p.spec, p.cache, std::vector<BlockCopy>{{1, 2}}, nullptr);
  ASSERT_EQ(state().launches.size(), 1u);
  EXPECT_EQ(state().launches[0].entry, "copy_blocks_16");
  const auto c = params_of<CopyBlocksParams>(state().launches[0]);
  EXPECT_EQ(c.k.piece_bytes, 16 * 2 * 64);
  EXPECT_EQ(c.v.data, nullptr);
  EXPECT_EQ(c.v.piece_bytes * c.v.sizes[0], 0);

  const KernelKey key = write_kv_key("sm_90a", p.spec, p.spec.q_dtype);
  EXPECT_EQ(key.str(), "write_kv.cu for sm_90a (kFrom 2, kTo 3, kDimK 64, kDimV 0, kBlockSize 16)");
  gpu::store_cached(gpu::kernel_cache_folder(), cache_name(key), {.binary = "not looked at", .log = ""});
  writer.emplace(context, "sm_90a", p.spec);
  state().params_bytes = sizeof(WriteKvParams);
  EXPECT_EQ(code(), "write_kv.v") << "values are not written";
  p.v = {};
  const auto w = params_of<WriteKvParams>(launch());
  EXPECT_EQ(state().launches.back().entry, "write_kv");
  EXPECT_EQ(w.k.data, at(1 << 20));
  EXPECT_EQ(w.v.data, nullptr);
  EXPECT_EQ(w.new_v.data, nullptr);
  p.cache.v = p.cache.k.slice(3, 0, 32);  // the same memory, said again
  EXPECT_EQ(params_of<WriteKvParams>(launch()).v.data, nullptr);
  p.cache.v = p.cache.k.slice(3, 32, 64);
  EXPECT_EQ(code(), "kv_cache.v.unexpected");
}

TEST_F(CopyBlocksLaunch, TheWidthFollowsTheLayout) {
  const auto entry = [&] {
    copier->copy(p.spec, p.cache, std::vector<BlockCopy>{{1, 2}}, nullptr);
    return state().launches.back().entry;
  };
  p.cache.k.strides = {16 * 2 * 72, 2 * 72, 72, 1};  // heads of 72 bytes
  EXPECT_EQ(entry(), "copy_blocks_8");
  const auto c = params_of<CopyBlocksParams>(state().launches.back());
  EXPECT_EQ(c.k.piece_bytes, 64);
  EXPECT_EQ(c.k.sizes[0], 32u);  // 16 tokens of 2 heads, evenly spaced
  EXPECT_EQ(c.k.strides[0], 72);
  p.cache.v.data = at((1 << 24) + 4);
  EXPECT_EQ(entry(), "copy_blocks_4");
  p.cache.v.data = at((1 << 24) + 2);
  EXPECT_EQ(entry(), "copy_blocks_2");
  p.cache.v.data = at((1 << 24) + 1);
  EXPECT_EQ(entry(), "copy_blocks_1");
}

TEST_F(CopyBlocksLaunch, ALongListIsCutIntoLaunches) {
  p.cache.k.sizes[0] = p.cache.v.sizes[0] = 2000;
  std::vector<BlockCopy> copies;
  for (int i = 0; i < kCopyBlocksAtOnce + 3; ++i) copies.push_back({i, 1000 + i});
  copier->copy(p.spec, p.cache, copies, nullptr);
  ASSERT_EQ(state().launches.size(), 2u);
  EXPECT_EQ(state().launches[0].grid_x, unsigned(kCopyBlocksAtOnce));
  EXPECT_EQ(state().launches[1].grid_x, 3u);
  EXPECT_EQ(params_of<CopyBlocksParams>(state().launches[1]).copies[2].to, 1000 + kCopyBlocksAtOnce + 2);
}

class MergeResultsLaunch : public WriteKvLaunch {
 protected:
  MergeResultsLaunch() {
    gpu::store_cached(gpu::kernel_cache_folder(), cache_name(merge_results_key("sm_90a")), {.binary = "not looked at", .log = ""});
    merger.emplace(context, "sm_90a");
    state().params_bytes = sizeof(MergeResultsParams);
  }
  PartialResult result(int64_t tokens, int64_t dim, DType type = DType::bf16) {
    return {.out = TensorView::contiguous(at(1 << 20), type, {tokens, 4, dim}, kGpu),
            .lse = TensorView::contiguous(at(1 << 24), DType::f32, {tokens, 4}, kGpu)};
  }
  std::string merge(const std::vector<PartialResult>& parts, const PartialResult& to) {
    return error_code([&] { merger->merge(parts, to.out, to.lse, nullptr); });
  }
  std::optional<MergeResults> merger;
};

TEST_F(MergeResultsLaunch, RowsInPiecesOfEightAndOthers) {
  PartialResult part = result(13, 64), to = result(13, 64, DType::f32);
  EXPECT_EQ(merge({part, part}, to), "nothing thrown");
  ASSERT_EQ(state().launches.size(), 1u);
  EXPECT_EQ(state().launches[0].entry, "merge_results_8");
  EXPECT_EQ(state().launches[0].grid_x, 7u);  // 52 rows
  const auto p = params_of<MergeResultsParams>(state().launches[0]);
  EXPECT_EQ(p.num_parts, 2);
  EXPECT_EQ(p.parts[1].head_stride, 128);
  EXPECT_EQ(p.result.head_stride, 256);
  part.out.data = at((1 << 20) + 2);
  EXPECT_EQ(merge({result(13, 64), part}, to), "nothing thrown");
  EXPECT_EQ(state().launches.back().entry, "merge_results_1");
  EXPECT_EQ(merge({result(13, 60)}, result(13, 60)), "nothing thrown");
  EXPECT_EQ(state().launches.back().entry, "merge_results_1");
}

TEST_F(MergeResultsLaunch, RefusesWhatItCannotMerge) {
  const PartialResult part = result(3, 8);
  EXPECT_EQ(merge({}, part), "merge.parts.none");
  EXPECT_EQ(merge(std::vector<PartialResult>(kMostMergeParts + 1, part), part), "merge.parts.many");
  EXPECT_EQ(merge({part}, result(3, 16)), "merge.out.shape");
  PartialResult elsewhere = part;
  elsewhere.lse.device = {};
  EXPECT_EQ(merge({elsewhere}, part), "merge.device");
  EXPECT_EQ(merge({result(int64_t(1) << 32, 8)}, result(int64_t(1) << 32, 8)), "merge.out.size");
  EXPECT_TRUE(state().launches.empty());
  EXPECT_EQ(merge({result(0, 8)}, result(0, 8)), "nothing thrown");
  EXPECT_TRUE(state().launches.empty());
}

TEST_F(CopyBlocksLaunch, RefusesWhatTheOneForTheHostRefuses) {
  EXPECT_EQ(copy_code({{1, 10}}), "kv_cache.copy.to");
  EXPECT_EQ(copy_code({{-1, 1}}), "kv_cache.copy.from");
  EXPECT_EQ(copy_code({{1, 2}, {2, 3}}), "kv_cache.copy.chained");
  EXPECT_EQ(copy_code({{1, 3}, {2, 3}}), "kv_cache.copy.twice");
  p.cache.k.device = p.cache.v.device = {};
  EXPECT_EQ(copy_code({{1, 2}}), "kv_cache.copy.device");
  p.spec.block_size = 0;
  EXPECT_EQ(copy_code({{1, 2}}), "kv_cache.copy.ragged");
  p = {}, p.spec.num_kv_heads = 4096, p.spec.num_q_heads = 4096, p.spec.block_size = 65536;
  p.cache.k = TensorView::contiguous(at(1 << 20), DType::fp8_e4m3, {10, 65536, 4096, 64}, kGpu);
  p.cache.v = TensorView::contiguous(at(1 << 20), DType::fp8_e4m3, {10, 65536, 4096, 32}, kGpu);
  EXPECT_EQ(copy_code({{1, 2}}), "kv_cache.copy.size");
  p = {};
  EXPECT_EQ(copy_code({}), "nothing thrown");
  EXPECT_TRUE(state().launches.empty());
}

}  // namespace
}  // namespace imbrex::cuda
