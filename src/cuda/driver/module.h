#pragma once
// A compiled kernel in a context: loaded once, unloaded with its last user, launched with as little as possible around the driver's call.
#include <memory>
#include <string>

#include "cuda/driver/context.h"
#include "cuda/driver/jit.h"

namespace imbrex::cuda {

struct LaunchShape {
  unsigned grid_x = 1, grid_y = 1, grid_z = 1;
  unsigned threads = 128;     // of a block
  unsigned cluster = 1;       // blocks along x that share their shared memory; sm_90 and newer
  bool programmatic = false;  // may begin before the kernel in front of it on the stream has ended; it must then use griddep_wait()
  unsigned smem_bytes = 0;    // dynamic, fewer than the kernel file says; 0: as many
};

// An entry point of a module, ready to launch: shared memory beyond 48 KiB is allowed. Lives as long as its module.
class Kernel {
 public:
  int registers() const { return registers_; }
  int local_bytes() const { return local_bytes_; }
  unsigned smem_bytes() const { return smem_bytes_; }  // dynamic, as the kernel file says
  CUfunction function() const { return function_; }
  // Blocks that fit on a multiprocessor at the same time. The context of the module must be current.
  int blocks_per_multiprocessor(int threads) const;

  // Error cuda.driver. The context of the module must be current (CurrentContext); parameters go by value, in the order of the
  // entry's parameters and with exactly their types.
  template <class... Parameters>
  void launch(const LaunchShape& shape, CUstream stream, const Parameters&... parameters) const {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&parameters))..., nullptr};
    launch_raw(shape, stream, addresses);
  }
  void launch_raw(const LaunchShape& shape, CUstream stream, void** parameters) const;

 private:
  friend class Module;
  std::string name_;
  CUfunction function_ = nullptr;
  unsigned smem_bytes_ = 0;
  int registers_ = 0, local_bytes_ = 0;
};

class Module {
 public:
  // Loads a kernel's module. Callers with the same key and context share it while one of them holds it. A kernel that is in no cache is
  // compiled.
  static std::shared_ptr<const Module> load(const std::shared_ptr<const Context>&, const KernelKey&);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  Kernel kernel(const std::string& entry) const;  // Error cuda.entry
  const std::shared_ptr<const Context>& context() const { return context_; }

 private:
  Module(std::shared_ptr<const Context>, std::string what, std::shared_ptr<const CompiledKernel>);
  std::shared_ptr<const Context> context_;
  std::string what_;  // the key, for messages
  std::shared_ptr<const CompiledKernel> compiled_;
  CUlibrary library_ = nullptr;
};

}  // namespace imbrex::cuda
