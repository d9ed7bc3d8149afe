#pragma once
// Libraries that are opened at run time: where they are looked for, and how their functions are found.
#include <dlfcn.h>
#include <fmt/format.h>

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

namespace imbrex::cuda {

// Where a library of the CUDA toolkit may be: what the environment variable names, alone; else each of `names` on the system's path, in
// CUDA_HOME, in /usr/local/cuda, and in the `more` folders, in this order.
std::vector<std::string> toolkit_names(std::string_view variable, std::initializer_list<const char*> names,
                                       const std::vector<std::string>& more = {});

struct OpenedLibrary {
  void* handle = nullptr;  // never closed: other parts of the process may hold on to it
  std::string path;        // the name it was opened by
  std::string tried;       // a line for each name that could not be opened
};
OpenedLibrary open_first(const std::vector<std::string>& names);

std::string last_open_error();

// The folder of the library that a function is in, with a slash at the end; empty where that is not known.
std::string folder_of(const void* function);

// False, with the symbol's name in `why`, when the library lacks one.
template <class Function>
bool bind_symbol(void* library, const std::string& path, const char* symbol, Function& function, std::string& why) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr) why = fmt::format("{} has no {}: too old", path, symbol);
  return function != nullptr;
}

}  // namespace imbrex::cuda
