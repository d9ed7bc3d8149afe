// Variants of a mask and of a position bias: chunks with a lookback, and ALiBi by square roots. In every kind of step, in encoders, and in
// prefill of several tiles.
#include "conformance/attention/case_table.h"

namespace imbrex {

void add_variant_cases(CaseTable& table) {
  struct Variant {
    const char* name;
    Mask mask;
    ScoreMod score;
  };
  const Variant variants[] = {
      {"mask_lookback", {.chunk = 16, .chunk_lookback = 2}, {}},
      {"mask_lookback_bidirectional", {.causal = false, .chunk = 32, .chunk_lookback = 1}, {}},
      {"mask_lookback_window", {.window_left = 50, .chunk = 20, .chunk_lookback = 3}, {}},
      {"mask_lookback_far", {.chunk = 1 << 30, .chunk_lookback = 1 << 30}, {}},
      {"score_alibi_sqrt", {}, {.alibi = true, .alibi_sqrt = true}},
      {"score_alibi_sqrt_both", {.causal = false}, {.alibi = true, .alibi_sqrt = true, .sinks = true}},
      {"score_alibi_sqrt_cap", {.window_left = 63}, {.head_scales = true, .soft_cap = 10.f, .alibi = true, .alibi_sqrt = true}},
      {"score_alibi_sqrt_lookback", {.chunk = 24, .chunk_lookback = 1}, {.alibi = true, .alibi_sqrt = true}},
  };
  for (const Variant& v : variants)
    for (const NamedRequests& step : kSteps) {
      const size_t i = table.cases.size();
      Case& c = table.add(fmt::format("{}_{}", v.name, step.name), i % 2 == 0 ? 4 : 1, i % 2 == 0 ? 1 : 2, {64, 64}, table.types(),
                          step.requests);
      c.spec.mask = v.mask;
      c.spec.score = v.score;
    }

  const Requests encoded{{50, 50}, {0, 0}, {131, 131}, {1, 1}};
  for (const DTypes types : {kDTypes[0], kDTypes[1]}) {
    Case& c = table.add(fmt::format("mask_encoder_only_alibi_sqrt_{}", to_string(types.q)), 1, 2, {64, 64}, types, encoded);
    c.spec.kind = AttentionKind::encoder_only;
    c.spec.mask.causal = false;
    c.spec.block_size = 0;
    c.spec.score.alibi = c.spec.score.alibi_sqrt = true;
  }

  const DTypes kTiles[] = {kDTypes[0], kDTypes[2], kDTypes[3], {DType::fp8_e4m3, DType::fp8_e4m3}};
  const Requests several[] = {{{150, 220}}, {{66, 190}, {1, 40}}, {{40, 300}, {0, 9}, {35, 35}}};
  for (const Dims dims : {Dims{64, 64}, {128, 128}})
    for (const DTypes types : kTiles)
      for (const bool alibi : {false, true}) {
        const size_t i = table.cases.size();
        const char* name = alibi ? "alibi_sqrt" : "lookback";
        Case& c = table.add(fmt::format("prefill_{}_{}_{}_{}", dims_name(dims), name, to_string(types.q), to_string(types.kv)), 4, 1, dims,
                            types, several[i % 3]);
        c.order = "lbthd";
        if (alibi)
          c.spec.score.alibi = c.spec.score.alibi_sqrt = true;
        else
          c.spec.mask.chunk = 40, c.spec.mask.chunk_lookback = 1;
      }
}

// Custom masks with a bit for each query and key: requests whose bits end within a byte, prompts of more than a tile of queries and keys,
// and few queries; with csr there are gaps between requests.
void add_packed_cases(CaseTable& table) {
  const Requests prompts{{100, 160}, {3, 77}, {40, 601}}, documents{{150, 350}, {0, 9}, {5, 325}, {1, 301}};
  struct Step {
    const char* name;
    const Requests& requests;
    CustomPattern pattern;
  };
  const Step steps[] = {{"decode", kDecode, CustomPattern::random}, {"verify", kVerify, CustomPattern::tree},
                        {"mixed", kMixed, CustomPattern::blind},    {"chunked", kChunked, CustomPattern::random},
                        {"prompts", prompts, CustomPattern::blind}, {"documents", documents, CustomPattern::documents}};
  for (const Step& step : steps)
    for (const Dims dims : {Dims{64, 64}, {128, 128}})
      for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]}) {
        const size_t i = table.cases.size();
        Case& c = table.add(fmt::format("packed_{}_{}_{}_{}", step.name, dims_name(dims), to_string(types.q), to_string(types.kv)),
                            i % 2 == 0 ? 4 : 1, i % 2 == 0 ? 1 : 2, dims, types, step.requests);
        c.spec.mask = {.causal = i % 3 == 0, .window_left = i % 5 == 0 ? 90 : -1, .custom = true};
        c.custom = step.pattern, c.packed_mask = true, c.csr = i % 4 == 1;
      }
  for (const NamedRequests& step : {kSteps[0], kSteps[3]}) {
    Case& c = table.add(fmt::format("packed_latent_{}", step.name), 16, 1, {576, 512}, kDTypes[0], step.requests);
    c.spec.kv_format = KvFormat::latent, c.spec.block_size = 64;
    c.spec.mask.custom = true, c.custom = CustomPattern::random, c.packed_mask = true;
  }
}

// Masks of the caller's beside scores that are more than q.k times a scale, with many dims.
void add_wide_mask_cases(CaseTable& table) {
  const Requests requests{{90, 200}, {0, 9}, {5, 325}, {1, 301}};
  struct Variant {
    const char* name;
    ScoreMod score;
    const char* score_mod = "";
  };
  const Variant variants[] = {{"capped", {.soft_cap = 20.f}},
                              {"alibi", {.alibi = true}},
                              {"scaled", {.head_scales = true, .sinks = true}},
                              {"biased", {}, "float bias[,]; score + bias[head, kv]"},
                              {"modified", {.sinks = true}, "20 * tanh(score / 20)"}};
  for (const Variant& v : variants)
    for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]})
      for (const bool expression : {false, true}) {
        Case& c =
            table.add(fmt::format("wide_{}_{}_{}_{}", v.name, expression ? "documents" : "packed", to_string(types.q), to_string(types.kv)),
                      2, 2, {256, 256}, types, requests);
        c.spec.mask.causal = false, c.spec.score = v.score;
        if (*v.score_mod != 0) c.spec.score_mod = parse_expression(v.score_mod);
        if (expression) {
          c.spec.mask_mod = parse_expression("int doc[,]; doc[batch, q] == doc[batch, kv] & kv <= q");
        } else {
          c.spec.mask.window_left = 150, c.spec.mask.custom = true;
          c.custom = CustomPattern::documents, c.packed_mask = true;
        }
      }
}

}  // namespace imbrex
