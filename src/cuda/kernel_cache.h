#pragma once
// The folder of compiled kernels. A file is a cubin that any tool can open, with the compiler's log and a seal behind it.
#include <filesystem>
#include <optional>
#include <string>

#include "cuda/jit.h"

namespace imbrex::cuda {

// IMBREX_CUDA_CACHE, else imbrex in XDG_CACHE_HOME or ~/.cache; empty when there is none of them: nothing is kept then.
std::filesystem::path kernel_cache_folder();

// The path of a kernel's file; `name` is cache_name(key).
std::filesystem::path cached_file(const std::filesystem::path& folder, const std::string& name);

// Nothing for a file that is missing, cut off or changed: it will be compiled and written again.
std::optional<CompiledKernel> load_cached(const std::filesystem::path& folder, const std::string& name);

// Readers see the whole file or none. False when it cannot be written, which costs the next process a compilation and nothing else.
bool store_cached(const std::filesystem::path& folder, const std::string& name, const CompiledKernel&);

}  // namespace imbrex::cuda
