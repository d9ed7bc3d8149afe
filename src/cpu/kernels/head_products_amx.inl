// Products of bf16 rows with a bf16 weight of each head in AMX tiles; included by head_products_amx.cpp (hardware) and
// head_products_amx_emulated.cpp (tiles in memory, for tests). Products of other types are those of AVX-512.
// What lies in memory as a left operand is one: rows in by_columns, the weight in by_rows, whose results come out transposed. The other
// side is interleaved on the way, the weight for all rows of a call, or the rows for all its columns.
#include <immintrin.h>

// clang-format off
#include "cpu/kernels/head_products.inl"
#include "cpu/kernels/avx512_math.inl"
#include "cpu/kernels/interleave.inl"
#ifdef IMBREX_AMX_EMULATED
#include "cpu/kernels/amx_tiles_emulated.inl"
#else
#include "cpu/kernels/amx_tiles_hardware.inl"
#endif
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kMostSteps = kProductMaxK / 32, kRowTiles = kProductRows / 16;

// 32 elements of a row that has `left` of them, zero behind these.
IMBREX_INLINE vi load_step(const char* p, int left) {
  return _mm512_maskz_loadu_epi16(left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1, p);
}

// A left operand: rows `pitch` bytes apart.
struct LeftRows {
  const char* rows;
  long pitch;
};

// `count` rows of p.k elements as left operands of whole tiles, up to `padded` rows: in place, or copied to `buffer` with zeros behind
// them.
inline LeftRows left_rows(const char* rows, long pitch, int k, int count, int padded, char* buffer) {
  if (count == padded && k % 32 == 0) return {rows, pitch};
  const long to_pitch = (k + 31) / 32 * 64;
  for (int i = 0; i < padded; ++i)
    for (int d = 0; d < k; d += 32)
      _mm512_store_si512(buffer + i * to_pitch + 2 * d, load_step(rows + (i < count ? i : 0) * pitch + 2L * d, i < count ? k - d : 0));
  return {buffer, to_pitch};
}

// Sums of `lefts` tiles of 16 rows and `rights` of 16 columns, right operands kMostSteps KiB apart: to [lefts][rights] tiles.
template <int lefts, int rights>
IMBREX_INLINE void tile_sums(LeftRows left, const char* right, int steps, float* to) {
  const char *below = left.rows + 16 * left.pitch, *beside = right + kMostSteps * 1024L;
  TILE_FENCE();
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int k = 0; k < steps; ++k) {
    TILE_LOAD_ROWS(4, left.rows + 64 * k, left.pitch);
    TILE_LOAD(6, right + 1024 * k);
    TILE_DOT(0, 4, 6);
    if (rights == 2) {
      TILE_LOAD(7, beside + 1024 * k);
      TILE_DOT(1, 4, 7);
    }
    if (lefts == 2) {
      TILE_LOAD_ROWS(5, below + 64 * k, left.pitch);
      TILE_DOT(2, 5, 6);
      if (rights == 2) TILE_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, to);
  if (rights == 2) TILE_STORE(1, to + 256);
  if (lefts == 2) {
    TILE_STORE(2, to + rights * 256);
    if (rights == 2) TILE_STORE(3, to + rights * 256 + 256);
  }
  TILE_FENCE();
}

// Stores a tile of sums, of which `rows` and `columns` are there.
template <int to_type>
inline void store_tile(const HeadProductParams& p, int head, int row, int rows, int n, int columns, const float* sums) {
  constexpr long size = to_type == kF32 ? 4 : 2;
  for (int r = 0; r < rows; ++r)
    store_vector<to_type>(load_vector<kF32>(reinterpret_cast<const char*>(sums + 16 * r), 16), columns,
                          p.to + (row + r) * p.to_row + head * p.to_head + n * size);
}

inline int at_most_16(int n) { return n < 16 ? n : 16; }

