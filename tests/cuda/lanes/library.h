#pragma once
// Opens the libraries that are made of kernel.cpp.
#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "cuda/lanes/launch.h"

namespace imbrex::test {

struct Library {  // maps: null, or q, k, v and outputs
  void (*run)(const void* params, const TensorMap* maps, const Launch&);
  unsigned (*smem_bytes)();
};
// A kernel of a variant: "attention_decode", "merge_decode".
inline Library open_library(const std::string& name) {
  void* const handle = dlopen((std::string(IMBREX_LANES) + "/" + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  return {reinterpret_cast<decltype(Library::run)>(dlsym(handle, "run_kernel")),
          reinterpret_cast<decltype(Library::smem_bytes)>(dlsym(handle, "kernel_smem_bytes"))};
}

}  // namespace imbrex::test
