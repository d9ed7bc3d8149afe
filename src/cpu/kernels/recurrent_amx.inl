// Prompts of recurrent layers in chunks, with products of bf16 in AMX tiles; included by recurrent_amx.cpp (hardware) and
// recurrent_amx_emulated.cpp (tiles in memory, for tests). recurrent_chunks.inl has the formulas, docs/kernels/recurrent.md the schedule.
//
// Of keys, queries and states products are those of PairProducts: keys and queries are what was given, a state is rounded once a chunk.
// All other factors are sums of several numbers of bf16, whose products are made one after the other: P, A, what tokens write, and keys and
// queries with decays of channels of two, which is a float but for 2^-17 of it; and without the delta rule what is written to the state of
// three, which is all of a float. With the delta rule that is rounded, as PairProducts have it.
#include <immintrin.h>

// clang-format off
#include "cpu/kernels/recurrent.inl"
#include "cpu/kernels/recurrent_narrow.inl"
#include "cpu/kernels/recurrent_outputs.inl"
#include "cpu/kernels/recurrent_weights.inl"
#ifdef IMBREX_AMX_EMULATED
#include "cpu/kernels/amx_tiles_emulated.inl"
#else
#include "cpu/kernels/amx_tiles_hardware.inl"
#endif
#include "cpu/kernels/recurrent_chunks.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kTile = 16, kTileFloats = kTile * kTile, kBlock = 2 * kTile;  // a block of sums: two tiles by two, one behind the other
constexpr int kTokenRow = kRecurrentChunk + 32;                             // numbers of a row of tokens; not of 2^n bytes
constexpr int kMostParts = 3;

// Right operands of whole chunks: two tokens of a value a word.
typedef u32 TokenPairs[kRecurrentChunk / 2][kColumns];

// What a worker has in memory, and behind it states as in ChunkScratch.
struct TileScratch {
  static constexpr bool kChannelDecays = true;
  union {
    ChunkScratch<PairProducts> of_heads;
    ChunkScratch<FloatProducts> of_channels;
  };
  // Left operands: with decays of channels, tokens' keys and queries; keys by channel; and -A and P below the diagonal's tiles, zeros
  // elsewhere. Each of so many parts.
  u16 keys[2][kRecurrentChunk][kKeyPitch], queries[2][kRecurrentChunk][kKeyPitch];
  u16 channels[2][kRecurrentDim][kTokenRow];
  u16 a[2][kRecurrentChunk][kTokenRow], p[2][kRecurrentChunk][kTokenRow];
  // Right operands: the state, two channels a word, what tokens have written, and what that is for the state.
  u32 state[kRecurrentDim / 2][kColumns];
  TokenPairs u[2], written[kMostParts];
  float of_keys[4 * kTileFloats], of_queries[4 * kTileFloats], of_earlier[4 * kTileFloats];

  static long bytes() {
    constexpr long kLine = 64;
    return (long(sizeof(TileScratch)) + kLine - 1) / kLine * kLine;
  }
  float* states() { return reinterpret_cast<float*>(reinterpret_cast<char*>(this) + bytes()); }
};

long tile_scratch_bytes(int dim_k, int values, int heads) {
  return TileScratch::bytes() + long(heads) * panels_of(values) * rounded_up(dim_k, kRows) * kColumns * long(sizeof(float));
}

// --- numbers as sums of numbers of bf16

// What is left of numbers without one of their parts; of an infinite number that is none.
inline Floats rest_of(Floats x, __m512i part) {
  const Floats rest = x - (Floats)part;
  return chosen(rest == rest, rest, Floats{});
}
// Takes what bf16 holds of a vector from it, as its codes.
inline __m256i take_part(Floats& x) {
  const __m256i codes = (__m256i)_mm512_cvtneps_pbh((__m512)x);
  x = rest_of(x, _mm512_slli_epi32(_mm512_cvtepu16_epi32(codes), 16));
  return codes;
}
// 16 numbers to the same place of each part.
template <int parts, int rows, int pitch>
inline void store_parts(Floats x, u16 (&to)[parts][rows][pitch], int row, int column) {
  for (int part = 0; part < parts; ++part) _mm256_storeu_si256((__m256i*)(to[part][row] + column), take_part(x));
}
// Two tokens' numbers of 16 values.
inline void store_token_pairs(Floats first, Floats second, TokenPairs* to, int parts, int pair, int column) {
  for (int part = 0; part < parts; ++part) {
    const __m512i pairs = PairProducts::pairs_of(first, second);
    _mm512_storeu_si512(to[part][pair] + column, pairs);
    first = rest_of(first, _mm512_slli_epi32(pairs, 16)), second = rest_of(second, _mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)));
  }
}

