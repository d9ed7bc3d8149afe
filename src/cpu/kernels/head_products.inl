// Products of rows with a weight of each head, in vectors as wide as the instruction set that it is compiled for has.
// Roofline: with few rows the weight is read once and memory is the limit; with many, a tile of sums stays in registers and multiply-adds
// are. A sum's terms are added in an order that depends on its length alone, however many rows and columns a call has.
#include "cpu/head_products_params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/vectors.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

// Tiles of sums that fit the registers: rows x vectors in by_columns, rows x columns in by_rows.
#if defined(__AVX512F__)
constexpr int kTileRows = 8, kDotRows = 4;
#else
constexpr int kTileRows = 4, kDotRows = 2;
#endif
constexpr int kTileVectors = 2, kDotColumns = 4;

// Adds halves to halves until one number is left. Shuffles leave the vector in its register, where parts of its memory would not.
inline float sum_of_lanes(Floats v) {
#if defined(__AVX512F__)
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif defined(__AVX2__)
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// One tile of by_columns: `rows` of floats, and `count` columns of the weight, at most kTileVectors vectors of them.
template <int weight_type, int to_type, int rows>
inline void column_tile(const HeadProductParams& p, const float (*from)[kProductMaxK], const char* weight, int count, char* to) {
  constexpr long size = weight_type == kF32 ? 4 : 2, to_size = to_type == kF32 ? 4 : 2;
  Floats sums[rows][kTileVectors] = {};
  const auto multiply = [&](auto load) {
    for (int k = 0; k < p.k; ++k) {
      Floats w[kTileVectors];
      for (int v = 0; v < kTileVectors; ++v) w[v] = load(weight + k * p.weight_row + v * kLanes * size, count - v * kLanes);
      for (int r = 0; r < rows; ++r)
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] += from[r][k] * w[v];
    }
  };
  if (count == kTileVectors * kLanes)
    multiply([](const char* at, int) { return load_vector<weight_type>(at, kLanes); });
  else
    multiply([](const char* at, int left) { return left > 0 ? load_vector<weight_type>(at, left < kLanes ? left : kLanes) : Floats{}; });
  for (int r = 0; r < rows; ++r)
    for (int v = 0; v * kLanes < count; ++v)
      store_vector<to_type>(sums[r][v], count - v * kLanes < kLanes ? count - v * kLanes : kLanes,
                            to + r * p.to_row + v * kLanes * to_size);
}

template <int weight_type, int to_type>
void columns_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  constexpr long size = weight_type == kF32 ? 4 : 2, to_size = to_type == kF32 ? 4 : 2;
  constexpr int kStep = kTileVectors * kLanes;
  alignas(64) float from[kTileRows][kProductMaxK];
  for (int row = row_begin, rows; row < row_end; row += rows) {
    rows = row_end - row >= kTileRows ? kTileRows : 1;
    for (int r = 0; r < rows; ++r)
      load_row(p.from + (row + r) * p.from_row + head * p.from_head, element_size(p.from_type), p.from_type, p.k, from[r]);
    for (int n = n_begin; n < n_end; n += kStep) {
      const int count = n_end - n < kStep ? n_end - n : kStep;
      const char* const weight = p.weight + head * p.weight_head + n * size;
      char* const to = p.to + row * p.to_row + head * p.to_head + n * to_size;
      rows == kTileRows ? column_tile<weight_type, to_type, kTileRows>(p, from, weight, count, to)
                        : column_tile<weight_type, to_type, 1>(p, from, weight, count, to);
    }
  }
}

// One tile of by_rows: the sums of `rows` rows with kDotColumns rows of the weight, as floats.
template <int rows>
inline void row_tile(const HeadProductParams& p, const char* from, const float (*weight)[kProductMaxK], float (*to)[kProductColumns]) {
  Floats sums[rows][kDotColumns] = {};
  // Called in two places: a call would keep the sums in memory.
  const auto add = [&](int k, int n) __attribute__((always_inline)) {
    Floats w[kDotColumns];
    for (int c = 0; c < kDotColumns; ++c) w[c] = load_vector<kF32>(reinterpret_cast<const char*>(weight[c] + k), n);
    for (int r = 0; r < rows; ++r) {
      const Floats f = load_vector<kF32>(from + r * p.from_row + k * 4L, n);
      for (int c = 0; c < kDotColumns; ++c) sums[r][c] += f * w[c];
    }
  };
  int k = 0;
  for (; k + kLanes <= p.k; k += kLanes) add(k, kLanes);
  if (k < p.k) add(k, p.k - k);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < kDotColumns; ++c) to[r][c] = sum_of_lanes(sums[r][c]);
}

// Stores a call's results as `to_type`.
template <int to_type>
inline void store_results(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end,
                          const float (*results)[kProductColumns]) {
  constexpr long to_size = to_type == kF32 ? 4 : 2;
  for (int row = row_begin; row < row_end; ++row)
    for (int n = n_begin; n < n_end; n += kLanes)
      store_vector<to_type>(load_vector<kF32>(reinterpret_cast<const char*>(&results[row - row_begin][n - n_begin]), kLanes),
                            n_end - n < kLanes ? n_end - n : kLanes, p.to + row * p.to_row + head * p.to_head + n * to_size);
}

template <int to_type>
void rows_of(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  alignas(64) float weight[kDotColumns][kProductMaxK], results[kProductRows][kProductColumns];
  for (int n = n_begin; n < n_end; n += kDotColumns) {
    for (int c = 0; c < kDotColumns; ++c)
      load_row(p.weight + head * p.weight_head + (n + c) * p.weight_row, element_size(p.weight_type), p.weight_type, p.k, weight[c]);
    for (int row = row_begin, rows; row < row_end; row += rows) {
      rows = row_end - row >= kDotRows ? kDotRows : 1;
      const char* const from = p.from + row * p.from_row + head * p.from_head;
      auto* const to = reinterpret_cast<float(*)[kProductColumns]>(&results[row - row_begin][n - n_begin]);
      rows == kDotRows ? row_tile<kDotRows>(p, from, weight, to) : row_tile<1>(p, from, weight, to);
    }
  }
  store_results<to_type>(p, head, row_begin, row_end, n_begin, n_end, results);
}

template <int weight_type>
void columns_from(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return columns_of<weight_type, kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return columns_of<weight_type, kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return columns_of<weight_type, kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

void product_by_columns(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.weight_type) {
    case kF32: return columns_from<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return columns_from<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return columns_from<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

void product_by_rows(const HeadProductParams& p, int head, int row_begin, int row_end, int n_begin, int n_end) {
  switch (p.to_type) {
    case kF32: return rows_of<kF32>(p, head, row_begin, row_end, n_begin, n_end);
    case kF16: return rows_of<kF16>(p, head, row_begin, row_end, n_begin, n_end);
    default: return rows_of<kBf16>(p, head, row_begin, row_end, n_begin, n_end);
  }
}

}  // namespace
}  // namespace imbrex::cpu
