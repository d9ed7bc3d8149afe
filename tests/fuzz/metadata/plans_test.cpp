// Wrong metadata through the plans of the C ABI: a problem that is right runs; one with mistakes gets an error or a result, never touches
// memory that it was not given, and leaves nothing behind. Cases are numbered, see cases.h.
#include <algorithm>

#include "api/structs.h"
#include "fuzz/metadata/breakage.h"
#include "fuzz/metadata/cases.h"

namespace imbrex::test {
namespace {

constexpr int kPlanCases = 1000;

// Every backend that may be there and pairs of them by phase, in a fixed order. One that this machine does not run leaves its cases to
// another.
std::vector<Target> targets() {
  static imbrex_device cpu{probe_cpu(), "cpu"};
  static imbrex_device gpu{probe_cuda().at(0), "cuda:0"};
  gpu.info.num_workers = 12;  // small batches are cut for few multiprocessors as for many, and scratch is for all of them
  if (cpu.info.isa == CpuIsa::avx512_bf16) cpu.info.isa = CpuIsa::amx_emulated;
  std::vector<Target> all;
  const auto add = [&](const imbrex_device& device, std::string prefill, std::string decode) {
    const AttentionSpec s{.num_q_heads = 2, .num_kv_heads = 1, .head_dim_qk = 32, .head_dim_v = 32};
    for (std::string* name : {&prefill, &decode})
      if (!find_backend(*name)->unsupported(s, device.info).empty()) *name = "cpu_generic";
    all.push_back({prefill == decode ? prefill : prefill + " and " + decode, &device, prefill, decode, &device == &gpu});
  };
  for (const char* name : {"reference", "cpu_generic", "cpu_avx512", "cpu_amx"}) add(cpu, name, name);
  add(cpu, "cpu_generic", "reference");
  add(cpu, "reference", "cpu_avx512");
  add(cpu, "cpu_amx", "cpu_avx512");
  for (const char* name : {"cuda_sm80", "cuda_sm90"}) add(gpu, name, name);
  add(gpu, "cuda_sm90", "cuda_sm80");
  return all;
}

// A problem that is right: everything works, and these are its results.
struct Right {
  Problem problem;
  PlanHandle plan;
  std::vector<unsigned char> results;

  std::vector<unsigned char> run_again(bool update) {
    problem.make_memory(update);
    if (update) {
      EXPECT_EQ(problem.update(plan.get()), IMBREX_OK) << imbrex_last_error();
    }
    if (problem.writes()) {
      EXPECT_EQ(problem.write_kv(plan.get()), IMBREX_OK) << imbrex_last_error();
    }
    EXPECT_EQ(problem.run(plan.get()), IMBREX_OK) << imbrex_last_error();
    return problem.written();
  }
};

bool make_right(const Target& target, Random& random, Right& right) {
  right.problem = right_problem(target, random);
  right.plan = plan_of(right.problem);
  right.problem.make_memory();
  if (right.problem.update(right.plan.get()) != IMBREX_OK) {
    EXPECT_EQ(last_code(), "phase_plan.interleaved");
    return false;
  }
  right.results = right.run_again(false);
  return true;
}

// The calls of a broken problem. What fails has changed nothing. True: the plan has taken the batch.
bool call_broken(Problem& p, imbrex_plan* plan, bool verbose) {
  bool taken = false;
  for (const Call call : p.calls) {
    const auto written = p.written(), cached = p.cached();
    const imbrex_status status = p.call(call, plan);
    const char* const name = call == Call::update ? "update" : call == Call::run ? "run" : "write_kv";
    if (verbose) std::printf("%s: %s\n", name, status == IMBREX_OK ? "done" : imbrex_last_error());
    if (status == IMBREX_OK) {
      taken = taken || call == Call::update;
      continue;
    }
    expect_explained(status, name);
    EXPECT_TRUE(p.written() == written) << name << " failed, but has written";
    EXPECT_TRUE(p.cached() == cached) << name << " failed, but has written";
  }
  EXPECT_STRNE(imbrex_plan_str(plan), "");
  return taken;
}

void run_case(const Target& target, int number, bool verbose) {
  Random random{uint64_t(number)};
  Right right;
  while (!make_right(target, random, right)) {
  }
  Broken broken = break_problem(right.problem, random, int(random.between(1, 3)));
  SCOPED_TRACE(broken.what);
  if (verbose) std::printf("%s\n  broken: %s\n", target.name.c_str(), broken.what.c_str());
  Problem& p = broken.problem;
  p.make_memory();
  PlanHandle other;
  if (broken.new_plan || broken.fresh_plan) {
    other = plan_of(p);
    if (verbose && other == nullptr) std::printf("plan: %s\n", imbrex_last_error());
    if (other == nullptr) {
      expect_explained(IMBREX_INVALID, "plan");
    } else {
      call_broken(p, other.get(), verbose);
    }
    if (target.cuda) return;  // the fake driver's kernels are of the later spec
  } else if (!call_broken(p, right.plan.get(), verbose)) {
    EXPECT_TRUE(right.run_again(false) == right.results) << "after calls that have failed";
  }
  EXPECT_TRUE(right.run_again(true) == right.results) << "after calls with mistakes";
}

TEST(Metadata, WrongProblemsGetAnErrorOrAResult) {
  const std::vector<Target> all = targets();
  for_each_case(kPlanCases, [&](int number, bool verbose) {
    const Target& target = all[size_t(number) % all.size()];
    SCOPED_TRACE(target.name);
    run_case(target, number, verbose);
  });
}

}  // namespace
}  // namespace imbrex::test
