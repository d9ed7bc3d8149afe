#pragma once
// The one table of cases of recurrent layers: the conformance tests run every backend over it.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/state_case.h"
#include "imbrex/recurrent.h"

namespace imbrex {

// What is hard about the numbers of a case.
enum class RecurrentValues : uint8_t {
  plain,      // decays of 0.5 to 1, values and keys alike
  none,       // a decay of 1 in every token: nothing is forgotten
  forgetful,  // decays of e^-60 and less now and then, where nothing of the past is left
  same_keys,  // keys that are nearly the same from token to token, where the delta rule takes off nearly all
  extreme     // beta 0 and 1, gates far from zero on both sides
};

struct RecurrentCase {
  std::string name;  // letters, digits, underscores; "gdn_verify"
  RecurrentSpec spec;
  StateCaseRequests requests;
  int chunk = 0;               // > 0: the requests' tokens come in steps of so many, without drafts
  Gaps gaps = Gaps::none;      // of all tensors
  int padding_tokens = 0;      // rows of tensors after the batch's tokens
  bool float_gates = true;     // gate, beta and norm_weight are f32, else of dtype
  bool shared_weight = false;  // norm_weight is one for all heads
  RecurrentValues values = RecurrentValues::plain;
  bool other_sources = false;  // as in RecurrentRunOptions
  uint64_t seed = 1;
};

// The layers that models have, by their usual names, with few heads: "gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1".
RecurrentSpec recurrent_layer(std::string_view name);

// Made by composing axes: layer, types, dims, heads, layout, length, context, drafts, values, requests, the norm and gate
// behind it (outputs), and the convolution in front (convolved): first part of the name.
std::span<const RecurrentCase> recurrent_cases();

}  // namespace imbrex
