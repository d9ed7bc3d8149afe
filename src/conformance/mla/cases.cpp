// See cases.h.
#include "conformance/mla/cases.h"

#include "conformance/attention/case_table.h"

namespace imbrex {
namespace {

struct MlaShape {
  int heads, latent, nope, rope, v;
};
constexpr MlaShape kSmallMla{4, 64, 32, 16, 40};

MlaSpec spec_of(const MlaShape& s, DTypes types) {
  return {.num_heads = s.heads,
          .kv_lora_rank = s.latent,
          .qk_nope_dim = s.nope,
          .qk_rope_dim = s.rope,
          .v_dim = s.v,
          .dtype = types.q,
          .kv_dtype = types.kv};
}

const Requests kMlaExtend{{70, 300}, {5, 201}};
const NamedRequests kMlaSteps[] = {
    {"decode", kDecode}, {"prefill", kPrefill}, {"extend", kMlaExtend}, {"verify", kVerify}, {"mixed", kMixed}};

struct MlaTable {
  std::vector<MlaCase> cases;

  MlaCase& add(std::string name, const MlaSpec& spec, const Requests& requests) {
    MlaCase c{.spec = spec, .attention = {}};
    c.attention.name = std::move(name);
    c.attention.requests = requests;
    for (int r = 0; r < int(requests.size()); ++r) c.attention.requests[size_t(r)].id = r;
    c.attention.seed = cases.size() + 1;
    c.attention.out_dtype = cases.size() % 4 == 3 ? DType::f32 : spec.dtype;
    c.attention.padding_tokens = int(cases.size() % 3);
    cases.push_back(std::move(c));
    return cases.back();
  }
  DTypes types() const { return kDTypes[cases.size() % std::size(kDTypes)]; }
};

void add_mla_shapes(MlaTable& table) {
  const MlaShape shapes[] = {{2, 512, 128, 64, 128}, {3, 512, 192, 64, 256}, {2, 512, 256, 64, 256}, {2, 256, 64, 32, 64},
                             {1, 384, 192, 64, 128}, {2, 512, 128, 0, 128},  {5, 64, 64, 8, 24},     {17, 40, 24, 32, 8}};
  const Requests few[] = {{{1, 37}, {1, 5}}, {{20, 20}, {1, 2}}, {{5, 29}}, {{30, 61}, {0, 0}, {1, 1}}};
  for (const MlaShape& s : shapes)
    for (const Requests& requests : few)
      table.add(fmt::format("shape_q{}_{}_{}_{}_{}_{}", s.heads, s.latent, s.nope, s.rope, s.v, table.cases.size()),
                spec_of(s, table.types()), requests);
}

void add_mla_types(MlaTable& table) {
  for (const DType q : {DType::f32, DType::bf16, DType::f16})
    for (const DType kv : {DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2})
      for (const NamedRequests& step : kMlaSteps)
        table.add(fmt::format("dtype_{}_{}_{}", to_string(q), to_string(kv), step.name), spec_of(kSmallMla, {q, kv}), step.requests);
  for (const NamedRequests& step : kMlaSteps)
    for (const int i : {0, 1, 2})
      table.add(fmt::format("dtype_peaked_{}_{}", to_string(kDTypes[i].q), step.name), spec_of(kSmallMla, kDTypes[i]), step.requests)
          .attention.q_gain = 6.f;
}

void add_mla_pages(MlaTable& table) {
  for (const int block_size : {1, 16, 64})
    for (const char* order : {"lbhtd", "lbthd", "lbhdt"})
      for (const bool csr : {false, true}) {
        MlaSpec spec = spec_of(kSmallMla, table.types());
        spec.block_size = block_size;
        MlaCase& c = table.add(fmt::format("page_b{}_{}_{}", block_size, order, csr ? "csr" : "dense"), spec, csr ? kMlaExtend : kMixed);
        c.attention.order = order;
        c.attention.csr = csr;
      }
}

void add_mla_masks(MlaTable& table) {
  struct MlaMask {
    const char* name;
    Mask mask;
    CustomPattern custom = CustomPattern::none;
    PositionPattern positions = PositionPattern::none;
  };
  const MlaMask masks[] = {{"full", {.causal = false}},
                           {"window_1", {.window_left = 0}},
                           {"window_30", {.window_left = 29}},
                           {"window_full", {.causal = false, .window_left = 40}},
                           {"both_sides", {.causal = false, .window_left = 9, .window_right = 5}},
                           {"chunk", {.chunk = 48}},
                           {"custom", {.custom = true}, CustomPattern::random},
                           {"tree", {.custom = true}, CustomPattern::tree},
                           {"blind", {.custom = true}, CustomPattern::blind},
                           {"positions", {.positions = true}, CustomPattern::none, PositionPattern::tree}};
  for (const MlaMask& m : masks)
    for (const NamedRequests& step : kMlaSteps)
      for (const bool sinks : {false, true}) {
        MlaSpec spec = spec_of(kSmallMla, table.types());
        spec.mask = m.mask;
        spec.sinks = sinks;
        MlaCase& c = table.add(fmt::format("mask_{}_{}{}", m.name, step.name, sinks ? "_sinks" : ""), spec, step.requests);
        c.attention.custom = m.custom;
        c.attention.positions = m.positions;
      }
}

void add_mla_absorbed(MlaTable& table) {
  for (const NamedRequests& step : kMlaSteps)
    for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]}) {
      MlaSpec spec = spec_of(kSmallMla, types);
      spec.absorbed = true;
      spec.sinks = types.q == DType::f32;
      table.add(fmt::format("absorbed_{}_{}_{}", to_string(types.q), to_string(types.kv), step.name), spec, step.requests);
    }
}

