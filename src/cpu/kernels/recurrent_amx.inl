// Prompts of recurrent layers in chunks, with products of bf16 in AMX tiles; included by recurrent_amx.cpp (hardware) and
// recurrent_amx_emulated.cpp (tiles in memory, for tests). recurrent_chunks.inl has the formulas, docs/kernels/recurrent.md the schedule.
//
// With T the inverse of 1 + A, what tokens write is T X: a product, whatever the number of tokens, instead of a substitution.
//
// Of keys, queries and states products are those of PairProducts: keys and queries are what was given, a state is rounded once a chunk.
// All other factors are sums of several numbers of bf16, whose products are made one after the other: T, P, X, what tokens write, and keys
// and queries with decays of channels of two, which is a float but for 2^-17 of it; and without the delta rule what is written to the state
// of three, which is all of a float. With the delta rule that is rounded, as PairProducts have it.
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
constexpr int kMostParts = 3, kTokenBlocks = kRecurrentChunk / kBlock;

// Right operands of whole chunks: two tokens of a value a word.
typedef u32 TokenPairs[kRecurrentChunk / 2][kColumns];

// What a worker has in memory, and behind it states as in ChunkScratch.
struct TileScratch {
  static constexpr bool kChannelDecays = true;
  union {
    ChunkScratch<PairProducts> of_heads;
    ChunkScratch<FloatProducts> of_channels;
  };
  // Left operands: with decays of channels, tokens' keys and queries; keys by channel; T and P, zeros above the diagonal's tiles. Each of
  // so many parts.
  u16 keys[2][kRecurrentChunk][kKeyPitch], queries[2][kRecurrentChunk][kKeyPitch];
  u16 channels[2][kRecurrentDim][kTokenRow];
  u16 t[2][kRecurrentChunk][kTokenRow], p[2][kRecurrentChunk][kTokenRow];
  // Right operands: the state, two channels a word, X, what tokens write, and what that is for the state.
  u32 state[kRecurrentDim / 2][kColumns];
  TokenPairs x[2], u[2], written[kMostParts];
  float inverse[kRecurrentChunk][kTokenPitch];  // T
  // Blocks of sums, of 32 tokens each: keys with the state, and then T X; queries with the state; P with what tokens write, and then 32
  // channels of what is added to the state.
  float of_keys[kTokenBlocks][4 * kTileFloats], of_queries[kTokenBlocks][4 * kTileFloats], of_written[2][4 * kTileFloats];

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
template <int pitch>
inline void store_token_pairs(Floats first, Floats second, u32 (*to)[kRecurrentChunk / 2][pitch], int parts, int pair, int column) {
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
[[gnu::always_inline]] inline void begin_block() {
  TILE_FENCE();
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
}
[[gnu::always_inline]] inline void store_block(float* to) {
  TILE_STORE(0, to);
  TILE_STORE(1, to + kTileFloats);
  TILE_STORE(2, to + 2 * kTileFloats);
  TILE_STORE(3, to + 3 * kTileFloats);
  TILE_FENCE();
}
// Left and right operands of two tiles each, and their four products, each followed by a part of what vectors do meanwhile.
[[gnu::always_inline]] inline void load_left(const TileFactors& factors, int step, long pitch) {
  TILE_LOAD_ROWS(4, factors.upper + 2 * kTile * step, 2 * pitch);
  TILE_LOAD_ROWS(5, factors.lower + 2 * kTile * step, 2 * pitch);
}
[[gnu::always_inline]] inline void load_right(const TileFactors& factors, int step, long pitch) {
  const u32* const right = factors.right + step * kTile * pitch;
  TILE_LOAD_ROWS(6, right, 4 * pitch);
  TILE_LOAD_ROWS(7, right + kTile, 4 * pitch);
}
template <class Work>
[[gnu::always_inline]] inline void multiply_loaded(Work& work) {
  TILE_DOT(0, 4, 6);
  work(0);
  TILE_DOT(1, 4, 7);
  work(1);
  TILE_DOT(2, 5, 6);
  work(2);
  TILE_DOT(3, 5, 7);
  work(3);
}
struct NoWork {
  void operator()(int) const {}
};

// The sums of some products to a block, `steps` times 32 numbers each: rows of left operands are `pitch` numbers apart, of right ones
// `right_pitch` words. An operand of the product in front is not loaded again.
template <class Work>
[[gnu::always_inline]] inline void multiply_tiles(const TileFactors* factors, int count, long pitch, long right_pitch, int steps, float* to,
                                                  Work&& work) {
  begin_block();
  for (int step = 0; step < steps; ++step)
    for (int i = 0; i < count; ++i) {
      if (i == 0 || factors[i].upper != factors[i - 1].upper) load_left(factors[i], step, pitch);
      if (i == 0 || factors[i].right != factors[i - 1].right) load_right(factors[i], step, right_pitch);
      multiply_loaded(work);
    }
  store_block(to);
}

// Work that is done beside products, `each` pieces behind each of them until all are done. A piece is told what multiple of four products'
// pieces it is behind, and its number from there on, which the compiler knows. Pieces are even in number.
template <int each, class Piece>
struct WorkBeside {
  const Piece piece;
  const int pieces = kBlock;
  int next = 0;

  [[gnu::always_inline]] inline void operator()(int product) {
    if (next < pieces)
      for (int i = 0; i < each; ++i) piece(next, product * each + i);
    if (product == 3) next += 4 * each;
  }
  // What is left.
  [[gnu::always_inline]] inline void end() {
    for (; next < pieces; next += 2) piece(next, 0), piece(next, 1);
  }
};

// Where a row of a block begins: its columns from 16 on are a tile behind, and the next row of its tile 16 numbers.
inline const float* row_of(const float* block, int row) { return block + row / kTile * 2 * kTileFloats + row % kTile * kTile; }
inline Floats of_row(const float* row, int more, int half) { return load_floats(row + more * kTile + half * kTileFloats, kLanes); }
inline Floats of_block(const float* block, int row, int half) { return of_row(row_of(block, row), 0, half); }

// --- what does not depend on values

// 16 tokens' keys and queries as they are, zeros behind the last token and the last channel, and their norms: sums of squares are of
// products of bf16, a vector of 16 sums a token, which are added up for all of them at once.
inline void load_keys_and_queries(const RecurrentParams& p, int begin, int count, int key_head, int t, int dim,
                                  ChunkScratch<PairProducts>& c) {
  const auto load = [&](const char* from, long stride, u32(&to)[kRecurrentChunk][kKeyPitch / 2], float* norms, float scale) {
    Floats squares[kTile];
    for (int r = 0; r < kTile; ++r) {
      squares[r] = Floats{};
      for (int i = 0; i < dim; i += 2 * kLanes) {
        const int there = t + r < count ? p.dim_k - i : 0;
        const u32 mask = there >= 2 * kLanes ? ~0u : there > 0 ? (1u << there) - 1 : 0u;
        const __m512i codes = _mm512_maskz_loadu_epi16(mask, from + (begin + t + r) * stride + 2l * i);
        _mm512_storeu_si512(to[t + r] + i / 2, codes);
        squares[r] = PairProducts::add(squares[r], codes, codes);
      }
    }
    Floats factors = Floats{} + scale;
    if (p.qk_norm) {
      transpose_lanes(squares);
      for (int step = kTile / 2; step > 0; step /= 2)
        for (int r = 0; r < step; ++r) squares[r] += squares[r + step];
      factors /= (Floats)_mm512_sqrt_ps((__m512)(squares[0] + 1e-6f));
    }
    store_vector<kF32>(factors, kLanes, reinterpret_cast<char*>(norms + t));
  };
  load(p.k + key_head * p.k_head_stride, p.k_token_stride, c.k, c.k_norms, 1.f);
  load(p.q + key_head * p.q_head_stride, p.q_token_stride, c.q, c.q_norms, p.scale);
}

// Keys and queries of a key head, and their products with keys up to their own, where heads have one decay.
void load_chunk(const RecurrentParams& p, int begin, int count, int key_head, TileScratch& c) {
  ChunkScratch<PairProducts>& pairs = c.of_heads;
  const int rows = rounded_up(count, kBlock), dim = rounded_up(p.dim_k, 2 * kTile), words = dim / 2, steps = dim / (2 * kTile);
  for (int t = 0; t < rows; t += kTile) load_keys_and_queries(p, begin, count, key_head, t, dim, pairs);
  const auto store_channels = [&](int t, int w) {
    Floats block[kLanes];
    for (int r = 0; r < kLanes; ++r) block[r] = (Floats)_mm512_loadu_si512(pairs.k[t + r] + w);
    transpose_lanes(block);
    for (int r = 0; r < kLanes; ++r) {
      const __m512i both = (__m512i)block[r];
      _mm512_storeu_si512(pairs.channels[w + r] + t, both);
      _mm256_storeu_si256((__m256i*)(c.channels[0][2 * (w + r)] + t), _mm512_cvtepi32_epi16(both));
      _mm256_storeu_si256((__m256i*)(c.channels[0][2 * (w + r) + 1] + t), _mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
    }
  };
  for (int t = 0; t < kBlock; t += kLanes)
    for (int w = 0; w < words; w += kLanes) store_channels(t, w);
  // Keys by channel of the second 32 tokens are made beside products of the first.
  int next_t = kBlock, next_w = 0;
  const auto store_next = [&] {
    if (next_t >= rows) return;
    store_channels(next_t, next_w);
    if ((next_w += kLanes) >= words) next_t += kLanes, next_w = 0;
  };
  const auto beside = [&](int product) __attribute__((always_inline)) {
    if (product == 3) store_next();
  };
  // Blocks of 16 tokens' keys and queries, or without the delta rule of 32 tokens' queries.
  const int block_rows = p.delta ? kTile : kBlock;
  for (int t = 0; t < rows; t += block_rows) {
    while (t == kBlock && next_t < rows) store_next();
    const u32* const lower = pairs.q[t + block_rows - kTile];
    const TileFactors factors = {reinterpret_cast<const u16*>(p.delta ? pairs.k[t] : pairs.q[t]), reinterpret_cast<const u16*>(lower),
                                 pairs.channels[0]};
    float(*const to_upper)[kTokenPitch] = (p.delta ? pairs.kk : pairs.qk) + t;
    float(*const to_lower)[kTokenPitch] = pairs.qk + t + block_rows - kTile;
    for (int column = 0; column <= t; column += kBlock) {
      begin_block();
      for (int step = 0; step < steps; ++step) {
        load_left(factors, step, kKeyPitch);
        load_right({nullptr, nullptr, factors.right + column}, step, kTokenPitch);
        multiply_loaded(beside);
      }
      TILE_STORE_ROWS(0, to_upper[0] + column, 4 * kTokenPitch);
      TILE_STORE_ROWS(1, to_upper[0] + column + kTile, 4 * kTokenPitch);
      TILE_STORE_ROWS(2, to_lower[0] + column, 4 * kTokenPitch);
      TILE_STORE_ROWS(3, to_lower[0] + column + kTile, 4 * kTokenPitch);
      TILE_FENCE();
    }
  }
}

// T, whose rows are unit vectors plus those in front of them times -A, 16 columns and kRows rows at a time.
inline void invert(const ChunkWeights& w, int rows, float (&inverse)[kRecurrentChunk][kTokenPitch]) {
  for (int column = 0; column < rows; column += kLanes)
    for (int t = column; t < rows; t += kRows) {
      Floats x[kRows];
      for (int r = 0; r < kRows; ++r) {
        const int own = t - column + r;
        x[r] = (Floats)_mm512_maskz_mov_ps(own < kLanes ? __mmask16(1u << own) : __mmask16(0), _mm512_set1_ps(1.f));
      }
      for (int j = column; j < t; ++j) {
        const Floats earlier = load_floats(inverse[j] + column, kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) x[r] += earlier * w.a[t + r][j];
      }
#pragma GCC unroll 8
      for (int j = 0; j < kRows - 1; ++j)
#pragma GCC unroll 8
        for (int r = j + 1; r < kRows; ++r) x[r] += x[j] * w.a[t + r][t + j];
      for (int r = 0; r < kRows; ++r) store_vector<kF32>(x[r], kLanes, reinterpret_cast<char*>(inverse[t + r] + column));
    }
}

// Left operands of rows and columns of a matrix, of two parts; nothing is read of what is above the diagonal.
template <int pitch>
inline void store_lower(const float (&from)[kRecurrentChunk][pitch], int rows, u16 (&to)[2][kRecurrentChunk][kTokenRow]) {
  for (int t = 0; t < rows; ++t)
    for (int column = 0; column <= t; column += kLanes) {
      const int own = t - column;
      const __mmask16 there = own < kLanes ? __mmask16((2u << own) - 1) : __mmask16(~0);
      store_parts((Floats)_mm512_maskz_loadu_ps(there, from[t] + column), to, t, column);
    }
}

// P and T as operands. Rows behind the last token are zeros, of T unit vectors.
inline void store_weights(ChunkWeights& w, bool delta, int count, TileScratch& c) {
  const int rows = rounded_up(count, kBlock);
  for (int t = rounded_up(count, kRows); t < rows; ++t) {
    for (int i = 0; i < kRecurrentChunk; ++i) w.p[t][i] = w.a[t][i] = 0.f;
    w.known[t] = w.values[t] = w.outputs[t] = w.written[t] = 0.f;
  }
  store_lower(w.p, rows, c.p);
  if (!delta) return;
  invert(w, rows, c.inverse);
  store_lower(c.inverse, rows, c.t);
}
void make_weights(const RecurrentParams& p, int begin, int count, int head, TileScratch& c) {
  make_weights(p, begin, count, head, c.of_heads);
  store_weights(c.of_heads.weights, p.delta, count, c);
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
  store_weights(floats.weights, p.delta, count, c);
}

// Clears what is above the diagonal's tiles and multiplied, where nothing is written.
void clear_above(TileScratch& c) {
  for (int part = 0; part < 2; ++part)
    for (int t = 0; t < kRecurrentChunk; t += kBlock)
      for (int r = 0; r < kTile; ++r) {
        _mm256_storeu_si256((__m256i*)(c.t[part][t + r] + t + kTile), __m256i{});
        _mm256_storeu_si256((__m256i*)(c.p[part][t + r] + t + kTile), __m256i{});
      }
}

}  // namespace
}  // namespace imbrex::cpu

// clang-format off
#include "cpu/kernels/recurrent_amx_panels.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

void run_tile_chunks(const RecurrentParams& p, const RecurrentItem& item, int head_begin, int head_end, int v_begin, int v_end,
                     char* scratch) {
  tiles_shape(kTile);
  clear_above(*reinterpret_cast<TileScratch*>(scratch));
  run_recurrent_chunks<TileScratch>(p, item, head_begin, head_end, v_begin, v_end, scratch);
  tiles_release();
}

}  // namespace
}  // namespace imbrex::cpu