template <int to_type>
void tile_columns_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  alignas(64) char copies[kProductRows * kMostSteps * 64], right[2 * kMostSteps * 1024];
  alignas(64) float sums[4 * 256];
  const int rows = row_end - row_begin, steps = (p.k + 31) / 32;
  const LeftRows left =
      left_rows(p.from + row_begin * p.from_row + head * p.from_head, p.from_row, p.k, rows, (rows + 15) / 16 * 16, copies);
  tiles_shape(16);
  for (int n = n_begin; n < n_end; n += 32) {
    for (int k = 0; k < 32 * steps; k += 2) {
      const char* const at = p.weight + head * p.weight_head + (k < p.k ? k : 0) * p.weight_row + n * 2L;
      const int columns = k < p.k ? n_end - n : 0;
      const Pairs pairs = interleave(load_step(at, columns), load_step(at + p.weight_row, columns));
      _mm512_store_si512(right + k * 32, pairs.first);
      _mm512_store_si512(right + k * 32 + kMostSteps * 1024L, pairs.second);
    }
    for (int r = 0; r < rows; r += 32) {
      const LeftRows from = {left.rows + r * left.pitch, left.pitch};
      rows - r > 16 ? tile_sums<2, 2>(from, right, steps, sums) : tile_sums<1, 2>(from, right, steps, sums);
      for (int i = 0; i < 2 && r + 16 * i < rows; ++i)
        for (int c = 0; c < 2 && n + 16 * c < n_end; ++c)
          store_tile<to_type>(p, head, row_begin + r + 16 * i, at_most_16(rows - r - 16 * i), n + 16 * c, at_most_16(n_end - n - 16 * c),
                              sums + (2 * i + c) * 256);
    }
  }
}

template <int to_type>
void tile_rows_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  alignas(64) char copies[32 * kMostSteps * 64], right[kRowTiles * kMostSteps * 1024];
  alignas(64) float sums[4 * 256];
  const int rows = row_end - row_begin, steps = (p.k + 31) / 32, row_tiles = (rows + 15) / 16;
  for (int t = 0; t < row_tiles; ++t)
    for (int k = 0; k < steps; ++k) {
      vi r[16];
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) {
        const int row = 16 * t + i;
        r[i] = load_step(p.from + (row_begin + (row < rows ? row : 0)) * p.from_row + head * p.from_head + 64L * k,
                         row < rows ? p.k - 32 * k : 0);
      }
      transpose(r);
      IMBREX_UNROLL(16)
      for (int i = 0; i < 16; ++i) _mm512_store_si512(right + (t * kMostSteps + k) * 1024L + 64 * i, r[i]);
    }
  tiles_shape(16);
  for (int n = n_begin; n < n_end; n += 32) {
    const int columns = n_end - n < 32 ? n_end - n : 32;
    const LeftRows left = left_rows(p.weight + head * p.weight_head + n * p.weight_row, p.weight_row, p.k, columns, 32, copies);
    for (int t = 0; t < row_tiles; t += 2) {
      const bool two = row_tiles - t > 1;
      const char* const from = right + t * (kMostSteps * 1024L);
      two ? tile_sums<2, 2>(left, from, steps, sums) : tile_sums<2, 1>(left, from, steps, sums);
      for (int c = 0; c < 2 && 16 * c < columns; ++c)
        for (int i = 0; i < (two ? 2 : 1); ++i) {
          vi* const tile = reinterpret_cast<vi*>(sums + (c * (two ? 2 : 1) + i) * 256);
          transpose(tile);
          store_tile<to_type>(p, head, row_begin + 16 * (t + i), at_most_16(rows - 16 * (t + i)), n + 16 * c, at_most_16(columns - 16 * c),
                              reinterpret_cast<const float*>(tile));
        }
    }
  }
}

void product_by_columns_bf16(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return tile_columns_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return tile_columns_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return tile_columns_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}
void product_by_rows_bf16(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return tile_rows_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return tile_rows_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return tile_rows_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

}  // namespace
}  // namespace imbrex::cpu
