#pragma once
// A file inside the binary; cmake/embed.cmake makes tables of them.
#include <span>
#include <string_view>

namespace imbrex {

struct EmbeddedText {
  std::string_view path, text;  // both zero-terminated
};

}  // namespace imbrex
