// The one table of attention cases, made by composing axes. A new feature gets an axis here, and every backend is tested on it.
#include "conformance/attention/cases.h"

#include <algorithm>

#include "conformance/attention/case_table.h"

namespace imbrex {
namespace {

// Group sizes and head dimensions of all models known, short sequences.
void add_shapes(CaseTable& table) {
  const Requests short_ones[] = {{{1, 37}, {1, 5}}, {{9, 9}, {1, 2}}, {{5, 29}}, {{3, 21}, {0, 0}, {1, 1}}};
  const Dims all_dims[] = {{8, 8},     {24, 24},   {64, 64},   {72, 72},   {80, 80},   {96, 96},  {112, 112},
                           {128, 128}, {192, 128}, {224, 224}, {256, 256}, {512, 512}, {576, 512}};
  for (int group : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 71})
    for (const Dims dims : all_dims)
      table.add(fmt::format("shape_g{}_{}", group, dims_name(dims)), group, group > 8 ? 1 : 2, dims, table.types(),
                short_ones[table.cases.size() % 4]);
}

// Lengths around the sizes of tiles and pages.
void add_lengths(CaseTable& table) {
  for (int length : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 300})
    for (bool prefill : {false, true})
      for (DTypes types : {kDTypes[0], kDTypes[1]})
        table.add(fmt::format("length_{}_{}_{}", length, prefill ? "prefill" : "decode", to_string(types.q)), prefill ? 2 : 4, 1, {64, 64},
                  types, {{prefill ? length : 1, length}});
}

void add_dtypes(CaseTable& table) {
  for (DType q : {DType::f32, DType::bf16, DType::f16})
    for (DType kv : {DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2})
      for (const NamedRequests& step : kSteps)
        table.add(fmt::format("dtype_{}_{}_{}", to_string(q), to_string(kv), step.name), 3, 2, {64, 48}, {q, kv}, step.requests);
  for (DType kv : {DType::fp8_e4m3, DType::fp8_e5m2})
    for (const NamedRequests& step : kSteps) {
      table.add(fmt::format("dtype_heads_{}_{}", to_string(kv), step.name), 2, 3, {64, 64}, {DType::bf16, kv}, step.requests)
          .scale_per_head = true;
      // Saturates: values beyond 448 (57344) times the scale are cut.
      table.add(fmt::format("dtype_saturated_{}_{}", to_string(kv), step.name), 2, 1, {64, 64}, {DType::bf16, kv}, step.requests).kv_scale =
          kv == DType::fp8_e4m3 ? 0.004f : 0.00003f;
    }
  for (const NamedRequests& step : kSteps)  // a peaked softmax shows errors of the logits
    for (DTypes types : {kDTypes[0], kDTypes[1], kDTypes[2]})
      table.add(fmt::format("dtype_peaked_{}_{}", to_string(types.q), step.name), 2, 1, {128, 128}, types, step.requests).q_gain = 6.f;
}

struct NamedMask {
  const char* name;
  Mask mask;
  CustomPattern custom = CustomPattern::none;
};

