// Queries whose positions the batch gives: under every kind of mask and position bias, in every kind of step, and in prefill of several
// tiles.
#include "conformance/attention/case_table.h"

namespace imbrex {

void add_position_cases(CaseTable& table) {
  struct Variant {
    const char* name;
    PositionPattern positions;
    Mask mask;
    ScoreMod score;
    CustomPattern custom = CustomPattern::none;
  };
  using enum PositionPattern;
  const Variant variants[] = {
      {"spans", spans, {}, {}},
      {"spans_window", spans, {.window_left = 40}, {.sinks = true}},
      {"zigzag", zigzag, {}, {}},
      {"zigzag_window", zigzag, {.causal = false, .window_left = 20, .window_right = 9}, {.soft_cap = 20.f}},
      {"zigzag_chunk", zigzag, {.chunk = 24, .chunk_lookback = 1}, {}},
      {"zigzag_alibi", zigzag, {}, {.alibi = true}},
      {"tree", tree, {.causal = false, .custom = true}, {.alibi = true}, CustomPattern::tree},
      {"tree_relative",
       tree,
       {.causal = false, .window_left = 60, .custom = true},
       {.relative_buckets = 32, .relative_max_distance = 128, .relative_bidirectional = true},
       CustomPattern::tree},
  };
  const auto set = [](Case& c, const Variant& v) {
    c.positions = v.positions, c.custom = v.custom;
    c.spec.mask = v.mask, c.spec.mask.positions = true;
    c.spec.score = v.score;
  };
  for (const Variant& v : variants) {
    for (const NamedRequests& step : kSteps) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("position_{}_{}", v.name, step.name), i % 2 == 0 ? 4 : 1, i % 2 == 0 ? 1 : 2, {64, 64}, table.types(),
                    step.requests),
          v);
    }
    const Requests several[] = {{{150, 220}}, {{66, 190}, {1, 40}}, {{40, 300}, {0, 9}, {35, 35}}};
    for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]}) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("position_{}_tiles_{}_{}", v.name, to_string(types.q), to_string(types.kv)), 4, 1, {128, 128}, types,
                    several[i % 3]),
          v);
    }
  }
  // More keys than a split has, and an encoder.
  set(table.add("position_zigzag_long", 4, 1, {64, 64}, kDTypes[1], {{4, 9000}, {1, 4500}, {16, 5000}}), variants[2]);
  Case& encoder = table.add("position_zigzag_encoder", 1, 2, {64, 64}, kDTypes[1], {{50, 50}, {0, 0}, {131, 131}});
  set(encoder, variants[3]);
  encoder.spec.kind = AttentionKind::encoder_only, encoder.spec.block_size = 0;
}

}  // namespace imbrex
