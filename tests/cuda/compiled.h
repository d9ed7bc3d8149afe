#pragma once
// Kernels for tests of what the compiler makes of them.
#include <filesystem>

#include "core/env.h"
#include "cuda/driver/jit.h"
#include "gpu/kernel_cache.h"

namespace imbrex::cuda::test {

// Compiled here and now. Where IMBREX_TEST_KERNELS names a folder, a kernel is taken from there, or put there for those who come later:
// .ci/run lets `imbrex compile` judge all kernels, and compiles none of them twice.
inline CompiledKernel compiled(const KernelKey& key) {
  const auto folder = env::get("IMBREX_TEST_KERNELS");
  if (!folder) return compile(key);
  if (auto kernel = gpu::load_cached(*folder, cache_name(key))) return *std::move(kernel);
  CompiledKernel kernel = compile(key);
  gpu::store_cached(*folder, cache_name(key), kernel);
  return kernel;
}

}  // namespace imbrex::cuda::test
