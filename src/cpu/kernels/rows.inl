// The rows of a work item (one for each query token and q head of the kv head's group), as every kernel file sees them.
// A row's result is a function of its own query and keys alone: blocks of kBlockKeys at absolute positions, taken in order, folded at
// multiples of split_keys. That is what makes results independent of batch, prompt chunking, tiles and threads.

namespace imbrex::cpu {
namespace {

constexpr int kMaxDim = 576;  // AttentionSpec::kMaxHeadDim, whose header kernels may not include

inline int clamp_int(int x, int lo, int hi) { return x < lo ? lo : x > hi ? hi : x; }

struct Row {
  int request, token, head;     // of the batch; q head
  int entry;                    // number of the token in the item
  int position;                 // of the query among the request's keys
  int lo, hi;                   // visible keys, a mask of bytes aside; in a stretch, of that
  Visible visible;              // and of the item, a mask_mod aside
  float scale;                  // of q.k, everything folded in but log2(e)
  float slope;                  // ALiBi, natural log units
  const float* bias;            // by distance, centred, or null
  const unsigned char* bytes;   // of the custom mask, of a tree's tail or, in a stretch, of a mask_mod, this query's; or null
  const unsigned char* custom;  // `bytes`, or null in a stretch of keys that it hides none of
  int first_byte;               // the key of bytes[0]
  const int* key_positions;     // likewise, where keys have others than their numbers: in a tree's tail; or null
};

inline void fill_rows(const AttentionParams& a, const WorkItem& item, int kv_head, Row* rows) {
  const int group = a.group, head0 = kv_head * group;
  for (int g = 0; g < group; ++g) {  // what depends on the head: in the rows of the first token
    const int head = head0 + g;
    rows[g].head = head;
    rows[g].scale = a.scale * (a.k.scales ? a.k.scales[kv_head * a.k.scale_stride] : 1.f) * (a.head_scales ? a.head_scales[head] : 1.f);
    rows[g].slope = a.alibi_slopes ? a.alibi_slopes[head] : 0.f;
    rows[g].bias = a.bias_by_distance ? a.bias_by_distance + head * (2L * a.bias_reach + 1) + a.bias_reach : nullptr;
  }
  Row* row = rows;
  for (int i = item.q_begin; i < item.q_end; ++i) {
    const int t = a.tokens ? a.tokens[i] : i, r = a.tokens ? a.request_of[t] : item.table;
    const int seq_len = a.seq_lens[r], position = position_of(a, r, t);
    const TreeTail* const tail = a.tree_tails && a.tree_tails[r].begin >= 0 ? a.tree_tails + r : nullptr;
    Visible visible = visible_keys(a, position, seq_len);
    const unsigned char* bytes = a.custom_mask ? a.custom_mask + a.custom_start[r] + long(t - a.query_start[r]) * seq_len : nullptr;
    if (tail) {
      visible.hi = seq_len - a.query_start[r + 1] + t + 1;  // behind its own key there are no ancestors
      bytes = a.tree_shown + tail->shown + long(t - a.query_start[r]) * tail->width;
    }
    for (int g = 0; g < group; ++g, ++row) {
      const Row& of_head = rows[g];
      *row = {.request = r,
              .token = t,
              .head = of_head.head,
              .entry = i - item.q_begin,
              .position = position,
              .lo = visible.lo,
              .hi = visible.hi,
              .visible = visible,
              .scale = of_head.scale,
              .slope = of_head.slope,
              .bias = of_head.bias,
              .bytes = bytes,
              .custom = bytes,
              .first_byte = tail ? tail->begin : 0,
              .key_positions = tail ? a.tree_positions + tail->key_positions : nullptr};
    }
  }
}

inline bool any_custom(const Row* rows, int num_rows) {
  for (int i = 0; i < num_rows; ++i)
    if (rows[i].custom) return true;
  return false;
}

// The blocks of keys of an item in their order: all of them, or those of its stretches.
class KeyBlocks {
 public:
  KeyBlocks(const AttentionParams& a, const WorkItem& item) : key_(item.kv_begin), end_(item.kv_end), split_(a.split_keys) {
    const ItemDetails* const details = details_of(a, item);
    if (!details || details->num_stretches < 0) return;
    stretch_ = a.stretches + details->first_stretch, left_ = details->num_stretches;
    if (left_ == 0) end_ = key_;
    begin_stretch();
  }
  bool done() const { return key_ >= end_; }
  int key() const { return key_; }                    // the first of the block
  int end() const { return end_; }                    // of the stretch
  const KeyStretch* stretch() const { return now_; }  // null: all keys of the item are one
  bool shown() const { return shown_; }
  bool begins() const { return begins_; }  // whether the block is a stretch's first, so that `shown` may be another
  bool leaves_split(const KeyBlocks& before) const { return key_ / split_ != before.key_ / split_; }
  void next() { skip_to(key_ + kBlockKeys); }
  // Goes on to `key`, a block of this stretch or its end.
  void skip_to(int key) {
    key_ = key, begins_ = false;
    if (key_ >= end_) begin_stretch();
  }

