#pragma once
// Kernels from text: specialised by constants, compiled by NVRTC when they are first needed, kept on disk. No GPU is needed for any of it.
#include <memory>
#include <string>
#include <string_view>

#include "gpu/kernel_cache.h"
#include "gpu/kernel_key.h"
#include "imbrex/device.h"

namespace imbrex::cuda {

using gpu::CompiledKernel;
using gpu::Constant;
using gpu::KernelKey;

// The architecture to compile for on a device: "sm_90a" for an H200.
std::string arch_of(const DeviceInfo&);
// 900 for "sm_90a". Error cuda.arch.
int arch_number(std::string_view arch);

// The text that stands in for config.cuh: the key's constants, below those of its architecture, and its functions. Error cuda.config.* for
// what is no constant.
std::string config_text(const KernelKey&);
// Everything that makes the cubin what it is, as the name of its file: "write_kv-sm_90a-<128-bit hash>". The version of NVRTC is left
// out, so that a cache filled elsewhere serves a machine without NVRTC.
std::string cache_name(const KernelKey&);

// Names what the cubin follows from and nothing else: the build of NVRTC, and of the texts those that the kernel includes, without
// comments. A record of what the compiler made of the kernel holds as long as this is the same. Error cuda.nvrtc_missing, and those of
// compile().
std::string content_hash(const KernelKey&);

// Always compiles. Errors cuda.compile with NVRTC's log, cuda.nvrtc_missing, cuda.source, cuda.arch, cuda.config.*.
CompiledKernel compile(const KernelKey&);
// Compiles a text that is not among the embedded ones; key.path names it in messages.
CompiledKernel compile_text(const KernelKey&, std::string_view text);

// Finds a kernel in this process, else in the cache on disk, else compiles it and stores it there. Threads that ask for one key compile it
// once. With IMBREX_CUDA_DUMP it is always compiled, and sources and cubin are left in that folder.
std::shared_ptr<const CompiledKernel> get_kernel(const KernelKey&);

}  // namespace imbrex::cuda
