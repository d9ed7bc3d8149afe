// See cases.h.
#include "conformance/recurrent/cases.h"

#include <fmt/format.h>

#include <array>
#include <utility>

#include "core/check.h"

namespace imbrex {
namespace {

constexpr DType kRecurrentTypes[] = {DType::bf16, DType::f32, DType::f16};
constexpr const char* kRecurrentLayers[] = {"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"};

// A kind of step, or of steps that compute the same requests in chunks.
struct RecurrentSteps {
  const char* name;
  StateCaseRequests requests;
  int chunk = 0, num_drafts = 0;
  bool tree_drafts = false;
};

// Lengths around 16 and 64, which chunked kernels cut at.
const std::vector<RecurrentSteps>& recurrent_steps() {
  static const std::vector<RecurrentSteps> all{
      {"prefill", {{70}, {3}, {128}, {1}}},
      {"history", {{65, 40}, {2, 1}, {130, 7}, {1, 300}}},
      {"chunked", {{150}, {33, 20}, {5}, {64, 64}}, 37},
      {"decode", {{1, 19}, {1, 131}, {1, 1}, {1, 2}}},
      {"mixed", {{1, 99}, {0, 0}, {79, 0}, {0, 25}, {6, 65}, {1, 0}, {17, 2}}},
      {"verify",
       {{5, 140, 4, 2}, {2, 7, 1, 0}, {4, 33, 4, 4}, {1, 9, 0, 3}, {9, 0, 3, 0}, {0, 12, 0, 1}, {4, 0, 4, 0}, {20, 3, 2, 1}},
       0,
       4},
  };
  return all;
}

// Collects cases; what an axis leaves open changes from one case to the next.
struct RecurrentTable {
  std::vector<RecurrentCase> cases;

  RecurrentSpec next_spec() const {
    const size_t n = cases.size();
    RecurrentSpec spec = recurrent_layer(kRecurrentLayers[n % std::size(kRecurrentLayers)]);
    spec.dtype = kRecurrentTypes[n % std::size(kRecurrentTypes)];
    spec.layout = StateLayout(n / 2 % 2);
    return spec;
  }
  RecurrentCase& add(std::string name, const RecurrentSpec& spec, StateCaseRequests requests) {
    const size_t n = cases.size();
    RecurrentCase c{.name = std::move(name), .spec = spec, .requests = std::move(requests), .gaps = Gaps(n / 3 % 3)};
    for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
    c.padding_tokens = int(n / 2 % 4);
    c.float_gates = n % 4 != 1;
    c.other_sources = n % 5 == 2;
    c.seed = n + 1;
    cases.push_back(std::move(c));
    return cases.back();
  }
  RecurrentCase& add(const std::string& name, RecurrentSpec spec, const RecurrentSteps& steps) {
    spec.num_drafts = steps.num_drafts, spec.tree_drafts = steps.tree_drafts;
    RecurrentCase& c = add(name + "_" + steps.name, spec, steps.requests);
    c.chunk = steps.chunk;
    return c;
  }
};

void add_recurrent_axes(RecurrentTable& table, std::span<const RecurrentSteps> all) {
  for (const RecurrentSteps& steps : all) {
    for (const char* layer : kRecurrentLayers)
      for (const StateLayout layout : {StateLayout::k_first, StateLayout::v_first}) {
        RecurrentSpec spec = recurrent_layer(layer);
        spec.layout = layout;
        table.add(fmt::format("{}_{}", layer, to_string(layout)), spec, steps);
      }
    for (const DType dtype : kRecurrentTypes)
      for (const DType state : kRecurrentTypes) {
        RecurrentSpec spec = table.next_spec();
        spec.dtype = dtype, spec.state_dtype = state;
        table.add(fmt::format("types_{}_{}", to_string(dtype), to_string(state)), spec, steps);
      }
    for (const auto& [name, values] : {std::pair{"none", RecurrentValues::none},
                                       {"forgetful", RecurrentValues::forgetful},
                                       {"same_keys", RecurrentValues::same_keys},
                                       {"extreme", RecurrentValues::extreme}})
      for (const char* layer : {"gdn", "kda", "mamba2"})
        table.add(fmt::format("values_{}_{}", name, layer), recurrent_layer(layer), steps).values = values;
    for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd})
      table.add(fmt::format("gaps_{}", to_string(gaps)), table.next_spec(), steps).gaps = gaps;
  }
}

