// ShortConvSpec: printing, and the rules that hold for every backend.
#include <fmt/format.h>

#include <type_traits>

#include "core/check.h"
#include "imbrex/short_conv.h"
#include "short_conv/spec_fields.h"

namespace imbrex {

const char* to_string(ShortConvForm form) {
  switch (form) {
    case ShortConvForm::gated: return "gated";
    case ShortConvForm::plain: return "plain";
  }
  return "unknown";
}

const char* to_string(ShortConvActivation activation) {
  switch (activation) {
    case ShortConvActivation::none: return "none";
    case ShortConvActivation::silu: return "silu";
  }
  return "unknown";
}

void parse_value(const std::string& name, ShortConvForm& form) {
  form = name == "plain" ? ShortConvForm::plain : ShortConvForm::gated;
  check(name == to_string(form), "short_conv.form", "expected gated or plain, got \"{}\"", name);
}

void parse_value(const std::string& name, ShortConvActivation& activation) {
  activation = name == "silu" ? ShortConvActivation::silu : ShortConvActivation::none;
  check(name == to_string(activation), "short_conv.activation", "expected none or silu, got \"{}\"", name);
}

void ShortConvSpec::validate() const {
  constexpr int kMostChannels = 1 << 24;
  check(dim >= 1 && dim <= kMostChannels, "short_conv.dim", "expected 1 to {} channels, got {}", kMostChannels, dim);
  check(width >= 2 && width <= 8, "short_conv.width", "expected 2 to 8 tokens, got {}", width);
  check(num_drafts >= 0 && num_drafts <= 64, "short_conv.num_drafts", "expected 0 to 64 drafts, got {}", num_drafts);
  check(!tree_drafts || num_drafts > 0, "short_conv.tree_drafts", "expected drafts for trees of them, got {}", num_drafts);
  check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "short_conv.dtype", "expected f32, bf16 or f16, got {}",
        to_string(dtype));
  check(form <= ShortConvForm::plain, "short_conv.form", "expected gated (0) or plain (1), got {}", int(form));
  check(activation <= ShortConvActivation::silu, "short_conv.activation", "expected none (0) or silu (1), got {}", int(activation));
  check(form == ShortConvForm::plain || activation == ShortConvActivation::none, "short_conv.activation",
        "expected no activation in the gated form, got {}", to_string(activation));
}

std::string ShortConvSpec::str() const {
  std::string text = fmt::format("short_conv d{} w{} {}", dim, width, to_string(dtype));
  const ShortConvSpec usual;
  for_each_field(*this, usual, [&](const SpecField& field, const auto& value, const auto& default_value) {
    if (field.feature.empty()) return;  // every layer has it: it is said already
    std::string word = field_text(field, value, default_value);
    if constexpr (std::is_enum_v<std::remove_cvref_t<decltype(value)>>) word = value != default_value ? to_string(value) : "";
    if (field.member == "num_drafts") word = num_drafts > 0 ? fmt::format("drafts{}", num_drafts) : "";
    if (!word.empty()) text += " " + word;
  });
  return text;
}

}  // namespace imbrex
