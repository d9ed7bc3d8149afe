// See openmp.h. The functions are looked up in what is loaded, since the package is not linked to OpenMP: two runtimes side by side would
// have threads that wait actively for work on each other's cores.
#include "openmp.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace imbrex::python {
namespace {

// The functions that libgomp and LLVM's and Intel's runtimes have in common.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* argument, unsigned num_threads,
                   unsigned flags);  // 0 threads: as many as the caller's setting says
  int (*num_threads)();
  int (*thread)();
  int (*max_threads)();
  int (*num_procs)();
};

template <class F>
bool find(void* library, const char* name, F*& function) {
  function = reinterpret_cast<F*>(dlsym(library, name));  // NOLINT: that is how dlsym gives functions
  return function != nullptr;
}

std::optional<OpenMp> openmp_of(void* library) {
  OpenMp found{};
  if (find(library, "GOMP_parallel", found.parallel) && find(library, "omp_get_num_threads", found.num_threads) &&
      find(library, "omp_get_thread_num", found.thread) && find(library, "omp_get_max_threads", found.max_threads) &&
      find(library, "omp_get_num_procs", found.num_procs))
    return found;
  return std::nullopt;
}

// PyTorch's own library is asked last: a runtime that was loaded ahead of all others, as vLLM does with Intel's, serves PyTorch too.
std::optional<OpenMp> openmp_of_pytorch() {
  void* const pytorch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (pytorch == nullptr) return std::nullopt;
  auto found = openmp_of(RTLD_DEFAULT);
  if (!found) found = openmp_of(pytorch);
  if (!found) dlclose(pytorch);
  return found;
}

struct Threads {
  const OpenMp openmp;
  ParallelFor (*const others)();
  const pid_t process = getpid();
};

struct Job {
  const OpenMp& openmp;
  const int num_workers;
  const ParallelFor::Body body;
  void* const argument;
  std::atomic_flag failed;
  std::exception_ptr error;  // the first one a body threw

  void run() noexcept {
    const int team = openmp.num_threads();
    for (int worker = openmp.thread(); worker < num_workers; worker += team) {
      try {
        body(argument, worker);
      } catch (...) {
        if (!failed.test_and_set()) error = std::current_exception();
      }
    }
  }
};

void invoke(void* context, int num_workers, ParallelFor::Body body, void* argument) {
  const auto& threads = *static_cast<const Threads*>(context);
  if (getpid() != threads.process) {
    const ParallelFor others = threads.others();
    return others.invoke(others.context, num_workers, body, argument);
  }
  Job job{threads.openmp, num_workers, body, argument, {}, nullptr};
  job.openmp.parallel([](void* it) { static_cast<Job*>(it)->run(); }, &job, 0, 0);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace

std::optional<ParallelFor> threads_of_pytorch(ParallelFor (*others)()) {
  static std::atomic<Threads*> shared{nullptr};  // kept for the life of the process, as are plans that nobody frees
  Threads* threads = shared.load();
  if (threads == nullptr) {
    const auto openmp = openmp_of_pytorch();
    if (!openmp) return std::nullopt;
    auto* const made = new Threads{*openmp, others};
    if (shared.compare_exchange_strong(threads, made)) {
      threads = made;
    } else {
      delete made;
    }
  }
  // Plans outlive a change of torch.set_num_threads(): with fewer threads each has several workers' shares, with more some have none.
  return ParallelFor{
      .num_workers = std::max(threads->openmp.num_procs(), threads->openmp.max_threads()), .context = threads, .invoke = invoke};
}

}  // namespace imbrex::python
