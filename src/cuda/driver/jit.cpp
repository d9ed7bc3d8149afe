// compile() and get_kernel(): from the embedded text and the constants of a key to a cubin, through NVRTC or a cache.
#include "cuda/driver/jit.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <fstream>

#include "core/check.h"
#include "core/env.h"
#include "cuda/driver/cubin.h"
#include "cuda/driver/driver.h"
#include "cuda/driver/kept_signals.h"
#include "cuda/driver/kernel_sources.h"
#include "gpu/kernel_cache.h"
#include "gpu/kernel_texts.h"

namespace imbrex::cuda {
namespace {

namespace fs = std::filesystem;

// Line numbers are kept for profilers; -v puts registers, spills and shared memory into the log.
std::vector<std::string> options_of(const KernelKey& key) {
  return {"--gpu-architecture=" + key.arch, "-std=c++20", "--device-as-default-execution-space", "--generate-line-info",
          "--ptxas-options=-v"};
}

void check_arch(const NvrtcApi& rtc, const KernelKey& key) {
  const int number = arch_number(key.arch) / 10;
  int count = 0;
  if (rtc.nvrtcGetNumSupportedArchs(&count) != 0) return;
  std::vector<int> archs(size_t(std::max(count, 0)));
  if (rtc.nvrtcGetSupportedArchs(archs.data()) != 0) return;
  check(std::find(archs.begin(), archs.end(), number) != archs.end(), "cuda.arch", "this NVRTC ({}.{}) compiles for sm_{}, not for {}",
        rtc.version / 1000, rtc.version % 1000 / 10, fmt::join(archs, ", sm_"), key.arch);
}

class Program {
 public:
  Program(const NvrtcApi& rtc, const std::string& text, const std::string& name, const std::vector<const char*>& headers,
          const std::vector<const char*>& header_names)
      : rtc_(rtc) {
    const nvrtcResult result =
        rtc.nvrtcCreateProgram(&program_, text.c_str(), name.c_str(), int(headers.size()), headers.data(), header_names.data());
    check(result == 0, "cuda.compile", "NVRTC makes no program of {}: error {}", name, result);
  }
  ~Program() { rtc_.nvrtcDestroyProgram(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  nvrtcResult compile(const std::vector<std::string>& options) {
    std::vector<const char*> arguments(options.size());
    std::transform(options.begin(), options.end(), arguments.begin(), [](const std::string& option) { return option.c_str(); });
    const KeptSignals signals(reinterpret_cast<const void*>(rtc_.nvrtcCompileProgram));
    return rtc_.nvrtcCompileProgram(program_, int(arguments.size()), arguments.data());
  }
  std::string log() const { return bytes(rtc_.nvrtcGetProgramLogSize, rtc_.nvrtcGetProgramLog, 1); }
  std::string cubin() const { return bytes(rtc_.nvrtcGetCUBINSize, rtc_.nvrtcGetCUBIN, 0); }

 private:
  std::string bytes(nvrtcResult (*size_of)(nvrtcProgram, size_t*), nvrtcResult (*copy)(nvrtcProgram, char*), size_t terminator) const {
    size_t size = 0;
    std::string result;
    if (size_of(program_, &size) != 0 || size <= terminator) return result;
    result.resize(size);
    if (copy(program_, result.data()) != 0) return {};
    result.resize(size - terminator);
    return result;
  }
  const NvrtcApi& rtc_;
  nvrtcProgram program_ = nullptr;
};

const gpu::KernelTexts& texts() {
  static const gpu::KernelTexts all(kernel_sources, "config.cuh", ".cu");
  return all;
}

}  // namespace

std::string arch_of(const DeviceInfo& device) {
  check(device.device.type == DeviceType::cuda && device.sm > 0, "cuda.arch", "expected a CUDA device, got {}", device.str());
  // From 12.0 on (GeForce, workstations) nothing here needs the instructions of exactly one architecture.
  return fmt::format("sm_{}{}", device.sm, device.sm >= 90 && device.sm < 120 ? "a" : "");
}

int arch_number(std::string_view arch) {
  int number = 0;
  const char* const end = arch.data() + arch.size();
  const bool prefix = arch.starts_with("sm_");
  const auto [rest, error] = std::from_chars(arch.data() + (prefix ? 3 : 0), end, number);
  const std::string_view suffix(rest, size_t(end - rest));
  check(prefix && error == std::errc() && number >= 80 && number < 1000 && (suffix.empty() || suffix == "a" || suffix == "f"), "cuda.arch",
        "expected an architecture from sm_80 on, such as sm_90a, got \"{}\"", arch);
  return number * 10;
}

std::string config_text(const KernelKey& key) {
  std::vector<Constant> constants{{"kArch", arch_number(key.arch)}, {"kArchFeatures", key.arch.ends_with('a')}};
  constants.insert(constants.end(), key.config.begin(), key.config.end());
  return gpu::config_text(key.path, constants) + key.functions;
}

std::string content_hash(const KernelKey& key) {
  // "13.0.88". NVRTC itself tells the first two numbers only.
  static const std::string build = [] {
    const CompiledKernel kernel =
        compile_text({"build.cu", "sm_80", {}}, "extern \"C\" __device__ const unsigned build = __CUDACC_VER_BUILD__;");
    const int version = need_nvrtc().version;
    return fmt::format("NVRTC {}.{}.{}", version / 1000, version % 1000 / 10, cubin_constant(kernel.binary, "build").value_or(0));
  }();
  return texts().content_hash(key, config_text(key), options_of(key), build);
}

std::string cache_name(const KernelKey& key) { return texts().file_name(key, config_text(key), options_of(key)); }

CompiledKernel compile(const KernelKey& key) { return compile_text(key, texts().text_of(key)); }

CompiledKernel compile_text(const KernelKey& key, std::string_view text) {
  const std::string config = config_text(key);
  const NvrtcApi& rtc = need_nvrtc();
  check_arch(rtc, key);
  std::vector<std::string> options = options_of(key);
  // Beside a driver NVRTC 13 keeps a cache of its own, and what comes from there has no log to read resources from.
  if (rtc.version >= 13000) options.push_back("--no-cache");
  gpu::KernelTexts::Headers headers;
  std::string name = key.path;
  const auto dump = env::get(env::kCudaDump);
  const fs::path dump_folder = dump ? fs::absolute(*dump) / cache_name(key) : fs::path();
  if (dump) {
    // A profiler can show these: every line number leads to them.
    name = texts().write_to(dump_folder, key, text, config).string();
    options.push_back("--include-path=" + dump_folder.string());
  } else {
    headers = texts().headers(config);
  }
  Program program(rtc, std::string(text), name, headers.texts, headers.names);
  const auto begin = std::chrono::steady_clock::now();
  const nvrtcResult result = program.compile(options);
  CompiledKernel kernel{.binary = {}, .log = program.log(), .compile_ms = 0};
  kernel.compile_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  if (result == 0) kernel.binary = program.cubin();
  check(!kernel.binary.empty(), "cuda.compile", "cannot compile {} with {}: NVRTC error {}\n{}", key.str(), fmt::join(options, " "), result,
        kernel.log);
  if (dump) {
    std::ofstream(dump_folder / "kernel.cubin", std::ios::binary) << kernel.binary;
    std::ofstream(dump_folder / "log.txt") << kernel.log;
  }
  return kernel;
}

std::shared_ptr<const CompiledKernel> get_kernel(const KernelKey& key) {
  const bool on_disk = !env::get(env::kCudaDump);  // dumped ones name files of this machine
  return gpu::compiled_once(cache_name(key), on_disk ? gpu::kernel_cache_folder() : fs::path(), key.str(), [&] { return compile(key); });
}

}  // namespace imbrex::cuda
