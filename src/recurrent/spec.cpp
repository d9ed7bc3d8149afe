// RecurrentSpec: printing, and the rules that hold for every backend.
#include <fmt/format.h>

#include <cmath>

#include "core/check.h"
#include "imbrex/recurrent.h"
#include "recurrent/spec_fields.h"

namespace imbrex {

const char* to_string(RecurrentGate gate) {
  switch (gate) {
    case RecurrentGate::fixed: return "fixed";
    case RecurrentGate::log: return "log";
    case RecurrentGate::softplus: return "softplus";
    case RecurrentGate::sigmoid: return "sigmoid";
  }
  return "unknown";
}

const char* to_string(OutputGate gate) {
  switch (gate) {
    case OutputGate::none: return "none";
    case OutputGate::silu: return "silu";
    case OutputGate::sigmoid: return "sigmoid";
  }
  return "unknown";
}

const char* to_string(OutputNorm norm) {
  switch (norm) {
    case OutputNorm::none: return "none";
    case OutputNorm::before_gate: return "before_gate";
    case OutputNorm::after_gate: return "after_gate";
  }
  return "unknown";
}

const char* to_string(RecurrentConv conv) {
  switch (conv) {
    case RecurrentConv::none: return "none";
    case RecurrentConv::qkv: return "qkv";
    case RecurrentConv::vkq: return "vkq";
  }
  return "unknown";
}

const char* to_string(StateLayout layout) {
  switch (layout) {
    case StateLayout::k_first: return "k_first";
    case StateLayout::v_first: return "v_first";
  }
  return "unknown";
}

int64_t RecurrentSpec::state_bytes() const { return int64_t(state_rows()) * num_v_heads * head_dim_k * head_dim_v * size_of(state_dtype); }

float RecurrentSpec::query_scale() const { return scale != 0 ? scale : 1 / std::sqrt(float(head_dim_k)); }

void RecurrentSpec::validate() const {
  constexpr int kMostHeads = 1 << 16, kMostDim = 256, kMostDrafts = 64;
  const auto is_float = [](DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; };
  check(num_k_heads >= 1 && num_k_heads <= kMostHeads, "recurrent.num_k_heads", "expected 1 to {} key heads, got {}", kMostHeads,
        num_k_heads);
  check(num_v_heads >= 1 && num_v_heads <= kMostHeads && num_v_heads % num_k_heads == 0, "recurrent.num_v_heads",
        "expected a multiple of {} value heads, at most {}, got {}", num_k_heads, kMostHeads, num_v_heads);
  check(head_dim_k >= 1 && head_dim_k <= kMostDim, "recurrent.head_dim_k", "expected 1 to {} dimensions of keys, got {}", kMostDim,
        head_dim_k);
  check(head_dim_v >= 1 && head_dim_v <= kMostDim, "recurrent.head_dim_v", "expected 1 to {} dimensions of values, got {}", kMostDim,
        head_dim_v);
  check(gate <= RecurrentGate::sigmoid, "recurrent.gate", "{} is no gate", int(gate));
  check(layout <= StateLayout::v_first, "recurrent.layout", "{} is no layout of a state", int(layout));
  check(!channel_gate || gate != RecurrentGate::fixed, "recurrent.channel_gate",
        "expected a gate of each token for one of each channel, got {}", to_string(gate));
  check(!channel_rates || gate != RecurrentGate::log, "recurrent.channel_rates", "expected a gate with rates, got {}", to_string(gate));
  check(std::isfinite(gate_min) && std::isfinite(gate_max), "recurrent.gate_limits", "expected finite limits of the gate, got {} and {}",
        gate_min, gate_max);
  if (gate == RecurrentGate::softplus) {
    check(gate_min >= 0 && (gate_max == 0 || gate_max >= gate_min), "recurrent.gate_limits",
          "expected 0 <= gate_min <= gate_max for a softplus, or gate_max 0, got {} and {}", gate_min, gate_max);
  } else if (gate == RecurrentGate::sigmoid) {
    check(gate_min < 0 && gate_max == 0, "recurrent.gate_limits", "expected gate_min < 0 and gate_max 0 for a sigmoid, got {} and {}",
          gate_min, gate_max);
  } else {
    check(gate_min == 0 && gate_max == 0, "recurrent.gate_limits", "expected no limits of a gate {}, got {} and {}", to_string(gate),
          gate_min, gate_max);
  }
  check(delta || (!sigmoid_beta && beta_scale == 1), "recurrent.beta",
        "expected no settings of beta without the delta rule, got factor {}{}", beta_scale, sigmoid_beta ? " of a sigmoid" : "");
  check(std::isfinite(beta_scale), "recurrent.beta", "expected a finite factor of beta, got {}", beta_scale);
  check(!scaled_values || gate == RecurrentGate::softplus, "recurrent.scaled_values", "expected a softplus for scaled values, got {}",
        to_string(gate));
  check(!scaled_values || !channel_gate, "recurrent.scaled_values",
        "expected one gate of a head for scaled values, got one of each channel");
  check(std::isfinite(scale), "recurrent.scale", "expected a finite scale, got {}", scale);
  check(out_gate <= OutputGate::sigmoid, "recurrent.out_gate", "{} is no gate of outputs", int(out_gate));
  check(out_norm <= OutputNorm::after_gate, "recurrent.out_norm", "{} is no norm of outputs", int(out_norm));
  check(out_norm != OutputNorm::after_gate || out_gate != OutputGate::none, "recurrent.out_norm",
        "expected a gate of outputs for a norm behind it, got {}", to_string(out_gate));
  check(norm_groups >= 0 && (norm_groups == 0 || num_v_heads % norm_groups == 0), "recurrent.norm_groups",
        "expected groups that divide {} value heads, or 0 for each head, got {}", num_v_heads, norm_groups);
  check(out_norm != OutputNorm::none || norm_groups == 0, "recurrent.norm_groups", "expected no groups without a norm of outputs, got {}",
        norm_groups);
  check(std::isfinite(norm_eps) && norm_eps > 0, "recurrent.norm_eps", "expected a finite epsilon above 0, got {}", norm_eps);
  constexpr int kLeastWidth = 2, kMostWidth = 8, kMostChannels = 1 << 24;  // of short convolutions
  check(conv <= RecurrentConv::vkq, "recurrent.conv", "{} is no order of convolved channels", int(conv));
  check(conv != RecurrentConv::none || (!conv_bias && conv_silu), "recurrent.conv", "expected no settings of a convolution without one");
  check(conv == RecurrentConv::none || conv_channels() <= kMostChannels, "recurrent.conv", "expected at most {} convolved channels, got {}",
        kMostChannels, conv_channels());
  check(conv_width >= kLeastWidth && conv_width <= kMostWidth, "recurrent.conv_width", "expected {} to {} tokens of a sum, got {}",
        kLeastWidth, kMostWidth, conv_width);
  check(is_float(dtype), "recurrent.dtype", "expected f32, bf16 or f16, got {}", to_string(dtype));
  check(is_float(state_dtype), "recurrent.state_dtype", "expected a state of f32, bf16 or f16, got {}", to_string(state_dtype));
  check(num_drafts >= 0 && num_drafts <= kMostDrafts, "recurrent.num_drafts", "expected 0 to {} drafts, got {}", kMostDrafts, num_drafts);
  check(!tree_drafts || num_drafts > 0, "recurrent.tree_drafts", "expected drafts for trees of them, got {}", num_drafts);
}

std::string RecurrentSpec::str() const {
  std::string text = fmt::format("recurrent q{} v{} k{} v{} {}", num_k_heads, num_v_heads, head_dim_k, head_dim_v, to_string(gate));
  const RecurrentSpec usual;
  for_each_field(*this, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    std::string word = field_text(field, value, default_value);
    if (field.member == "num_drafts") word = num_drafts > 0 ? fmt::format("drafts{}", num_drafts) : "";
    if (field.member == "out_gate" && out_gate != OutputGate::none) word = fmt::format("out_{}", to_string(out_gate));
    if (field.member == "out_norm" && out_norm != OutputNorm::none) word = fmt::format("norm_{}", to_string(out_norm));
    if (field.member == "conv" && conv != RecurrentConv::none) word = fmt::format("conv_{}", to_string(conv));
    if (field.member == "conv_silu") word = conv_silu ? "" : "conv_linear";
    if (field.member.starts_with("num_") && field.member != "num_drafts") word.clear();
    if (field.member.starts_with("head_dim")) word.clear();
    if (!word.empty()) text += " " + word;
  });
  return text + fmt::format(" {} state {} {}", to_string(dtype), to_string(state_dtype), to_string(layout));
}

}  // namespace imbrex
