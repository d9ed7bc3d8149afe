// Caches, blocks and the merge of partial results through the C ABI.
#include <cmath>

#include "api/handles.h"

namespace imbrex::test {
namespace {

PoolHandle pool_of(int num_blocks) {
  return make_handle<PoolHandle>([&](auto** out) { return imbrex_block_pool_create(num_blocks, out); });
}

TEST(CApiCache, AllocationHasLayersOfZeros) {
  const SpecHandle spec = spec_of(small_fields());
  const DeviceHandle device = cpu();
  const auto make = [&](int layers, int64_t blocks, const char* order) {
    return make_handle<AllocationHandle>(
        [&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), layers, blocks, order, out); });
  };
  const AllocationHandle memory = make(3, 5, "lbthd");
  ASSERT_NE(memory, nullptr) << imbrex_last_error();
  EXPECT_GE(imbrex_kv_allocation_bytes(memory.get()), 3 * 5 * 16 * 2 * (64 + 64) * 4);
  imbrex_kv_cache first = init(imbrex_kv_cache_init), last = first;
  ASSERT_EQ(imbrex_kv_allocation_layer(memory.get(), 0, &first), IMBREX_OK);
  ASSERT_EQ(imbrex_kv_allocation_layer(memory.get(), 2, &last), IMBREX_OK);
  ASSERT_EQ(last.k->ndim, 4);
  const int64_t sizes[4] = {5, 16, 2, 64}, strides[4] = {16 * 2 * 64, 2 * 64, 64, 1};
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(last.k->shape[i] == sizes[i] && last.k->strides[i] == strides[i]) << i;
  EXPECT_NE(first.k->data, last.k->data);
  EXPECT_EQ(static_cast<const float*>(last.v->data)[0], 0.f);
  EXPECT_EQ(last.k_scale, nullptr);

