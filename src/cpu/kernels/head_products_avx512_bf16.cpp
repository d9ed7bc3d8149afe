// Products with a weight of each head compiled for AVX-512 with products of pairs of bf16, which products of bf16 are made of.
#include <immintrin.h>

// clang-format off
#include "cpu/kernels/head_products.inl"
#include "cpu/kernels/interleave.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

constexpr int kPairLanes = 32;  // bf16 numbers of a vector

inline __m512bh load_pairs(const char* p, int n) {
  return (__m512bh)(n >= kPairLanes ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16((1u << n) - 1, p));
}

// The sums of `rows` rows with kDotColumns rows of the weight. Each lane adds its pairs in the order of k.
template <int rows>
inline void pair_tile(const HeadProductParams& p, const char* from, const char* weight, float (*to)[kProductColumns]) {
  __m512 sums[rows][kDotColumns] = {};
  for (int k = 0; k < p.k; k += kPairLanes) {
    __m512bh w[kDotColumns];
    for (int c = 0; c < kDotColumns; ++c) w[c] = load_pairs(weight + c * p.weight_row + k * 2L, p.k - k);
    for (int r = 0; r < rows; ++r) {
      const __m512bh f = load_pairs(from + r * p.from_row + k * 2L, p.k - k);
      for (int c = 0; c < kDotColumns; ++c) sums[r][c] = _mm512_dpbf16_ps(sums[r][c], f, w[c]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < kDotColumns; ++c) to[r][c] = sum_of_lanes((Floats)sums[r][c]);
}

template <int to_type>
void pairs_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  alignas(64) float results[kProductRows][kProductColumns];
  for (int n = n_begin; n < n_end; n += kDotColumns) {
    const char* const weight = p.weight + head * p.weight_head + n * p.weight_row;
    for (int row = row_begin, rows; row < row_end; row += rows) {
      rows = row_end - row >= kDotRows ? kDotRows : 1;
      const char* const from = p.from + row * p.from_row + head * p.from_head;
      auto* const to = reinterpret_cast<float(*)[kProductColumns]>(&results[row - row_begin][n - n_begin]);
      rows == kDotRows ? pair_tile<kDotRows>(p, from, weight, to) : pair_tile<1>(p, from, weight, to);
    }
  }
  store_results<to_type>(p, head, row_begin, row_end, n_begin, n_end, results);
}

// Two terms of the sums of `count` columns, at most 32.
inline Pairs pair_terms(const HeadProductParams& p, const char* weight, int count) {
  return interleave((__m512i)load_pairs(weight, count), (__m512i)load_pairs(weight + p.weight_row, count));
}

// The sums of `rows` rows with `count` columns of the weight, at most 32, each a chain over pairs of terms. pairs_at(k) has those of k and
// k + 1.
template <int to_type, int rows, class PairsAt>
inline void pair_columns(const HeadProductParams& p, const char* from, const PairsAt& pairs_at, int count, char* to) {
  constexpr long to_size = to_type == kF32 ? 4 : 2;
  __m512 sums[rows][2] = {};
  for (int k = 0; k < p.k; k += 2) {
    const Pairs w = pairs_at(k);
    for (int r = 0; r < rows; ++r) {
      int pair;
      __builtin_memcpy(&pair, from + r * p.from_row + k * 2L, 4);
      const __m512bh f = (__m512bh)_mm512_set1_epi32(pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], (__m512bh)w.first, f);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], (__m512bh)w.second, f);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < 2 && 16 * c < count; ++c)
      store_vector<to_type>((Floats)sums[r][c], count - 16 * c < 16 ? count - 16 * c : 16, to + r * p.to_row + 16 * c * to_size);
}

// The pairs of a call's columns are made once where it has many rows: their terms lie a row of the weight apart, which is a bad distance
// for caches.
template <int to_type>
void pair_columns_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  constexpr long to_size = to_type == kF32 ? 4 : 2;
  constexpr int kRows = 8;
  alignas(64) Pairs pairs[kProductMaxK / 2];
  for (int n = n_begin; n < n_end; n += kPairLanes) {
    const int count = n_end - n < kPairLanes ? n_end - n : kPairLanes;
    const char* const weight = p.weight + head * p.weight_head + n * 2L;
    const auto made = [&](int k) { return pairs[k / 2]; };
    const auto new_ones = [&](int k) { return pair_terms(p, weight + k * p.weight_row, count); };
    if (row_end - row_begin > 1)
      for (int k = 0; k < p.k; k += 2) pairs[k / 2] = new_ones(k);
    for (int row = row_begin, rows; row < row_end; row += rows) {
      rows = row_end - row >= kRows ? kRows : 1;
      const char* const from = p.from + row * p.from_row + head * p.from_head;
      char* const to = p.to + row * p.to_row + head * p.to_head + n * to_size;
      if (rows == kRows)
        pair_columns<to_type, kRows>(p, from, made, count, to);
      else if (row_end - row_begin > 1)
        pair_columns<to_type, 1>(p, from, made, count, to);
      else
        pair_columns<to_type, 1>(p, from, new_ones, count, to);
    }
  }
}

void product_by_columns_bf16(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return pair_columns_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return pair_columns_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return pair_columns_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

void product_by_rows_bf16(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return pairs_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return pairs_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return pairs_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

}  // namespace

extern const HeadProductKernels head_products_avx512_bf16;
const HeadProductKernels head_products_avx512_bf16 = {"avx512_bf16",           product_by_columns,   product_by_rows,
                                                      product_by_columns_bf16, product_by_rows_bf16, nullptr};

}  // namespace imbrex::cpu