void add_masks(CaseTable& table) {
  const NamedMask masks[] = {
      {"bidirectional", {.causal = false}},
      {"window_1", {.window_left = 0}},
      {"window_4", {.window_left = 3}},
      {"window_128", {.window_left = 127}},
      {"window_both", {.causal = false, .window_left = 8, .window_right = 8}},
      {"window_right", {.causal = false, .window_right = 4}},
      {"chunk_16", {.chunk = 16}},
      {"chunk_100", {.chunk = 100}},
      {"chunk_bidirectional", {.causal = false, .chunk = 32}},
      {"window_chunk", {.window_left = 20, .chunk = 48}},
      {"custom_random", {.causal = false, .custom = true}, CustomPattern::random},
      {"custom_causal", {.causal = true, .custom = true}, CustomPattern::random},
      {"custom_tree", {.causal = true, .custom = true}, CustomPattern::tree},
      {"custom_blind", {.causal = false, .custom = true}, CustomPattern::blind},
      {"custom_window", {.causal = true, .window_left = 30, .custom = true}, CustomPattern::random},
  };
  for (const NamedMask& m : masks)
    for (const NamedRequests& step : kSteps) {
      Case& c = table.add(fmt::format("mask_{}_{}", m.name, step.name), 4, 1, {64, 64}, table.types(), step.requests);
      c.spec.mask = m.mask;
      c.custom = m.custom;
    }

  const Requests encoded{{50, 50}, {0, 0}, {131, 131}, {1, 1}}, crossed{{1, 60}, {0, 0}, {9, 3}, {30, 129}, {4, 0}};
  for (AttentionKind kind : {AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder})
    for (DTypes types : {kDTypes[0], kDTypes[1], kDTypes[2]})
      for (int variant = 0; variant < 4; ++variant) {
        const bool cross = kind == AttentionKind::encoder_decoder;
        const char* names[] = {"full", cross ? "paged" : "window", "alibi", "relative"};
        Case& c = table.add(fmt::format("mask_{}_{}_{}", to_string(kind), names[variant], to_string(types.q)), 1, 2, {64, 64}, types,
                            cross ? crossed : encoded);
        c.spec.kind = kind;
        c.spec.mask.causal = false;
        c.spec.block_size = cross && variant == 1 ? 16 : 0;
        if (!cross && variant == 1) c.spec.mask.window_left = c.spec.mask.window_right = 20;
        if (variant == 2) c.spec.score.alibi = true;
        if (variant == 3) {
          c.spec.score.relative_buckets = 32;
          c.spec.score.relative_max_distance = 128;
          c.spec.score.relative_bidirectional = true;
        }
      }
}

// Page sizes, tables and physical orders; ragged keys too.
void add_pages(CaseTable& table) {
  for (int block_size : {0, 1, 3, 16, 32, 64, 128, 544})
    for (bool csr : {false, true})
      for (const char* order : {"lbhtd", "lbthd", "blhtd", "hlbtd", "lbhdt"}) {
        if (block_size == 0 && (csr || std::string_view(order) != "lbhtd")) continue;
        Case& c = table.add(fmt::format("page_b{}_{}_{}", block_size, csr ? "csr" : "dense", order), 2, 2, {64, 64}, table.types(), kMixed);
        c.spec.block_size = block_size;
        c.csr = csr;
        c.order = order;
      }
}

struct NamedScore {
  const char* name;
  ScoreMod score;
  int window_left = -1;
  bool causal = true;
};

void add_scores(CaseTable& table) {
  const NamedScore scores[] = {
      {"scale", {.scale = 0.3f}},
      {"cap_30", {.soft_cap = 30.f}},
      {"cap_2", {.soft_cap = 2.f}},
      {"head_scales", {.head_scales = true}},
      {"alibi", {.alibi = true}},
      {"relative", {.relative_buckets = 32, .relative_max_distance = 128}},
      {"relative_both", {.relative_buckets = 32, .relative_max_distance = 64, .relative_bidirectional = true}, -1, false},
      {"sinks", {.sinks = true}},
      {"sinks_window", {.sinks = true}, 31},
      {"cap_sinks", {.soft_cap = 20.f, .sinks = true}},
      {"cap_window", {.soft_cap = 50.f}, 63},
      {"head_scales_cap_alibi", {.head_scales = true, .soft_cap = 10.f, .alibi = true}},
      {"alibi_sinks", {.alibi = true, .sinks = true}},
      {"relative_sinks", {.relative_buckets = 16, .relative_max_distance = 40, .sinks = true}},
  };
  for (const NamedScore& s : scores)
    for (const NamedRequests& step : kSteps)
      for (int group : {1, 6}) {
        Case& c = table.add(fmt::format("score_{}_g{}_{}", s.name, group, step.name), group, 2, {64, 64}, table.types(), step.requests);
        c.spec.score = s.score;
        c.spec.mask.window_left = s.window_left;
        c.spec.mask.causal = s.causal;
      }
}

