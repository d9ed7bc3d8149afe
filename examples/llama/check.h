#pragma once
// How the example says that something is wrong: a text with the expected and the actual value, thrown here and printed by main().
#include <sstream>
#include <stdexcept>
#include <string>

namespace llama {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <class... Parts>
void check(bool good, const Parts&... parts) {
  if (!good) fail(parts...);
}

// A piece of a file for a message: a hostile one cannot flood it.
inline std::string shortened(const std::string& text) { return text.size() <= 80 ? text : text.substr(0, 77) + "..."; }

}  // namespace llama
