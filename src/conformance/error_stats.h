#pragma once
// How far results are from what is expected.
#include <vector>

namespace imbrex {

struct ErrorStats {
  double max = 0, mean = 0;  // of |actual - expected|; infinite when only one of the two is NaN or infinite
};
ErrorStats compare(const std::vector<float>& actual, const std::vector<float>& expected);
bool bit_identical(const std::vector<float>&, const std::vector<float>&);

}  // namespace imbrex
