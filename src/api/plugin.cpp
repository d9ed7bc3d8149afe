// See plugin.h.
#include "api/plugin.h"

#include <dlfcn.h>

#include "api/guard.h"
#include "core/env.h"

namespace imbrex {

void load_plugin(const std::string& path) {
  // It stays open: what it has registered may be in use, even if it fails then.
  void* object = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  const char* why = object == nullptr ? dlerror() : nullptr;
  check(object != nullptr, "plugin.open", "{} cannot be opened: {}", path, why == nullptr ? "" : why);
  const auto entry = reinterpret_cast<imbrex_plugin_function>(dlsym(object, "imbrex_plugin"));
  check(entry != nullptr, "plugin.entry", "{} defines no function imbrex_plugin", path);
  const imbrex_host host{.struct_size = sizeof host,
                         .abi_version = IMBREX_ABI_VERSION,
                         .register_backend = imbrex_register_backend,
                         .last_error = imbrex_last_error,
                         .register_device = imbrex_register_device,
                         .register_short_conv_backend = imbrex_register_short_conv_backend,
                         .register_recurrent_backend = imbrex_register_recurrent_backend};
  const imbrex_status status = entry(&host);
  check(status == IMBREX_OK, "plugin.refused", "imbrex_plugin of {} returned status {}: {}", path, status, imbrex_last_error());
}

void load_plugins_of_environment() {
  const std::string list = env::get(env::kPlugins).value_or("");
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(':', begin), list.size());
    if (end > begin) load_plugin(list.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace imbrex

imbrex_status imbrex_load_plugin(const char* path) {
  return imbrex::api::guarded([&] { imbrex::load_plugin(&imbrex::api::deref(path, "path")); });
}
