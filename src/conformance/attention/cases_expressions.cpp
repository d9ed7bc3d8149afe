// Layers with expressions of the user's: what spec.h says in another way, and what nothing else says; of every kind of step, at borders of
// tiles and of splits, beside masks, biases and sinks of the spec.
#include "conformance/attention/case_table.h"

namespace imbrex {

void add_expression_cases(CaseTable& table) {
  struct Variant {
    const char* name;
    const char *mask_mod, *score_mod;  // texts; "": none
    Mask mask = {.causal = false};
    ScoreMod score = {};
  };
  const Variant variants[] = {
      {"causal", "kv <= q", ""},
      {"window", "q_len > 0 & kv <= q & q - kv < 40", ""},  // with the first term backends do not take it for Mask's
      {"first_keys", "kv < 4 | q - kv < 9", "", {.causal = true}},
      {"documents", "int doc[,]; doc[batch, q] == doc[batch, kv] & kv <= q", ""},
      {"prefix", "int prefix[]; kv < prefix[batch] | kv <= q", ""},
      {"heads", "kv <= q & (head % 2 == 0 | q - kv < 7)", "", {}, {.sinks = true}},
      {"nothing", "q % 3 == 1 & kv <= q", ""},
      {"scattered", "(q * 7 + kv * 13) % 5 < 2", "", {.causal = true, .window_left = 60}},
      {"of_requests", "bool shown[]; shown[batch] | kv == q", ""},
      {"scale", "", "1.25 * score", {}},
      {"soft_cap", "", "20 * tanh(score / 20)", {}},
      {"alibi", "", "float slope[]; score + 0.01 * slope[head] * float(kv - q)", {}},
      {"hidden", "", "where(kv <= q & kv % 3 != 1, score, -inf)"},
      {"bias", "", "float bias[,]; score + bias[head, kv]", {.causal = true, .window_left = 50}},
      {"biased_cap", "", "score - 0.02 * abs(float(q - kv))", {}, {.soft_cap = 25.f, .alibi = true}},
      {"both", "kv <= q & kv % 4 != 2", "float slope[]; score * exp(0.1 * slope[head])", {}, {.head_scales = true, .sinks = true}},
      {"both_documents", "int doc[,]; doc[batch, q] == doc[batch, kv]", "int doc[,]; score + 0.1 * float(doc[batch, kv])", {}},
  };
  const auto set = [](Case& c, const Variant& v) {
    c.spec.mask = v.mask, c.spec.score = v.score;
    if (*v.mask_mod != 0) c.spec.mask_mod = parse_expression(v.mask_mod);
    if (*v.score_mod != 0) c.spec.score_mod = parse_expression(v.score_mod);
  };
  const Requests border{{8, 131}, {130, 260}, {1, 64}, {20, 140}, {7, 129}, {5, 130}}, mixed{{90, 150}, {0, 0}, {8, 60}, {0, 9}, {1, 300}};
  const NamedRequests steps[] = {{"decode", kDecode}, {"border", border}, {"mixed", mixed}};
  for (const Variant& v : variants) {
    for (const NamedRequests& step : steps) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("expression_{}_{}", v.name, step.name), i % 3 == 0 ? 4 : 1, i % 3 == 0 ? 1 : 2, {64, 64}, table.types(),
                    step.requests),
          v);
    }
    for (const DTypes types : {kDTypes[0], kDTypes[1]})
      set(table.add(fmt::format("expression_{}_d128_{}", v.name, to_string(types.q)), 3, 2, {128, 128}, types,
                    Requests{{16, 300}, {200, 200}, {1, 513}}),
          v);
  }
  const Requests long_ones{{1, 9000}, {3, 4100}, {2, 4500}};
  for (const size_t i : {1u, 2u, 3u, 11u})
    set(table.add(fmt::format("expression_{}_long", variants[i].name), 4, 1, {64, 64}, kDTypes[i % 2], long_ones), variants[i]);
  for (const int block_size : {0, 1, 5}) {
    Case& c = table.add(fmt::format("expression_documents_page{}", block_size), 2, 2, {64, 64}, kDTypes[0], border);
    set(c, variants[3]);
    c.spec.block_size = block_size, c.csr = block_size == 1;
  }
  for (const size_t i : {3u, 11u}) {
    Case& c = table.add(fmt::format("expression_{}_latent", variants[i].name), 4, 1, {128, 64}, kDTypes[0], border);
    set(c, variants[i]);
    c.spec.kv_format = KvFormat::latent;
  }
}

}  // namespace imbrex
