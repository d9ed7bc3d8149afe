#pragma once
// A warp's products with mma.sync, of fragments from shared memory: its rows of queries with keys, and weights with values; and the
// modifications of scores before they become weights. For attention_sm80.cu and attention_sm90_decode.cu.
#include "attention_expression.cuh"
#include "attention_output.cuh"
#include "attention_sm80_tiles.cuh"
#include "fragment.cuh"

namespace imbrex::cuda {

constexpr int kWarpRows = kTileRows / kRowWarps, kRowTiles = kWarpRows / 16;  // 16 rows of a product each
constexpr int kKeyTiles = kTeamKeys / 8;                                      // 8 columns of scores each
constexpr int kSteps = kQkDims / 16;                                          // products along the head dimension
constexpr int kLoadSteps = kBytes ? 2 : 1;                                    // of them fed by one load of two pieces
constexpr float kSlack = 8.f;                                                 // log2 units by which a maximum may outgrow a row's reference
constexpr bool kOneScale = kPlainLogits && !kPowerScaled;                     // of all rows, and nothing else is done to a logit

// Sums of scores that a warp keeps side by side and adds at the end: with few keys, products would wait for the one before.
constexpr int kScoreSums = kKeyTiles * kRowTiles <= 2 && !kExact ? 2 : 1;

// Whether what rows see beside a mask_mod() becomes bits first: there are too many keys and rows for registers otherwise.
constexpr bool kMaskBits = kTeamKeys >= 64 && kRowTiles > 1;
static_assert(!kMaskMod || !(kCustomMask || kTree));

constexpr int kQRegisters = kQPlanes * kRowTiles * kSteps * 4;  // of all fragments of queries

// --- fragments

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kProductType == kBf16) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}

