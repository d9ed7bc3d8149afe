// The environment variables of the project and what they mean.
#include "core/env.h"

#include <charconv>
#include <cstdlib>

#include "core/check.h"

namespace imbrex::env {

static constexpr Variable kVariables[] = {
    {kCpuIsa.data(), "CPU instruction set to use at most: generic, avx2, avx512, avx512_bf16, amx_emulated, amx"},
    {kBackend.data(), "backend (or alias) to force for every layer of a family that has it"},
    {kPlugins.data(), "shared objects with backends, separated by colons, that the imbrex program loads when it starts"},
    {kNumThreads.data(), "threads to use; default: one for each core this process may use"},
    {kLog.data(), "what to say on stderr: off; warning, the default; info, a line for each plan and each GPU kernel"},
    {kCudaCache.data(), "folder of compiled CUDA kernels; default: imbrex in XDG_CACHE_HOME or ~/.cache"},
    {kCudaDump.data(), "folder to write the text and the cubin of every CUDA kernel to, for profilers"},
    {kCudaDriver.data(), "NVIDIA driver library to open; default: libcuda.so.1"},
    {kCudaNvrtc.data(), "NVRTC library to open; default: libnvrtc.so of the system, CUDA_HOME or /usr/local/cuda"},
    {kCudaCublasLt.data(), "cuBLASLt library to open; default: libcublasLt.so of the system, CUDA_HOME, /usr/local/cuda or beside NVRTC"},
};

std::span<const Variable> variables() { return kVariables; }

std::optional<std::string> get(std::string_view name) {
  const char* value = std::getenv(std::string(name).c_str());
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<int> num_threads() {
  const auto text = get(kNumThreads);
  if (!text) return std::nullopt;
  int count = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), count);
  check(error == std::errc() && end == text->data() + text->size() && count >= 1 && count <= 4096, "env.num_threads",
        "expected a whole number from 1 to 4096 in {}, got \"{}\"", kNumThreads, *text);
  return count;
}

}  // namespace imbrex::env
