#pragma once
// Mistakes of a caller, one at a time.
#include "fuzz/metadata/problem.h"

namespace imbrex::test {

// Additional steps of a broken problem, beside its own calls.
struct Broken {
  Problem problem;
  std::string what;         // all mistakes, for messages
  bool new_plan = false;    // spec or options are broken: a plan has to be made of them
  bool fresh_plan = false;  // the calls begin with a plan that has had no update
};

// A copy of the problem with `count` mistakes.
Broken break_problem(const Problem&, Random&, int count);

// A number that is wrong, or nearly right, where `right` is right.
int64_t wrong_number(Random&, int64_t right, int64_t low, int64_t high);
int32_t wrong_int(Random&, int64_t right);

// Another description of a tensor; false when nothing has changed. `what` tells the change.
bool break_argument(Argument&, Random&, std::string& what);

}  // namespace imbrex::test
