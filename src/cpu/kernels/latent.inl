// Attention to latents, whose values are the first elements of their keys, for kernels that multiply pairs of bf16: what AVX-512 and AMX
// share. All rows of an item (query tokens and their q heads) share each key, so a block of keys is looked up, converted and turned into
// values once for all of them.
//
// Scores are products of keys, as they lie in memory, with queries whose pairs of dims are interleaved: [key][16 rows]. So a vector holds
// 16 rows, a softmax is vertical, and its probabilities come out as pairs of keys for 16 rows. The files that include this one define
// `struct LatentProducts`, the two products and the form of outputs.

namespace imbrex::cpu {
namespace {

constexpr int kLatentRows = 16;              // of a tile of rows
constexpr int kLatentSplit = 1024;           // keys of a split: there is one kv head, so a request would else keep few cores busy
constexpr long kLatentPitch = 2L * kMaxDim;  // bytes from one copied key to the next
constexpr int kKeyGroups = kBlockKeys / 16, kKeyChunks = kBlockKeys / 32;
constexpr int kMostChunks = 4 * kKeyChunks;  // whose values are added at once
constexpr float kLatentLazy = 8.f;           // log2 units by which a row may outgrow its reference before its sums are rescaled

// Whether an item's rows share latents as these kernels read them.
IMBREX_INLINE bool has_latent_shape(const AttentionParams& a) {
  const int dim = a.row_parts.twice ? a.k.dim - a.row_parts.second : a.k.dim;
  const bool pairs = a.q_type == kBf16 && (a.k.type == kBf16 || a.k.type == kE4m3 || a.k.type == kE5m2);
  return a.values_in_keys && pairs && dim % 32 == 0 && a.v.dim % 64 == 0;
}
IMBREX_INLINE bool shares_latents(const AttentionParams& a) {
  return has_latent_shape(a) && plain_logits(a) && !a.row_parts.second_factors;
}
inline int latent_split_keys(const AttentionParams& a) { return has_latent_shape(a) ? kLatentSplit : kSplitKeys; }

// A block of keys: where they are.
struct LatentBlock {
  const char *rows[kBlockKeys], *second[kBlockKeys];    // second: where the second parts are, of rows in two places
  int kb = 0, chunk_begin = 0, chunk_end = kKeyChunks;  // chunks of 32 keys that some row sees
};

// 32 keys as rows of bf16.
struct LatentChunk {
  int key;                  // the first
  const char* const* rows;  // of each
  const char* group[2];     // the first of 16 keys, which are `pitch` bytes apart
  long pitch[2];
};

// The chunks whose weights wait for their values, in the order of the keys: those that some row sees of Products::kBlocks blocks, which
// begin at a multiple of as many.
struct LatentChunks {
  LatentChunk chunk[kMostChunks];
  int count = 0, blocks = 0;
};

// 16 rows: what they see, and their running softmax. Rows behind the last one are as the last one.
struct LatentTile {
  alignas(64) float max[kLatentRows], sum[kLatentRows], scale[kLatentRows];
  alignas(64) int lo[kLatentRows], hi[kLatentRows];
  int all_lo, all_hi, any_lo, any_hi;  // keys that every row sees, and that some row sees
  bool plain, custom;                  // scales are positive; a custom mask hides keys
  bool fresh;                          // no values have been added since sums began
};

// One worker's memory, cut from `scratch`.
struct LatentScratch {
  Row* rows;
  LatentTile* tiles;
  int num_tiles, steps, v;  // of 16 rows; of 32 dims of a key; dims of a value
  char* q;                  // [tiles][steps][16 pairs of dims][16 rows]
  float* out;               // of `v` floats a row, as LatentProducts have them
  float *folded, *folded_max, *folded_sum;
  float* scores;  // [2][2 tiles][32 keys][16 rows]
  char* weights;  // [tiles][most_chunks] of 16 pairs of keys and 16 rows, as LatentProducts have them
  int most_chunks;
  char* values;         // [2][most_chunks] of 2 KiB, pairs of keys, as LatentProducts have them
  LatentBlock* blocks;  // those whose values wait, and the next one
  LatentChunks* chunks;
  char *copies, *compact;  // for each block: keys that are no rows of bf16 with one pitch, and what those are made of
  char* zero;
};

template <class Products>
long latent_layout(char* base, const AttentionParams& a, long rows, LatentScratch* out) {
  const long tiles = (rows + kLatentRows - 1) / kLatentRows, padded = tiles * kLatentRows;
  long at = 0;
  const auto take = [&](long bytes) {
    char* const p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  const auto floats = [&](long n) { return reinterpret_cast<float*>(take(n * 4)); };
  LatentScratch s;
  s.num_tiles = int(tiles), s.steps = a.k.dim / 32, s.v = a.v.dim, s.most_chunks = Products::kBlocks * kKeyChunks;
  s.scores = floats(4L * 32 * kLatentRows);
  s.values = take(s.most_chunks * 4096L);
  s.weights = take(tiles * s.most_chunks * 1024);
  s.q = take(tiles * s.steps * 1024);
  s.out = floats(padded * s.v);
  s.folded = floats(padded * s.v);
  s.folded_max = floats(padded);
  s.folded_sum = floats(padded);
  s.tiles = reinterpret_cast<LatentTile*>(take(tiles * long(sizeof(LatentTile))));
  s.rows = reinterpret_cast<Row*>(take(padded * long(sizeof(Row))));
  s.blocks = reinterpret_cast<LatentBlock*>(take((Products::kBlocks + 1) * long(sizeof(LatentBlock))));
  s.chunks = reinterpret_cast<LatentChunks*>(take(sizeof(LatentChunks)));
  s.copies = take(Products::kBlocks * kBlockKeys * kLatentPitch);
  s.compact = take(Products::kBlocks * compact_bytes(a.k));
  s.zero = take(4 * (kMaxDim + 64));
  if (out) *out = s;
  return at;
}
template <class Products>
long latent_bytes(const AttentionParams& a, int max_rows) {
  return has_latent_shape(a) ? latent_layout<Products>(nullptr, a, max_rows, nullptr) : 0;
}

// Prefetches the next block into L2, in shares that the work on this one asks for: all at once they would fill the line buffers.
class LatentFetch {
 public:
  // Of each `every` bytes of a row a line.
  LatentFetch(const AttentionParams& a, const LatentBlock* next, int steps, int every)
      : next_(next), bytes_{a.k.row_bytes, a.row_parts.first > 0 ? a.v.row_bytes : 0}, steps_(steps > 0 ? steps : 1), every_(every) {
    line_count_ = next ? kBlockKeys * int((bytes_[0] + every - 1) / every + (bytes_[1] + every - 1) / every) : 0;
    if (next) begin_row();
  }
  IMBREX_INLINE void step() {
    for (due_ += line_count_; due_ >= steps_; due_ -= steps_) {
      if (at_ >= end_ && !next_row()) return;
      __builtin_prefetch(at_, 0, 2);
      at_ += every_;
    }
  }

 private:
  void begin_row() {
    at_ = (part_ == 0 ? next_->rows : next_->second)[key_];
    end_ = at_ + bytes_[part_];
  }
  bool next_row() {
    if (part_ == 0 && bytes_[1] > 0) {
      part_ = 1;
    } else {
      part_ = 0;
      if (++key_ >= kBlockKeys) line_count_ = 0, key_ = kBlockKeys - 1;
    }
    if (line_count_ == 0) return false;
    begin_row();
    return true;
  }
  const LatentBlock* next_;
  const char *at_ = nullptr, *end_ = nullptr;  // of the row that is asked for
  long bytes_[2];
  int steps_, every_, line_count_, due_ = 0, key_ = 0, part_ = 0;
};

inline void find_latents(const AttentionParams& a, const WorkItem& item, int kv_head, int kb, Visible keys, const char* zero,
                         LatentBlock& b) {
  b.kb = kb;
  b.chunk_begin = clamp_int(keys.lo - kb, 0, kBlockKeys) / 32, b.chunk_end = (clamp_int(keys.hi - kb, 0, kBlockKeys) + 31) / 32;
  find_rows(a, a.k, item.table, kv_head, kb, kBlockKeys, keys, zero, b.rows);
  if (a.row_parts.first > 0) find_rows(a, a.v, item.table, kv_head, kb, kBlockKeys, keys, zero, b.second);
}

// The block that the worker reads after `block`: the item's next one, or the first one of the next task. False when there is none.
inline bool find_latents_after(const AttentionParams& a, const WorkItem& item, int kv_head, KeyBlocks block, Visible keys, NextTask next,
                               const char* zero, LatentBlock& b) {
  block.next();
  if (!block.done()) {
    find_latents(a, item, kv_head, block.key(), keys, zero, b);
    return true;
  }
  if (!next.item) return false;
  const KeyBlocks first(a, *next.item);
  if (first.done()) return false;
  find_latents(a, *next.item, next.kv_head, first.key(), keys_seen(a, *next.item), zero, b);
  return true;
}

// Makes the keys of a block rows of bf16, each 16 of them with one pitch, in place where they are so: more chunks.
template <class Products>
void settle_latents(const AttentionParams& a, const LatentScratch& s, LatentBlock& b) {
  LatentChunks& all = *s.chunks;
  char* const compact = s.compact + all.blocks * compact_bytes(a.k);
  char* const copies = s.copies + all.blocks * (kBlockKeys * kLatentPitch);
  ++all.blocks;
  if (a.row_parts.first > 0) {
    join_parts(a, kBlockKeys, s.zero, b.rows, b.second, compact);
  } else {
    compact_rows(a.k, kBlockKeys, s.zero, b.rows, compact);
  }
  for (int c = b.chunk_begin; c < b.chunk_end; ++c) {
    LatentChunk& chunk = all.chunk[all.count++];
    chunk.key = b.kb + 32 * c, chunk.rows = b.rows + 32 * c;
    for (int g = 0; g < 2; ++g) {
      const char** const rows = b.rows + 32 * c + 16 * g;
      const long pitch = rows[1] - rows[0];
      bool direct = a.k.type == kBf16 && (Products::kAnyPitch || pitch == kLatentPitch);
      for (int i = 2; direct && i < 16; ++i) direct = rows[i] - rows[i - 1] == pitch;
      for (int i = 0; !direct && i < 16; ++i) {
        char* const to = copies + (32L * c + 16 * g + i) * kLatentPitch;
        for (int d = 0; d < a.k.dim; d += 32) _mm512_store_si512(to + 2 * d, Products::bf16_of(a.k.type, rows[i], d));
        rows[i] = to;
      }
      chunk.group[g] = rows[0], chunk.pitch[g] = direct ? pitch : kLatentPitch;
    }
  }
}

// Whether some row of tiles [t, t + count) sees some of keys [begin, end).
inline bool tiles_see(const LatentScratch& s, int t, int count, int begin, int end) {
  bool any = false;
  for (const LatentTile* tile = s.tiles + t; tile < s.tiles + t + count; ++tile) any |= tile->any_lo < end && tile->any_hi > begin;
  return any;
}
// Whether some row of tiles [t, t + count) sees some of the chunks that wait.
inline bool tiles_see_any(const LatentScratch& s, int t, int count) {
  const LatentChunks& all = *s.chunks;
  return all.count > 0 && tiles_see(s, t, count, all.chunk[0].key, all.chunk[all.count - 1].key + 32);
}
inline void clear_weights(const LatentScratch& s, int t, int chunk) {
  char* const to = s.weights + (long(t) * s.most_chunks + chunk) * 1024;
  for (int i = 0; i < 1024; i += 64) _mm512_store_si512(to + i, _mm512_setzero_si512());
}

// Interleaves the pairs of dims of 16 rows of queries.
inline void pack_latent_queries(const AttentionParams& a, const LatentScratch& s, int t) {
  for (int k = 0; k < s.steps; ++k) {
    vi r[16];
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) {
      const Row& row = s.rows[t * kLatentRows + i];
      r[i] = _mm512_loadu_si512(a.q + row.token * a.q_token_stride + row.head * a.q_head_stride + 64L * k);
    }
    transpose(r);
    IMBREX_UNROLL(16)
    for (int i = 0; i < 16; ++i) _mm512_store_si512(s.q + (long(t) * s.steps + k) * 1024 + 64 * i, r[i]);
  }
}

inline void clear_latents(const LatentScratch& s) {
  for (int t = 0; t < s.num_tiles; ++t) {
    s.tiles[t].fresh = true;
    _mm512_store_ps(s.tiles[t].max, _mm512_set1_ps(kEmptyMax));
    _mm512_store_ps(s.tiles[t].sum, _mm512_setzero_ps());
  }
}

// What the rows of a tile see of a stretch of keys.
inline void describe_stretch(const LatentScratch& s, int t) {
  LatentTile& tile = s.tiles[t];
  tile.all_lo = 0, tile.all_hi = 0x7fffffff;
  for (int i = 0; i < kLatentRows; ++i) {
    const Row& row = s.rows[t * kLatentRows + i];
    tile.lo[i] = row.lo, tile.hi[i] = row.hi;
    tile.all_lo = row.lo > tile.all_lo ? row.lo : tile.all_lo, tile.all_hi = row.hi < tile.all_hi ? row.hi : tile.all_hi;
  }
  tile.custom = any_custom(s.rows + t * kLatentRows, kLatentRows);
}

// What stays as it is: chunks of keys wait beyond the end of a stretch.
inline void describe_tile(const LatentScratch& s, int t) {
  LatentTile& tile = s.tiles[t];
  tile.any_hi = 0, tile.any_lo = 0x7fffffff, tile.plain = true;
  for (int i = 0; i < kLatentRows; ++i) {
    const Row& row = s.rows[t * kLatentRows + i];
    tile.scale[i] = row.scale * kLog2e;
    tile.plain = tile.plain && row.scale > 0.f;
    if (row.lo >= row.hi) continue;
    tile.any_lo = row.lo < tile.any_lo ? row.lo : tile.any_lo, tile.any_hi = row.hi > tile.any_hi ? row.hi : tile.any_hi;
  }
}

// Row i's output, which may be in `row`.
template <class Products>
const float* latent_row(const LatentScratch& s, int i, float* row) {
  if (!s.tiles[i / kLatentRows].fresh) return Products::row_of(s, i, row);
  for (int d = 0; d < s.v; d += 16) _mm512_store_ps(row + d, _mm512_setzero_ps());
  return row;
}

// Runs an item for one kv head.
template <class Products>
bool attend_latents(const AttentionParams& a, const WorkItem& item, int kv_head, NextTask next, char* memory) {
  constexpr int together = kBlockKeys * Products::kBlocks;
  static_assert(kLatentSplit % together == 0 && Products::kBlocks * kKeyChunks <= kMostChunks);
  const int num_rows = (item.q_end - item.q_begin) * a.group;
  LatentScratch s;
  latent_layout<Products>(memory, a, num_rows, &s);
  fill_rows(a, item, kv_head, s.rows);
  for (int i = num_rows; i < s.num_tiles * kLatentRows; ++i) s.rows[i] = s.rows[num_rows - 1];
  const Visible keys = item_keys(a, item, s.rows, num_rows);
  for (int i = 0; i < 4 * (kMaxDim + 64); i += 64) _mm512_store_si512(s.zero + i, _mm512_setzero_si512());
  for (int t = 0; t < s.num_tiles; ++t) {
    pack_latent_queries(a, s, t);
    describe_tile(s, t);
    describe_stretch(s, t);
  }
  clear_latents(s);
  Products::enter();
  KeyBlocks block(a, item), before = block;
  LatentBlock *now = s.blocks, *ahead = s.blocks + 1;
  s.chunks->count = s.chunks->blocks = 0;
  if (!block.done()) find_latents(a, item, kv_head, block.key(), keys, s.zero, *now);
  bool folded = false;
  alignas(64) float row_out[kMaxDim];
  for (; !block.done(); before = block, block.next()) {
    if (block.begins()) {
      show(a, item, s.rows, s.num_tiles * kLatentRows, block);
      for (int t = 0; t < s.num_tiles; ++t) describe_stretch(s, t);
    }
    if (block.leaves_split(before) && item.partial < 0) {
      for (int i = 0; i < num_rows; ++i) {
        float* const into = s.folded + long(i) * s.v;
        if (!folded) {
          s.folded_max[i] = kEmptyMax, s.folded_sum[i] = 0.f;
          for (int d = 0; d < s.v; d += 16) _mm512_store_ps(into + d, _mm512_setzero_ps());
        }
        const LatentTile& tile = s.tiles[i / kLatentRows];
        const float* const out = latent_row<Products>(s, i, row_out);
        fold(into, s.folded_max + i, s.folded_sum + i, out, tile.max[i % kLatentRows], tile.sum[i % kLatentRows], s.v);
      }
      clear_latents(s);
      folded = true;
    }
    const bool more = find_latents_after(a, item, kv_head, block, keys, next, s.zero, *ahead);
    KeyBlocks after = block;
    after.next();
    const bool last = after.done() || after.key() / together != block.key() / together;
    const int waiting = s.chunks->count;
    settle_latents<Products>(a, s, *now);
    LatentFetch fetch(a, more ? ahead : nullptr, Products::fetch_steps(s, waiting, last), Products::fetch_every(s));
    Products::weigh(s, waiting, fetch);
    if (last) {
      Products::add_values(s, fetch);
      s.chunks->count = s.chunks->blocks = 0;
    }
    now = ahead, ahead = ahead == s.blocks + Products::kBlocks ? s.blocks : ahead + 1;
  }
  bool finite = true;
  for (int i = 0; i < num_rows; ++i) {
    const LatentTile& tile = s.tiles[i / kLatentRows];
    const float* out = latent_row<Products>(s, i, row_out);
    float max = tile.max[i % kLatentRows], sum = tile.sum[i % kLatentRows];
    if (folded) {
      float* const into = s.folded + long(i) * s.v;
      fold(into, s.folded_max + i, s.folded_sum + i, out, max, sum, s.v);
      out = into, max = s.folded_max[i], sum = s.folded_sum[i];
    }
    finite &= finish_row(a, item, s.rows[i], out, max, sum);
  }
  return finite;
}

// Runs an item for the kv heads that are run together, one after the other.
template <class Products>
bool attend_latent_heads(const AttentionParams& a, const WorkItem& item, int kv_head, NextTask next, char* memory) {
  bool finite = true;
  for (int h = 0; h < a.heads_together; ++h)
    finite &= attend_latents<Products>(a, item, kv_head + h, h + 1 < a.heads_together ? NextTask{&item, kv_head + h + 1} : next, memory);
  return finite;
}

}  // namespace
}  // namespace imbrex::cpu
