// Cases of prefill: several tiles of rows and keys in a request, queries in fp8, groups that fill no tile, and keys that many rows read.
#include <algorithm>

#include "conformance/attention/case_table.h"

namespace imbrex {
namespace {

// Several tiles of 64 and of 128 rows and keys in a request, in the dimensions of most models: what steps of prefill are made of.
void add_prefills(CaseTable& table) {
  const DTypes bf16 = kDTypes[0];
  const NamedFeature features[] = {
      {"causal", 1, bf16, [](Case&) {}},
      {"bidirectional", 1, bf16, [](Case& c) { c.spec.mask.causal = false; }},
      {"window", 1, bf16, [](Case& c) { c.spec.mask.window_left = 99; }},
      {"window_both", 1, bf16, [](Case& c) { c.spec.mask = {.causal = false, .window_left = 20, .window_right = 40}; }},
      {"chunk", 1, bf16, [](Case& c) { c.spec.mask.chunk = 100; }},
      {"cap", 1, bf16, [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"alibi", 1, bf16, [](Case& c) { c.spec.score.alibi = true; }},
      {"head_scales", 1, bf16, [](Case& c) { c.spec.score.head_scales = true; }},
      {"sinks", 1, bf16, [](Case& c) { c.spec.score.sinks = true; }},
      {"f16", 2, kDTypes[2], [](Case&) {}},
      {"e4m3", 2, kDTypes[3], [](Case& c) { c.scale_per_head = true; }},
  };
  const Requests requests[] = {{{120, 120}}, {{66, 190}, {1, 40}}, {{40, 300}, {0, 9}, {35, 35}}};
  const int block_sizes[] = {16, 64, 0, 128, 256}, groups[] = {4, 1, 8, 2};
  for (const Dims dims : {Dims{64, 64}, {128, 128}, {192, 128}, {256, 256}})
    for (const NamedFeature& f : features) {
      const size_t i = table.cases.size();
      const int group = std::max(1, (dims.qk > 128 ? 4 : groups[i % 4]) / f.kv_heads);  // work is limited
      Case& c = table.add(fmt::format("prefill_{}_{}", dims_name(dims), f.name), group, f.kv_heads, dims, f.types, requests[i % 3]);
      c.spec.block_size = block_sizes[i % 5];
      c.order = i % 6 == 5 ? "lbhdt" : "lbthd";
      f.set(c);
    }
}

// Queries in e4m3, which a kernel may multiply as they are: every kind of step, then prefill of several tiles of 128 rows and of 192 keys.
void add_fp8_queries(CaseTable& table) {
  constexpr DTypes kE4m3{DType::fp8_e4m3, DType::fp8_e4m3};
  for (const NamedRequests& step : kSteps) {
    table.add(fmt::format("dtype_e4m3_{}", step.name), 3, 2, {64, 48}, kE4m3, step.requests).out_dtype = DType::f16;
    table.add(fmt::format("dtype_e4m3_heads_{}", step.name), 2, 3, {128, 128}, kE4m3, step.requests).scale_per_head = true;
  }
  const NamedFeature features[] = {
      {"causal", 1, kE4m3, [](Case&) {}},
      {"bidirectional", 1, kE4m3, [](Case& c) { c.spec.mask.causal = false; }},
      {"heads", 2, kE4m3, [](Case& c) { c.scale_per_head = true; }},
      {"window", 1, kE4m3, [](Case& c) { c.spec.mask.window_left = 99; }},
      {"window_both", 1, kE4m3, [](Case& c) { c.spec.mask = {.causal = false, .window_left = 20, .window_right = 40}; }},
      {"chunk", 1, kE4m3, [](Case& c) { c.spec.mask.chunk = 100; }},
      {"cap", 1, kE4m3, [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"alibi", 1, kE4m3, [](Case& c) { c.spec.score.alibi = true; }},
      {"head_scales", 1, kE4m3, [](Case& c) { c.spec.score.head_scales = true; }},
      {"sinks", 1, kE4m3, [](Case& c) { c.spec.score.sinks = true; }},
      {"rising", 1, kE4m3, [](Case& c) { c.values = ValuePattern::rising; }},
      {"falling", 1, kE4m3, [](Case& c) { c.values = ValuePattern::falling; }},
  };
  const Requests requests[] = {{{150, 220}}, {{40, 420}, {1, 40}}, {{20, 500}, {0, 9}, {70, 70}}};
  const int block_sizes[] = {16, 64, 0, 128, 8, 544}, groups[] = {4, 1, 8, 2};
  for (const int dim : {64, 128, 256})
    for (const NamedFeature& f : features) {
      const size_t i = table.cases.size();
      const int group = std::max(1, (dim > 128 ? 2 : groups[i % 4]) / f.kv_heads);  // work is limited
      Case& c = table.add(fmt::format("dtype_e4m3_prefill_d{}_{}", dim, f.name), group, f.kv_heads, {dim, dim}, kE4m3, requests[i % 3]);
      c.spec.block_size = block_sizes[i % 6];
      c.order = "lbthd";
      f.set(c);
    }
}

// Groups that do not divide 64, the rows of a warpgroup's product, in prefill of several tiles of rows.
void add_odd_groups(CaseTable& table) {
  for (const int group : {3, 5, 6, 7, 9, 12, 20, 33, 48})
    for (const int kv_heads : {1, 2}) {
      const int n = group + kv_heads, dim = n / 3 % 2 == 0 ? 128 : 64, queries = 400 / n;
      const DType type = n % 3 == 1 ? DType::fp8_e4m3 : DType::bf16;
      const Requests requests{{queries, queries + 150}, {1, 40}, {queries / 2, queries / 2}};
      Case& c = table.add(fmt::format("group_{}_{}", group, kv_heads), group, kv_heads, {dim, dim}, {type, type}, requests);
      c.spec.mask = {.causal = n % 4 != 1, .window_left = n % 4 == 2 ? 50 : -1};
      c.spec.score.alibi = n % 7 == 1;
    }
}

// Keys that hundreds of rows read, in pages or types that are slow to read: a backend may first make them what its products take.
void add_rereads(CaseTable& table) {
  const DTypes bf16 = kDTypes[0], f16 = kDTypes[2], bytes = kDTypes[3], f16_bytes{DType::f16, DType::fp8_e4m3},
               byte_queries{DType::fp8_e4m3, DType::fp8_e4m3};
  const struct {
    const char* name;
    DTypes types;
    int dim, kv_heads, block_size;
    void (*set)(Case&);
  } features[] = {
      {"page1", bf16, 128, 2, 1, [](Case&) {}},
      {"page3_sinks", f16, 64, 1, 3, [](Case& c) { c.spec.score.sinks = true; }},
      {"page1_window", bf16, 128, 1, 1, [](Case& c) { c.spec.mask.window_left = 149; }},
      {"page3_bidirectional", bf16, 80, 2, 3, [](Case& c) { c.spec.mask.causal = false; }},
      {"page1_wide", bf16, 256, 1, 1, [](Case&) {}},
      {"e4m3", bytes, 128, 2, 16, [](Case& c) { c.scale_per_head = true; }},
      {"e4m3_f16_window", f16_bytes, 64, 2, 64, [](Case& c) { c.spec.mask.window_left = 149; }},
      {"e4m3_wide", bytes, 256, 1, 16, [](Case&) {}},
      {"e4m3_ragged", bytes, 128, 2, 0, [](Case&) {}},
      {"e4m3_page1_heads", bytes, 128, 2, 1, [](Case& c) { c.scale_per_head = true; }},
      {"e4m3_page3_cap", bytes, 64, 1, 3, [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"e4m3_queries_page1_heads", byte_queries, 128, 2, 1, [](Case& c) { c.scale_per_head = true; }},
      {"e4m3_queries_page3_cap", byte_queries, 64, 1, 3, [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"e4m3_queries_page1_wide", byte_queries, 256, 1, 1, [](Case&) {}},
      {"e4m3_queries_page5_window", byte_queries, 96, 2, 5, [](Case& c) { c.spec.mask.window_left = 149; }},
      {"e4m3_queries_page1_bidirectional", byte_queries, 192, 1, 1, [](Case& c) { c.spec.mask.causal = false; }},
  };
  for (const auto& f : features) {
    const int keys = f.kv_heads * f.dim <= 128 ? 300 : 150;  // work is limited
    Case& c = table.add(fmt::format("reread_{}", f.name), 16, f.kv_heads, {f.dim, f.dim}, f.types, {{55, keys}, {1, 20}, {0, 9}});
    c.spec.block_size = f.block_size;
    c.order = "lbthd";
    f.set(c);
  }
}

}  // namespace

void add_prefill_cases(CaseTable& table) {
  add_prefills(table);
  add_fp8_queries(table);
  add_odd_groups(table);
  add_rereads(table);
}

}  // namespace imbrex
