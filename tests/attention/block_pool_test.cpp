// BlockPool against a slow model (plain containers, the rules spelled out), its errors, and the small functions beside it.
#include "imbrex/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <map>
#include <random>
#include <set>

#include "expect_error.h"
#include "imbrex/error.h"

namespace imbrex {
namespace {

// The rules of block_pool.h over lists and maps.
struct SlowPool {
  std::map<int32_t, int> refs;
  std::map<BlockHash, int32_t> cache;
  std::list<int32_t> uncached_free, cached_free;  // front is handed out first
  int64_t evictions = 0;

  explicit SlowPool(int n) {
    for (int b = 0; b < n; ++b) refs[b] = 0, uncached_free.push_back(b);
  }
  BlockHash hash_of(int32_t b) const {
    for (const auto& [hash, block] : cache) {
      if (block == b) return hash;
    }
    return 0;
  }
  size_t num_free() const { return uncached_free.size() + cached_free.size(); }
  // The fast pool chooses among uncached blocks as it likes, so the model is told which block it got and checks that it may.
  void take(int32_t b) {
    if (!uncached_free.empty()) {
      const auto it = std::find(uncached_free.begin(), uncached_free.end(), b);
      ASSERT_NE(it, uncached_free.end()) << "block " << b << " was not an uncached free block";
      uncached_free.erase(it);
    } else {
      ASSERT_FALSE(cached_free.empty());
      ASSERT_EQ(cached_free.front(), b) << "not the least recently used block";
      cached_free.pop_front();
      cache.erase(hash_of(b));
      ++evictions;
    }
    refs[b] = 1;
  }
  void release(const std::vector<int32_t>& blocks) {
    for (size_t i = blocks.size(); i-- > 0;) {
      if (--refs[blocks[i]] == 0) (hash_of(blocks[i]) ? cached_free : uncached_free).push_back(blocks[i]);
    }
  }
  int lookup(const std::vector<BlockHash>& hashes, std::vector<int32_t>& out) {
    int n = 0;
    for (const BlockHash h : hashes) {
      const auto it = cache.find(h);
      if (it == cache.end()) break;
      if (refs[it->second]++ == 0) cached_free.remove(it->second);
      out.push_back(it->second);
      ++n;
    }
    return n;
  }
  void publish(int32_t b, BlockHash h) { cache.emplace(h, b); }
  void clear() {
    cache.clear();
    uncached_free.splice(uncached_free.end(), cached_free);
  }
};

void run_against_model(int num_blocks, int num_hashes, int operations, uint64_t seed) {
  BlockPool pool(num_blocks);
  SlowPool model(num_blocks);
  std::mt19937_64 rng(seed);
  const auto below = [&](int n) { return int(rng() % uint64_t(n)); };
  std::vector<std::vector<int32_t>> held;  // each as a request would: released as a whole
  int64_t exhausted = 0, copies = 0, revived = 0;
  for (int op = 0; op < operations; ++op) {
    switch (below(12)) {
      case 0:
      case 1:
      case 2: {
        std::vector<int32_t> got{-7};
        const int count = below(5);
        const bool ok = pool.allocate(count, got);
        ASSERT_EQ(ok, size_t(count) <= model.num_free());
        ASSERT_EQ(got.size(), ok ? size_t(count) + 1 : 1u);
        ASSERT_EQ(got[0], -7);
        got.erase(got.begin());
        for (const int32_t b : got) ASSERT_NO_FATAL_FAILURE(model.take(b));
        exhausted += !ok;
        if (!got.empty()) held.push_back(got);
        break;
      }
      case 3:
      case 4: {
        if (held.empty()) break;
        const auto it = held.begin() + below(int(held.size()));
        pool.release(*it);
        model.release(*it);
        held.erase(it);
        break;
      }
      case 5: {
        if (held.empty()) break;
        const auto again = held[size_t(below(int(held.size())))];
        pool.retain(again);
        for (const int32_t b : again) ++model.refs[b];
        held.push_back(again);
        break;
      }
      case 6:
      case 7:
      case 8: {
        if (held.empty()) break;
        const auto& blocks = held[size_t(below(int(held.size())))];
        const int32_t b = blocks[size_t(below(int(blocks.size())))];
        const BlockHash h = BlockHash(1 + below(num_hashes));
        if (const BlockHash old = model.hash_of(b); old != 0 && old != h) {
          ASSERT_EQ(test::error_code([&] { pool.publish(b, h); }), "block_pool.publish.again");
        } else {
          pool.publish(b, h);
          model.publish(b, h);
        }
        break;
      }
      case 9: {
        std::vector<BlockHash> hashes;
        for (int i = below(4); i >= 0; --i) hashes.push_back(BlockHash(1 + below(num_hashes)));
        std::vector<int32_t> got, expected;
        const int peeked = pool.peek(hashes), free_before = pool.num_free();
        const int found = pool.lookup(hashes, got);
        ASSERT_EQ(peeked, found);
        ASSERT_EQ(found, model.lookup(hashes, expected));
        ASSERT_EQ(got, expected);
        revived += pool.num_free() < free_before;
        if (!got.empty()) held.push_back(got);
        break;
      }
      case 10: {
        if (held.empty()) break;
        auto& blocks = held[size_t(below(int(held.size())))];
        int32_t& b = blocks[size_t(below(int(blocks.size())))];
        const auto writable = pool.make_writable(b);
        if (model.refs[b] == 1) {
          ASSERT_EQ(writable, b);
          model.cache.erase(model.hash_of(b));
        } else if (model.num_free() == 0) {
          ASSERT_EQ(writable, std::nullopt);
        } else {
          ASSERT_TRUE(writable.has_value());
          --model.refs[b];
          ASSERT_NO_FATAL_FAILURE(model.take(*writable));
          b = *writable;
          ++copies;
        }
        break;
      }
      default:
        if (below(200) == 0) pool.clear_cache(), model.clear();
    }
    ASSERT_NO_THROW(pool.check()) << "operation " << op;
    ASSERT_EQ(size_t(pool.num_free()), model.num_free());
    ASSERT_EQ(size_t(pool.num_cached()), model.cache.size());
    ASSERT_EQ(pool.stats().evictions, model.evictions);
    const int32_t b = below(num_blocks);
    ASSERT_EQ(pool.ref_count(b), model.refs[b]);
  }
  for (const auto& blocks : held) pool.release(blocks);
  pool.check();
  EXPECT_EQ(pool.num_free(), num_blocks);
  // The walk has been everywhere.
  EXPECT_GT(exhausted, 0);
  EXPECT_GT(copies, 0);
  EXPECT_GT(revived, 0);
  EXPECT_GT(model.evictions, 0);
}

TEST(BlockPool, AgreesWithTheSlowModel) { run_against_model(23, 40, 100'000, 1); }
TEST(BlockPool, AgreesWithTheSlowModelWhenTiny) { run_against_model(3, 4, 20'000, 2); }
TEST(BlockPool, AgreesWithTheSlowModelWithFewHashes) { run_against_model(64, 9, 20'000, 3); }

TEST(BlockPool, ExhaustedMemoryIsAnAnswer) {
  BlockPool pool(4);
  std::vector<int32_t> a;
  ASSERT_TRUE(pool.allocate(3, a));
  const auto before = a;
  EXPECT_FALSE(pool.allocate(2, a));
  EXPECT_EQ(a, before);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_TRUE(pool.allocate(1, a));
  EXPECT_FALSE(pool.allocate(1, a));
  EXPECT_TRUE(pool.allocate(0, a));
  pool.retain(a);
  EXPECT_EQ(pool.make_writable(a[0]), std::nullopt);
  EXPECT_EQ(pool.ref_count(a[0]), 2);
  pool.check();
}

TEST(BlockPool, LastBlockOfARequestIsEvictedFirst) {
  BlockPool pool(4);
  std::vector<int32_t> a;
  ASSERT_TRUE(pool.allocate(4, a));
  for (int i = 0; i < 4; ++i) pool.publish(a[size_t(i)], BlockHash(100 + i));
  pool.release(a);
  std::vector<int32_t> b;
  ASSERT_TRUE(pool.allocate(2, b));
  EXPECT_EQ(b, (std::vector<int32_t>{a[3], a[2]}));
  const std::vector<BlockHash> hashes{100, 101, 102, 103};
  EXPECT_EQ(pool.peek(hashes), 2);  // the beginning of the request is still there
  EXPECT_EQ(pool.stats().evictions, 2);
}

TEST(BlockPool, UncachedBlocksGoBeforeCachedOnesAndUseMakesRecent) {
  BlockPool pool(4);
  std::vector<int32_t> a, hit, next;
  ASSERT_TRUE(pool.allocate(4, a));
  pool.publish(a[0], 1), pool.publish(a[1], 2), pool.publish(a[2], 3);
  for (const int32_t b : a) pool.release(std::vector<int32_t>{b});
  const std::vector<BlockHash> one{1};
  ASSERT_EQ(pool.lookup(one, hit), 1);
  pool.release(hit);  // block 0 is the most recently used now
  ASSERT_TRUE(pool.allocate(4, next));
  EXPECT_EQ(next, (std::vector<int32_t>{a[3], a[1], a[2], a[0]}));
}

TEST(BlockPool, FirstBlockUnderAHashStays) {
  BlockPool pool(2);
  std::vector<int32_t> a, hit;
  ASSERT_TRUE(pool.allocate(2, a));
  pool.publish(a[0], 9);
  pool.publish(a[1], 9);
  EXPECT_EQ(pool.num_cached(), 1);
  const std::vector<BlockHash> nine{9};
  ASSERT_EQ(pool.lookup(nine, hit), 1);
  EXPECT_EQ(hit[0], a[0]);
  EXPECT_EQ(pool.stats().lookups, 1);
  EXPECT_EQ(pool.stats().hits, 1);
}

TEST(BlockPool, AWritableBlockIsNoLongerShared) {
  BlockPool pool(3);
  std::vector<int32_t> a;
  ASSERT_TRUE(pool.allocate(1, a));
  pool.publish(a[0], 5);
  const std::vector<BlockHash> five{5};
  std::vector<int32_t> other;
  ASSERT_EQ(pool.lookup(five, other), 1);
  const auto copy = pool.make_writable(a[0]);
  ASSERT_TRUE(copy.has_value());
  EXPECT_NE(*copy, a[0]);
  EXPECT_EQ(pool.ref_count(a[0]), 1);
  EXPECT_EQ(pool.ref_count(*copy), 1);
  EXPECT_EQ(pool.peek(five), 1);                      // the other request's block is still cached,
  EXPECT_EQ(pool.make_writable(other[0]), other[0]);  // until its last owner writes
  EXPECT_EQ(pool.peek(five), 0);
  pool.check();
}

TEST(BlockPool, ErrorsChangeNothing) {
  BlockPool pool(3);
  std::vector<int32_t> a;
  ASSERT_TRUE(pool.allocate(2, a));
  const int32_t free_block = 3 - a[0] - a[1];
  EXPECT_EQ(test::error_code([&] { pool.release(std::vector<int32_t>{a[0], a[1], a[0]}); }), "block_pool.block.free");
  EXPECT_EQ(test::error_code([&] { pool.release(std::vector<int32_t>{a[0], 3}); }), "block_pool.block.range");
  EXPECT_EQ(test::error_code([&] { pool.retain(std::vector<int32_t>{a[0], free_block}); }), "block_pool.block.free");
  EXPECT_EQ(test::error_code([&] { pool.retain(std::vector<int32_t>{a[0], -1}); }), "block_pool.block.range");
  EXPECT_EQ(test::error_code([&] { pool.publish(free_block, 1); }), "block_pool.block.free");
  EXPECT_EQ(test::error_code([&] { pool.publish(a[0], 0); }), "block_pool.publish.hash");
  EXPECT_EQ(test::error_code([&] { pool.make_writable(free_block); }), "block_pool.block.free");
  EXPECT_EQ(test::error_code([&] { pool.ref_count(17); }), "block_pool.block.range");
  EXPECT_EQ(test::error_code([&] { pool.allocate(-1, a); }), "block_pool.allocate.count");
  EXPECT_EQ(test::error_code([] { BlockPool none(0); }), "block_pool.size");
  EXPECT_EQ(pool.ref_count(a[0]), 1);
  EXPECT_EQ(pool.ref_count(a[1]), 1);
  EXPECT_EQ(pool.num_free(), 1);
  pool.check();
}

TEST(BlockPool, ASpanMayNameABlockTwice) {
  BlockPool pool(2);
  std::vector<int32_t> a;
  ASSERT_TRUE(pool.allocate(1, a));
  const std::vector<int32_t> twice{a[0], a[0]};
  pool.retain(twice);
  EXPECT_EQ(pool.ref_count(a[0]), 3);
  pool.release(a);
  pool.release(twice);
  EXPECT_EQ(pool.num_free(), 2);
  pool.check();
}

TEST(HashBlock, DependsOnParentOrderAndLength) {
  const std::vector<uint64_t> a{1, 2, 3}, b{1, 3, 2}, c{1, 2}, zeros1{0}, zeros2{0, 0};
  std::set<BlockHash> all{hash_block(0, a),
                          hash_block(0, b),
                          hash_block(0, c),
                          hash_block(7, a),
                          hash_block(0, zeros1),
                          hash_block(0, zeros2),
                          hash_block(hash_block(0, c), a)};
  EXPECT_EQ(all.size(), 7u);
  EXPECT_EQ(all.count(0), 0u);
  EXPECT_EQ(hash_block(0, a), hash_block(0, std::vector<uint64_t>{1, 2, 3}));
}

// The vectors of SipHash's authors, for messages of 8 and 16 bytes 0, 1, 2, ... with the key 0, 1, ... 15.
TEST(HashBlock, IsSipHash) {
  const HashKey key{0x0706050403020100u, 0x0f0e0d0c0b0a0908u};
  const std::vector<uint64_t> ids{0x0f0e0d0c0b0a0908u};
  EXPECT_EQ(hash_block(key, 0x0706050403020100u, {}), 0x93f5f5799a932462u);
  EXPECT_EQ(hash_block(key, 0x0706050403020100u, ids), 0x3f2acc7f57c29bdbu);
  EXPECT_NE(hash_block({1, 2}, 0, ids), hash_block({2, 1}, 0, ids));
  EXPECT_NE(hash_block({1, 2}, 0, ids), hash_block(0, ids)) << "this process has a key of its own";
}

// A hash that is a chain of bijections is forged by walking it backwards: whatever stands before, the last id leads to the wanted hash.
TEST(HashBlock, IsNotForgedByWalkingBackwards) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  };
  const auto unmix = [](uint64_t x) {
    const auto unshift = [](uint64_t y, int bits) {  // of x ^ (x >> bits)
      uint64_t z = y;
      for (int known = bits; known < 64; known += bits) z = y ^ (z >> bits);
      return z;
    };
    x = unshift(x, 31) * 0x319642b2d24d8ec3u;
    x = unshift(x, 27) * 0x96de1b173f119089u;
    return unshift(x, 30);
  };
  constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
  const auto chained = [&](uint64_t h, std::span<const uint64_t> ids) {
    for (const uint64_t id : ids) h = mix((h ^ id) + kStep);
    return h;
  };
  const std::vector<uint64_t> victim{11, 12, 13, 14, 15, 16, 17, 18};
  std::vector<uint64_t> forged{900, 901, 902, 903, 904, 905, 906, 0};
  for (const uint64_t parent : {uint64_t(0), hash_block(0, victim)}) {
    const uint64_t start = mix(parent + kStep * (victim.size() + 1));
    forged.back() = (unmix(chained(start, victim)) - kStep) ^ chained(start, std::span(forged).first(forged.size() - 1));
    ASSERT_EQ(chained(start, forged), chained(start, victim)) << "the attack itself";
    EXPECT_NE(hash_block(parent, forged), hash_block(parent, victim));
    BlockPool pool(4);
    std::vector<int32_t> blocks;
    pool.allocate(1, blocks);
    pool.publish(blocks[0], hash_block(parent, forged));
    const std::vector<BlockHash> wanted{hash_block(parent, victim)};
    EXPECT_EQ(pool.peek(wanted), 0) << "the victim's prefix is not the attacker's block";
  }
}

TEST(AppendSlots, FollowsTheBlocks) {
  const std::vector<int32_t> blocks{5, 2, 9};
  std::vector<int64_t> slots{-1};
  append_slots(blocks, 4, 2, 9, slots);
  EXPECT_EQ(slots, (std::vector<int64_t>{-1, 22, 23, 8, 9, 10, 11, 36}));
  append_slots(blocks, 4, 12, 12, slots);
  EXPECT_EQ(slots.size(), 8u);
  const std::vector<int32_t> far{2'000'000'000};
  slots.clear();
  append_slots(far, 16, 15, 16, slots);
  EXPECT_EQ(slots, (std::vector<int64_t>{32'000'000'015}));
  EXPECT_EQ(test::error_code([&] { append_slots(blocks, 4, 0, 13, slots); }), "block_pool.slots.blocks");
  EXPECT_EQ(test::error_code([&] { append_slots(blocks, 4, 3, 2, slots); }), "block_pool.slots.range");
  EXPECT_EQ(test::error_code([&] { append_slots(blocks, 4, -1, 2, slots); }), "block_pool.slots.range");
  EXPECT_EQ(test::error_code([&] { append_slots(blocks, 0, 0, 2, slots); }), "block_pool.slots.block_size");
  EXPECT_EQ(slots.size(), 1u);
}

TEST(FirstNeededBlock, IsTheBlockOfTheFirstVisibleKey) {
  EXPECT_EQ(first_needed_block(1000, -1, 0, 16), 0);
  for (const int block_size : {1, 3, 16}) {
    for (const int window_left : {-1, 0, 1, 15, 16, 40}) {
      for (const int chunk : {0, 1, 7, 32}) {
        for (int p = 0; p < 100; ++p) {
          int key = 0;  // the definition of Mask, key by key
          while ((window_left >= 0 && key < p - window_left) || (chunk > 0 && key / chunk != p / chunk)) ++key;
          ASSERT_EQ(first_needed_block(p, window_left, chunk, block_size), key / block_size) << p << " " << window_left << " " << chunk;
        }
      }
    }
  }
  for (int p = 0; p < 100; ++p) {
    int key = 0;
    while (p / 7 - key / 7 > 2) ++key;
    ASSERT_EQ(first_needed_block(p, Mask{.chunk = 7, .chunk_lookback = 2}, 3), key / 3) << p;
  }
  EXPECT_EQ(test::error_code([] { first_needed_block(-1, 4, 0, 16); }), "block_pool.needed.position");
  EXPECT_EQ(test::error_code([] { first_needed_block(1, 4, 0, 0); }), "block_pool.needed.block_size");
}

}  // namespace
}  // namespace imbrex
