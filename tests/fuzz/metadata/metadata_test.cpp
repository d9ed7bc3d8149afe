// Wrong metadata through the C ABI: a problem that is right runs; one with mistakes gets an error or a result, never touches memory that
// it was not given, and leaves nothing behind. Cases are numbered. IMBREX_METADATA_CASES says how many, IMBREX_METADATA_CASE which one (or
// the first), and to tell what happens.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>

#include <unistd.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#define IMBREX_ASAN
// Memory that no machine has is an error of the library's, not of the sanitizer.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:max_allocation_size_mb=512"; }
void* operator new(size_t bytes) {
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif
#endif

#include "api/structs.h"
#include "fuzz/metadata/breakage.h"

namespace imbrex::test {
namespace {

constexpr int kCases = 1500, kSeconds = 60;  // a case takes milliseconds: one that takes so long hangs

// Says in which case a program ended that could not say it itself.
struct Current {
  char text[96] = "";
  static Current& of_process() {
    static Current current;
    return current;
  }
  void begin(const std::string& target, int number) {
    std::snprintf(text, sizeof text, "\nin case %d on %s: IMBREX_METADATA_CASE=%d shows it\n", number, target.c_str(), number);
    alarm(kSeconds);
  }
  static void say() { [[maybe_unused]] const auto ignored = write(2, of_process().text, std::strlen(of_process().text)); }
  static void on_signal(int signal) {
    say();
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  static void watch() {
    std::signal(SIGALRM, on_signal);
    std::signal(SIGABRT, on_signal);
#ifdef IMBREX_ASAN  // has reports of its own for the others
    __sanitizer_set_death_callback(say);
#else
    for (const int signal : {SIGSEGV, SIGFPE, SIGBUS, SIGILL}) std::signal(signal, on_signal);
#endif
  }
};

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Every CPU backend that this machine runs, two of them by phase, and those of the GPU that the fake driver pretends.
std::vector<Target> targets() {
  static const imbrex_device cpu{probe_cpu(), "cpu"};
  static const imbrex_device gpu{probe_cuda().at(0), "cuda:0"};
  std::vector<Target> all;
  const auto add = [&](const imbrex_device& device, const char* prefill, const char* decode) {
    AttentionSpec s{.num_q_heads = 2, .num_kv_heads = 1, .head_dim_qk = 32, .head_dim_v = 32};
    for (const char* name : {prefill, decode})
      if (!find_backend(name)->unsupported(s, device.info).empty()) return;
    all.push_back({prefill == decode ? prefill : std::string(prefill) + " and " + decode, &device, prefill, decode, &device == &gpu});
  };
  for (const char* name : {"reference", "cpu_generic", "cpu_avx512", "cpu_amx"}) add(cpu, name, name);
  add(cpu, "cpu_generic", "reference");
  add(cpu, "reference", "cpu_avx512");
  add(cpu, "cpu_amx", "cpu_avx512");
  for (const char* name : {"cuda_sm80", "cuda_sm90"}) add(gpu, name, name);
  add(gpu, "cuda_sm90", "cuda_sm80");
  return all;
}

void expect_explained(imbrex_status status, const char* call) {
  EXPECT_STRNE(imbrex_last_error(), "") << call;
  EXPECT_NE(last_code(), "") << call;
  EXPECT_NE(status, IMBREX_INTERNAL) << call << ": " << imbrex_last_error();
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
    EXPECT_EQ(p.written(), written) << name << " failed, but has written";
    EXPECT_EQ(p.cached(), cached) << name << " failed, but has written";
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
    EXPECT_EQ(right.run_again(false), right.results) << "after calls that have failed";
  }
  EXPECT_EQ(right.run_again(true), right.results) << "after calls with mistakes";
}

TEST(Metadata, WrongProblemsGetAnErrorOrAResult) {
  const int only = number_from("IMBREX_METADATA_CASE", -1);
  const int first = std::max(only, 0), cases = number_from("IMBREX_METADATA_CASES", only >= 0 ? 1 : kCases);
  const std::vector<Target> all = targets();
  Current::watch();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was said last is needed when a case ends the program
  for (int number = first; number < first + cases; ++number) {
    const Target& target = all[size_t(number) % all.size()];
    Current::of_process().begin(target.name, number);
    SCOPED_TRACE("case " + std::to_string(number) + " on " + target.name);
    run_case(target, number, only >= 0);
    if (HasFatalFailure()) break;
  }
  alarm(0);
}

}  // namespace
}  // namespace imbrex::test
