// See cases.h.
#include "conformance/short_conv/cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace imbrex {
namespace {

using ConvRequests = std::vector<ShortConvCaseRequest>;

constexpr DType kConvTypes[] = {DType::bf16, DType::f32, DType::f16};
constexpr int kConvDims[] = {64, 100, 7, 2048, 1}, kConvWidths[] = {3, 4, 2, 8};

// A kind of step, or of steps that compute the same requests in chunks.
struct ConvSteps {
  const char* name;
  ConvRequests requests;
  int chunk = 0, num_drafts = 0;
  bool tree_drafts = false;
};

// Lengths around 64, which CPU kernels cut at, and around multiples of 16 and 128.
const std::vector<ConvSteps>& conv_steps() {
  static const std::vector<ConvSteps> all{
      {"prefill", {{70}, {3}, {128}, {1}}},
      {"history", {{65, 40}, {2, 1}, {130, 7}, {1, 300}}},
      {"chunked", {{150}, {33, 20}, {5}, {64, 64}}, 37},
      {"decode", {{1, 19}, {1, 131}, {1, 1}, {1, 2}, {1, 3}, {1, 8}}},
      {"mixed", {{1, 99}, {0, 0}, {129, 0}, {0, 25}, {6, 65}, {1, 0}, {65, 2}, {0, 0}}},
      {"verify", {{5, 140, 4, 2}, {2, 7, 1, 0}, {4, 33, 4, 4}, {1, 9, 0, 3}, {9, 0, 3, 0}, {0, 12, 0, 1}, {70, 3, 2, 1}}, 0, 4},
  };
  return all;
}

// Collects cases; what an axis leaves open changes from one case to the next.
struct ConvTable {
  std::vector<ShortConvCase> cases;

  ShortConvSpec next_spec() const {
    const size_t n = cases.size();
    return {.dim = kConvDims[n % std::size(kConvDims)],
            .width = kConvWidths[n % std::size(kConvWidths)],
            .bias = n % 7 < 3,
            .dtype = kConvTypes[n % std::size(kConvTypes)]};
  }
  ShortConvCase& add(std::string name, const ShortConvSpec& spec, ConvRequests requests) {
    const size_t n = cases.size();
    ShortConvCase c{.name = std::move(name), .spec = spec, .requests = std::move(requests), .gaps = Gaps(n / 3 % 3)};
    for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
    c.padding_tokens = int(n / 2 % 4);
    c.other_sources = n % 5 == 2;
    c.seed = n + 1;
    cases.push_back(std::move(c));
    return cases.back();
  }
  ShortConvCase& add(const std::string& name, ShortConvSpec spec, const ConvSteps& steps) {
    spec.num_drafts = steps.num_drafts, spec.tree_drafts = steps.tree_drafts;
    ShortConvCase& c = add(name + "_" + steps.name, spec, steps.requests);
    c.chunk = steps.chunk;
    return c;
  }
};

void add_axes(ConvTable& table, std::span<const ConvSteps> all) {
  for (const ConvSteps& steps : all) {
    for (const DType dtype : kConvTypes) {
      ShortConvSpec spec = table.next_spec();
      spec.dtype = dtype;
      table.add(fmt::format("dtype_{}", to_string(dtype)), spec, steps);
      spec.bias = true;
      table.add(fmt::format("bias_{}", to_string(dtype)), spec, steps);
    }
    for (int width = 2; width <= 8; ++width) {
      ShortConvSpec spec = table.next_spec();
      spec.width = width;
      table.add(fmt::format("width_{}", width), spec, steps);
    }
    // Around the widths of vectors, and around the 1024 channels of a CPU kernel's call.
    for (const int dim : {1, 7, 16, 33, 64, 100, 513, 1024, 1030, 2048, 2600}) {
      ShortConvSpec spec = table.next_spec();
      spec.dim = dim;
      table.add(fmt::format("dim_{}", dim), spec, steps);
    }
    for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd})
      table.add(fmt::format("gaps_{}", to_string(gaps)), table.next_spec(), steps).gaps = gaps;
    for (const auto& [name, values] : {std::pair{"steep", ShortConvValues::steep}, {"tiny", ShortConvValues::tiny}})
      for (const DType dtype : kConvTypes) {
        ShortConvSpec spec = table.next_spec();
        spec.dtype = dtype;
        table.add(fmt::format("values_{}_{}", name, to_string(dtype)), spec, steps).values = values;
      }
    ShortConvSpec half = table.next_spec();
    half.dtype = DType::f16;
    table.add("values_large_f16", half, steps).values = ShortConvValues::large;
  }
}

