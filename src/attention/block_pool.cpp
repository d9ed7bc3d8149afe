// Who owns which block of a KV cache (see block_pool.h). One list of free blocks in the order they are handed out, one hash table;
// every operation is O(1) a block, and nothing is allocated after construction except in the caller's vectors.
#include "imbrex/block_pool.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "attention/mask.h"
#include "core/check.h"

namespace imbrex {

namespace {

constexpr int32_t kNone = -1;     // end of the list, empty place of the table
constexpr int32_t kNotFree = -2;  // Block::next of a block in use

// 64-bit finaliser (Stafford's variant 13 of MurmurHash3's): every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

struct Block {
  BlockHash hash = 0;  // 0: not cached
  int32_t refs = 0;
  int32_t prev = kNone, next = kNotFree;  // neighbours in the list of free blocks
};

// Hash -> block with linear probing. A pool has at most num_blocks entries, so that the table is never more than half full and
// never grows. The hashes themselves are in the blocks.
class HashTable {
 public:
  explicit HashTable(size_t max_entries) : places_(std::bit_ceil(2 * max_entries), kNone), mask_(places_.size() - 1) {}

  int32_t find(BlockHash hash, const std::vector<Block>& blocks) const {
    for (size_t i = home(hash);; i = (i + 1) & mask_) {
      if (places_[i] == kNone || blocks[size_t(places_[i])].hash == hash) return places_[i];
    }
  }

  void insert(BlockHash hash, int32_t block) {  // the hash is not there yet
    size_t i = home(hash);
    while (places_[i] != kNone) i = (i + 1) & mask_;
    places_[i] = block;
  }

  void erase(int32_t block, const std::vector<Block>& blocks) {  // the block is there and still has its hash
    size_t hole = home(blocks[size_t(block)].hash);
    while (places_[hole] != block) hole = (hole + 1) & mask_;
    // Entries after the hole move into it unless that would put them before their home.
    for (size_t i = (hole + 1) & mask_; places_[i] != kNone; i = (i + 1) & mask_) {
      const size_t from_home = (i - home(blocks[size_t(places_[i])].hash)) & mask_;
      if (from_home >= ((i - hole) & mask_)) {
        places_[hole] = places_[i];
        hole = i;
      }
    }
    places_[hole] = kNone;
  }

  void clear() { std::fill(places_.begin(), places_.end(), kNone); }

 private:
  size_t home(BlockHash hash) const { return size_t(mix(hash)) & mask_; }

  std::vector<int32_t> places_;
  size_t mask_;
};

}  // namespace

struct BlockPool::State {
  explicit State(int num_blocks) : blocks(size_t(num_blocks)), table(size_t(num_blocks)) {
    for (int32_t b = 0; b < num_blocks; ++b) push_back(b);
  }

  std::vector<Block> blocks;
  HashTable table;
  int32_t first = kNone, last = kNone;  // free blocks: uncached ones, then cached ones, least recently used first
  int num_free = 0, num_cached = 0;
  BlockPoolStats stats;

  Block& at(int32_t b) { return blocks[size_t(b)]; }

  void push_back(int32_t b) {
    at(b).prev = last;
    at(b).next = kNone;
    (last == kNone ? first : at(last).next) = b;
    last = b;
    ++num_free;
  }

  void push_front(int32_t b) {
    at(b).prev = kNone;
    at(b).next = first;
    (first == kNone ? last : at(first).prev) = b;
    first = b;
    ++num_free;
  }

  void unlink(int32_t b) {
    Block& block = at(b);
    (block.prev == kNone ? first : at(block.prev).next) = block.next;
    (block.next == kNone ? last : at(block.next).prev) = block.prev;
    block.prev = kNone;
    block.next = kNotFree;
    --num_free;
  }

  void forget(int32_t b) {
    table.erase(b, blocks);
    at(b).hash = 0;
    --num_cached;
  }

  int32_t take_first() {  // num_free > 0
    const int32_t b = first;
    unlink(b);
    if (at(b).hash != 0) {
      forget(b);
      ++stats.evictions;
    }
    at(b).refs = 1;
    return b;
  }

  void add_free(int32_t b) { at(b).hash != 0 ? push_back(b) : push_front(b); }

  void check_id(int32_t b) const {
    imbrex::check(b >= 0 && size_t(b) < blocks.size(), "block_pool.block.range", "block must be in [0, {}), is {}", blocks.size(), b);
  }
  void check_used(int32_t b) const {
    check_id(b);
    imbrex::check(blocks[size_t(b)].refs > 0, "block_pool.block.free", "block {} must be in use, has no references", b);
  }

