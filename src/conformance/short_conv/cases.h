#pragma once
// The one table of cases of the short convolution: the conformance tests run every backend over it.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/state_case.h"
#include "imbrex/short_conv.h"

namespace imbrex {

// How large h is from token to token.
enum class ShortConvValues : uint8_t {
  plain,  // alike
  steep,  // by powers of two up to 4096 apart: a row of the past taken for another one shows
  tiny,   // below the type's normal numbers
  large   // now and then beyond what an f16 holds: infinite there
};

using ShortConvCaseRequest = StateCaseRequest;

struct ShortConvCase {
  std::string name;  // letters, digits, underscores; "width_4_verify"
  ShortConvSpec spec;
  std::vector<ShortConvCaseRequest> requests;
  int chunk = 0;           // > 0: the requests' tokens come in steps of so many, without drafts
  Gaps gaps = Gaps::none;  // of all tensors
  int padding_tokens = 0;  // rows of input and out after the batch's tokens
  ShortConvValues values = ShortConvValues::plain;
  bool other_sources = false;  // as in ShortConvRunOptions
  uint64_t seed = 1;

  int num_tokens() const;
};

// Made by composing axes: dtype, width, dim, bias, length, context, drafts, gaps, values, requests (first part of the name);
// plain and silu for the plain form without and with SiLU.
std::span<const ShortConvCase> short_conv_cases();
const ShortConvCase* find_short_conv_case(std::string_view name);  // nullptr when there is none

}  // namespace imbrex
