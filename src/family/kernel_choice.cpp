// KernelChoice as text.
#include <fmt/format.h>

#include "imbrex/family.h"

namespace imbrex {

std::string KernelChoice::str() const {
  std::string text = requests;
  if (most_queries < INT32_MAX) {
    text += least_queries == most_queries ? fmt::format(" ({} {})", most_queries, most_queries == 1 ? "query" : "queries")
                                          : fmt::format(" ({} to {} queries)", least_queries, most_queries);
  } else if (least_queries > 1) {
    text += fmt::format(" ({} queries or more)", least_queries);
  }
  text += ": " + kernel;
  const char* before = " with ";
  for (const Size& size : sizes) {
    text += fmt::format("{}{} {}", before, size.name, size.value);
    before = ", ";
  }
  return text;
}

}  // namespace imbrex
