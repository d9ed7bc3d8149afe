#pragma once
// check() and fail(): how every file throws imbrex::Error, with the values in the message.
#include <fmt/format.h>

#include <limits>
#include <string_view>
#include <utility>

#include "imbrex/error.h"

namespace imbrex {

template <class... Args>
[[noreturn]] void fail(std::string_view code, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(code, fmt::format(text, std::forward<Args>(args)...));
}

// The message is only formatted when the check fails.
template <class... Args>
void check(bool ok, std::string_view code, fmt::format_string<Args...> text, Args&&... args) {
  if (!ok) [[unlikely]]
    fail(code, text, std::forward<Args>(args)...);
}

// 64-bit product of sizes; Error `code` when it overflows or a factor is negative.
inline int64_t checked_mul(std::string_view code, int64_t a, int64_t b) {
  int64_t product = 0;
  check(a >= 0 && b >= 0 && !__builtin_mul_overflow(a, b, &product), code, "size {} x {} is negative or does not fit 63 bits", a, b);
  return product;
}

}  // namespace imbrex