void add_recurrent_shapes(RecurrentTable& table) {
  const StateCaseRequests requests{{19, 5}, {1, 30}, {34}};
  for (const auto& [k, v] : {std::pair{128, 128}, {64, 64}, {256, 256}, {16, 1}, {128, 64}, {96, 80}, {7, 5}, {33, 31}, {1, 1}, {200, 130}})
    for (const char* layer : {"gdn", "kda", "lightning"}) {
      RecurrentSpec spec = recurrent_layer(layer);
      spec.head_dim_k = k, spec.head_dim_v = v;
      spec.layout = StateLayout(table.cases.size() % 2);
      table.add(fmt::format("dims_{}_{}_{}", k, v, layer), spec, requests);
    }
  for (const auto& [k_heads, v_heads] : {std::pair{1, 1}, {1, 2}, {2, 6}, {1, 4}, {3, 3}, {5, 20}}) {
    RecurrentSpec spec = recurrent_layer("gdn");
    spec.num_k_heads = k_heads, spec.num_v_heads = v_heads, spec.head_dim_k = 32, spec.head_dim_v = 48;
    table.add(fmt::format("heads_{}_{}", k_heads, v_heads), spec, requests);
  }
  // Settings that no layer above has, one at a time.
  const auto changed = [&](const char* name, const char* layer, const auto& change) {
    RecurrentSpec spec = recurrent_layer(layer);
    change(spec);
    table.add(fmt::format("setting_{}_{}", name, layer), spec, requests);
  };
  changed("log", "gdn", [](RecurrentSpec& s) { s.gate = RecurrentGate::log; });
  changed("log", "kda", [](RecurrentSpec& s) { s.gate = RecurrentGate::log; });
  changed("beta_as_given", "gdn", [](RecurrentSpec& s) { s.sigmoid_beta = false; });
  changed("negative_eigenvalues", "gdn", [](RecurrentSpec& s) { s.beta_scale = 2; });
  changed("skip", "gdn", [](RecurrentSpec& s) { s.skip = true; });
  changed("no_norm", "kda", [](RecurrentSpec& s) { s.qk_norm = false; });
  changed("no_skip", "mamba2", [](RecurrentSpec& s) { s.skip = false; });
  changed("limits", "mamba2", [](RecurrentSpec& s) { s.gate_min = 0.2f, s.gate_max = 0.6f; });
  changed("channel_rates", "lightning", [](RecurrentSpec& s) { s.channel_rates = true; });
  changed("channel_rates", "kda", [](RecurrentSpec& s) { s.channel_rates = true; });
  changed("scale", "gdn", [](RecurrentSpec& s) { s.scale = 0.3f; });
}

// What models have behind the recurrence, in all kinds of steps.
void add_recurrent_outputs(RecurrentTable& table) {
  struct Stage {
    const char *name, *layer;
    OutputGate gate;
    OutputNorm norm;
    int groups = 0;
  };
  const auto with = [](const Stage& stage) {
    RecurrentSpec spec = recurrent_layer(stage.layer);
    spec.out_gate = stage.gate, spec.out_norm = stage.norm, spec.norm_groups = stage.groups;
    return spec;
  };
  using G = OutputGate;
  using N = OutputNorm;
  for (const Stage& stage : {Stage{"gdn", "gdn", G::silu, N::before_gate},
                             {"kda", "kda", G::sigmoid, N::before_gate},
                             {"mamba2", "mamba2", G::silu, N::after_gate, 1},
                             {"gate_alone", "mamba2", G::silu, N::none},
                             {"mamba1", "mamba1", G::silu, N::none},
                             {"lightning", "lightning", G::sigmoid, N::before_gate, 1}})
    for (const RecurrentSteps& steps : recurrent_steps()) {
      RecurrentSpec spec = with(stage);
      const size_t n = table.cases.size();
      spec.layout = StateLayout(n / 6 % 2), spec.dtype = kRecurrentTypes[n % std::size(kRecurrentTypes)];
      table.add(fmt::format("outputs_{}", stage.name), spec, steps).shared_weight = stage.groups == 0;
    }
  const StateCaseRequests requests{{19, 5}, {1, 30}, {34}};
  for (const Stage& stage : {Stage{"norm_alone", "gdn", G::none, N::before_gate, 2},
                             {"sigmoid_alone", "gdn", G::sigmoid, N::none},
                             {"head_norm_after", "gdn", G::silu, N::after_gate},
                             {"groups_before", "gdn", G::silu, N::before_gate, 2},
                             {"groups_after", "gdn", G::silu, N::after_gate, 2},
                             {"groups_narrow", "mamba1", G::silu, N::after_gate, 3}})
    for (const int dim : {128, 31, 80}) {
      RecurrentSpec spec = with(stage);
      if (spec.head_dim_v > 1) spec.head_dim_v = dim;
      spec.dtype = kRecurrentTypes[table.cases.size() % std::size(kRecurrentTypes)];
      spec.norm_eps = dim == 80 ? 0.1f : 1e-5f;
      RecurrentCase& c = table.add(fmt::format("outputs_{}_{}", stage.name, dim), spec, requests);
      if (dim == 31) c.values = RecurrentValues::extreme;
      c.shared_weight = dim == 128;
    }
}