// --- products

// A product of 32 rows, whose tiles begin at `upper` and at `lower`, and 32 columns.
struct TileFactors {
  const u16 *upper, *lower;
  const u32* right;
};
// The sums of some products to a block, `steps` times 32 numbers each: rows of left operands are `pitch` numbers apart, of right ones
// `right_pitch` words.
inline void multiply_tiles(const TileFactors* factors, int count, long pitch, long right_pitch, int steps, float* to) {
  TILE_FENCE();
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int i = 0; i < count; ++i) {
    for (int step = 0; step < steps; ++step) {
      const u32* const right = factors[i].right + step * kTile * right_pitch;
      TILE_LOAD_ROWS(4, factors[i].upper + 2 * kTile * step, 2 * pitch);
      TILE_LOAD_ROWS(6, right, 4 * right_pitch);
      TILE_DOT(0, 4, 6);
      TILE_LOAD_ROWS(7, right + kTile, 4 * right_pitch);
      TILE_DOT(1, 4, 7);
      TILE_LOAD_ROWS(5, factors[i].lower + 2 * kTile * step, 2 * pitch);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, to);
  TILE_STORE(1, to + kTileFloats);
  TILE_STORE(2, to + 2 * kTileFloats);
  TILE_STORE(3, to + 3 * kTileFloats);
  TILE_FENCE();
}
// 16 columns of a row of a block.
inline Floats of_block(const float* block, int row, int half) {
  return load_floats(block + (row / kTile * 2 + half) * kTileFloats + row % kTile * kTile, kLanes);
}

// --- what does not depend on values

// Of keys and queries of rows [begin, begin + kBlock) with the state.
inline void multiply_state(const RecurrentParams& p, TileScratch& c, int begin) {
  const int steps = rounded_up(p.dim_k, 2 * kTile) / (2 * kTile);
  const bool channels = has_channel_decays(p);
  const auto multiply = [&](const u16* rows, const u16* rest, float* to) {
    const TileFactors factors[2] = {{rows, rows + kTile * kKeyPitch, c.state[0]}, {rest, rest + kTile * kKeyPitch, c.state[0]}};
    multiply_tiles(factors, channels ? 2 : 1, kKeyPitch, kColumns, steps, to);
  };
  const auto rows_of = [&](u16(&parts)[2][kRecurrentChunk][kKeyPitch], u32(&words)[kRecurrentChunk][kKeyPitch / 2], int part) {
    return channels ? parts[part][begin] : reinterpret_cast<const u16*>(words[begin]);
  };
  if (p.delta) multiply(rows_of(c.keys, c.of_heads.k, 0), rows_of(c.keys, c.of_heads.k, 1), c.of_keys);
  multiply(rows_of(c.queries, c.of_heads.q, 0), rows_of(c.queries, c.of_heads.q, 1), c.of_queries);
}

