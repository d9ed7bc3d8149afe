// The addresses of the rows of a block of keys, and prefetching those of the next block: pages are scattered, so the processor cannot
// predict them.

namespace imbrex::cpu {
namespace {

struct BlockRows {
  const char *k[kBlockKeys], *v[kBlockKeys];
};

// The rows of another head, whose keys and values lie so many bytes further.
inline void shift_rows(const BlockRows& from, const char* zero, long k_by, long v_by, BlockRows& to) {
  for (int j = 0; j < kBlockKeys; ++j) {
    to.k[j] = from.k[j] == zero ? zero : from.k[j] + k_by;
    to.v[j] = from.v[j] == zero ? zero : from.v[j] + v_by;
  }
}

inline void find_block_rows(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const char* zero,
                            BlockRows& rows) {
  find_rows(a, a.k, item.table, kv_head, kb, kBlockKeys, keys, zero, rows.k);
  find_rows(a, a.v, item.table, kv_head, kb, kBlockKeys, keys, zero, rows.v);
}

// The rows that the worker reads after `block`: the item's next block, or the first one of the next task. False when there are
// none.
inline bool find_rows_after(const AttentionParams& a, const WorkItem& item, int kv_head, KeyBlocks block, Visible keys, NextTask next,
                            const char* zero, BlockRows& rows) {
  block.next();
  if (!block.done()) {
    find_block_rows(a, item, kv_head, block.key(), keys, zero, rows);
    return true;
  }
  if (!next.item) return false;
  const KeyBlocks first(a, *next.item);
  if (first.done()) return false;
  find_block_rows(a, *next.item, next.kv_head, first.key(), keys_seen(a, *next.item), zero, rows);
  return true;
}

// Prefetches the rows of the next block, in portions that are spread over the work on this one, keys and values by turns: all at once they
// would fill the core's line buffers, and the loads of the computation would wait behind them. Where heads are run together, a row is that
// of all of them, and the work of each head on the block prefetches a share.
class BlockFetch {
 public:
  // The 2 * kBlockKeys rows are divided among three passes over a block: transposing keys, scores, products with values.
  static constexpr int kOfKeys = 64, kOfScores = 96, kOfValues = 96;

  BlockFetch() = default;
  BlockFetch(const AttentionParams& a, const BlockRows* next)
      : next_(next), heads_(a.heads_together), key_bytes_(bytes_of(a, a.k)), value_bytes_(bytes_of(a, a.v)) {}

  // Prefetches this share of all rows at once, for items of many rows, which work on a block for long.
  void share(int part, int of) {
    begin((2 * kBlockKeys * part + of - 1) / of, 1);
    step();
    begin(0, 1);
  }
  // Prefetches the rows that the passes have left, as they do where rows see few keys of a block.
  void rest() {
    begin(2 * kBlockKeys * heads_, 1);
    step();
  }
  // A pass of about so many steps begins, each of which is announced, and prefetches so many rows.
  void begin(int rows, int steps) { rows_ = next_ ? rows : 0, steps_ = (steps > 0 ? steps : 1) * heads_, due_ = 0; }
  __attribute__((always_inline)) void step() {
    for (due_ += rows_; due_ >= steps_ && at_ < 2 * kBlockKeys; due_ -= steps_, ++at_) {
      const char* const row = at_ % 2 == 0 ? next_->k[at_ / 2] : next_->v[at_ / 2];
      const char* const end = row + (at_ % 2 == 0 ? key_bytes_ : value_bytes_);
      for (const char* line = row - reinterpret_cast<unsigned long>(row) % 64; line < end; line += 64) __builtin_prefetch(line, 0, kLevel);
    }
  }

 private:
  static constexpr int kLevel = 2;  // L2
  // The bytes of a row of one head, or of the heads that are run together with the gaps between them.
  static long bytes_of(const AttentionParams& a, const KvSide& side) { return (a.heads_together - 1) * side.head_stride + side.row_bytes; }

  const BlockRows* next_ = nullptr;
  int heads_ = 1;
  long key_bytes_ = 0, value_bytes_ = 0;
  int rows_ = 0, steps_ = 1, due_ = 0, at_ = 0;  // at_: the row that is asked for next
};

}  // namespace
}  // namespace imbrex::cpu