// d += the sum over planes of a * b, without the pairs that are below the last bit of f32. The matrix unit truncates when it adds, which
// long sums of f32 would show; so with f32 the products are added to d by the ordinary adder.
DEVICE void multiply_planes(float (&d)[4], const u32 (&a)[kQPlanes][4], const u32 (&b)[kKvPlanes][2]) {
  if constexpr (!kExact) {
    multiply(d, a[0], b[0][0], b[0][1]);
  } else {
    float fresh[4] = {};
#pragma unroll
    for (int sum = kQPlanes - 1; sum >= 0; --sum) {  // small ones first
#pragma unroll
      for (int i = 0; i <= sum; ++i) {
        if (sum - i < kKvPlanes) multiply(fresh, a[i], b[sum - i][0], b[sum - i][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += fresh[i];
  }
}

DEVICE u32 widened(u32 four, int half) {
  if constexpr (kKvType == kE4m3) return e4m3_to_f16(four, half);
  return e5m2_to_f16(four, half);
}

// Widens two of the bytes {key, dim}, {key, dim + 1}, {key + 1, dim}, {key + 1, dim + 1}: both keys at dim + `odd`.
DEVICE u32 widened_keys(u32 four, int odd) {
  if constexpr (kKvType == kE5m2) return pick_bytes(four, 0, odd == 0 ? 0x2404 : 0x3414);
  return widened(pick_bytes(four, 0, 0x3120), odd);
}

DEVICE u32 pack(float low, float high) {
  if constexpr (kProductType == kBf16) return pack_bf16(low, high);
  return pack_f16(low, high);
}

// Probabilities as planes of a left operand; what a plane rounds off goes to the next.
DEVICE void pack_planes(float2 x, int i, u32 (&a)[kQPlanes][4]) {
#pragma unroll
  for (int plane = 0; plane < kQPlanes; ++plane) {
    a[plane][i] = pack(x.x, x.y);
    if constexpr (kExact) {
      const float2 rounded = unpack_bf16(a[plane][i]);
      x.x -= rounded.x, x.y -= rounded.y;
    }
  }
}

// --- scores

// The scores of a warp's rows. `kept`: fragments of queries stay in registers. `ranges_kept`: so does which keys the rows see; a warp that
// finds this for each tile has all rows of an item.
template <class Layout, bool kept, bool ranges_kept = true>
class Scores {
 public:
  using Tile = TiledFragment<kTeamKeys>[kRowTiles];

  // Prepares the scores of rows from `row` on, whose queries are at `q` in shared memory. The caller provides `item` and `scale`; the other
  // fields of `slot` are valid when the queries are.
  DEVICE Scores(const AttentionParams& p, const Item& item, const ItemSlot& slot, u32 q, float scale, int row)
      : p_(p), slot_(slot), scale_(scale), lane_(computed_here(lane_id())), row_(row) {
    q_ = q + row_ * kQRowBytes + (lane_ % 16) * kQRowBytes + lane_ / 16 * 16;
    k_lane_ = Layout::lane(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2, Layout::kKRow);
    const int last = min(row_ + kWarpRows, item.num_rows) - 1;
    if (ranges_kept && row_ <= last) {
      const RowsSeen seen = seen_by_rows(p, item, row_, last);
      some_ = {max(item.lo, seen.some.lo), min(item.hi, seen.some.hi)};
      all_ = {max(item.lo, seen.all.lo), min(item.hi, seen.all.hi)};
    }
  }

  // Called when the item's queries are in shared memory.
  DEVICE void begin() {
    if constexpr (kept) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q(step, q_kept_[step]);
    }
  }

  // A number made of all queries in registers, on which report_read() can depend.
  DEVICE u32 kept_bits() const {
    static_assert(kept);
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < kSteps * kRowTiles * kQPlanes * 4; ++i) bits ^= (&q_kept_[0][0][0][0])[i];
    return bits;
  }

  // Whether a row sees any of the keys [begin, begin + kTeamKeys).
  DEVICE bool sees(int begin) const {
    if constexpr (ranges_kept) return begin < some_.hi && (!kWindow || begin + kTeamKeys > some_.lo);
    const KeyRange some{slot_.item.lo, slot_.item.hi};
    return begin < some.hi && (!kWindow || begin + kTeamKeys > some.lo);
  }

  // Computes the scores of these keys, which are in shared memory at `k`; -inf where a key is hidden from a row. `shown`: mask_mod() hides
  // none of them.
  DEVICE void compute(int begin, u32 k, Tile& s, bool shown = false) const {
    multiply_keys(k + k_lane_, s);
    const KeyRange all = seen_by_all();
    const bool whole = !kCustomMask && (!kMaskMod || shown) && (!kWindow || begin >= all.lo) && begin + kTeamKeys <= all.hi;
    if constexpr (!kPlainLogits) modify(begin, s);
    if (!whole) hide(begin, s);
  }

  // The factor that a row's scores still have to be multiplied by.
  DEVICE float factor_left(int row) const {
    if constexpr (!kFactorLeft) return 1.f;
    if constexpr (kScoreMod) return kLog2e;
    return kSoftCap ? p_.soft_cap * kLog2e : terms(row).scale;
  }
  // Row of the item's tile that this lane holds.
  DEVICE int row_of(int m, int h) const { return row_ + 16 * m + 8 * h + lane_ / 4; }

 private:
  using QFragments = u32[kRowTiles][kQPlanes][4];

  // Keys that all of the warp's rows see.
  DEVICE KeyRange seen_by_all() const {
    static_assert(ranges_kept || kRowWarps == 1);
    if constexpr (ranges_kept) return all_;
    const Item& item = slot_.item;
    const int first = computed_here(row_), last = min(first + kWarpRows, item.num_rows) - 1;
    const KeyRange seen = seen_by_rows(p_, item, first, last).all;
    return {max(item.lo, seen.lo), min(item.hi, seen.hi)};
  }

  DEVICE void load_q(int step, QFragments& a) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int plane = 0; plane < kQPlanes; ++plane) load_matrix(a[m][plane], q_ + plane * kQPlaneBytes + m * 16 * kQRowBytes + step * 32);
    }
  }

  DEVICE RowTerms terms(int row) const {
    if constexpr (kOneScale) return {scale_, 0.f, nullptr};
    RowTerms terms = slot_.terms[row];
    if constexpr (kPowerScaled) terms.scale *= slot_.q_scale[row];
    return terms;
  }

  DEVICE void multiply_keys(u32 k, Tile& s) const {
    float sums[kScoreSums][kRowTiles][kKeyTiles][4];
#pragma unroll
    for (int i = 0; i < kScoreSums * kRowTiles * kKeyTiles * 4; ++i) (&sums[0][0][0][0])[i] = 0.f;
#pragma unroll(kExact && !kept ? 1 : kSteps)
    for (int load = 0; load * kLoadSteps < kSteps; ++load) {
      QFragments a[kLoadSteps];
      if constexpr (!kept) {
#pragma unroll
        for (int i = 0; i < kLoadSteps; ++i) {
          if (load * kLoadSteps + i < kSteps) load_q(load * kLoadSteps + i, a[i]);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        u32 words[kKvPlanes][4];
#pragma unroll
        for (int plane = 0; plane < kKvPlanes; ++plane)
          load_matrix(words[plane], Layout::at(k, load) + plane * kKPlaneBytes + n * 8 * Layout::kKRow);
#pragma unroll
        for (int i = 0; i < kLoadSteps; ++i) {
          const int step = load * kLoadSteps + i;
          if (step >= kSteps) continue;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            u32 b[kKvPlanes][2];
#pragma unroll
            for (int plane = 0; plane < kKvPlanes; ++plane) {
              const u32(&w)[4] = words[plane];
              b[plane][0] = kBytes ? widened(w[2 * half + i], 0) : w[2 * half];
              b[plane][1] = kBytes ? widened(w[2 * half + i], 1) : w[2 * half + 1];
            }
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              if constexpr (kept) {
                multiply_planes(sums[step % kScoreSums][m][n + half], q_kept_[step][m], b);
              } else {
                multiply_planes(sums[step % kScoreSums][m][n + half], a[i][m], b);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * kKeyTiles * 4; ++i) {
      float sum = (&sums[0][0][0][0])[i];
      if constexpr (kScoreSums == 2) sum += (&sums[kScoreSums - 1][0][0][0])[i];
      (&s[0][0][0])[i] = sum;
    }
  }

  // Whether a tile has keys of a tree's tokens.
  DEVICE bool has_bits(int begin) const { return kTree && begin + kTeamKeys > slot_.item.first_bit; }

  DEVICE void modify(int begin, Tile& s) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = computed_here(row_of(m, h)), distance = begin + 2 * (lane_ % 4) - slot_.item.position_of(row);
        const RowTerms row_terms = terms(row);
        if constexpr (kScoreMod) {
          const ExpressionInputs in = expression_inputs(p_, slot_.item, row, p_.score_tensors);
          constexpr bool kAlone = !kHeadScales && !kSoftCap && !kAlibi && !kRelative;
          const float scale = kAlone ? factor_of(p_, row_terms) : 1.f;
          each_of_row(s[m], h, [=, this](float& x, int key) {
            const float logit = kAlone ? x : modified(p_, row_terms, x, distance + key);
            x = score_mod(of_logit(in, begin + 2 * (lane_ % 4), key, logit, scale));
          });
        } else if (has_bits(begin)) {
          const u64 word = slot_.item.word_of(p_, row);
          const int bit = begin + 2 * (lane_ % 4) - slot_.item.first_bit;
          each_of_row(s[m], h, [=, this](float& x, int key) {
            x = modified(p_, row_terms, x, bit + key < 0 ? distance + key : depth_to(word, min(bit + key, kMostTreeTokens - 1)));
          });
        } else {
          each_of_row(s[m], h, [=, this](float& x, int key) { x = modified(p_, row_terms, x, distance + key); });
        }
      }
    }
  }

  DEVICE void hide(int begin, Tile& s) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = computed_here(row_of(m, h)), first = begin + 2 * (lane_ % 4);
        const KeyRange keys = seen_by(p_, slot_.item, row);
        const int lo = max(keys.lo, slot_.item.lo) - first, hi = min(keys.hi, slot_.item.hi) - first;
        long custom = 0;
        if constexpr (kCustomMask) {
          const int query = slot_.item.query_index + (slot_.item.row_begin + min(row, slot_.item.num_rows - 1)) / kGroup;
          custom = p_.custom_start[slot_.item.request] + long(query) * slot_.item.seq_len + first;
        }
        ExpressionInputs in{};
        if constexpr (kMaskMod) in = expression_inputs(p_, slot_.item, row, p_.mask_tensors);
        if constexpr (kMaskMod && kMaskBits) {
          u32 seen[1];
          set_seen_bits<kTeamKeys>(seen,
                                   [=](int, int key) { return key < hi && (!kWindow || key >= lo) && mask_mod(of_key(in, first + key)); });
          hide_unseen(seen[0], h, s[m]);
          continue;
        }
        u64 word = 0;
        if constexpr (kTree) word = slot_.item.word_of(p_, row);
        const int bit = first - slot_.item.first_bit;
        each_of_row(s[m], h, [=, this](float& x, int key) {
          bool seen = key < hi;
          if constexpr (kTree) seen = seen && shows(word, bit + key);
          if constexpr (kWindow) seen = seen && key >= lo;
          if constexpr (kCustomMask) seen = seen && custom_shows(p_, custom + key);
          if constexpr (kMaskMod) seen = seen && mask_mod(of_key(in, first + key));
          if (!seen) x = -infinity();
        });
      }
    }
  }

  const AttentionParams& p_;
  const ItemSlot& slot_;
  float scale_;  // kOneScale: of all rows
  const int lane_, row_;
  u32 q_, k_lane_;                   // where this lane's rows of the fragments begin
  KeyRange some_{0, 0}, all_{0, 0};  // ranges_kept: keys that some, and that all of the warp's rows see
  QFragments q_kept_[kept ? kSteps : 1];
};