  int longest_prefix(std::span<const BlockHash> hashes) const {
    size_t n = 0;
    while (n < hashes.size() && hashes[n] != 0 && table.find(hashes[n], blocks) != kNone) ++n;
    return int(n);
  }
};

BlockPool::BlockPool(int num_blocks) {
  imbrex::check(num_blocks > 0, "block_pool.size", "a pool needs at least 1 block, got {}", num_blocks);
  state_ = std::make_unique<State>(num_blocks);
}
BlockPool::~BlockPool() = default;
BlockPool::BlockPool(BlockPool&&) noexcept = default;
BlockPool& BlockPool::operator=(BlockPool&&) noexcept = default;

int BlockPool::num_blocks() const { return int(state_->blocks.size()); }
int BlockPool::num_free() const { return state_->num_free; }
int BlockPool::num_cached() const { return state_->num_cached; }
const BlockPoolStats& BlockPool::stats() const { return state_->stats; }

int BlockPool::ref_count(int32_t block) const {
  state_->check_id(block);
  return state_->at(block).refs;
}

bool BlockPool::allocate(int count, std::vector<int32_t>& blocks) {
  imbrex::check(count >= 0, "block_pool.allocate.count", "count must be >= 0, is {}", count);
  if (count > state_->num_free) return false;
  const size_t begin = blocks.size();
  blocks.resize(begin + size_t(count));  // the only thing that can throw
  for (size_t i = begin; i < blocks.size(); ++i) blocks[i] = state_->take_first();
  return true;
}

void BlockPool::retain(std::span<const int32_t> blocks) {
  State& s = *state_;
  for (size_t i = 0; i < blocks.size(); ++i) {
    s.check_used(blocks[i]);
    imbrex::check(int64_t(s.at(blocks[i]).refs) + int64_t(blocks.size()) <= std::numeric_limits<int32_t>::max(), "block_pool.refs.overflow",
                  "block {} has {} references, {} more do not fit 31 bits", blocks[i], s.at(blocks[i]).refs, blocks.size());
  }
  for (const int32_t b : blocks) ++s.at(b).refs;
}

void BlockPool::release(std::span<const int32_t> blocks) {
  State& s = *state_;
  for (size_t i = blocks.size(); i-- > 0;) {
    try {
      s.check_used(blocks[i]);  // here and not before the loop, because a block can be in the span more than once
    } catch (...) {
      for (size_t j = i + 1; j < blocks.size(); ++j) {
        if (s.at(blocks[j]).refs++ == 0) s.unlink(blocks[j]);
      }
      throw;
    }
    if (--s.at(blocks[i]).refs == 0) s.add_free(blocks[i]);
  }
}

int BlockPool::lookup(std::span<const BlockHash> hashes, std::vector<int32_t>& blocks) {
  State& s = *state_;
  const int found = s.longest_prefix(hashes);
  const size_t begin = blocks.size();
  blocks.resize(begin + size_t(found));
  for (int i = 0; i < found; ++i) {
    const int32_t b = s.table.find(hashes[size_t(i)], s.blocks);
    if (s.at(b).refs++ == 0) s.unlink(b);
    blocks[begin + size_t(i)] = b;
  }
  s.stats.lookups += int64_t(hashes.size());
  s.stats.hits += found;
  return found;
}

int BlockPool::peek(std::span<const BlockHash> hashes) const { return state_->longest_prefix(hashes); }

void BlockPool::publish(int32_t block, BlockHash hash) {
  State& s = *state_;
  s.check_used(block);
  imbrex::check(hash != 0, "block_pool.publish.hash", "the hash of block {} must not be 0", block);
  const BlockHash old = s.at(block).hash;
  if (old == hash) return;
  imbrex::check(old == 0, "block_pool.publish.again", "block {} is cached under {:#x} and cannot be published under {:#x}", block, old,
                hash);
  if (s.table.find(hash, s.blocks) != kNone) return;
  s.table.insert(hash, block);
  s.at(block).hash = hash;
  ++s.num_cached;
}

std::optional<int32_t> BlockPool::make_writable(int32_t block) {
  State& s = *state_;
  s.check_used(block);
  if (s.at(block).refs == 1) {
    if (s.at(block).hash != 0) s.forget(block);  // its contents are about to change
    return block;
  }
  if (s.num_free == 0) return std::nullopt;
  --s.at(block).refs;
  return s.take_first();
}

void BlockPool::clear_cache() {
  for (Block& block : state_->blocks) block.hash = 0;
  state_->table.clear();
  state_->num_cached = 0;
}

void BlockPool::check() const {
  const State& s = *state_;
  const auto require = [](bool ok, std::string_view what, int64_t expected, int64_t actual) {
    imbrex::check(ok, "block_pool.invariant", "{}: expected {}, is {}", what, expected, actual);
  };
  int64_t free = 0, cached = 0, unreferenced = 0;
  bool seen_cached = false;
  int32_t before = kNone;
  for (int32_t b = s.first; b != kNone; before = b, b = s.blocks[size_t(b)].next) {
    const Block& block = s.blocks[size_t(b)];
    ++free;
    require(free <= int64_t(s.blocks.size()), "length of the free list", int64_t(s.blocks.size()), free);
    require(block.refs == 0, "references of a free block", 0, block.refs);
    require(block.prev == before, "link to the free block before", before, block.prev);
    require(block.hash != 0 || !seen_cached, "uncached free blocks after a cached one", 0, 1);
    seen_cached |= block.hash != 0;
  }
  require(s.last == before, "last free block", before, s.last);
  require(s.num_free == free, "free blocks", free, s.num_free);
  for (size_t b = 0; b < s.blocks.size(); ++b) {
    const Block& block = s.blocks[b];
    require(block.refs >= 0, "smallest number of references", 0, block.refs);
    require((block.refs == 0) == (block.next != kNotFree), "a block is in the free list when it has no references", block.refs == 0,
            block.next != kNotFree);
    unreferenced += block.refs == 0;
    cached += block.hash != 0;
    if (block.hash != 0)
      require(s.table.find(block.hash, s.blocks) == int32_t(b), "block under its hash", int64_t(b), s.table.find(block.hash, s.blocks));
  }
  require(unreferenced == free, "blocks without references", free, unreferenced);
  require(s.num_cached == cached, "cached blocks", cached, s.num_cached);
}

namespace {

// SipHash-2-4 (Aumasson and Bernstein, 2012), a function of a secret key that nobody without it can predict, of a message of 64-bit words.
class SipHash {
 public:
  explicit SipHash(const HashKey& key)
      : a_(key.low ^ 0x736f6d6570736575u),
        b_(key.high ^ 0x646f72616e646f6du),
        c_(key.low ^ 0x6c7967656e657261u),
        d_(key.high ^ 0x7465646279746573u) {}