void add_mla_scales(MlaTable& table) {
  for (const float scale : {0.01f, 0.5f})
    for (const NamedRequests& step : kMlaSteps) {
      MlaSpec spec = spec_of(kSmallMla, table.types());
      spec.scale = scale;
      table.add(fmt::format("scale_{}_{}", scale < 0.1f ? "small" : "large", step.name), spec, step.requests);
    }
}

// Trees of drafts beside prompts and decode: with as many rows as a tile of a GPU's kernels has and with more, on both sides of a block's
// end, in every format that has its own reader, and prompts whose keys may be expanded.
void add_mla_trees(MlaTable& table) {
  struct Tree {
    const char* name;
    TreePattern tree;
    Mask mask;
    bool sinks;
  };
  using enum TreePattern;
  const Tree trees[] = {{"binary", binary, {}, false},
                        {"random", random, {}, true},
                        {"wide", wide, {}, false},
                        {"forest", forest, {}, false},
                        {"chain", none, {}, true},
                        {"window", random, {.window_left = 40}, false},
                        {"short_window", random, {.window_left = 2}, true},
                        {"chunk", random, {.chunk = 9, .chunk_lookback = 1}, false}};
  const Requests border{{8, 131}, {13, 13}, {1, 64}, {20, 140}, {7, 129}}, nodes{{64, 200}, {33, 33}, {6, 128}, {64, 64}, {16, 75}},
      beside_prompts{{90, 150}, {8, 60}, {0, 9}, {1, 140}, {66, 66}, {9, 9}};
  const NamedRequests steps[] = {{"verify", kVerify}, {"border", border}, {"nodes", nodes}, {"mixed", beside_prompts}};
  const auto set = [](MlaCase& c, const Tree& t) {
    c.spec.mask = t.mask, c.spec.mask.tree = true;
    c.spec.sinks = t.sinks;
    c.attention.tree = t.tree;
  };
  for (const Tree& t : trees)
    for (const NamedRequests& step : steps)
      set(table.add(fmt::format("tree_{}_{}", t.name, step.name), spec_of(kSmallMla, table.types()), step.requests), t);
  const Requests few{{5, 40}, {8, 70}, {70, 90}};
  const MlaShape shapes[] = {{2, 512, 128, 64, 128}, {16, 512, 32, 64, 16}, {33, 128, 16, 32, 16}};
  for (const MlaShape& s : shapes)
    for (const DTypes types : {kDTypes[0], kDTypes[3]})
      set(table.add(fmt::format("tree_q{}_{}_{}_{}", s.heads, s.latent, to_string(types.q), to_string(types.kv)), spec_of(s, types), few),
          trees[1]);
  for (const int block_size : {1, 5, 64}) {
    MlaCase& c = table.add(fmt::format("tree_page{}", block_size), spec_of(kSmallMla, kDTypes[0]), border);
    set(c, trees[1]);
    c.spec.block_size = block_size, c.attention.csr = block_size == 1;
  }
  for (const DTypes types : {kDTypes[0], kDTypes[1]}) {
    MlaCase& c = table.add(fmt::format("tree_absorbed_{}", to_string(types.q)), spec_of(kSmallMla, types), beside_prompts);
    set(c, trees[0]);
    c.spec.absorbed = true;
  }
  MlaCase& records = table.add("tree_records", spec_of(shapes[0], {DType::bf16, DType::fp8_e4m3}), few);
  set(records, trees[0]);
  records.spec.kv_format = KvFormat::fp8_ds_mla, records.spec.block_size = 64;
  MlaCase& parts = table.add("tree_parts", spec_of(shapes[0], kDTypes[0]), few);
  set(parts, trees[3]);
  parts.spec.kv_format = KvFormat::latent_rope;
}

