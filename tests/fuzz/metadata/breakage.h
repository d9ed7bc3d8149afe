#pragma once
// Mistakes of a caller, one at a time.
#include <fmt/format.h>

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

// A size between that of the first version and what is to come, with or without something in it.
template <class T>
std::string break_size(const char* name, Struct<T>& s, Random& random) {
  constexpr size_t kSizes[] = {0, 1, 8, 24, sizeof(T) - 8, sizeof(T) - 1, sizeof(T) + 8, sizeof(T) + 64, 1024, SIZE_MAX / 2, SIZE_MAX};
  if (random.one_in(6)) return s.given = false, fmt::format("{} = NULL", name);
  s.size = random.pick(kSizes);
  s.tail = random.one_in(2) ? 0 : 0xa5;
  return fmt::format("{}.struct_size = {}, then {}", name, s.size, s.tail);
}

// A limit of a plan, or the place where it is planned, is wrong.
std::string break_limits(imbrex_plan_options&, Random&);

// Another description of a tensor; false when nothing has changed. `what` tells the change.
bool break_argument(Argument&, Random&, std::string& what);

}  // namespace imbrex::test
