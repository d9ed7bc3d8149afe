#pragma once
// Lets messages take a TensorView or a Device as it is: its text is only made when the check has failed.
#include <fmt/format.h>

#include <algorithm>

#include "imbrex/tensor.h"

namespace imbrex::detail {

// For types with str(). Takes no format options; inheriting them from fmt's string formatter trips a false warning of gcc 12.
template <class T>
struct StrFormatter {
  constexpr auto parse(fmt::format_parse_context& context) { return context.begin(); }
  auto format(const T& value, fmt::format_context& context) const {
    const std::string text = value.str();
    return std::copy(text.begin(), text.end(), context.out());
  }
};

}  // namespace imbrex::detail

template <>
struct fmt::formatter<imbrex::TensorView> : imbrex::detail::StrFormatter<imbrex::TensorView> {};
template <>
struct fmt::formatter<imbrex::Device> : imbrex::detail::StrFormatter<imbrex::Device> {};
