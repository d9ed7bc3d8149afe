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

// Value of a variable of the table, read anew on every call; nullopt when unset or empty.
std::optional<std::string> get(std::string_view name);

inline constexpr std::string_view kCpuIsa = "IMBREX_CPU_ISA";
inline constexpr std::string_view kBackend = "IMBREX_BACKEND";
inline constexpr std::string_view kNumThreads = "IMBREX_NUM_THREADS";
inline constexpr std::string_view kLog = "IMBREX_LOG";

// IMBREX_NUM_THREADS as a number; nullopt when unset. Error env.num_threads unless it is a whole number from 1 to 4096.
std::optional<int> num_threads();

}  // namespace imbrex::env
