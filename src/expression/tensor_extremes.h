#pragma once
// The least and the greatest element in boxes of a tensor, for interval arithmetic: found from those of blocks along the last dimension.
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
  static constexpr int kBlock = 64;
  static constexpr int64_t kMostSteps = 1 << 16;  // of one box: elements and blocks that are looked at

  ValueRange at(int64_t i, int64_t j, int64_t k) const;
  int64_t row_of(int64_t i, int64_t j) const { return i * data_.sizes[1] + j; }

  ExpressionTensorData data_;  // with its last dimension of more than one index, number rank_, in the place of the third
  ExpressionType type_;
  int rank_;                        // of that dimension
  int64_t blocks_ = 0;              // of a row; 0: not summarised
  std::vector<ValueRange> ranges_;  // of each block
};

}  // namespace imbrex
