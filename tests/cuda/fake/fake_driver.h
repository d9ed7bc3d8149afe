#pragma once
// A CUDA driver for machines without a GPU: memory is the host's, kernels do not run, and everything that is made is counted. What a stream
// is given happens as late as the rules allow, when somebody waits for it, and fresh memory is poisoned: a copy or a wait that is missing
// shows. Only the null stream works at once. While a stream is captured it refuses what CUDA refuses then.
// Tests load it in place of libcuda and look at its state.
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace imbrex::cuda::fake {

struct Launch {
  std::string entry, module;  // module: the cubin, as far as it is text
  unsigned grid_x, grid_y, grid_z, threads, smem_bytes, cluster;
  bool programmatic;
  CUstream stream;
  CUcontext context;                                   // current at the launch
  std::vector<unsigned char> params;                   // of the first parameter, as many bytes as `params_bytes` says
  std::vector<std::vector<unsigned char>> all_params;  // where `param_sizes` knows the entry
};

// The contents of the fake's CUtensorMap: all that it was made from. Dimensions innermost first.
struct TensorMap {
  char* data;
  uint64_t sizes[5], strides[4];  // elements; bytes, of all but the innermost
  uint32_t rank, box[5];
};

struct State {
  int version = 13000, init_result = 0, num_devices = 2;  // what the driver says of itself
  CUresult fail_next = 0;                                 // what the next call that makes something returns
  long calls_until_failure = 0;                           // of those that a step makes, the failing one included; 0: none fails
  bool keeps_failing = false;                             // and all behind it too
  bool has_failed = false;
  int buffers = 0, pinned = 0, streams = 0, events = 0, libraries = 0, contexts = 0;  // alive; contexts: references to primary ones
  size_t free_bytes = size_t(100) << 20;                                              // what the device says it has left
  int user_objects = 0;                                                               // alive, of graphs
  int waits = 0;                                                                      // of the host for a stream or an event, ever
  int stream_waits = 0;                                                               // of a stream for an event, ever
  int library_loads = 0, context_pushes = 0, maps = 0;                                // ever
  size_t params_bytes = 0;
  std::map<std::string, std::vector<size_t>> param_sizes;  // of the parameters of an entry
  std::function<void(const Launch&)> on_launch;            // what runs in the kernel's place, also when a graph is replayed
  std::map<std::string, int> max_dynamic_smem;             // by entry
  std::vector<Launch> launches;
};

// The state of the library that IMBREX_CUDA_DRIVER names.
State& state();

// While it lives, call `number` of those that a step makes fails, counted from 1.
template <bool keeps_failing>
class FailCall {
 public:
  explicit FailCall(long number) { set(number, keeps_failing); }
  ~FailCall() { set(0, false); }
  FailCall(const FailCall&) = delete;
  FailCall& operator=(const FailCall&) = delete;
  bool has_failed() const { return state().has_failed; }

 private:
  static void set(long number, bool keeps) {
    state().calls_until_failure = number, state().keeps_failing = keeps, state().has_failed = false;
  }
};

}  // namespace imbrex::cuda::fake
