// Products with a weight of each head compiled for AVX-512 with products of pairs of bf16, which by_rows_bf16 is made of.
#include <immintrin.h>

#include "cpu/kernels/head_products.inl"

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

void product_by_rows_bf16(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return pairs_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return pairs_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return pairs_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

}  // namespace

extern const HeadProductKernels head_products_avx512_bf16;
const HeadProductKernels head_products_avx512_bf16 = {"avx512_bf16", product_by_columns, product_by_rows, product_by_rows_bf16};

}  // namespace imbrex::cpu
