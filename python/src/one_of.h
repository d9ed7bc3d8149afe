#pragma once
// Values of C++ enums by their names.
#include <initializer_list>
#include <span>
#include <string>

#include "imbrex/error.h"

namespace imbrex::python {

// Error python.name
template <class T>
T one_of(const std::string& text, std::span<const T> values, const char* name) {
  std::string names;
  for (const T value : values) {
    if (text == to_string(value)) return value;
    names += names.empty() ? "" : ", ";
    names += to_string(value);
  }
  throw Error("python.name", std::string(name) + ": expected one of " + names + ", got \"" + text + "\"");
}

template <class T>
T one_of(const std::string& text, std::initializer_list<T> values, const char* name) {
  return one_of(text, std::span<const T>(values.begin(), values.size()), name);
}

}  // namespace imbrex::python
