// Masks of engines and models that are said as expressions: items that are scored behind one prompt, retained prompts, static sinks, the
// parts of dual-chunk attention, images beside windows, and the biases of windows of an image. docs/variants.md has pictures of them.
#include "conformance/attention/case_table.h"

namespace imbrex {
namespace {

struct Variant {
  const char* name;
  const char *mask_mod, *score_mod;  // texts; "": none
  Mask mask = {};
  ScoreMod score = {};
};

void set(Case& c, const Variant& v) {
  c.spec.mask = v.mask, c.spec.score = v.score;
  if (*v.mask_mod != 0) c.spec.mask_mod = parse_expression(v.mask_mod);
  if (*v.score_mod != 0) c.spec.score_mod = parse_expression(v.score_mod);
}

// Decoders: in every kind of step, and with several tiles of queries and keys.
void add_decoders(CaseTable& table) {
  const Variant variants[] = {
      {"items", "int item[,]; item[batch, kv] == 0 | item[batch, q] == item[batch, kv]", ""},
      {"retained", "int prefix[]; kv < prefix[batch] | q - kv < 11", ""},
      {"static_sinks", "kv < 16 | q - kv < 24", "", {}, {.sinks = true}},
      {"dual_intra", "", "", {.chunk = 24}},
      {"dual_successive", "q // 24 == kv // 24 + 1", "", {.causal = false}},
      {"dual_inter", "q // 24 > kv // 24 + 1", "", {.causal = false}},
      {"images", "int image[,]; image[batch, q] == image[batch, kv] & image[batch, kv] % 2 == 1 | kv <= q", "", {.causal = false}},
      {"images_window",
       "int image[,]; image[batch, q] == image[batch, kv] & image[batch, kv] % 2 == 1 | kv <= q & q - kv < 20",
       "",
       {.causal = false}},
  };
  const Requests several[] = {{{150, 220}}, {{66, 190}, {1, 40}}, {{40, 300}, {0, 9}, {35, 35}}};
  for (const Variant& v : variants) {
    for (const NamedRequests& step : kSteps) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("variant_{}_{}", v.name, step.name), i % 2 == 0 ? 4 : 1, i % 2 == 0 ? 1 : 2, {64, 64}, table.types(),
                    step.requests),
          v);
    }
    for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]}) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("variant_{}_tiles_{}_{}", v.name, to_string(types.q), to_string(types.kv)), 4, 1, {128, 128}, types,
                    several[i % 3]),
          v);
    }
  }
}

// Encoders, whose keys have no pages. Swin: a table of biases for each head, and windows whose regions do not see each other; BEiT: the
// table alone.
void add_encoders(CaseTable& table) {
  const Variant variants[] = {
      {"bias", "", "float bias[,,]; score + bias[head, q, kv]", {.causal = false}},
      {"shifted", "int region[,]; region[batch, q] == region[batch, kv]", "float bias[,,]; score + bias[head, q, kv]", {.causal = false}},
  };
  const Requests windows{{49, 49}, {49, 49}, {0, 0}, {144, 144}, {1, 1}};
  for (const Variant& v : variants)
    for (const Dims dims : {Dims{64, 64}, {128, 128}})
      for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[2]}) {
        Case& c = table.add(fmt::format("variant_{}_{}_{}", v.name, dims_name(dims), to_string(types.q)), 1, 3, dims, types, windows);
        set(c, v);
        c.spec.kind = AttentionKind::encoder_only, c.spec.block_size = 0;
      }
}

}  // namespace

void add_mask_cases(CaseTable& table) {
  add_decoders(table);
  add_encoders(table);
}

}  // namespace imbrex