// Contexts around multiples of 4096 keys, where CPU plans split.
void add_long(CaseTable& table) {
  for (int length : {4095, 4096, 4097, 8193, 12289})
    for (int q_len : {1, 4, 17})
      for (const char* what : {"causal", "window", "sinks", "fp8", "f32"}) {
        const std::string_view kind = what;
        if (q_len == 17 && (length > 4097 || kind != "causal")) continue;
        const DTypes types = kind == "fp8" ? kDTypes[3] : kind == "f32" ? kDTypes[1] : kDTypes[0];
        Case& c = table.add(fmt::format("long_{}_q{}_{}", length, q_len, what), q_len == 1 ? 2 : 1, 1, {64, 64}, types,
                            {{q_len, length}, {1, 50}});
        c.spec.block_size = 64;
        if (kind == "window") c.spec.mask.window_left = 4200;
        if (kind == "sinks") c.spec.score.sinks = true;
      }
}

// Batches of everything at once, in an order that a seed decides.
void add_mixed(CaseTable& table) {
  uint64_t state = 12345;
  const auto below = [&](int n) { return int((state = state * 6364136223846793005ull + 1442695040888963407ull) >> 33) % n; };
  for (int i = 0; i < 24; ++i) {
    Requests requests;
    for (int r = 0, count = 1 + below(9); r < count; ++r) {
      const int context = below(120);
      switch (below(6)) {
        case 0: requests.push_back({0, 0}); break;
        case 1: requests.push_back({0, context}); break;
        case 2: requests.push_back({1, context + 1}); break;
        case 3: requests.push_back({2 + below(15), context + 20}); break;
        case 4: requests.push_back({context + 1, context + 1}); break;
        case 5: requests.push_back({1 + below(40), context + 41}); break;
      }
    }
    Case& c = table.add(fmt::format("mixed_{}", i), 1 + below(5), 1 + below(2), {64, 64}, table.types(), requests);
    c.csr = i % 2 == 1;
    if (i % 3 == 1) c.spec.mask.window_left = 40;
    if (i % 4 == 2) c.spec.score.sinks = true;
    if (i % 5 == 3) c.spec.block_size = 128;
  }
  table.add("mixed_only_padding", 2, 1, {64, 64}, kDTypes[0], {{0, 0}, {0, 0}});
  table.add("mixed_no_request", 2, 1, {64, 64}, kDTypes[0], {});
}

void add_verifies(CaseTable& table) {
  for (int q_len = 2; q_len <= 16; ++q_len)
    for (int group : {1, 5})
      table.add(fmt::format("verify_q{}_g{}", q_len, group), group, 1, {128, 128}, table.types(), {{q_len, 130 + q_len}, {q_len, q_len}});
}

struct NamedValues {
  const char* name;
  ValuePattern pattern;
};
const NamedValues kValues[] = {{"rising", ValuePattern::rising},
                               {"falling", ValuePattern::falling},
                               {"spike", ValuePattern::spike},
                               {"large", ValuePattern::large},
                               {"constant", ValuePattern::constant}};

// Logits with a trend: from one row of an item to several blocks of rows, over three to five blocks of keys.
void add_value_shapes(CaseTable& table, const NamedValues& values) {
  const Dims few_rows[] = {{128, 128}, {80, 80}, {256, 256}, {64, 64}, {192, 128}}, more_rows[] = {{64, 64}, {128, 128}};
  const int block_sizes[] = {16, 1, 128};
  for (int group : {1, 4, 8})
    for (int q_len : {1, 4, 8, 16, 40, 200}) {
      const int i = int(table.cases.size()), rows = q_len * group;
      // Work is limited.
      const int queries = q_len < 200 ? q_len : group == 1 ? 150 : 66, keys = rows <= 8 ? 260 : rows <= 32 ? 430 : q_len < 200 ? 390 : 270;
      const Dims dims = rows <= 8 ? few_rows[i % 5] : rows <= 32 ? more_rows[i % 3 == 2] : Dims{rows < 160 ? 64 : 32, 64};
      Case& c = table.add(fmt::format("value_{}_g{}_q{}", values.name, group, q_len), group, 1, dims, kDTypes[i % 5 == 4 ? 3 : 0],
                          {{queries, keys + i % 7}});
      if (i % 3 == 0) c.requests.push_back({.q_len = 1, .seq_len = 130, .id = 1});
      c.spec.block_size = block_sizes[i % 3];
      c.values = values.pattern;
    }
}

