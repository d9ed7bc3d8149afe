#pragma once
// One warp of attention_sm80.cu or attention_sm90_decode.cu: its rows of scores and output in registers, fed by fragments from shared
// memory.
#include "attention_sm80_tiles.cuh"

namespace imbrex::cuda {

constexpr int kWarpRows = kTileRows / kRowWarps, kRowTiles = kWarpRows / 16;  // 16 rows of a product each
constexpr int kKeyTiles = kTeamKeys / 8;                                      // 8 columns of scores each
constexpr int kWarpDims = kVDims / kDimWarps, kDimTiles = kWarpDims / 8;
constexpr int kSteps = kQkDims / 16;                       // products along the head dimension
constexpr int kLoadSteps = kBytes ? 2 : 1;                 // of them fed by one load of two pieces
constexpr float kSlack = 8.f;                              // log2 units by which a maximum may outgrow a row's reference
constexpr bool kOneScale = kPlainLogits && !kPowerScaled;  // of all rows, and nothing else is done to a logit

// Sums of scores that a warp keeps side by side and adds at the end: with few keys, products would wait for the one before.
constexpr int kScoreSums = kKeyTiles * kRowTiles <= 2 && !kExact ? 2 : 1;

// Fragments of queries that stay in registers: as many as leave room for scores and output.
constexpr int kQRegisters = kQPlanes * kRowTiles * kSteps * 4;
constexpr bool kQInRegisters = kQRegisters + kRowTiles * (kDimTiles + kKeyTiles) * 4 <= 176 && kQRegisters <= 64;

// --- fragments

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kProductType == kBf16) {
    mma_bf16(d, a, b0, b1);
  } else {
    mma_f16(d, a, b0, b1);
  }
}

// d += the sum over planes of a * b, without the pairs that are below the last bit of f32. The matrix unit cuts where it adds, which long
// sums of f32 would show: they get theirs from the ordinary adder.
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

// Of the bytes {key, dim}, {key, dim + 1}, {key + 1, dim}, {key + 1, dim + 1}: both keys at dim + `odd`.
DEVICE u32 widened_keys(u32 four, int odd) {
  if constexpr (kKvType == kE5m2) return pick_bytes(four, 0, odd == 0 ? 0x2404 : 0x3414);
  return widened(pick_bytes(four, 0, 0x3120), odd);
}

DEVICE u32 pack(float low, float high) {
  if constexpr (kProductType == kBf16) return pack_bf16(low, high);
  return pack_f16(low, high);
}

// Probabilities as planes of a left operand; what a plane rounds off goes to the next.
DEVICE void pack_planes(float low, float high, int i, u32 (&a)[kQPlanes][4]) {
#pragma unroll
  for (int plane = 0; plane < kQPlanes; ++plane) {
    a[plane][i] = pack(low, high);
    if constexpr (kExact) {
      const float2 rounded = unpack_bf16(a[plane][i]);
      low -= rounded.x, high -= rounded.y;
    }
  }
}

// --- the warp

