#pragma once
// The least and the greatest element in boxes of a tensor, for interval arithmetic: found from those of blocks along the last dimension, of
// blocks of blocks and so on.
#include <cstdint>
#include <vector>

#include "expression/operations.h"
#include "expression/value_range.h"
#include "imbrex/expression.h"

namespace imbrex {

class TensorExtremes {
 public:
  // `summarise`: reads the whole tensor now, so that large boxes are found quickly. Otherwise of these nothing is known.
  TensorExtremes(const ExpressionTensorData& data, ExpressionType type, bool summarise);
  // Of the elements at indices from `first` to `last`, both included, with 0 where some are outside of the tensor.
  ValueRange over(const int64_t* first, const int64_t* last) const;

 private:
  static constexpr int64_t kBlock = 64;           // elements of a block, blocks of one of the next level, ...
  static constexpr int64_t kMostSteps = 1 << 16;  // of one box: elements and blocks that are looked at

  // Blocks of one size: so many of each row, and of each its extremes.
  struct Level {
    int64_t length, blocks;
    std::vector<ValueRange> ranges;
  };

  ValueRange at(int64_t i, int64_t j, int64_t k) const;
  void join_row(int64_t i, int64_t j, int64_t first, int64_t last, ValueRange& range) const;
  int64_t row_of(int64_t i, int64_t j) const { return i * data_.sizes[1] + j; }

  ExpressionTensorData data_;  // with its last dimension of more than one index, number rank_, in the place of the third
  ExpressionType type_;
  int rank_;  // of that dimension
  std::vector<Level> levels_;
};

}  // namespace imbrex
