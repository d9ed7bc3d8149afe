#pragma once
// Compiled kernels, in the process and in a folder. A file is a binary that any tool can open, with the compiler's log and a seal behind
// it. The seal shows damage, not who wrote the file: folders and files that anybody but this process's user and root can write are not
// used.
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace imbrex::gpu {

struct CompiledKernel {
  std::string binary;     // a cubin, for CUDA
  std::string log;        // the compiler's; of NVRTC with the resources that ptxas tells, which cuda/driver/cubin.h reads
  double compile_ms = 0;  // 0: from the cache
};

// IMBREX_CUDA_CACHE, else imbrex in XDG_CACHE_HOME or ~/.cache; empty when there is none of them: nothing is kept then.
std::filesystem::path kernel_cache_folder();

// The path of a kernel's file; `name` is cache_name(key).
std::filesystem::path cached_file(const std::filesystem::path& folder, const std::string& name);

// Why the folder is not used, in words: its owner or mode. Empty for one that is used or not there.
std::string why_not_trusted(const std::filesystem::path& folder);

// Nothing for a file that is missing, cut off, changed, a link, or not to be trusted: it will be compiled and written again. A folder that
// is not to be trusted is named on stderr, once.
std::optional<CompiledKernel> load_cached(const std::filesystem::path& folder, const std::string& name);

// Makes the folder for this user alone where it is missing. Readers see the whole file or none. False when it cannot be written, which
// costs the next process a compilation and nothing else.
bool store_cached(const std::filesystem::path& folder, const std::string& name, const CompiledKernel&);

// From this process, else from the folder, else compiled and stored there. Threads that ask for one name compile it once. `what` says in
// the log which kernel it is.
std::shared_ptr<const CompiledKernel> compiled_once(const std::string& name, const std::filesystem::path& folder, const std::string& what,
                                                    const std::function<CompiledKernel()>& compile);

}  // namespace imbrex::gpu
