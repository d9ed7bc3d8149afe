#pragma once
// Shared objects with backends or devices: opened here, for the C ABI and for the program.
#include <string>

namespace imbrex {

// imbrex_load_plugin(), with errors as exceptions: Error plugin.*.
void load_plugin(const std::string& path);
void load_plugins_of_environment();  // of IMBREX_PLUGINS, in its order

}  // namespace imbrex
