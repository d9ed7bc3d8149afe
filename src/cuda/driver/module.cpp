// Module and Kernel: cubins in a context.
#include "cuda/driver/module.h"

#include <utility>

#include "core/check.h"
#include "cuda/driver/cubin.h"
#include "gpu/shared_by_key.h"

namespace imbrex::cuda {
namespace {

constexpr unsigned kSmemWithoutAsking = 48 << 10;

using Modules = gpu::SharedByKey<std::pair<unsigned long long, std::string>, const Module>;  // by context and name
Modules& modules() {
  static auto* const all = new Modules;  // never destroyed: plans may die while static objects go down
  return *all;
}

}  // namespace

std::shared_ptr<const Module> Module::load(const std::shared_ptr<const Context>& context, const KernelKey& key) {
  return modules().get({context->id(), cache_name(key)}, [&] {
    const auto compiled = get_kernel(key);
    const CurrentContext current(*context);
    return std::shared_ptr<const Module>(new Module(context, key.str(), compiled));
  });
}

Module::Module(std::shared_ptr<const Context> context, std::string what, std::shared_ptr<const CompiledKernel> compiled)
    : context_(std::move(context)), what_(std::move(what)), compiled_(std::move(compiled)) {
  const RelaxedCapture relaxed;
  check_cuda(need_driver().cuLibraryLoadData(&library_, compiled_->binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "load {}",
             what_);
}

// A context that its owner has destroyed, or a process that ends, has unloaded the library already.
Module::~Module() {
  const RelaxedCapture relaxed;
  if (const DriverApi* const cu = driver()) cu->cuLibraryUnload(library_);
}

Kernel Module::kernel(const std::string& entry) const {
  const DriverApi& cu = need_driver();
  const CurrentContext current(*context_);
  const RelaxedCapture relaxed;
  Kernel kernel;
  kernel.name_ = entry;
  CUkernel handle = nullptr;
  const CUresult found = cu.cuLibraryGetKernel(&handle, library_, entry.c_str());
  check(found != kCudaNotFound, "cuda.entry", "{} has no entry point \"{}\"", what_, entry);
  const auto prepare = [&](CUresult result) { check_cuda(result, "prepare {} of {}", entry, what_); };
  prepare(found);
  // The code is loaded to the context now: otherwise the driver would load it at the first launch, which may be in a capture.
  prepare(cu.cuKernelGetFunction(&kernel.function_, handle));
  prepare(cu.cuFuncGetAttribute(&kernel.registers_, kFunctionRegisters, kernel.function_));
  prepare(cu.cuFuncGetAttribute(&kernel.local_bytes_, kFunctionLocalBytes, kernel.function_));
  kernel.smem_bytes_ = dynamic_smem_bytes(compiled_->binary, entry);
  if (kernel.smem_bytes_ > kSmemWithoutAsking) {
    check_cuda(cu.cuFuncSetAttribute(kernel.function_, kFunctionMaxDynamicSmem, int(kernel.smem_bytes_)),
               "prepare {} of {} with {} bytes of shared memory", entry, what_, kernel.smem_bytes_);
  }
  // Kernels of one run follow each other, and a multiprocessor is empty for a moment where two want different shares of its memory.
  prepare(cu.cuFuncSetAttribute(kernel.function_, kFunctionSmemCarveout, 100));
  return kernel;
}

int Kernel::blocks_per_multiprocessor(int threads) const {
  int blocks = 0;
  check_cuda(need_driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function_, threads, smem_bytes_),
             "find the occupancy of {} with {} threads", name_, threads);
  return blocks;
}

void Kernel::launch_raw(const LaunchShape& shape, CUstream stream, void** parameters) const {
  const DriverApi& cu = need_driver();
  CUresult result = kCudaSuccess;
  const unsigned smem_bytes = shape.smem_bytes > 0 ? shape.smem_bytes : smem_bytes_;
  if (shape.cluster <= 1 && !shape.programmatic) {
    result = cu.cuLaunchKernel(function_, shape.grid_x, shape.grid_y, shape.grid_z, shape.threads, 1, 1, smem_bytes, stream, parameters,
                               nullptr);
  } else {
    CUlaunchAttribute attributes[2];
    unsigned count = 0;
    if (shape.cluster > 1) {
      attributes[count].id = kLaunchCluster;
      attributes[count++].value.cluster = {shape.cluster, 1, 1};
    }
    if (shape.programmatic) {
      attributes[count].id = kLaunchProgrammaticSerialization;
      attributes[count++].value.programmatic_serialization = 1;
    }
    const CUlaunchConfig config{shape.grid_x, shape.grid_y, shape.grid_z, shape.threads, 1, 1, smem_bytes, stream, attributes, count};
    result = cu.cuLaunchKernelEx(&config, function_, parameters, nullptr);
  }
  check_cuda(result, "launch {} with {} x {} x {} blocks of {} threads and {} bytes of shared memory", name_, shape.grid_x, shape.grid_y,
             shape.grid_z, shape.threads, smem_bytes);
}

}  // namespace imbrex::cuda