// The layers in front of a recurrence: the axes once more for the plain form, without SiLU and with it.
void add_plain(ConvTable& table, std::span<const ConvSteps> all) {
  using enum ShortConvActivation;
  const auto next = [&](ShortConvActivation activation) {
    ShortConvSpec spec = table.next_spec();
    spec.form = ShortConvForm::plain, spec.activation = activation;
    return spec;
  };
  const auto name_of = [](ShortConvActivation activation) { return activation == silu ? "silu" : "plain"; };
  for (const ConvSteps& steps : all) {
    for (const ShortConvActivation activation : {none, silu}) {
      for (const DType dtype : kConvTypes)
        for (const bool bias : {false, true}) {
          ShortConvSpec spec = next(activation);
          spec.dtype = dtype, spec.bias = bias, spec.width = 4;
          table.add(fmt::format("{}_{}{}", name_of(activation), to_string(dtype), bias ? "_bias" : ""), spec, steps);
        }
      for (int width = 2; width <= 8; ++width) {
        ShortConvSpec spec = next(activation);
        spec.width = width;
        table.add(fmt::format("{}_width_{}", name_of(activation), width), spec, steps);
      }
      for (const Gaps gaps : {Gaps::none, Gaps::aligned, Gaps::odd})
        table.add(fmt::format("{}_gaps_{}", name_of(activation), to_string(gaps)), next(activation), steps).gaps = gaps;
      for (const auto& [name, values] : {std::pair{"steep", ShortConvValues::steep}, {"tiny", ShortConvValues::tiny}})
        for (const DType dtype : kConvTypes) {
          ShortConvSpec spec = next(activation);
          spec.dtype = dtype;
          table.add(fmt::format("{}_{}_{}", name_of(activation), name, to_string(dtype)), spec, steps).values = values;
        }
      ShortConvSpec half = next(activation);
      half.dtype = DType::f16;
      table.add(fmt::format("{}_large_f16", name_of(activation)), half, steps).values = ShortConvValues::large;
    }
    for (const int dim : {1, 7, 16, 33, 100, 513, 1030, 2600}) {
      ShortConvSpec spec = next(silu);
      spec.dim = dim;
      table.add(fmt::format("silu_dim_{}", dim), spec, steps);
    }
  }
}
void add_plain_lengths(ConvTable& table) {
  for (const int q_len : {1, 3, 16, 63, 64, 65, 129, 257})
    for (const int context : {0, 1, 9}) {
      ShortConvSpec spec = table.next_spec();
      spec.form = ShortConvForm::plain, spec.activation = ShortConvActivation::silu;
      table.add(fmt::format("silu_length_{}_after_{}", q_len, context), spec, ConvRequests{{q_len, context}});
    }
}

void add_lengths(ConvTable& table) {
  for (const int q_len : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 200, 257, 513})
    for (const int context : {0, 1, 9}) table.add(fmt::format("length_{}_after_{}", q_len, context), table.next_spec(), {{q_len, context}});
  // Fewer tokens gone by than a sum is over, and a step that leaves some of the past in the state.
  for (int context = 0; context <= 8; ++context)
    for (const int q_len : {1, 3}) {
      ShortConvSpec spec = table.next_spec();
      spec.width = 8;
      table.add(fmt::format("context_{}_then_{}", context, q_len), spec, {{q_len, context}, {q_len, 8 - context}});
    }
}

void add_drafts(ConvTable& table) {
  for (const int most : {1, 2, 5, 64})
    for (const int width : {2, 4, 8}) {
      ShortConvSpec spec = table.next_spec();
      spec.width = width;
      spec.num_drafts = most;
      // Of one token and of many, all drafts and some, all kept and none; more rows than the step has tokens.
      ConvRequests requests{{most, 40, most, most}, {most + 1, 3, most, 0}, {1, 77, 0, most},
                            {1, 1, 1, 0},           {most, 0, most, 0},     {130, 5, most / 2, (most + 1) / 2}};
      table.add(fmt::format("drafts_{}_width_{}", most, width), spec, std::move(requests));
    }
}

void add_many(ConvTable& table) {
  for (const int count : {17, 100, 300}) {
    ConvRequests requests;
    for (int r = 0; r < count; ++r) requests.push_back({1, r % 7});
    table.add(fmt::format("requests_{}_decode", count), table.next_spec(), requests);
    for (int r = 0; r < count; ++r) requests[size_t(r)] = {r % 5, r % 3 == 0 ? 0 : r % 11};
    table.add(fmt::format("requests_{}_mixed", count), table.next_spec(), requests);
  }
  table.add("requests_none", table.next_spec(), ConvRequests{});
  table.add("requests_without_tokens", table.next_spec(), {{0, 0}, {0, 5}, {0, 1}});
}

void add_padded(ConvTable& table) {
  for (const ShortConvForm form : {ShortConvForm::gated, ShortConvForm::plain}) {
    ShortConvSpec spec = table.next_spec();
    spec.form = form;
    table.add(fmt::format("padding_{}", to_string(form)), spec, padded_requests());
    spec.num_drafts = 3;
    ConvRequests requests = padded_requests();
    requests[5].drafts = 3, requests[5].accepted = 2;
    table.add(fmt::format("padding_{}_drafts", to_string(form)), spec, requests);
  }
}

}  // namespace

std::span<const ShortConvCase> short_conv_cases() {
  static const std::vector<ShortConvCase> all = [] {
    ConvTable table;
    add_axes(table, conv_steps());
    add_lengths(table);
    add_drafts(table);
    add_many(table);
    add_plain(table, conv_steps());  // behind the others, whose contents depend on their places
    add_plain_lengths(table);
    const ConvSteps trees{"tree", tree_requests(), 0, kTreeDrafts, true};
    add_axes(table, std::span(&trees, 1));
    add_plain(table, std::span(&trees, 1));
    add_padded(table);
    return table.cases;
  }();
  return all;
}

const ShortConvCase* find_short_conv_case(std::string_view name) {
  const auto found = std::ranges::find(short_conv_cases(), name, &ShortConvCase::name);
  return found == short_conv_cases().end() ? nullptr : &*found;
}

}  // namespace imbrex