// What models have in front of the recurrence, in all kinds of steps, with what they have behind it.
void add_recurrent_convolutions(RecurrentTable& table, std::span<const RecurrentSteps> all) {
  struct Front {
    const char* layer;
    RecurrentConv conv;
    int width = 4;
    bool bias = false, silu = true;
  };
  for (const Front& front : {Front{"gdn", RecurrentConv::qkv},
                             {"kda", RecurrentConv::qkv, 3, true},
                             {"mamba2", RecurrentConv::vkq, 4, true},
                             {"kda_bounded", RecurrentConv::vkq, 2, false, false}})
    for (const RecurrentSteps& steps : all) {
      RecurrentSpec spec = recurrent_layer(front.layer);
      const size_t n = table.cases.size();
      spec.conv = front.conv, spec.conv_width = front.width, spec.conv_bias = front.bias, spec.conv_silu = front.silu;
      spec.layout = StateLayout(n / 6 % 2), spec.dtype = kRecurrentTypes[n % std::size(kRecurrentTypes)];
      spec.out_gate = OutputGate::silu, spec.out_norm = front.bias ? OutputNorm::after_gate : OutputNorm::before_gate;
      RecurrentCase& c = table.add(fmt::format("convolved_{}", front.layer), spec, steps);
      c.gaps = Gaps(n % 3), c.other_sources = n % 2 == 0;
    }
}

void add_recurrent_lengths(RecurrentTable& table) {
  for (const int q_len : {1, 2, 3, 8, 15, 16, 17, 31, 63, 64, 65, 127, 129, 257})
    for (const int context : {0, 1, 9}) table.add(fmt::format("length_{}_after_{}", q_len, context), table.next_spec(), {{q_len, context}});
  for (const int most : {1, 3, 7}) {
    RecurrentSpec spec = table.next_spec();
    spec.num_drafts = most;
    table.add(fmt::format("drafts_{}", most), spec,
              {{most, 40, most, most},
               {most + 1, 3, most, 0},
               {1, 77, 0, most},
               {1, 1, 1, 0},
               {most, 0, most, 0},
               {30, 5, most / 2, (most + 1) / 2}});
  }
  for (const int count : {17, 60}) {
    StateCaseRequests requests;
    for (int r = 0; r < count; ++r) requests.push_back({r % 5, r % 3 == 0 ? 0 : r % 11});
    table.add(fmt::format("requests_{}", count), table.next_spec(), requests);
  }
  table.add("requests_none", table.next_spec(), StateCaseRequests{});
  table.add("requests_without_tokens", table.next_spec(), {{0, 0}, {0, 5}});
}

// Heads of one value, more than a task or a thread block has, in steps of many requests with few tokens, and in prompts.
void add_narrow_requests(RecurrentTable& table) {
  StateCaseRequests many;
  for (int r = 0; r < 60; ++r) many.push_back({r == 20 ? 2 : 1, r % 7 == 0 ? 0 : 3 * r});
  const StateCaseRequests prompts{{90}, {33, 4}, {1, 8}, {16}, {17, 2}};
  for (const auto& [k_heads, v_heads, dim_k] : {std::array{1, 300, 16}, {2, 256, 16}, {3, 78, 16}, {1, 70, 8}, {1, 150, 4}, {1, 33, 40}})
    for (const bool decode : {true, false}) {
      RecurrentSpec spec = recurrent_layer("mamba1");
      spec.num_k_heads = k_heads, spec.num_v_heads = v_heads, spec.head_dim_k = dim_k;
      if (dim_k == 8) spec.gate = RecurrentGate::log, spec.scaled_values = spec.channel_rates = false;
      if (dim_k == 4) spec.gate = RecurrentGate::sigmoid, spec.gate_min = -4, spec.scaled_values = false;
      if (dim_k == 40) spec.skip = false, spec.qk_norm = true;
      spec.dtype = kRecurrentTypes[table.cases.size() % std::size(kRecurrentTypes)];
      spec.state_dtype = kRecurrentTypes[table.cases.size() / 3 % std::size(kRecurrentTypes)];
      table.add(fmt::format("narrow_{}_{}_{}_{}", k_heads, v_heads, dim_k, decode ? "decode" : "prompts"), spec, decode ? many : prompts);
    }
}

