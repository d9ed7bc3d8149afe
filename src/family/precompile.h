#pragma once
// Compiling GPU kernels ahead of time, for `imbrex compile` and `imbrex info`; the folder of the hardware defines it.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "imbrex/device.h"
#include "imbrex/layer_spec.h"

namespace imbrex {

struct PrecompileRequest {
  std::vector<std::string> archs;  // "sm_90a"
  std::vector<LayerSpec> specs;    // what the kernels are for; empty: a set that covers every kernel
  std::string backend;             // only what its plans run, unless a tensor lies in an unusual way; empty: whatever a plan may load
  std::string folder;              // to be filled; empty: the cache of this user
  int jobs = 1;                    // threads
  // Which kernels to leave out, by their content; empty: none. It is called by several threads at a time.
  std::function<bool(const std::string& content)> left_out;
};

struct PrecompiledEntry {  // an entry point of a kernel file
  std::string name;
  int registers = 0, spill_bytes = 0, stack_bytes = 0;  // of a thread; spills: stores and loads
  int smem_bytes = 0;                                   // of a thread block, static and dynamic
};

struct PrecompiledKernel {
  std::string family, file, arch, constants;
  std::string content;  // with left_out: a hash of all that the compiler reads, and which compiler it is
  bool left_out = false;
  std::vector<PrecompiledEntry> entries;
  std::vector<std::string> problems;  // what --strict refuses: spills, stack, warnings
  std::string error;                  // not empty: it did not compile
  double compile_ms = 0;              // 0: it was in the folder already
  int64_t cubin_bytes = 0;
};

// Compiles every kernel of the request once, in a fixed order. A kernel that fails has its error in its result; an Error is thrown only for
// what concerns all of them: cuda.nvrtc_missing, cuda.arch, cuda.cache.
std::vector<PrecompiledKernel> precompile(const PrecompileRequest&);

// The architecture that a GPU's kernels are compiled for: "sm_90a".
std::string kernel_arch(const DeviceInfo&);

struct KernelCompiler {
  std::string name;  // "NVRTC 13.0"; empty: there is none, see `why`
  std::string why;
  std::string cache_folder;  // empty: no place to keep kernels
};
KernelCompiler kernel_compiler();

}  // namespace imbrex
