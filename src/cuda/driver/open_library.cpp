// See open_library.h.
#include "cuda/driver/open_library.h"

#include "core/env.h"

namespace imbrex::cuda {

std::vector<std::string> toolkit_names(std::string_view variable, std::initializer_list<const char*> names,
                                       const std::vector<std::string>& more) {
  if (const auto path = env::get(variable)) return {*path};
  std::vector<std::string> folders{""};
  if (const auto home = env::get(env::kCudaHome)) folders.insert(folders.end(), {*home + "/lib64/", *home + "/lib/"});
  folders.emplace_back("/usr/local/cuda/lib64/");
  folders.insert(folders.end(), more.begin(), more.end());
  std::vector<std::string> paths;
  for (const std::string& folder : folders)
    for (const char* name : names) paths.push_back(folder + name);
  return paths;
}

OpenedLibrary open_first(const std::vector<std::string>& names) {
  OpenedLibrary library;
  for (const std::string& name : names) {
    library.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library.handle != nullptr) {
      library.path = name;
      break;
    }
    library.tried += fmt::format("\n  {}", last_open_error());
  }
  return library;
}

std::string last_open_error() {
  const char* text = dlerror();
  return text ? text : "unknown error";
}

std::string folder_of(const void* function) {
  Dl_info info{};
  if (dladdr(function, &info) == 0 || info.dli_fname == nullptr) return {};
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash + 1);
}

}  // namespace imbrex::cuda