// Prompts in chunks, with other numbers of value heads for a key head than the layers above have.
void add_grouped_prompts(RecurrentTable& table) {
  for (const auto& [layer, each] : {std::pair{"gdn", 1}, {"gdn", 3}, {"gdn", 4}, {"kda", 3}, {"mamba2", 3}}) {
    RecurrentSpec spec = recurrent_layer(layer);
    spec.num_k_heads = 2, spec.num_v_heads = 2 * each, spec.head_dim_k = spec.head_dim_v = 128;
    spec.layout = StateLayout(table.cases.size() % 2);
    table.add(fmt::format("prompts_of_{}_{}", each, layer), spec, {{150}, {70, 40}});
  }
}

// Padding, of layers that have each kind of kernel, and all stages.
void add_padded(RecurrentTable& table) {
  for (const char* layer : {"gdn", "kda", "lightning", "mamba2", "mamba1"}) {
    RecurrentSpec spec = recurrent_layer(layer);
    spec.dtype = kRecurrentTypes[table.cases.size() % std::size(kRecurrentTypes)];
    table.add(fmt::format("padding_{}", layer), spec, padded_requests());
    if (layer == std::string_view("mamba1")) continue;
    spec.head_dim_k = spec.head_dim_v = 128;
    table.add(fmt::format("padding_{}_128", layer), spec, padded_requests());
  }
  RecurrentSpec drafts = recurrent_layer("gdn");
  drafts.num_drafts = 3;
  StateCaseRequests requests = padded_requests();
  requests[5].drafts = 3, requests[5].accepted = 2;
  table.add("padding_drafts", drafts, requests);
  RecurrentSpec all = recurrent_layer("gdn");
  all.conv = RecurrentConv::qkv, all.conv_width = 4, all.conv_silu = true;
  all.out_gate = OutputGate::silu, all.out_norm = OutputNorm::after_gate;
  table.add("padding_all_stages", all, padded_requests());
}

}  // namespace

RecurrentSpec recurrent_layer(std::string_view name) {
  RecurrentSpec spec{.num_k_heads = 2, .num_v_heads = 2, .head_dim_k = 64, .head_dim_v = 64};
  if (name == "gdn") {
    spec.num_v_heads = 4, spec.delta = spec.sigmoid_beta = spec.qk_norm = true;
  } else if (name == "kda" || name == "kda_bounded") {
    spec.delta = spec.sigmoid_beta = spec.qk_norm = spec.channel_gate = true;
    if (name == "kda_bounded") spec.gate = RecurrentGate::sigmoid, spec.gate_min = -5;
  } else if (name == "lightning") {
    spec.gate = RecurrentGate::fixed, spec.scale = 1;
  } else if (name == "mamba2") {
    spec.num_k_heads = 1, spec.scaled_values = spec.skip = true, spec.scale = 1;
  } else if (name == "mamba1") {
    spec = {.num_k_heads = 1,
            .num_v_heads = 24,
            .head_dim_k = 16,
            .head_dim_v = 1,
            .channel_rates = true,
            .scaled_values = true,
            .skip = true,
            .scale = 1};
  } else {
    fail("conformance.layer", "expected gdn, kda, kda_bounded, lightning, mamba2 or mamba1, got {}", name);
  }
  return spec;
}

std::span<const RecurrentCase> recurrent_cases() {
  static const std::vector<RecurrentCase> all = [] {
    RecurrentTable table;
    add_recurrent_axes(table, recurrent_steps());
    add_recurrent_shapes(table);
    add_recurrent_lengths(table);
    add_recurrent_outputs(table);
    const RecurrentSteps trees{"tree", tree_requests(), 0, kTreeDrafts, true};  // behind the others, whose contents depend on their places
    add_recurrent_axes(table, std::span(&trees, 1));
    add_recurrent_convolutions(table, recurrent_steps());
    add_recurrent_convolutions(table, std::span(&trees, 1));
    add_narrow_requests(table);
    add_grouped_prompts(table);
    add_padded(table);
    return table.cases;
  }();
  return all;
}

}  // namespace imbrex
