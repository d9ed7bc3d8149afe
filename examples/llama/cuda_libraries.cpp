// See cuda_libraries.h.
#include "cuda_libraries.h"

#include <dlfcn.h>

#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "check.h"

namespace llama::cuda {
namespace {

void* open(const char* what, std::initializer_list<const char*> names) {
  std::vector<std::string> folders{""};
  if (const char* home = std::getenv("CUDA_HOME"))
    folders.insert(folders.end(), {std::string(home) + "/lib64/", std::string(home) + "/lib/"});
  folders.emplace_back("/usr/local/cuda/lib64/");
  std::string tried;
  for (const std::string& folder : folders) {
    for (const char* name : names) {
      if (void* library = dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
      const char* why = dlerror();
      tried += std::string("\n  ") + (why != nullptr ? why : name);
    }
  }
  fail(what, " is not found; it was looked for by LD_LIBRARY_PATH and in CUDA_HOME:", tried);
}

template <class Function>
void bind(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  check(function != nullptr, "the library has no ", name, ": too old");
}

}  // namespace

#define X(name, parameters) bind(library, #name, api.name);
const Driver& driver() {
  static const Driver loaded = [] {
    void* const library = open("NVIDIA's driver", {"libcuda.so.1"});
    Driver api;
    LLAMA_DRIVER_API(X)
    const int result = api.cuInit(0);
    check(result == 0, "NVIDIA's driver does not start: error ", result);
    return api;
  }();
  return loaded;
}

const Nvrtc& nvrtc() {
  static const Nvrtc loaded = [] {
    void* const library = open("NVRTC", {"libnvrtc.so.13", "libnvrtc.so.12"});
    Nvrtc api;
    LLAMA_NVRTC_API(X)
    return api;
  }();
  return loaded;
}

const CuBlas& cublas() {
  static const CuBlas loaded = [] {
    void* const library = open("cuBLAS", {"libcublas.so.13", "libcublas.so.12"});
    CuBlas api;
    LLAMA_BLAS_API(X)
    return api;
  }();
  return loaded;
}
#undef X

void check_driver(int result, const char* what) {
  if (result == 0) return;
  const char* name = nullptr;
  driver().cuGetErrorName(result, &name);
  fail(what, ": ", name != nullptr ? name : "an unknown error of the driver", " (", result, ")");
}

}  // namespace llama::cuda