  void add(uint64_t word) {
    mix_in(word);
    bytes_ += 8;
  }
  uint64_t finish() {
    mix_in(bytes_ << 56);
    c_ ^= 0xff;
    for (int i = 0; i < 4; ++i) round();
    return a_ ^ b_ ^ c_ ^ d_;
  }

 private:
  void mix_in(uint64_t word) {
    d_ ^= word;
    round();
    round();
    a_ ^= word;
  }
  void round() {
    a_ += b_, b_ = std::rotl(b_, 13) ^ a_, a_ = std::rotl(a_, 32);
    c_ += d_, d_ = std::rotl(d_, 16) ^ c_;
    a_ += d_, d_ = std::rotl(d_, 21) ^ a_;
    c_ += b_, b_ = std::rotl(b_, 17) ^ c_, c_ = std::rotl(c_, 32);
  }
  uint64_t a_, b_, c_, d_;
  uint64_t bytes_ = 0;
};

const HashKey& key_of_this_process() {
  static const HashKey key = [] {
    HashKey random;
    imbrex::check(getentropy(&random, sizeof random) == 0, "block_pool.hash.key", "the system gives no random numbers: {}",
                  std::strerror(errno));
    return random;
  }();
  return key;
}

}  // namespace

BlockHash hash_block(const HashKey& key, BlockHash parent, std::span<const uint64_t> token_ids) {
  SipHash hash(key);
  hash.add(parent);
  for (const uint64_t id : token_ids) hash.add(id);
  return std::max<BlockHash>(hash.finish(), 1);
}

BlockHash hash_block(BlockHash parent, std::span<const uint64_t> token_ids) { return hash_block(key_of_this_process(), parent, token_ids); }

void append_slots(std::span<const int32_t> blocks, int block_size, int begin, int end, std::vector<int64_t>& slots) {
  check(block_size > 0, "block_pool.slots.block_size", "block_size must be positive, is {}", block_size);
  check(begin >= 0 && begin <= end, "block_pool.slots.range", "tokens [{}, {}) are not a range", begin, end);
  check(int64_t(end) <= int64_t(blocks.size()) * block_size, "block_pool.slots.blocks",
        "tokens up to {} need {} blocks of {}, the request has {}", end, (int64_t(end) + block_size - 1) / block_size, block_size,
        blocks.size());
  const size_t first = slots.size();
  slots.resize(first + size_t(end - begin));
  int64_t* slot = slots.data() + first;
  for (int token = begin; token < end;) {
    const int offset = token % block_size;
    const int count = std::min(block_size - offset, end - token);
    const int64_t base = int64_t(blocks[size_t(token / block_size)]) * block_size + offset;
    for (int i = 0; i < count; ++i) *slot++ = base + i;
    token += count;
  }
}

int first_needed_block(int position, const Mask& mask, int block_size) {
  check(position >= 0, "block_pool.needed.position", "position must be >= 0, is {}", position);
  check(block_size > 0, "block_pool.needed.block_size", "block_size must be positive, is {}", block_size);
  return int(first_visible_key(mask, position) / block_size);
}

int first_needed_block(int position, int window_left, int chunk, int block_size) {
  return first_needed_block(position, Mask{.window_left = window_left, .chunk = chunk}, block_size);
}

}  // namespace imbrex
