// Opens cuBLASLt at run time and fills the table of cublaslt.h, or finds out why that cannot be.
#include "cuda/driver/cublaslt.h"

#include "core/check.h"
#include "core/env.h"
#include "cuda/driver/open_library.h"

namespace imbrex::cuda {
namespace {

std::vector<std::string> cublaslt_names() {
  std::vector<std::string> more;
  if (const NvrtcApi* rtc = nvrtc()) {
    // CUDA 13's packages of Python share a folder, lib of nvidia/cu13. Before that each library had one: nvidia/cuda_nvrtc, nvidia/cublas.
    const std::string folder = folder_of(reinterpret_cast<const void*>(rtc->nvrtcVersion));
    if (!folder.empty()) more = {folder, folder + "../../cublas/lib/"};
  }
  return toolkit_names(env::kCudaCublasLt, {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}, more);
}

const Loaded<CublasLtApi>& loaded_cublaslt() {
  static const auto* const loaded = new Loaded<CublasLtApi>(load_cublaslt(cublaslt_names()));
  return *loaded;
}

}  // namespace

Loaded<CublasLtApi> load_cublaslt(const std::vector<std::string>& names) {
  Loaded<CublasLtApi> loaded;
  const OpenedLibrary library = open_first(names);
  loaded.path = library.path;
  if (library.handle == nullptr) {
    loaded.why = fmt::format(
        "cuBLASLt is not found; install the CUDA toolkit or the Python package nvidia-cublas and set CUDA_HOME, or name the library with "
        "{}; tried:{}",
        env::kCudaCublasLt, library.tried);
    return loaded;
  }
  auto api = std::make_unique<CublasLtApi>();
#define X(result, symbol, parameters) \
  if (!bind_symbol(library.handle, loaded.path, #symbol, api->symbol, loaded.why)) return loaded;
  IMBREX_CUBLASLT_API(X)
#undef X
  if (const size_t version = api->cublasLtGetVersion(); version < kMinCublasLtVersion) {
    loaded.why = fmt::format("expected cuBLASLt {} or newer, {} is {}", kMinCublasLtVersion, loaded.path, version);
    return loaded;
  }
  loaded.api = std::move(api);
  return loaded;
}

const CublasLtApi* cublaslt(std::string* why) {
  const Loaded<CublasLtApi>& loaded = loaded_cublaslt();
  if (why) *why = loaded.why;
  return loaded.api.get();
}

const CublasLtApi& need_cublaslt() {
  const Loaded<CublasLtApi>& loaded = loaded_cublaslt();
  check(loaded.api != nullptr, "cuda.cublaslt_missing", "{}", loaded.why);
  return *loaded.api;
}

void fail_cublaslt(cublasStatus_t status, std::string_view what) {
  fail("cuda.cublaslt", "{}: {}", what, need_cublaslt().cublasLtGetStatusString(status));
}

}  // namespace imbrex::cuda