// --- values

// Adds weights of 16 keys times their values, to kRowTiles outputs. `v`: where this lane's rows of the fragments begin.
template <class Layout, class Out>
DEVICE void add_products(const u32 (&a)[kRowTiles][kQPlanes][4], u32 v, Out* out) {
  constexpr int tiles = kTilesOf<Out>;
#pragma unroll
  for (int d = 0; d < tiles; d += 2 * kLoadSteps) {
    u32 words[kKvPlanes][4];
#pragma unroll
    for (int plane = 0; plane < kKvPlanes; ++plane) {
      const u32 from = Layout::at(v, d / (2 * kLoadSteps)) + plane * kVPlaneBytes;
      if (tiles - d >= 2 * kLoadSteps) {
        load_matrix_transposed(words[plane], from);
      } else {  // bytes: what is behind the row's last piece may just be written
        u32 last[2];
        load_matrix_transposed(last, from);
        words[plane][0] = last[0], words[plane][1] = last[1], words[plane][2] = words[plane][3] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kLoadSteps; ++i) {
      if (d + i >= tiles) continue;
      u32 b[kKvPlanes][2];
#pragma unroll
      for (int plane = 0; plane < kKvPlanes; ++plane) {
        const u32(&w)[4] = words[plane];
        b[plane][0] = kBytes ? widened_keys(w[i / 2 * 2], i % 2) : w[i * 2 % 4];
        b[plane][1] = kBytes ? widened_keys(w[i / 2 * 2 + 1], i % 2) : w[i * 2 % 4 + 1];
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) multiply_planes(out[m][d + i], a[m], b);
    }
  }
}

// The first dim of a lane's pair of neighbouring dims. For each row a lane holds as many pairs as there are tiles; with values of 8 bits,
// even dims are in one tile and odd ones in the next.
DEVICE int dim_of_pair(int pair) {
  const int t = lane_id() % 4;
  return pair / 2 * 16 + (kBytes ? 4 * t + pair % 2 * 2 : pair % 2 * 8 + 2 * t);
}
template <class Out>
DEVICE float2 pair_of(const Out& out, int h, int number) {
  if constexpr (kBytes) return {at(out, number / 2 * 2, h, number % 2), at(out, number / 2 * 2 + 1, h, number % 2)};
  return pair(out, number, h);
}

// --- the end of a row

// Writes row `row` of the item: what a lane has of it, its row h in `out`, of the dims from `first_dim` on.
template <class Out>
DEVICE void store_row(const AttentionParams& p, const Item& item, int row, float reference, float sum, const Out& out, int h, int first_dim,
                      bool first, bool aligned, float v_scale) {
  const int token = item.token_of(row), head = item.head_of(row);
  if (item.partial >= 0) {
    if (first) reinterpret_cast<float2*>(p.partial_state)[partial_row(p, item, row)] = {reference, sum};
    float* const to = p.partial_out + partial_row(p, item, row) * kHeadDimV;
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; ++i) {
      const float2 x = pair_of(out, h, i);
      const int d = first_dim + dim_of_pair(i);
      if (d < kHeadDimV) *reinterpret_cast<float2*>(to + d) = x;
    }
  } else {
    const RowEnd end = row_end(p, head, reference, sum);
    if (first) store_lse(p, token, head, end.lse);
    char* const to = out_row(p, token, head);
#pragma unroll
    for (int i = 0; i < kTilesOf<Out>; ++i) {
      const float2 x = pair_of(out, h, i);
      const int d = first_dim + dim_of_pair(i);
      if (d < kHeadDimV)
        store_pair(to + d * element_bytes(kOutType), aligned, {ended(x.x, end.factor * v_scale), ended(x.y, end.factor * v_scale)});
    }
  }
}

}  // namespace imbrex::cuda
