#pragma once
// Lengths of requests, and random numbers to choose them by, for tests that cut batches.
#include <initializer_list>
#include <random>
#include <vector>

#include "imbrex/batch.h"

namespace imbrex::test {

struct Lengths {
  std::vector<int32_t> starts{0}, lens;
  void add(int q_len, int seq_len) {
    starts.push_back(starts.back() + q_len);
    lens.push_back(seq_len);
  }
  Batch view() const {
    Batch batch;
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    return batch;
  }
};

class Random {
 public:
  explicit Random(int seed) : engine_(unsigned(seed)) {}
  int between(int low, int high) { return low + int(engine_() % unsigned(high - low + 1)); }
  int of(std::initializer_list<int> values) { return values.begin()[between(0, int(values.size()) - 1)]; }

 private:
  std::mt19937 engine_;
};

}  // namespace imbrex::test