  EXPECT_EQ(imbrex_kv_allocation_layer(memory.get(), 3, &last), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.index");
  EXPECT_EQ(make(1, 5, "lbt"), nullptr);
  EXPECT_EQ(last_code().substr(0, 14), "kv_cache.order");
  EXPECT_EQ(make(1, int64_t(1) << 60, nullptr), nullptr);
}

TEST(CApiCache, CopiesBlocks) {
  const SpecHandle spec = spec_of(small_fields());
  const DeviceHandle device = cpu();
  const AllocationHandle memory =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 1, 4, "lbthd", out); });
  imbrex_kv_cache cache = init(imbrex_kv_cache_init);
  ASSERT_EQ(imbrex_kv_allocation_layer(memory.get(), 0, &cache), IMBREX_OK);
  auto* k = static_cast<float*>(cache.k->data);
  const int64_t block = cache.k->strides[0];
  for (int64_t i = 0; i < block; ++i) k[i] = float(i);
  const int32_t from[2] = {0, 1}, to[2] = {3, 2};
  ASSERT_EQ(imbrex_copy_blocks(spec.get(), &cache, from, to, 2, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_TRUE(std::equal(k, k + block, k + 3 * block));
  EXPECT_EQ(k[2 * block], 0.f);
  EXPECT_EQ(imbrex_copy_blocks(spec.get(), &cache, to, to, 2, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "kv_cache.copy.chained");
  EXPECT_EQ(imbrex_copy_blocks(spec.get(), &cache, nullptr, to, 2, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_copy_blocks(spec.get(), &cache, from, to, -1, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.count");
  EXPECT_EQ(imbrex_copy_blocks(spec.get(), &cache, nullptr, nullptr, 0, nullptr), IMBREX_OK);

  const CopierHandle copier = make_handle<CopierHandle>([&](auto** out) { return imbrex_block_copier_create(device.get(), nullptr, out); });
  ASSERT_NE(copier, nullptr) << imbrex_last_error();
  const int32_t first = 0, second = 1;
  EXPECT_EQ(imbrex_block_copier_copy(copier.get(), spec.get(), &cache, &first, &second, 1, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_TRUE(std::equal(k, k + block, k + block));
  EXPECT_EQ(imbrex_block_copier_copy(copier.get(), spec.get(), &cache, from, from, 2, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "kv_cache.copy.chained");
  EXPECT_EQ(imbrex_block_copier_copy(nullptr, spec.get(), &cache, from, to, 2, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  const DeviceHandle described = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("h200", out); });
  EXPECT_EQ(make_handle<CopierHandle>([&](auto** out) { return imbrex_block_copier_create(described.get(), nullptr, out); }), nullptr);
  EXPECT_EQ(last_code(), "backend.device_absent");
}

TEST(CApiCache, HashesOfAKeyAreTheSameEverywhere) {
  const uint64_t key[2] = {0x0706050403020100u, 0x0f0e0d0c0b0a0908u}, ids[1] = {0x0f0e0d0c0b0a0908u};
  uint64_t hash = 0;
  ASSERT_EQ(imbrex_hash_block_with_key(key, 0x0706050403020100u, ids, 1, &hash), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(hash, 0x3f2acc7f57c29bdbu);
  EXPECT_NE(imbrex_hash_block(0x0706050403020100u, ids, 1), hash) << "the process has another key";
  EXPECT_EQ(imbrex_hash_block_with_key(nullptr, 0, ids, 1, &hash), IMBREX_INVALID);
  EXPECT_EQ(imbrex_hash_block_with_key(key, 0, nullptr, 1, &hash), IMBREX_INVALID);
  EXPECT_EQ(imbrex_hash_block_with_key(key, 0, ids, -1, &hash), IMBREX_INVALID);
  EXPECT_EQ(imbrex_hash_block(0, nullptr, 1), 0u);
  EXPECT_EQ(imbrex_hash_block(0, ids, -1), 0u);
}

TEST(CApiCache, PoolSharesAndRunsOut) {
  const PoolHandle pool = pool_of(4);
  int32_t blocks[4] = {-1, -1, -1, -1};
  ASSERT_EQ(imbrex_block_pool_allocate(pool.get(), 3, blocks), IMBREX_OK);
  EXPECT_EQ(imbrex_block_pool_num_free(pool.get()), 1);
  int32_t more[2] = {-7, -7};
  EXPECT_EQ(imbrex_block_pool_allocate(pool.get(), 2, more), IMBREX_OUT_OF_MEMORY);
  EXPECT_EQ(last_code(), "block_pool.exhausted");
  EXPECT_TRUE(more[0] == -7 && imbrex_block_pool_num_free(pool.get()) == 1);

  const uint64_t tokens[2] = {11, 12};
  const uint64_t hashes[2] = {imbrex_hash_block(0, tokens, 2), imbrex_hash_block(imbrex_hash_block(0, tokens, 2), tokens, 2)};
  EXPECT_NE(hashes[0], hashes[1]);
  ASSERT_EQ(imbrex_block_pool_publish(pool.get(), blocks[0], hashes[0]), IMBREX_OK);
  EXPECT_EQ(imbrex_block_pool_num_cached(pool.get()), 1);
  int32_t found = -1, shared[2] = {-1, -1};
  ASSERT_EQ(imbrex_block_pool_lookup(pool.get(), hashes, 2, shared, &found), IMBREX_OK);
  EXPECT_TRUE(found == 1 && shared[0] == blocks[0] && shared[1] == -1);

  int32_t writable = -1;
  ASSERT_EQ(imbrex_block_pool_make_writable(pool.get(), blocks[0], &writable), IMBREX_OK);  // has two owners
  EXPECT_NE(writable, blocks[0]);
  ASSERT_EQ(imbrex_block_pool_retain(pool.get(), blocks, 1), IMBREX_OK);
  EXPECT_EQ(imbrex_block_pool_make_writable(pool.get(), blocks[0], &writable), IMBREX_OUT_OF_MEMORY);  // four are in use
  ASSERT_EQ(imbrex_block_pool_release(pool.get(), blocks, 3), IMBREX_OK);
  EXPECT_EQ(imbrex_block_pool_release(pool.get(), blocks + 1, 1), IMBREX_INVALID);
  EXPECT_EQ(last_code().substr(0, 11), "block_pool.");
  EXPECT_EQ(imbrex_block_pool_allocate(pool.get(), -1, blocks), IMBREX_INVALID);
  EXPECT_EQ(pool_of(0), nullptr);
  EXPECT_EQ(last_code(), "block_pool.size");
}

TEST(CApiCache, MergesPartialResults) {
  HostTensor<float> a({1, 1, 8}, kFloat, 1.f), b({1, 1, 8}, kFloat, 3.f), out({1, 1, 8}, kFloat), lse_a({1, 1}, kFloat, 0.f),
      lse_b({1, 1}, kFloat, std::log(3.f)), lse({1, 1}, kFloat);
  const imbrex_partial_result parts[2] = {{&a.view, &lse_a.view}, {&b.view, &lse_b.view}};
  ASSERT_EQ(imbrex_merge_partial_results(parts, 2, &out.view, &lse.view, nullptr), IMBREX_OK) << imbrex_last_error();
  for (const float x : out.data) EXPECT_NEAR(x, 2.5f, 1e-6);
  EXPECT_NEAR(lse.data[0], std::log(4.f), 1e-6);
  const DeviceHandle device = cpu();
  const MergerHandle merger = make_handle<MergerHandle>([&](auto** to) { return imbrex_merger_create(device.get(), nullptr, to); });
  HostTensor<float> same({1, 1, 8}, kFloat), same_lse({1, 1}, kFloat);
  ASSERT_EQ(imbrex_merger_merge(merger.get(), parts, 2, &same.view, &same_lse.view, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(same.data, out.data);
  EXPECT_EQ(imbrex_merger_merge(nullptr, parts, 2, &same.view, &same_lse.view, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_merge_partial_results(parts, 2, nullptr, &lse.view, nullptr), IMBREX_INVALID);
  const imbrex_partial_result half = {&a.view, nullptr};
  EXPECT_EQ(imbrex_merge_partial_results(&half, 1, &out.view, &lse.view, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
}

}  // namespace
}  // namespace imbrex::test
