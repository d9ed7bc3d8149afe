#pragma once
// Cases that a seed draws: of every family, in shapes, types, masks, biases, pages and requests that no table names.
// random_cases_test.cpp says how they are run.
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "conformance/attention/cases.h"
#include "conformance/case_random.h"
#include "conformance/mla/cases.h"
#include "conformance/recurrent/cases.h"
#include "conformance/short_conv/cases.h"

namespace imbrex::test {

// Random numbers, the same on every machine.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(splitmix(seed)) {}
  uint64_t next() { return state_ = splitmix(state_); }
  int below(int n) { return int(next() % uint64_t(n)); }
  int from_to(int first, int last) { return first + below(last - first + 1); }
  bool one_in(int n) { return below(n) == 0; }
  template <class T>
  T pick(std::initializer_list<T> all) {
    return all.begin()[below(int(all.size()))];
  }
  template <class Range>
  auto pick(const Range& all) {
    return all[size_t(below(int(std::size(all))))];
  }
  template <class List>
  void shuffle(List& list) {
    for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[next() % i]);
  }

 private:
  uint64_t state_;
};

// Any spec, also one that validate() refuses.
AttentionSpec random_spec(Dice&);
// Requests of a step: decode, verify, parts of prompts, or all of these with padded requests and requests without queries among them.
std::vector<CaseRequest> random_requests(Dice&);
// Fewer and shorter requests, until the case has no more multiply-adds than that.
void limit_work(Case&, int64_t most);

// Whether a logit is a sum of so many floats that its rounding, which the rule for the log-sum-exp has no part of, shows where logits are
// large.
inline bool has_long_float_sums(const AttentionSpec& s) { return s.q_dtype == DType::f32 && s.head_dim_qk > 128; }

// Cases whose specs are valid, and which take some milliseconds. One in 16 has a request of more keys than a split of CPU plans.
Case random_case(uint64_t seed);
MlaCase random_mla_case(uint64_t seed);
RecurrentCase random_recurrent_case(uint64_t seed);
ShortConvCase random_short_conv_case(uint64_t seed);

// All of a case in one line.
std::string describe(const Case&);
std::string describe(const MlaCase&);
std::string describe(const RecurrentCase&);
std::string describe(const ShortConvCase&);

// Cases with something less, to find the least of a case that fails.
std::vector<Case> simpler_cases(const Case&);

}  // namespace imbrex::test
