#pragma once
// A step of a layer with states in slots through the C ABI, right as it is made and then broken on purpose: what does not depend on the
// family.
#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "api/handles.h"
#include "fuzz/metadata/breakage.h"
#include "fuzz/metadata/cases.h"

namespace imbrex::test {

struct StateTarget {
  const char* backend;
  const imbrex_device* device;
  bool cuda;
};

// A family's problem derives from it, and has make_memory(), run(plan) and written(): what run() writes.
struct StateProblem {
  static constexpr int kStateSlots = 8;

  Struct<imbrex_plan_options> options;
  Struct<imbrex_batch> batch;
  Numbers starts, lens, slots, drafts, accepted, sources, parents;
  bool update_first = true;
  int runs = 1;

  static constexpr Numbers StateProblem::*kLists[] = {&StateProblem::starts, &StateProblem::lens,     &StateProblem::slots,
                                                      &StateProblem::drafts, &StateProblem::accepted, &StateProblem::sources,
                                                      &StateProblem::parents};

  void make_step(int num_drafts, bool tree_drafts, Random&);  // options and a batch without a mistake, of at most 30 tokens
  int64_t num_tokens() const { return starts.values.back(); }
  imbrex_status update(imbrex_plan*);
};

// A tensor with random numbers near 1, in the memory of the target.
void set_random(Argument&, const imbrex_dl_type&, std::vector<int64_t> shape, const StateTarget&, Random&);
void append_written(const Argument&, std::vector<unsigned char>& to);

// A mistake in the lists of a step, in their number, or in the order of calls; empty where nothing has changed.
std::string break_requests(StateProblem&, Random&);
std::string break_list(StateProblem&, Random&);
std::string break_calls(StateProblem&, Random&);

template <class Problem>
struct BrokenState {
  Problem problem;
  std::string what;
  bool new_plan = false;
};

// The calls of a broken problem. What fails has changed nothing. True: the plan has taken the batch.
template <class Problem>
bool call_broken_state(Problem& p, imbrex_plan* plan, bool verbose) {
  bool taken = false;
  for (int call = p.update_first ? -1 : 0; call < p.runs; ++call) {
    const auto before = p.written();
    const imbrex_status status = call < 0 ? p.update(plan) : p.run(plan);
    if (verbose) std::printf("%s: %s\n", call < 0 ? "update" : "run", status == IMBREX_OK ? "done" : imbrex_last_error());
    if (status == IMBREX_OK) {
      taken = taken || call < 0;
      continue;
    }
    expect_explained(status, call < 0 ? "update" : "run");
    EXPECT_TRUE(p.written() == before) << "a call failed, but has written";
  }
  EXPECT_STRNE(imbrex_plan_str(plan), "");
  return taken;
}

// One to three mistakes of break_once(broken, target, random), and a right call before and after them. plan_of(problem, target): null
// where the library refuses.
template <class Problem, class PlanOf, class BreakOnce>
void run_state_case(const Problem& given, const StateTarget& target, Random& random, bool verbose, const PlanOf& plan_of,
                    const BreakOnce& break_once) {
  Problem right = given;
  const PlanHandle plan = plan_of(right, target);
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  const auto results = [&](bool update) {
    right.make_memory();
    if (update) {
      EXPECT_EQ(right.update(plan.get()), IMBREX_OK) << imbrex_last_error();
    }
    EXPECT_EQ(right.run(plan.get()), IMBREX_OK) << imbrex_last_error();
    return right.written();
  };
  const auto expected = results(true);
  BrokenState<Problem> broken{right, {}};
  for (int64_t left = random.between(1, 3); left > 0;)
    if (const std::string what = break_once(broken, target, random); !what.empty()) broken.what += what + "; ", --left;
  SCOPED_TRACE(broken.what);
  if (verbose) std::printf("%s\n  broken: %s\n", target.backend, broken.what.c_str());
  broken.problem.make_memory();
  if (broken.new_plan) {
    const PlanHandle other = plan_of(broken.problem, target);
    if (other == nullptr) {
      expect_explained(IMBREX_INVALID, "plan");
    } else {
      call_broken_state(broken.problem, other.get(), verbose);
    }
  } else if (!call_broken_state(broken.problem, plan.get(), verbose)) {
    EXPECT_TRUE(results(false) == expected) << "after calls that have failed";
  }
  EXPECT_TRUE(results(true) == expected) << "after calls with mistakes";
}

// A plan of the spec that `make(&spec)` makes.
template <class Make>
PlanHandle state_plan_of(StateProblem& p, const StateTarget& target, const Make& make) {
  const SpecHandle spec = make_handle<SpecHandle>(make);
  const SelectionHandle selection = spec == nullptr ? nullptr : select_for(spec.get(), target.device, target.backend);
  if (selection == nullptr) return nullptr;
  return make_handle<PlanHandle>([&](auto** to) { return imbrex_plan_create(selection.get(), p.options.make(), to); });
}

}  // namespace imbrex::test