// With whatever else moves, hides or weighs logits, and in every element type; 20 rows for the first request and 4 for the second.
void add_value_features(CaseTable& table, const NamedValues& values) {
  const DTypes bf16 = kDTypes[0];
  const NamedFeature features[] = {
      {"sinks", 1, bf16, [](Case& c) { c.spec.score.sinks = true; }},
      {"cap", 1, bf16, [](Case& c) { c.spec.score.soft_cap = 30.f; }},
      {"window", 1, bf16, [](Case& c) { c.spec.mask.window_left = 199; }},
      {"chunk", 1, bf16, [](Case& c) { c.spec.mask.chunk = 200; }},
      {"alibi", 1, bf16, [](Case& c) { c.spec.score.alibi = true; }},
      {"head_scales", 1, bf16, [](Case& c) { c.spec.score.head_scales = true; }},
      {"custom", 1, bf16, [](Case& c) { c.spec.mask.custom = true, c.custom = CustomPattern::random; }},
      {"e4m3", 2, kDTypes[3], [](Case& c) { c.scale_per_head = true; }},
      {"e5m2", 1, {DType::bf16, DType::fp8_e5m2}, [](Case&) {}},
      {"f32", 1, kDTypes[1], [](Case&) {}},
      {"f16", 1, kDTypes[2], [](Case&) {}},
      {"f16_e5m2", 1, kDTypes[5], [](Case& c) { c.spec.score.sinks = true; }},
  };
  for (const NamedFeature& f : features) {
    Case& c = table.add(fmt::format("value_{}_{}", values.name, f.name), 4, f.kv_heads, {64, 64}, f.types, {{5, 390}, {1, 130}});
    f.set(c);
    c.values = values.pattern;
  }
}

// Across the 4096 keys at which CPU plans split.
void add_value_split(CaseTable& table, const NamedValues& values, int q_len, int seq_len) {
  Case& c = table.add(fmt::format("value_{}_split_q{}", values.name, q_len), 4, 1, {64, 64}, kDTypes[0], {{q_len, seq_len}});
  c.spec.block_size = 64;
  c.values = values.pattern;
}

void add_values(CaseTable& table) {
  for (const NamedValues& values : kValues) {
    add_value_shapes(table, values);
    add_value_features(table, values);
    add_value_split(table, values, 5, 4230);
    if (values.pattern == ValuePattern::rising || values.pattern == ValuePattern::spike) add_value_split(table, values, 1, 4100);
  }
}

std::vector<Case> make_cases() {
  CaseTable table;
  add_shapes(table);
  add_lengths(table);
  add_dtypes(table);
  add_masks(table);
  add_pages(table);
  add_scores(table);
  add_long(table);
  add_mixed(table);
  add_verifies(table);
  add_values(table);
  add_prefill_cases(table);
  add_variant_cases(table);
  add_latent_cases(table);
  add_position_cases(table);
  add_record_cases(table);
  add_tree_cases(table);
  add_expression_cases(table);
  add_packed_cases(table);
  add_mask_cases(table);
  add_latent_tree_cases(table);
  add_wide_mask_cases(table);
  add_latent_masks(table);  // new ones last: a case's seed and types depend on how many are in front of it
  return std::move(table.cases);
}

}  // namespace

std::span<const Case> cases() {
  static const std::vector<Case> table = make_cases();
  return table;
}

const Case* find_case(std::string_view name) {
  for (const Case& c : cases())
    if (c.name == name) return &c;
  return nullptr;
}

}  // namespace imbrex
