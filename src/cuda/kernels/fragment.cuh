#pragma once
// What a thread has of a matrix product's result, in registers, and what is done with it.
#include "ptx.cuh"

namespace imbrex::cuda {

// A warp has 16 rows of a result, and of each tile of 8 columns its lane 4 g + t has columns 2 t and 2 t + 1: of row g (h = 0), then of row
// g + 8 (h = 1). wgmma computes all tiles at once, mma.sync one at a time. These are arrays, which compilers keep in registers as they are:
// of a struct around them they make longer machine code.
template <int columns>
using Fragment = float[columns / 2];
template <int columns>
using TiledFragment = float[columns / 8][4];

// The first of a thread's columns; its others are counted from there.
DEVICE int first_column() { return 2 * (lane_id() % 4); }

template <class D>
constexpr int kTilesOf = sizeof(D) / 16;

template <class T, int n>
DEVICE T& at(T (&d)[n], int tile, int h, int c) {
  return d[4 * tile + 2 * h + c];
}
template <class T, int n>
DEVICE T& at(T (&d)[n][4], int tile, int h, int c) {
  return d[tile][2 * h + c];
}

// So many columns of it, from `first` on.
template <int columns, class T, int n>
DEVICE Fragment<columns>& part_of(T (&d)[n], int first) {
  return *reinterpret_cast<Fragment<columns>*>(d + first / 2);
}

// Both columns of a row.
template <class D>
DEVICE float2 pair(const D& d, int tile, int h) {
  return {at(d, tile, h, 0), at(d, tile, h, 1)};
}
// Both columns of both rows.
template <class D>
DEVICE float4 four(const D& d, int tile) {
  return {at(d, tile, 0, 0), at(d, tile, 0, 1), at(d, tile, 1, 0), at(d, tile, 1, 1)};
}
template <class D>
DEVICE void set_four(D& d, int tile, const float4& x) {
  at(d, tile, 0, 0) = x.x, at(d, tile, 0, 1) = x.y, at(d, tile, 1, 0) = x.z, at(d, tile, 1, 1) = x.w;
}

// Does `verb(x, h, column)` to all of d. A verb captures numbers that do not change by value: behind references, compilers see too late
// that they do not.
template <class D, class Verb>
DEVICE void each(D& d, const Verb& verb) {
#pragma unroll
  for (int i = 0; i < 4 * kTilesOf<D>; ++i) verb(at(d, i / 4, i / 2 % 2, i % 2), i / 2 % 2, i / 4 * 8 + i % 2);
}
// Does `verb(x, column)` to all that d has of a row.
template <class D, class Verb>
DEVICE void each_of_row(D& d, int h, const Verb& verb) {
#pragma unroll
  for (int i = 0; i < 2 * kTilesOf<D>; ++i) verb(at(d, i / 2, h, i % 2), i / 2 * 8 + i % 2);
}

template <int n>
DEVICE void fill(float (&d)[n], float value) {
#pragma unroll
  for (float& x : d) x = value;
}
template <int n>
DEVICE void fill(float (&d)[n][4], float value) {
#pragma unroll
  for (int tile = 0; tile < n; ++tile) fill(d[tile], value);
}

// The greatest that d has of a row.
template <class D>
DEVICE float greatest(const D& d, int h) {
  float top = -infinity();
#pragma unroll
  for (int tile = 0; tile < kTilesOf<D>; ++tile) top = fmaxf(top, fmaxf(at(d, tile, h, 0), at(d, tile, h, 1)));
  return top;
}

}  // namespace imbrex::cuda