// Keys and queries of a key head, and their products with keys up to their own, where heads have one decay.
void load_chunk(const RecurrentParams& p, int begin, int count, int key_head, TileScratch& c) {
  ChunkScratch<PairProducts>& pairs = c.of_heads;
  const int rows = rounded_up(count, kBlock), dim = rounded_up(p.dim_k, 2 * kTile), words = dim / 2, steps = dim / (2 * kTile);
  for (int t = 0; t < rows; ++t) {
    load_key_and_query(p, begin + t, t < count ? p.dim_k : 0, dim, key_head, t, pairs);
  }
  for (int t = 0; t < rows; t += kLanes)
    for (int w = 0; w < words; w += kLanes) {
      Floats block[kLanes];
      for (int r = 0; r < kLanes; ++r) block[r] = (Floats)_mm512_loadu_si512(pairs.k[t + r] + w);
      transpose_lanes(block);
      for (int r = 0; r < kLanes; ++r) {
        const __m512i both = (__m512i)block[r];
        _mm512_storeu_si512(pairs.channels[w + r] + t, both);
        _mm256_storeu_si256((__m256i*)(c.channels[0][2 * (w + r)] + t), _mm512_cvtepi32_epi16(both));
        _mm256_storeu_si256((__m256i*)(c.channels[0][2 * (w + r) + 1] + t), _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
      }
    }
  float block[4 * kTileFloats];
  for (int t = 0; t < rows; t += kTile)
    for (int column = 0; column <= t; column += kBlock) {
      const TileFactors factors = {reinterpret_cast<const u16*>(pairs.k[t]), reinterpret_cast<const u16*>(pairs.q[t]),
                                   pairs.channels[0] + column};
      multiply_tiles(&factors, 1, kKeyPitch, kTokenPitch, steps, block);
      for (int r = 0; r < kTile; ++r)
        for (int half = 0; half < 2; ++half) {
          const auto store = [&](Floats x, float* row) { store_vector<kF32>(x, kLanes, reinterpret_cast<char*>(row + half * kLanes)); };
          store(of_block(block, r, half), pairs.kk[t + r] + column);
          store(of_block(block, kTile + r, half), pairs.qk[t + r] + column);
        }
    }
}

// Below the diagonal's tiles -A and P become left operands. Of the others nothing is multiplied: what is no number in a later token does
// not reach earlier ones.
inline void store_weights(const ChunkWeights& w, bool delta, int rows, TileScratch& c) {
  for (int t = kTile; t < rows; ++t)
    for (int column = 0; column < rounded_up(t / kTile * kTile, 2 * kTile); column += kLanes) {
      const bool below = column < t / kTile * kTile;
      store_parts(below ? load_floats(w.p[t] + column, kLanes) : Floats{}, c.p, t, column);
      store_parts(below && delta ? load_floats(w.a[t] + column, kLanes) : Floats{}, c.a, t, column);
    }
}
void make_weights(const RecurrentParams& p, int begin, int count, int head, TileScratch& c) {
  make_weights(p, begin, count, head, c.of_heads);
  store_weights(c.of_heads.weights, p.delta, rounded_up(count, kRows), c);
}
void make_channel_weights(const RecurrentParams& p, int begin, int count, int head, TileScratch& c) {
  ChunkScratch<FloatProducts>& floats = c.of_channels;
  make_channel_weights(p, begin, count, head, floats);
  const int rows = rounded_up(count, kRows), dim = rounded_up(p.dim_k, kRows), columns = rounded_up(count, kBlock);
  for (int t = 0; t < columns; ++t)
    for (int i = 0; i < rounded_up(dim, 2 * kTile); i += kLanes) {
      const int there = t < rows ? dim - i : 0;
      const auto of = [&](const float* row) { return there <= 0 ? Floats{} : load_floats(row + i, there < kLanes ? there : kLanes); };
      store_parts(of(floats.k[t]), c.keys, t, i);
      store_parts(of(floats.q[t]), c.queries, t, i);
    }
  for (int i = 0; i < rounded_up(dim, kBlock); ++i)
    for (int t = 0; t < columns; t += kLanes) {
      const int there = i < dim ? rows - t : 0;
      store_parts(there <= 0 ? Floats{} : load_floats(floats.channels[i] + t, there < kLanes ? there : kLanes), c.channels, i, t);
    }
  store_weights(floats.weights, p.delta, rows, c);
}

// --- panels

inline void store_state(const float* state, int dim, TileScratch& c) {
  for (int i = 0; i < rounded_up(dim, 2 * kTile) / 2; ++i)
    for (int half = 0; half < kColumns; half += kLanes) {
      const float* const from = state + 2l * i * kColumns + half;
      const bool there = 2 * i < dim;
      PairProducts::store_pairs(c.state[i] + half, there ? load_floats(from, kLanes) : Floats{},
                                there ? load_floats(from + kColumns, kLanes) : Floats{});
    }
}

// What tokens [t, t + kRows) write, and their outputs; c has what those in front of their tile have written.
void run_rows(const RecurrentParams& p, const ChunkPanel& panel, int t, const ChunkWeights& w, float (&u)[kRecurrentChunk][kColumns],
              const TileScratch& c) {
  const int there = panel.count - t < kRows ? panel.count - t : kRows, first = t / kTile * kTile, row = t % kBlock;
  const long size = element_size(p.type);
  const float skip = p.skip == nullptr ? 0.f : p.skip[panel.head];
  float given[kRows][kColumns], out[kRows][kColumns];
  load_values(p, panel, t, there, given);
  Sums x;
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i) {
      x.of[r][i] = load_floats(given[r] + i * kLanes, kLanes) * w.values[t + r];
      if (p.delta) x.of[r][i] -= of_block(c.of_keys, row + r, i) * w.known[t + r];
      if (p.delta && first > 0) x.of[r][i] += of_block(c.of_earlier, t - first + r, i);
    }
  if (p.delta) {
    add_products<FloatProducts, kTokenPitch, 1, kColumns>(x, w.a[t] + first, u[first], t - first);
    substitute(x, w, t);
  }
  store_sums(x, u[t]);
  Sums y;
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < 2; ++i) {
      y.of[r][i] = of_block(c.of_queries, row + r, i) * w.outputs[t + r];
      if (p.skip != nullptr) y.of[r][i] += load_floats(given[r] + i * kLanes, kLanes) * skip;
      if (first > 0) y.of[r][i] += of_block(c.of_earlier, kTile + t - first + r, i);
    }
  add_products<FloatProducts, kTokenPitch, 1, kColumns>(y, w.p[t] + first, u[first], t - first);
  add_own(y, w, t, u + t);
  store_sums(y, out[0]);
  for (int r = 0; r < there; ++r) {
    char* const to = p.out + (panel.begin + t + r) * p.out_token_stride + panel.head * p.out_head_stride + panel.first * size;
    store_value_row(to, p.type, panel.values, out[r]);
  }
}

