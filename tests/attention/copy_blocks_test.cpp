// copy_blocks(): every layout, nothing but the destination changes, bad lists are refused before anything is copied.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "expect_error.h"
#include "imbrex/kv_cache.h"

namespace imbrex {
namespace {

using test::error_code;

AttentionSpec spec_of(DType kv_dtype = DType::bf16, KvFormat format = KvFormat::strided) {
  return {.num_q_heads = 6,
          .num_kv_heads = 3,
          .head_dim_qk = 16,
          .head_dim_v = 8,
          .kv_dtype = kv_dtype,
          .kv_format = format,
          .block_size = format == KvFormat::strided ? 5 : 48,
          .mask = {},
          .score = {}};
}

// Byte offsets, from the tensor's data, of every byte of one block in the order of its elements.
std::vector<int64_t> block_bytes(const TensorView& t, int64_t block) {
  std::vector<int64_t> offsets = {block * t.stride(0) * size_of(t.dtype)};
  for (int d = 1; d < t.rank; ++d) {
    std::vector<int64_t> longer;
    for (int64_t o : offsets)
      for (int64_t i = 0; i < t.size(d); ++i) longer.push_back(o + i * t.stride(d) * size_of(t.dtype));
    offsets = std::move(longer);
  }
  std::vector<int64_t> bytes;
  for (int64_t o : offsets)
    for (int64_t i = 0; i < size_of(t.dtype); ++i) bytes.push_back(o + i);
  return bytes;
}

std::vector<char> random_bytes(size_t n) {
  std::mt19937 random(3);
  std::vector<char> bytes(n);
  for (char& b : bytes) b = char(random());
  return bytes;
}

// Copies with copy_blocks and byte by byte, and compares all of the memory around the cache.
void expect_copied(const AttentionSpec& spec, const KvCache& cache, char* memory, size_t bytes, const std::vector<BlockCopy>& copies,
                   const ParallelFor& threads = {}) {
  const std::vector<char> filling = random_bytes(bytes);
  std::memcpy(memory, filling.data(), bytes);
  std::vector<char> expected = filling;
  for (const TensorView* t : {&cache.k, &cache.v, &cache.k_rope}) {
    if (t->empty()) continue;
    const int64_t start = t->as<char>() - memory;
    for (const BlockCopy& c : copies) {
      const std::vector<int64_t> from = block_bytes(*t, c.from), to = block_bytes(*t, c.to);
      for (size_t i = 0; i < from.size(); ++i) expected[size_t(start + to[i])] = filling[size_t(start + from[i])];
    }
  }
  copy_blocks(spec, cache, copies, threads);
  for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(memory[i], expected[i]) << "byte " << i << " of " << bytes;
}

const std::vector<BlockCopy> kCopies = {{0, 4}, {6, 1}, {0, 5}, {3, 2}};  // one source serves two destinations

TEST(CopyBlocks, EveryOrderEveryType) {
  for (DType dtype : {DType::f32, DType::bf16, DType::fp8_e4m3}) {
    const AttentionSpec spec = spec_of(dtype);
    std::string order = "bdhlt";  // sorted: all permutations follow
    do {
      const KvAllocation allocation(spec, /*num_layers=*/2, /*num_blocks=*/7, order);
      char* const memory = allocation.layer(0).k.as<char>();  // the other layer is a neighbour
      ASSERT_NO_FATAL_FAILURE(expect_copied(spec, allocation.layer(1), memory, size_t(allocation.bytes()), kCopies)) << order;
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(CopyBlocks, PackedFormats) {
  for (DType dtype : {DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2}) {
    const AttentionSpec spec = spec_of(dtype, KvFormat::amx_packed);
    for (const char* order : {"lbh", "lhb", "blh", "bhl", "hlb", "hbl"}) {
      const KvAllocation allocation(spec, 2, 7, order);
      char* const memory = allocation.layer(0).k.as<char>();
      ASSERT_NO_FATAL_FAILURE(expect_copied(spec, allocation.layer(1), memory, size_t(allocation.bytes()), kCopies)) << order;
    }
  }
}

TEST(CopyBlocks, LatentValuesGoWithTheirKeys) {
  AttentionSpec records = spec_of(DType::fp8_e4m3, KvFormat::fp8_ds_mla);
  records.num_kv_heads = 1, records.head_dim_qk = 576, records.head_dim_v = 512;
  for (const AttentionSpec& spec : {spec_of(DType::bf16, KvFormat::latent), spec_of(DType::bf16, KvFormat::latent_rope), records})
    for (const char* order : {"lbhtd", "dblth"}) {
      const KvAllocation allocation(spec, 2, 7, order);
      char* const memory = allocation.layer(0).k.as<char>();
      ASSERT_NO_FATAL_FAILURE(expect_copied(spec, allocation.layer(1), memory, size_t(allocation.bytes()), kCopies)) << order;
    }
}

TEST(CopyBlocks, StridesWithGaps) {
  const AttentionSpec spec = spec_of();
  std::vector<uint16_t> memory(70000);
  KvCache cache;
  const auto view = [&](int64_t first, std::array<int64_t, 4> sizes, std::array<int64_t, 4> strides) {
    TensorView t{.data = memory.data() + first, .dtype = DType::bf16, .rank = 4};
    std::copy(sizes.begin(), sizes.end(), t.sizes.begin());
    std::copy(strides.begin(), strides.end(), t.strides.begin());
    return t;
  };
  const auto expect = [&] { expect_copied(spec, cache, reinterpret_cast<char*>(memory.data()), memory.size() * 2, kCopies); };
  // Rows with room behind them; k and v interleaved in one row; every second element.
  cache.k = view(3, {7, 5, 3, 16}, {1000, 70, 20, 1});
  cache.v = view(8003, {7, 5, 3, 8}, {1000, 70, 20, 1});
  ASSERT_NO_FATAL_FAILURE(expect());
  cache.k = view(0, {7, 5, 3, 16}, {5 * 3 * 24, 3 * 24, 24, 1});
  cache.v = view(16, {7, 5, 3, 8}, {5 * 3 * 24, 3 * 24, 24, 1});
  ASSERT_NO_FATAL_FAILURE(expect());
  cache.k = view(1, {7, 5, 3, 16}, {5 * 3 * 32, 3 * 32, 32, 2});
  cache.v = view(8001, {7, 5, 3, 8}, {1, 7 * 3, 7, 7 * 3 * 5});
  ASSERT_NO_FATAL_FAILURE(expect());
}

TEST(CopyBlocks, ValuesMayBeAPartOfTheKeys) {
  AttentionSpec spec = spec_of();
  spec.num_kv_heads = 1;
  spec.head_dim_qk = 96;
  spec.head_dim_v = 80;
  std::vector<uint16_t> memory(7 * 5 * 96);
  KvCache cache;
  cache.k = TensorView::contiguous(memory.data(), DType::bf16, {7, 5, 1, 96});
  cache.v = cache.k.slice(3, 0, 80);
  expect_copied(spec, cache, reinterpret_cast<char*>(memory.data()), memory.size() * 2, kCopies);
}

TEST(CopyBlocks, ManyBlocksOnManyThreads) {
  const AttentionSpec spec = spec_of(DType::f32);
  constexpr int kBlocks = 600;
  const KvAllocation allocation(spec, 1, kBlocks);
  std::vector<int32_t> ids(kBlocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  std::vector<BlockCopy> copies;
  for (size_t i = 0; i < kBlocks / 2; ++i) copies.push_back({ids[i], ids[i + kBlocks / 2]});
  const KvCache cache = allocation.layer(0);
  char* const memory = cache.k.as<char>();
  ThreadPool pool(3);
  expect_copied(spec, cache, memory, size_t(allocation.bytes()), copies, pool.parallel_for());
  int calls = 0;  // a host's hook that runs one worker after the other
  ParallelFor hook{.num_workers = 5, .context = &calls, .invoke = [](void* context, int n, ParallelFor::Body body, void* argument) {
                     ++*static_cast<int*>(context);
                     for (int w = 0; w < n; ++w) body(argument, w);
                   }};
  expect_copied(spec, cache, memory, size_t(allocation.bytes()), copies, hook);
  EXPECT_EQ(calls, 1);
  expect_copied(spec, cache, memory, size_t(allocation.bytes()), {{1, 2}}, hook);
  EXPECT_EQ(calls, 1);  // one small block is not worth waking anybody
}

TEST(CopyBlocks, RefusalsCopyNothing) {
  const AttentionSpec spec = spec_of();
  const KvAllocation allocation(spec, 1, 7);
  const KvCache cache = allocation.layer(0);
  const std::vector<char> filling = random_bytes(size_t(allocation.bytes()));
  std::memcpy(cache.k.data, filling.data(), filling.size());
  const auto code = [&](const std::vector<BlockCopy>& copies) { return error_code([&] { copy_blocks(spec, cache, copies); }); };
  EXPECT_EQ(code({{0, 1}, {-1, 2}}), "kv_cache.copy.from");
  EXPECT_EQ(code({{0, 1}, {7, 2}}), "kv_cache.copy.from");
  EXPECT_EQ(code({{0, 1}, {2, -1}}), "kv_cache.copy.to");
  EXPECT_EQ(code({{0, 1}, {2, 7}}), "kv_cache.copy.to");
  EXPECT_EQ(code({{0, 1}, {2, INT32_MAX}}), "kv_cache.copy.to");
  EXPECT_EQ(code({{0, 1}, {2, 1}}), "kv_cache.copy.twice");
  EXPECT_EQ(code({{0, 1}, {0, 1}}), "kv_cache.copy.twice");
  EXPECT_EQ(code({{0, 1}, {1, 2}}), "kv_cache.copy.chained");
  EXPECT_EQ(code({{1, 2}, {0, 1}}), "kv_cache.copy.chained");
  EXPECT_EQ(code({{0, 1}, {1, 0}}), "kv_cache.copy.chained");
  EXPECT_EQ(code({{0, 1}, {3, 3}}), "kv_cache.copy.chained");
  EXPECT_EQ(std::memcmp(cache.k.data, filling.data(), filling.size()), 0);
  EXPECT_EQ(code({}), "nothing thrown");
  EXPECT_EQ(std::memcmp(cache.k.data, filling.data(), filling.size()), 0);
}

TEST(CopyBlocks, BadCachesAreRefused) {
  AttentionSpec spec = spec_of();
  const KvAllocation allocation(spec, 1, 7);
  KvCache cache = allocation.layer(0);
  const auto code = [&] { return error_code([&] { copy_blocks(spec, cache, kCopies); }); };
  cache.k.device = cache.v.device = {DeviceType::cuda, 0};
  EXPECT_EQ(code(), "kv_cache.copy.device");
  cache = allocation.layer(0);
  cache.v = cache.v.slice(0, 0, 6);
  EXPECT_EQ(code(), "kv_cache.num_blocks.differ");
  cache = allocation.layer(0);
  cache.k = {};
  EXPECT_EQ(code(), "kv_cache.k.missing");
  spec.block_size = 0;
  EXPECT_EQ(code(), "kv_cache.copy.ragged");
}

}  // namespace
}  // namespace imbrex
