#pragma once
// Expectations about imbrex::Error, for all tests of refusals.
#include <gtest/gtest.h>

#include <string>

#include "imbrex/error.h"

namespace imbrex::test {

// Code of the Error that f throws; "nothing thrown" otherwise.
template <class F>
std::string error_code(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    EXPECT_STRNE(error.what(), "") << error.code();
    return error.code();
  }
  return "nothing thrown";
}

}  // namespace imbrex::test
