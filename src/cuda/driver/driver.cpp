// Opens libcuda and NVRTC at run time and fills the tables of driver.h, or finds out why that cannot be.
#include "cuda/driver/driver.h"

#include <atomic>

#include "core/check.h"
#include "core/env.h"
#include "core/fork.h"
#include "cuda/driver/open_library.h"

namespace imbrex::cuda {
namespace {

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

std::string text_of(const DriverApi& cu, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  if (cu.cuGetErrorName(result, &name) != kCudaSuccess || name == nullptr) return fmt::format("error {}", result);
  if (cu.cuGetErrorString(result, &text) != kCudaSuccess || text == nullptr) return name;
  return fmt::format("{} ({})", name, text);
}

std::vector<std::string> nvrtc_names() { return toolkit_names(env::kCudaNvrtc, {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}); }

// The process (by fork_generation()) that opened the driver, or is about to: what it says of a GPU is true there alone.
constexpr int64_t kNobody = -1;   // it was not asked for yet
constexpr int64_t kAnybody = -2;  // it cannot be used, which is as true in a child
constinit std::atomic<int64_t> driver_owner{kNobody};

bool driver_is_of_a_parent() {
  const auto here = int64_t(fork_generation());
  int64_t owner = driver_owner.load(std::memory_order_acquire);
  if (owner == kNobody && driver_owner.compare_exchange_strong(owner, here)) return false;
  return owner != here && owner != kAnybody;
}

constexpr const char* kForked =
    "CUDA was started before this process was forked off, and does not work in it; start GPU processes with spawn or exec, or fork "
    "before the first use of a GPU";

// Must not be called in a forked child: it would wait for ever if a thread of the parent was opening the driver at the time.
const Loaded<DriverApi>& loaded_driver() {
  static const auto* const loaded = [] {
    auto* const opened = new Loaded<DriverApi>(load_driver(env::get(env::kCudaDriver).value_or("libcuda.so.1")));
    if (opened->api == nullptr) driver_owner.store(kAnybody, std::memory_order_release);
    return opened;
  }();
  return *loaded;
}

const Loaded<NvrtcApi>& loaded_nvrtc() {
  static const auto* const loaded = new Loaded<NvrtcApi>(load_nvrtc(nvrtc_names()));
  return *loaded;
}

}  // namespace

Loaded<DriverApi> load_driver(const std::string& name) {
  Loaded<DriverApi> loaded{.api = nullptr, .why = {}, .path = name};
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.why = fmt::format("no NVIDIA driver: {}", last_open_error());
    return loaded;
  }
  auto api = std::make_unique<DriverApi>();
  // The version comes first: that of an old driver says more than the first function it lacks.
  if (!bind_symbol(library, name, "cuDriverGetVersion", api->cuDriverGetVersion, loaded.why)) return loaded;
  int version = 0;
  const CUresult got = api->cuDriverGetVersion(&version);
  if (got != kCudaSuccess || version < kMinDriverVersion) {
    loaded.why = fmt::format("expected an NVIDIA driver for CUDA {} or newer, {} is for {}", version_text(kMinDriverVersion), name,
                             version_text(version));
    return loaded;
  }
#define X(symbol, parameters) \
  if (!bind_symbol(library, name, #symbol, api->symbol, loaded.why)) return loaded;
  IMBREX_CUDA_DRIVER_API(X)
#undef X
  std::string absent;
#define X(symbol, parameters) bind_symbol(library, name, #symbol, api->symbol, absent);
  IMBREX_CUDA_OPTIONAL_DRIVER_API(X)
#undef X
  const CUresult result = api->cuInit(0);
  if (result != kCudaSuccess) {
    // A hint for a process that was forked off after another library had started CUDA.
    const char* hint = result == kCudaNotInitialized ? "; was CUDA started before this process was forked off?" : "";
    loaded.why = fmt::format("the NVIDIA driver does not start: {}{}", text_of(*api, result), hint);
    return loaded;
  }
  loaded.api = std::move(api);
  return loaded;
}

Loaded<NvrtcApi> load_nvrtc(const std::vector<std::string>& names) {
  Loaded<NvrtcApi> loaded;
  const OpenedLibrary library = open_first(names);
  loaded.path = library.path;
  if (library.handle == nullptr) {
    loaded.why = fmt::format(
        "NVRTC is not found; install the CUDA toolkit or the Python package nvidia-cuda-nvrtc and set CUDA_HOME, or fill the cache of "
        "kernels on another machine (imbrex compile) and name it with {}; tried:{}",
        env::kCudaCache, library.tried);
    return loaded;
  }
  auto api = std::make_unique<NvrtcApi>();
#define X(symbol, parameters) \
  if (!bind_symbol(library.handle, loaded.path, #symbol, api->symbol, loaded.why)) return loaded;
  IMBREX_NVRTC_API(X)
#undef X
  int major = 0, minor = 0;
  const nvrtcResult got = api->nvrtcVersion(&major, &minor);
  api->version = major * 1000 + minor * 10;
  if (got != 0 || api->version < kMinNvrtcVersion) {
    loaded.why =
        fmt::format("expected NVRTC {} or newer, {} is {}", version_text(kMinNvrtcVersion), loaded.path, version_text(api->version));
    return loaded;
  }
  loaded.api = std::move(api);
  return loaded;
}

const DriverApi* driver(std::string* why) {
  if (driver_is_of_a_parent()) {
    if (why) *why = kForked;
    return nullptr;
  }
  const Loaded<DriverApi>& loaded = loaded_driver();
  if (why) *why = loaded.why;
  return loaded.api.get();
}

const NvrtcApi* nvrtc(std::string* why) {
  const Loaded<NvrtcApi>& loaded = loaded_nvrtc();
  if (why) *why = loaded.why;
  return loaded.api.get();
}

const DriverApi& need_driver() {
  check(!driver_is_of_a_parent(), "cuda.forked", "{}", kForked);
  const Loaded<DriverApi>& loaded = loaded_driver();
  check(loaded.api != nullptr, "cuda.driver_missing", "{}", loaded.why);
  return *loaded.api;
}

const NvrtcApi& need_nvrtc() {
  const Loaded<NvrtcApi>& loaded = loaded_nvrtc();
  check(loaded.api != nullptr, "cuda.nvrtc_missing", "{}", loaded.why);
  return *loaded.api;
}

void fail_cuda(CUresult result, std::string_view what) {
  const std::string text = text_of(need_driver(), result);
  if (result == kCudaOutOfMemory) fail("cuda.memory", "{}: {}", what, text);
  fail("cuda.driver", "{}: {}", what, text);
}

}  // namespace imbrex::cuda