// Custom masks with a bit for each query and key, which a step in slices takes apart.
void add_mla_packed(MlaTable& table) {
  for (const NamedRequests& step : kMlaSteps)
    for (const CustomPattern pattern : {CustomPattern::random, CustomPattern::blind}) {
      MlaCase& c = table.add(fmt::format("packed_{}_{}", pattern == CustomPattern::random ? "random" : "blind", step.name),
                             spec_of(kSmallMla, table.types()), step.requests);
      c.spec.mask.custom = true;
      c.attention.custom = pattern, c.attention.packed_mask = true, c.attention.csr = pattern == CustomPattern::blind;
    }
}

// Trees in latents of as many dims as models have, of which kernels of GPUs take few rows and many, bf16, bytes and records: with keys in
// front of the tree that all rows see.
void add_mla_large_trees(MlaTable& table) {
  constexpr DTypes kBytes{DType::bf16, DType::fp8_e4m3};
  for (const int heads : {16, 64, 128})
    for (const DTypes types : {kDTypes[0], kBytes})
      for (const KvFormat format : {KvFormat::latent, KvFormat::fp8_ds_mla}) {
        if (format == KvFormat::fp8_ds_mla && types.kv != DType::fp8_e4m3) continue;
        MlaSpec spec = spec_of({heads, 512, 16, 64, 16}, types);
        spec.kv_format = format, spec.block_size = 64, spec.mask.tree = true;
        table.add(fmt::format("tree_large_q{}_{}_{}", heads, to_string(types.kv), to_string(format)), spec, {{8, 200}, {3, 65}, {1, 30}})
            .attention.tree = TreePattern::random;
      }
}

}  // namespace

std::span<const MlaCase> mla_cases() {
  static const std::vector<MlaCase> all = [] {
    MlaTable table;
    add_mla_shapes(table);
    add_mla_types(table);
    add_mla_pages(table);
    add_mla_masks(table);
    add_mla_absorbed(table);
    add_mla_scales(table);
    add_mla_trees(table);
    add_mla_packed(table);
    add_mla_large_trees(table);
    for (MlaCase& c : table.cases) c.attention.spec = c.spec.latent_spec();
    return std::move(table.cases);
  }();
  return all;
}

}  // namespace imbrex
