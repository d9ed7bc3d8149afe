// Families that imbrex knows by name and refuses: what each waits for; used by parse_model_config().
#include <algorithm>

#include "model/families.h"

namespace imbrex {

namespace {

constexpr std::string_view kMlaVision = "a reader of models with a vision encoder beside MLA layers";
constexpr std::string_view kLinear = kWaitsForLinear;
constexpr std::string_view kSparseMla =
    "linear layers (a recurrent state instead of a KV cache), beside which it has sparse attention on MLA";
constexpr std::string_view kBlocks = "layers that differ in heads from block to block (block_configs)";

constexpr LaterFamily kLater[] = {
    {"deepseek_vl_v2", kMlaVision},
    {"deepseek_v4", "compressed sparse attention (shared keys and values, compressed at a ratio that differs by layer)"},
    {"zamba", kLinear},
    {"recurrent_gemma", kLinear},
    {"rwkv", kLinear},
    {"glm5_next", kSparseMla},
    {"glm5_next_text", kSparseMla},
    {"nemotron-nas", kBlocks},
};

}  // namespace

const LaterFamily* find_later_family(std::string_view model_type) {
  const auto it = std::find_if(std::begin(kLater), std::end(kLater), [&](const LaterFamily& f) { return f.model_type == model_type; });
  return it == std::end(kLater) ? nullptr : it;
}

}  // namespace imbrex
