// See tensor_extremes.h.
#include "expression/tensor_extremes.h"

namespace imbrex {
namespace {

int64_t last_dimension(const ExpressionTensorData& data) {
  int last = 2;
  while (last > 0 && data.sizes[last] == 1) --last;
  return last;
}

}  // namespace

TensorExtremes::TensorExtremes(const ExpressionTensorData& data, ExpressionType type, bool summarise)
    : data_(data), type_(type), rank_(int(last_dimension(data))) {
  std::swap(data_.sizes[rank_], data_.sizes[2]);
  std::swap(data_.strides[rank_], data_.strides[2]);
  if (!summarise) return;
  const int64_t rows = int64_t(data_.sizes[0]) * data_.sizes[1], size = data_.sizes[2];
  for (int64_t length = kBlock; length / kBlock < size; length *= kBlock) {
    Level level{length, (size + length - 1) / length, {}};
    level.ranges.reserve(size_t(rows * level.blocks));
    for (int64_t i = 0; i < data_.sizes[0]; ++i) {
      for (int64_t j = 0; j < data_.sizes[1]; ++j) {
        for (int64_t first = 0; first < size; first += length) {
          level.ranges.push_back(ValueRange::nothing(type_));
          join_row(i, j, first, std::min(first + length, size) - 1, level.ranges.back());
        }
      }
    }
    levels_.push_back(std::move(level));
  }
}

// Of elements from `first` to `last` of a row: the longest blocks that begin where the last one ended.
void TensorExtremes::join_row(int64_t i, int64_t j, int64_t first, int64_t last, ValueRange& range) const {
  for (int64_t k = first; k <= last;) {
    size_t level = levels_.size();
    const auto fits = [&](const Level& l) { return k % l.length == 0 && (k + l.length - 1 <= last || last == data_.sizes[2] - 1); };
    while (level > 0 && !fits(levels_[level - 1])) --level;
    if (level == 0) {
      range.join(at(i, j, k));
      ++k;
    } else {
      const Level& blocks = levels_[level - 1];
      range.join(blocks.ranges[size_t(row_of(i, j) * blocks.blocks + k / blocks.length)]);
      k += blocks.length;
    }
  }
}

ValueRange TensorExtremes::at(int64_t i, int64_t j, int64_t k) const {
  const int64_t offset = i * data_.strides[0] + j * data_.strides[1] + k * data_.strides[2];
  if (type_ == ExpressionType::boolean) {
    const double value = static_cast<const uint8_t*>(data_.data)[offset] != 0 ? 1 : 0;
    return ValueRange::of(type_, value, value);
  }
  return ValueRange::of_value(type_, {static_cast<const int32_t*>(data_.data)[offset]});
}

ValueRange TensorExtremes::over(const int64_t* wanted_first, const int64_t* wanted_last) const {
  std::array<int64_t, 3> first, last;
  std::copy_n(wanted_first, 3, first.begin());
  std::copy_n(wanted_last, 3, last.begin());
  std::swap(first[size_t(rank_)], first[2]);
  std::swap(last[size_t(rank_)], last[2]);
  ValueRange range = ValueRange::nothing(type_);
  for (size_t d = 0; d < 3; ++d) {
    const int64_t size = data_.sizes[d];
    if (first[d] < 0 || last[d] >= size) range = ValueRange::of(type_, 0, 0);
    first[d] = std::max<int64_t>(first[d], 0);
    last[d] = std::min(last[d], size - 1);
  }
  for (size_t d = 0; d < 3; ++d)
    if (first[d] > last[d]) return range;
  const int64_t rows = (last[0] - first[0] + 1) * (last[1] - first[1] + 1), length = last[2] - first[2] + 1;
  const int64_t steps = levels_.empty() ? length : std::min(length, 4 * kBlock * int64_t(levels_.size() + 1));
  if (rows > kMostSteps || rows * steps > kMostSteps) return ValueRange::everything(type_);
  for (int64_t i = first[0]; i <= last[0]; ++i)
    for (int64_t j = first[1]; j <= last[1]; ++j) join_row(i, j, first[2], last[2], range);
  return range;
}

}  // namespace imbrex
