#pragma once
// The only place that reads environment variables. `imbrex info` prints the table.
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace imbrex::env {

struct Variable {
  const char* name;
  const char* meaning;
};
std::span<const Variable> variables();

// Value of a variable, read anew on every call; nullopt when unset or empty.
std::optional<std::string> get(std::string_view name);

inline constexpr std::string_view kCpuIsa = "IMBREX_CPU_ISA";
inline constexpr std::string_view kBackend = "IMBREX_BACKEND";
inline constexpr std::string_view kNumThreads = "IMBREX_NUM_THREADS";
inline constexpr std::string_view kPlugins = "IMBREX_PLUGINS";
inline constexpr std::string_view kLog = "IMBREX_LOG";
inline constexpr std::string_view kCudaCache = "IMBREX_CUDA_CACHE";
inline constexpr std::string_view kCudaDump = "IMBREX_CUDA_DUMP";
inline constexpr std::string_view kCudaDriver = "IMBREX_CUDA_DRIVER";
inline constexpr std::string_view kCudaNvrtc = "IMBREX_CUDA_NVRTC";
inline constexpr std::string_view kCudaCublasLt = "IMBREX_CUDA_CUBLASLT";
// A variable of the CUDA toolkit, not of imbrex.
inline constexpr std::string_view kCudaHome = "CUDA_HOME";
inline constexpr std::string_view kCacheHome = "XDG_CACHE_HOME";
inline constexpr std::string_view kHome = "HOME";

// IMBREX_NUM_THREADS as a number; nullopt when unset. Error env.num_threads unless it is a whole number from 1 to 4096.
std::optional<int> num_threads();

}  // namespace imbrex::env