template <class Layout>
class Warp {
 public:
  // `item` and `scale` are the caller's; what else is in `slot` is there when the queries are.
  DEVICE Warp(const AttentionParams& p, const Item& item, const ItemSlot& slot, float scale, int warp)
      : p_(p),
        slot_(slot),
        scale_(scale),
        lane_(computed_here(lane_id())),
        row_(warp % kRowWarps * kWarpRows),
        dim_(warp / kRowWarps % kDimWarps * kWarpDims) {
    const u32 q_lane = (lane_ % 16) * kQRowBytes + lane_ / 16 * 16;
    q_ = shared_address(slot.q) + row_ * kQRowBytes + q_lane;
    k_lane_ = Layout::lane(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2, Layout::kKRow);
    v_lane_ = Layout::lane(lane_ % 16, lane_ / 16, Layout::kVRow) + dim_ * kStoredBytes + Layout::kVBegin;
    const int last = min(row_ + kWarpRows, item.num_rows) - 1;
    if (row_ <= last) {
      const KeyRange first_row = visible_keys(p, item.position_of(row_)), last_row = visible_keys(p, item.position_of(last));
      some_ = {max(item.lo, first_row.lo), min(item.hi, last_row.hi)};
      all_ = {max(item.lo, last_row.lo), min(item.hi, first_row.hi)};
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) reference_[m][h] = kEmptyReference, sum_[m][h] = 0.f;
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
#pragma unroll
        for (float& x : out_[m][n]) x = 0.f;
      }
    }
  }

  // When the queries have arrived.
  DEVICE void begin() {
    if constexpr (kQInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load_q(step, q_kept_[step]);
    }
  }

  // Keys [begin, begin + kTeamKeys) and their values, in shared memory at `stage`.
  DEVICE void step(int begin, u32 stage) {
    if (begin >= some_.hi || (kWindow && begin + kTeamKeys <= some_.lo)) return;
    float s[kRowTiles][kKeyTiles][4];
    scores(stage + k_lane_, s);
    const bool whole = !kCustomMask && (!kWindow || begin >= all_.lo) && begin + kTeamKeys <= all_.hi;
    if constexpr (!kPlainLogits) modify(begin, s);
    if (!whole) hide(begin, s);
    weigh(s);
    add_values(stage + v_lane_, s);
  }

  // The sums of the row that lanes 4g to 4g + 3 share, in each of them.
  DEVICE float total(int m, int h) const { return sum_over<4>(sum_[m][h]); }
  DEVICE float reference(int m, int h) const { return reference_[m][h]; }
  // Rows of the item's tile, and dims, that this lane holds. Of each row there are kDimTiles pairs of neighbours.
  DEVICE int row_of(int m, int h) const { return row_ + 16 * m + 8 * h + lane_ / 4; }
  DEVICE int dim_of(int pair) const {
    const int t = lane_ % 4;
    return dim_ + pair / 2 * 16 + (kBytes ? 4 * t + pair % 2 * 2 : pair % 2 * 8 + 2 * t);
  }
  DEVICE float2 pair_of(int m, int h, int pair) const {
    if constexpr (kBytes) {  // even dims are in one tile, odd ones in the next
      const int tile = pair / 2 * 2;
      return {out_[m][tile][2 * h + pair % 2], out_[m][tile + 1][2 * h + pair % 2]};
    } else {
      return {out_[m][pair][2 * h], out_[m][pair][2 * h + 1]};
    }
  }
  DEVICE bool has_first_dims() const { return dim_ == 0; }

 private:
  using QFragments = u32[kRowTiles][kQPlanes][4];

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

  DEVICE void scores(u32 k, float (&s)[kRowTiles][kKeyTiles][4]) const {
    float sums[kScoreSums][kRowTiles][kKeyTiles][4];
#pragma unroll
    for (int i = 0; i < kScoreSums * kRowTiles * kKeyTiles * 4; ++i) (&sums[0][0][0][0])[i] = 0.f;
#pragma unroll(kExact && !kQInRegisters ? 1 : kSteps)
    for (int load = 0; load * kLoadSteps < kSteps; ++load) {
      QFragments a[kLoadSteps];
      if constexpr (!kQInRegisters) {
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
              if constexpr (kQInRegisters) {
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

  DEVICE void modify(int begin, float (&s)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = computed_here(row_of(m, h)), distance = begin + 2 * (lane_ % 4) - slot_.item.position_of(row);
        const RowTerms row_terms = terms(row);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) s[m][n][2 * h + c] = modified(p_, row_terms, s[m][n][2 * h + c], distance + 8 * n + c);
        }
      }
    }
  }

  DEVICE void hide(int begin, float (&s)[kRowTiles][kKeyTiles][4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = computed_here(row_of(m, h)), first = begin + 2 * (lane_ % 4);
        const KeyRange keys = visible_keys(p_, slot_.item.position_of(row));
        const int lo = max(keys.lo, slot_.item.lo) - first, hi = min(keys.hi, slot_.item.hi) - first;
        const unsigned char* custom = nullptr;
        if constexpr (kCustomMask) {
          const int query = slot_.item.query_index + (slot_.item.row_begin + min(row, slot_.item.num_rows - 1)) / kGroup;
          custom = p_.custom_mask + p_.custom_start[slot_.item.request] + long(query) * slot_.item.seq_len + first;
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int key = 8 * n + c;
            bool seen = key < hi;
            if constexpr (kWindow) seen = seen && key >= lo;
            if constexpr (kCustomMask) seen = seen && custom[key] != 0;
            if (!seen) s[m][n][2 * h + c] = -infinity();
          }
        }
      }
    }
  }

  // Scores become weights relative to each row's reference; where a maximum outgrows it by too much, the row's sums are rescaled.
  DEVICE void weigh(float (&s)[kRowTiles][kKeyTiles][4]) {
    float factor[kRowTiles][2], scale[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -infinity();
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
        top = max_over<4>(top);
        if constexpr (kPlainLogits) top *= scale[m][h] = terms(row_of(m, h)).scale;
        const bool moves = top > reference_[m][h] + kSlack;
        factor[m][h] = moves ? exp2_approx(reference_[m][h] - top) : 1.f;
        if (moves) reference_[m][h] = top;
        moved = moved || moves;
      }
    }
    if (any_lane(moved)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        sum_[m][0] *= factor[m][0], sum_[m][1] *= factor[m][1];
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          out_[m][n][0] *= factor[m][0], out_[m][n][1] *= factor[m][0];
          out_[m][n][2] *= factor[m][1], out_[m][n][3] *= factor[m][1];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = s[m][n][i], reference = reference_[m][i / 2];
          s[m][n][i] = exp2_approx(kPlainLogits ? fmaf(x, scale[m][i / 2], -reference) : x - reference);
          sum_[m][i / 2] += s[m][n][i];
        }
      }
    }
  }

  DEVICE void add_values(u32 v, const float (&s)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 a[kRowTiles][kQPlanes][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) pack_planes(s[m][n + i / 2][i % 2 * 2], s[m][n + i / 2][i % 2 * 2 + 1], i, a[m]);
      }
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 2 * kLoadSteps) {
        u32 words[kKvPlanes][4];
#pragma unroll
        for (int plane = 0; plane < kKvPlanes; ++plane)
          load_matrix_transposed(words[plane], Layout::at(v, d / (2 * kLoadSteps)) + plane * kVPlaneBytes + n * 8 * Layout::kVRow);
#pragma unroll
        for (int i = 0; i < 2 * kLoadSteps; ++i) {
          if (d + i >= kDimTiles) continue;
          u32 b[kKvPlanes][2];
#pragma unroll
          for (int plane = 0; plane < kKvPlanes; ++plane) {
            const u32(&w)[4] = words[plane];
            b[plane][0] = kBytes ? widened_keys(w[i / 2 * 2], i % 2) : w[i * 2 % 4];
            b[plane][1] = kBytes ? widened_keys(w[i / 2 * 2 + 1], i % 2) : w[i * 2 % 4 + 1];
          }
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) multiply_planes(out_[m][d + i], a[m], b);
        }
      }
    }
  }

  const AttentionParams& p_;
  const ItemSlot& slot_;
  const int lane_, row_, dim_;       // first row of the tile and first dim of the output that are this warp's
  u32 q_, k_lane_, v_lane_;          // where this lane's rows of the fragments begin
  KeyRange some_{0, 0}, all_{0, 0};  // keys that some, and that all of the warp's rows see
  float scale_;                      // kOneScale: of all rows
  QFragments q_kept_[kQInRegisters ? kSteps : 1];
  float out_[kRowTiles][kDimTiles][4], reference_[kRowTiles][2], sum_[kRowTiles][2];
};

}  // namespace imbrex::cuda