void run_panel(const RecurrentParams& p, const ChunkPanel& panel, TileScratch& c) {
  const bool channels = has_channel_decays(p);
  const ChunkWeights& w = channels ? c.of_channels.weights : c.of_heads.weights;
  float(&u)[kRecurrentChunk][kColumns] = channels ? c.of_channels.u : c.of_heads.u;
  const int rows = rounded_up(panel.count, kRows), columns = rounded_up(panel.count, kBlock), dim = rounded_up(p.dim_k, kRows);
  store_state(panel.state, dim, c);
  __builtin_memset(c.u, 0, sizeof c.u);
  for (int t = 0; t < rows; t += kTile) {
    if (t % kBlock == 0) multiply_state(p, c, t);
    if (t > 0) {
      const auto factors = [&](int of_weights, int of_written) {
        return TileFactors{p.delta ? c.a[of_weights][t] : c.p[of_weights][t], c.p[of_weights][t], c.u[of_written][0]};
      };
      const TileFactors all[3] = {factors(1, 0), factors(0, 1), factors(0, 0)};
      multiply_tiles(all, 3, kTokenRow, kColumns, rounded_up(t, 2 * kTile) / (2 * kTile), c.of_earlier);
    }
    for (int eight = t; eight < t + kTile && eight < rows; eight += kRows) run_rows(p, panel, eight, w, u, c);
    for (int i = t; i < t + kTile && i < rows; i += 2)
      for (int half = 0; half < kColumns; half += kLanes)
        store_token_pairs(load_floats(u[i] + half, kLanes), load_floats(u[i + 1] + half, kLanes), c.u, 2, i / 2, half);
  }
  const int parts = p.delta ? 1 : kMostParts;
  for (int t = 0; t < columns; t += 2)
    for (int half = 0; half < kColumns; half += kLanes) {
      const auto written = [&](int i) { return i < rows ? load_floats(u[i] + half, kLanes) * w.written[i] : Floats{}; };
      store_token_pairs(written(t), written(t + 1), c.written, parts, t / 2, half);
    }
  // Least products first.
  TileFactors factors[2 * kMostParts];
  float block[4 * kTileFloats];
  for (int i = 0; i < dim; i += kBlock) {
    int count = 0;
    for (int of_keys = channels ? 1 : 0; of_keys >= 0; --of_keys)
      for (int part = parts - 1; part >= 0; --part)
        factors[count++] = {c.channels[of_keys][i], c.channels[of_keys][i + kTile], c.written[part][0]};
    multiply_tiles(factors, count, kTokenRow, kColumns, columns / (2 * kTile), block);
    for (int r = 0; r < kBlock && i + r < dim; ++r)
      for (int half = 0; half < 2; ++half) {
        float* const at = panel.state + long(i + r) * kColumns + half * kLanes;
        store_vector<kF32>(load_floats(at, kLanes) * w.decays[i + r] + of_block(block, r, half), kLanes, reinterpret_cast<char*>(at));
      }
  }
}

void run_tile_chunks(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, int v_begin, int v_end,
                     char* scratch) {
  tiles_shape(kTile);
  run_recurrent_chunks<TileScratch>(p, item, head_begin, head_end, v_begin, v_end, scratch);
  tiles_release();
}

}  // namespace
}  // namespace imbrex::cpu