 private:
  void begin_stretch() {
    if (left_ == 0) return;
    key_ = stretch_->begin, end_ = stretch_->end, shown_ = stretch_->shown != 0, begins_ = true;
    now_ = stretch_++, --left_;
  }
  const KeyStretch *now_ = nullptr, *stretch_ = nullptr;  // this one, and the next one
  int left_ = 0, key_, end_, split_;
  bool shown_ = false, begins_ = false;
};

// Prepares rows for the stretch of keys that begins with the block: `shown` ones are hidden from none of them by a mask of bytes.
inline void show(const AttentionParams& a, const WorkItem& item, Row* rows, int num_rows, const KeyBlocks& block) {
  const bool modified = a.stretch_rows && block.stretch();
  const long first = modified ? a.stretch_rows[block.stretch() - a.stretches] : -1;
  for (int i = 0; i < num_rows; ++i) {
    Row& row = rows[i];
    if (modified) row.lo = row.visible.lo, row.hi = row.visible.hi;
    if (first >= 0) {
      const long of_head = a.mask_heads > 1 ? row.head * long(item.q_end - item.q_begin) : 0;
      const MaskRow& seen = a.mask_rows[first + of_head + row.entry];
      row.lo = seen.begin > row.lo ? seen.begin : row.lo, row.hi = seen.end < row.hi ? seen.end : row.hi;
      row.bytes = seen.bytes < 0 ? nullptr : a.mask_bytes + seen.bytes;
      row.first_byte = block.key();
    }
    row.custom = block.shown() || block.key() < row.first_byte ? nullptr : row.bytes;
  }
}

inline int usual_split_keys(const AttentionParams&) { return kSplitKeys; }

// True where a logit is q.k * scale and nothing else.
inline bool plain_logits(const AttentionParams& a) {
  return a.soft_cap == 0.f && !a.alibi_slopes && !a.bias_by_distance && !a.modify_scores;
}

// What the score_mod makes of a row's logits, which become natural units once they are scaled; s[0] is that of key `kb`, and groups of 16
// are `pitch` floats apart. Of a half of the block in which the row sees no key, nothing.
inline void modify_scores(const AttentionParams& a, const Row& row, int kb, float* s, long pitch, float scale) {
  constexpr int half = kBlockKeys / 2;
  if (row.lo >= row.hi || row.lo >= kb + kBlockKeys || row.hi <= kb) return;
  const int begin = row.lo >= kb + half ? kb + half : kb, end = row.hi <= kb + half ? kb + half : kb + kBlockKeys;
  const int q_len = a.query_start[row.request + 1] - a.query_start[row.request];
  a.modify_scores(a.score_mod, {row.request, row.head, row.position, q_len, a.seq_lens[row.request], begin, end, pitch, scale},
                  s + (begin - kb) / 16 * pitch);
}

// Keys that at least one row of the item sees: nothing else of the cache may be read, or multiplied even by zero (it may hold NaN).
inline Visible item_keys(const AttentionParams& a, const WorkItem& item, const Row* rows, int num_rows) {
  Visible keys = {item.kv_end, item.kv_begin};
  for (int i = 0; i < num_rows; i += a.group) {
    if (rows[i].lo >= rows[i].hi) continue;
    keys.lo = rows[i].lo < keys.lo ? rows[i].lo : keys.lo;
    keys.hi = rows[i].hi > keys.hi ? rows[i].hi : keys.hi;
  }
  keys.lo = keys.lo > item.kv_begin ? keys.lo : item.kv_begin;
  keys.hi = keys.hi < item.kv_end ? keys.hi : item.kv_end;
  return keys;
}

// The keys that an item sees, computed without its rows: what a query sees moves with its position, so the first and the last query decide,
// where positions rise. The schedule has left out what no query sees, but for the rest of a tile at either end.
inline Visible keys_seen(const AttentionParams& a, const WorkItem& item) {
  if (a.tokens || a.positions) return {item.kv_begin, item.kv_end};
  const int seq_len = a.seq_lens[item.table], shift = seq_len - a.query_start[item.table + 1];
  const Visible first = visible_keys(a, shift + item.q_begin, seq_len), last = visible_keys(a, shift + item.q_end - 1, seq_len);
  const bool first_empty = first.lo >= first.hi, last_empty = last.lo >= last.hi;
  const int lo = first_empty ? last.lo : first.lo, hi = last_empty ? first.hi : last.hi;
  return {lo > item.kv_begin ? lo : item.kv_begin, hi < item.kv_end ? hi : item.kv_end};
}

// rows[j] = where key (or value) kb + j of the request is; `zero` for keys outside `keys`, whose memory and table are not touched.
inline void find_rows(const AttentionParams& a, const KvSide& side, int request, int kv_head, int kb, int count, Visible keys,
                      const char* zero, const char** rows) {
  const char* const base = side.data + kv_head * side.head_stride;
  const int begin = clamp_int(keys.lo - kb, 0, count), end = clamp_int(keys.hi - kb, begin, count);
  for (int j = 0; j < begin; ++j) rows[j] = zero;
  for (int j = end; j < count; ++j) rows[j] = zero;
  if (begin == end) return;
  if (a.block_size == 0) {
    const char* p = base + (a.block_start[request] + kb + begin) * side.token_stride;
    for (int j = begin; j < end; ++j, p += side.token_stride) rows[j] = p;
    return;
  }
  const int* block = a.block_ids + a.block_start[request] + (kb + begin) / a.block_size;
  int offset = (kb + begin) % a.block_size;
  for (int j = begin; j < end; ++block, offset = 0) {
    const char* p = base + *block * side.block_stride + offset * side.token_stride;
    const int run = a.block_size - offset < end - j ? a.block_size - offset : end - j;
    for (const int stop = j + run; j < stop; ++j, p += side.token_stride) rows[j] = p;
  }
}

// Copies rows whose elements are not contiguous to `buffer` first: the slow way, for layouts that no engine uses on a CPU.
inline void compact_rows(const KvSide& side, int count, const char* zero, const char** rows, char* buffer) {
  const long size = element_size(side.type);
  if (side.dim_stride == size) return;
  for (int j = 0; j < count; ++j, buffer += side.dim * size) {
    if (rows[j] == zero) continue;
    for (int d = 0; d < side.dim; ++d) __builtin_memcpy(buffer + d * size, rows[j] + d * side.dim_stride, size);
    rows[j] = buffer;
  }
}
inline long compact_bytes(const KvSide& side) { return kBlockKeys * side.dim * element_size(side.type); }

// exp2 to 1e-7, exact for integers; 0 far below zero. Scalar, for merges and the portable kernels; loops over it vectorise.
inline float exp2_exact(float x) {
  const float clamped = x < -150.f ? -150.f : x > 127.f ? 127.f : x;
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = clamped + magic;
  const float n = shifted - magic, f = clamped - n;
  float p = 1.535336188e-4f;  // minimax on [-1/2, 1/2], relative error 1.7e-7 (Cephes exp2f)
  p = p * f + 1.339887440e-3f;
  p = p * f + 9.618437357e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472028e-1f;
  p = p * f + 1.f;
  // 2^n in two factors, so that results below 2^-126 come out as subnormals or zero. n is in the bits of `shifted` already: those of a NaN
  // are some number too, where a conversion would be undefined.
  const int i = int(as_bits(shifted) - as_bits(magic)), half = i >> 1;
  return p * as_float(u32(half + 127) << 23) * as_float(u32(i - half + 127) << 23);
}

}  // namespace
}  // namespace imbrex::cpu
