#pragma once
// Sums of rows over pieces of their keys, as thread blocks leave them in memory, and over runs of pieces.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "imbrex/work.h"

namespace imbrex::test {

// The sums of one row, as kernels keep them in registers and leave them in memory.
struct Sums {
  float reference = -1e30f, sum = -0.f;
  std::vector<float> x;
  explicit Sums(int dims) : x(size_t(dims), -0.f) {}
  void fold(const Sums& others) {
    const float top = std::max(reference, others.reference), kept = std::exp2(reference - top), added = std::exp2(others.reference - top);
    const auto joined = [&](float a, float b) { return std::fma(b, added, a * kept); };
    reference = top, sum = joined(sum, others.sum);
    for (size_t d = 0; d < x.size(); ++d) x[d] = joined(x[d], others.x[d]);
  }
};

// The splits of a merge, each with the sums of its rows.
using Splits = std::vector<std::vector<Sums>>;

// So many splits of rows, a fourth of which have seen no key; all of them, if `none` says so. In each third row one split outweighs most
// others.
inline Splits random_splits(std::mt19937& random, int splits, int rows, int dims, bool none) {
  const auto below = [&](int n) { return int(random() % unsigned(n)); };
  Splits made;
  for (; splits > 0; --splits) {
    std::vector<Sums>& of_rows = made.emplace_back();
    for (int row = 0; row < rows; ++row) {
      Sums& sums = of_rows.emplace_back(dims);
      if (none || below(4) == 0) {
        sums.sum = 0.f, sums.x.assign(sums.x.size(), 0.f);
        continue;
      }
      sums.reference = float(below(row % 3 == 0 ? 4000 : 40)) / 4.f - 500.f;
      sums.sum = 1.f + float(below(1 << 20)) / 1024.f;
      for (float& x : sums.x) x = below(10) == 0 ? -0.f : float(below(1 << 20) - (1 << 19)) / 4096.f;
    }
  }
  return made;
}

constexpr size_t kRunLengths = 4;
// The same, folded as a thread block folds the pieces of its run: of 4, 16, 64 pieces, and of all.
inline std::array<Splits, kRunLengths> runs_of(const Splits& pieces) {
  const std::vector<Sums> empty(pieces[0].size(), Sums(int(pieces[0][0].x.size())));
  const auto fold = [&](std::vector<Sums>& to, const std::vector<Sums>& from) {
    for (size_t row = 0; row < to.size(); ++row) to[row].fold(from[row]);
  };
  std::array<Splits, kRunLengths> runs;
  const Splits* nodes = &pieces;
  for (size_t level = 0; level + 1 < kRunLengths; ++level) {
    for (size_t i = 0; i < nodes->size(); ++i) {
      if (i % kPiecesTogether == 0) runs[level].push_back(empty);
      fold(runs[level].back(), (*nodes)[i]);
    }
    nodes = &runs[level];
  }
  runs.back().push_back(empty);
  for (const std::vector<Sums>& sums : *nodes) fold(runs.back()[0], sums);
  return runs;
}

}  // namespace imbrex::test
