// ShortConvSpec: printing, and the rules that hold for every backend.
#include <fmt/format.h>

#include "core/check.h"
#include "imbrex/short_conv.h"

namespace imbrex {

void ShortConvSpec::validate() const {
  constexpr int kMostChannels = 1 << 24;
  check(dim >= 1 && dim <= kMostChannels, "short_conv.dim", "expected 1 to {} channels, got {}", kMostChannels, dim);
  check(width >= 2 && width <= 8, "short_conv.width", "expected 2 to 8 tokens, got {}", width);
  check(num_drafts >= 0 && num_drafts <= 64, "short_conv.num_drafts", "expected 0 to 64 drafts, got {}", num_drafts);
  check(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "short_conv.dtype", "expected f32, bf16 or f16, got {}",
        to_string(dtype));
}

std::string ShortConvSpec::str() const {
  std::string text = fmt::format("short_conv d{} w{} {}", dim, width, to_string(dtype));
  if (bias) text += " bias";
  if (num_drafts > 0) text += fmt::format(" drafts{}", num_drafts);
  return text;
}

}  // namespace imbrex
