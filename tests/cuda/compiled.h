#pragma once
// Kernels for tests of what the compiler makes of them.
#include <string>
#include <vector>

#include "conformance/kernel_ledger.h"
#include "core/env.h"
#include "cuda/driver/cubin.h"
#include "cuda/driver/jit.h"
#include "cuda/precompile.h"
#include "gpu/kernel_cache.h"

namespace imbrex::cuda::test {

struct Judged {
  std::vector<PrecompiledEntry> entries;
  std::vector<std::string> problems;
};

// As the ledger of clean kernels has it, and compiled here and now where that has none. Where IMBREX_TEST_KERNELS names a folder, such a
// kernel is taken from there, or put there for those who come later: .ci/run lets `imbrex compile` judge all kernels, and compiles none of
// them twice.
inline Judged judged(const KernelKey& key) {
  static const KernelLedger ledger(IMBREX_KERNEL_LEDGER);
  if (const auto* const record = ledger.find(content_hash(key))) return {*record, {}};
  const auto folder = env::get("IMBREX_TEST_KERNELS");
  auto kernel = folder ? gpu::load_cached(*folder, cache_name(key)) : std::nullopt;
  if (!kernel) {
    kernel = compile(key);
    if (folder) gpu::store_cached(*folder, cache_name(key), *kernel);
  }
  return {precompiled_entries(*kernel), strict_problems(*kernel)};
}

}  // namespace imbrex::cuda::test
