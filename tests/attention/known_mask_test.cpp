// Which masks of the user's have names in the spec.
#include "attention/known_mask.h"

#include <gtest/gtest.h>

#include "attention/mask.h"
#include "imbrex/bound_expression.h"

namespace imbrex {
namespace {

AttentionSpec layer(const char* mask_mod, const Mask& mask = {.causal = false}) {
  AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64};
  spec.mask = mask, spec.mask_mod = parse_expression(mask_mod);
  return spec;
}

TEST(KnownMask, IsSaidByTheSpec) {
  struct Known {
    const char* text;
    Mask mask, beside = {.causal = false};
  };
  const Known cases[] = {
      {"kv <= q", {.causal = true}},
      {"q >= kv", {.causal = true}},
      {"kv < q + 1", {.causal = true}},
      {"q - kv >= 0", {.causal = true}},
      {"0 <= q - kv", {.causal = true}},
      {"kv - q <= 0 & true", {.causal = true}},
      {"kv <= q & q - kv < 128", {.causal = true, .window_left = 127}},
      {"kv > q - 128 & q >= kv", {.causal = true, .window_left = 127}},
      {"kv + 128 > q & kv <= q", {.causal = true, .window_left = 127}},
      {"kv <= q & q - kv < 128 & q - kv <= 30", {.causal = true, .window_left = 30}},
      {"q - kv <= 20 & kv - q <= 9", {.causal = false, .window_left = 20, .window_right = 9}},
      {"abs(q - kv) <= 4", {.causal = false, .window_left = 4, .window_right = 4}},
      {"abs(kv - q) < 4 & kv <= q", {.causal = true, .window_left = 3}},
      {"q - kv < 128", {.causal = true, .window_left = 99}, {.causal = true, .window_left = 99}},
      {"q - kv < 50", {.causal = true, .window_left = 49}, {.causal = true, .window_left = 99}},
      {"-kv >= -q", {.causal = true, .chunk = 64, .chunk_lookback = 1}, {.causal = false, .chunk = 64, .chunk_lookback = 1}},
      {"kv <= q", {.causal = true}, {.causal = false, .window_right = 5}},
      {"true", {.causal = false}},
  };
  for (const Known& c : cases) {
    const AttentionSpec given = layer(c.text, c.beside), known = with_known_mask(given);
    EXPECT_TRUE(known.mask_mod.empty()) << c.text;
    EXPECT_EQ(known.mask, c.mask) << c.text << ": " << known.mask.str();
    known.validate();
    const BoundExpression mask(given.mask_mod, {});
    for (int q = 0; q < 300; ++q)
      for (int kv = 0; kv < 300; ++kv) {
        const bool shown = mask_allows(c.beside, q, kv) && mask.evaluate({.q = q, .kv = kv, .q_len = 300, .kv_len = 300}).boolean();
        ASSERT_EQ(mask_allows(known.mask, q, kv), shown) << c.text << " at " << q << ", " << kv;
      }
  }
}

TEST(KnownMask, OthersStayAsTheyAre) {
  for (const char* text :
       {"kv < q", "kv <= q + head", "kv <= q & q_len > 0", "kv <= q | kv < 4", "q - kv > 3", "kv <= 2 * q", "q < 5", "false",
        "kv <= q & q // 8 == kv // 8", "int doc[]; kv <= q & doc[q] == doc[kv]", "float(kv) <= float(q)", "abs(q - kv) > 4", "q - kv < -3",
        "abs(q - kv) < 0", "q + kv < 9", "kv != q", "kv <= q + 2147483647", "bool shown[]; shown[kv]"}) {
    const AttentionSpec given = layer(text);
    EXPECT_EQ(with_known_mask(given), given) << text;
  }
  AttentionSpec none = layer("kv <= q");
  none.mask_mod = {};
  EXPECT_EQ(with_known_mask(none), none);
}

}  // namespace
}  // namespace imbrex
