#pragma once
// Who owns which block of a KV cache: reference counts, prefix hashes and sharing, eviction. Used by schedulers; not thread-safe.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "imbrex/spec.h"

namespace imbrex {

using BlockHash = uint64_t;  // of a full block's tokens and of all before it; 0 is not a valid hash

struct BlockPoolStats {
  int64_t lookups = 0, hits = 0;  // blocks asked for by hash, and found
  int64_t evictions = 0;          // cached blocks given to somebody else
};

// Block ids in [0, num_blocks). A block is free (no references), or in use. A free block may still be *cached* under its hash and
// be revived by a later lookup; free blocks are handed out uncached first, then least recently used first.
// Exhausted memory is an answer: allocate returns false and changes nothing.
class BlockPool {
 public:
  explicit BlockPool(int num_blocks);  // Error block_pool.size when not positive
  ~BlockPool();
  BlockPool(BlockPool&&) noexcept;
  BlockPool& operator=(BlockPool&&) noexcept;

  int num_blocks() const;
  int num_free() const;    // blocks without references, cached ones included
  int num_cached() const;  // blocks with a hash, in use or free
  int ref_count(int32_t block) const;

  bool allocate(int count, std::vector<int32_t>& blocks);  // appends `count` blocks with one reference each, hashes forgotten
  void retain(std::span<const int32_t> blocks);            // one more reference each (Error block_pool.* for a free or bad id)
  void release(std::span<const int32_t> blocks);           // one less; the last block of the span is evicted first

  // The length of the longest prefix of `hashes` that is cached; retains its blocks and appends them.
  int lookup(std::span<const BlockHash> hashes, std::vector<int32_t>& blocks);
  int peek(std::span<const BlockHash> hashes) const;  // what lookup() would return; retains nothing
  void publish(int32_t block, BlockHash hash);        // a full block can now be shared; the first block of a hash stays cached under it
  // A block that may be written: itself when nobody else has it, otherwise a new one in its place. The reference to the old one is then
  // given back here, and the caller copies its contents with copy_blocks(). nullopt: no block is free, nothing changed.
  std::optional<int32_t> make_writable(int32_t block);
  void clear_cache();  // forget all hashes
  const BlockPoolStats& stats() const;
  void check() const;  // Error block_pool.invariant if the books do not balance; O(num_blocks)

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct HashKey {
  uint64_t low = 0, high = 0;
};

// Hash of a full block of tokens and of all before it: chained, `parent` is 0 for the first block. Tenants share a pool, and a tenant who
// could make two prefixes with one hash could have his keys and values read in another's place. So the hash is SipHash-2-4 with a key that
// is drawn at random in every process (and inherited by its forks): without the key a collision happens only by chance. With 64 bits,
// one lookup in 2^64 / num_cached() finds a wrong block by chance: with a million cached blocks and a thousand lookups a second, one in 600
// years. The hash is never 0, and differs from process to process. Error block_pool.hash.key when the system has no random numbers.
BlockHash hash_block(BlockHash parent, std::span<const uint64_t> token_ids);
// The hash with a key of the caller's, for processes that share hashes. The key is a secret between them: 128 random bits, kept from
// tenants.
BlockHash hash_block(const HashKey&, BlockHash parent, std::span<const uint64_t> token_ids);

// Appends the slots of tokens [begin, end) of a request whose blocks are given: block * block_size + offset.
void append_slots(std::span<const int32_t> blocks, int block_size, int begin, int end, std::vector<int64_t>& slots);

// First block that a layer with this mask still needs when the next query is at `position`; blocks before it can be given back.
int first_needed_block(int position, const Mask&, int block_size);
int first_needed_block(int position, int window_left, int chunk, int block_size);  // of a mask with these fields

}  // namespace imbrex
