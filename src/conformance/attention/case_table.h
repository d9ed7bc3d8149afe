#pragma once
// The parts that the axes of the table of cases (cases.cpp, cases_prefill.cpp, cases_variants.cpp, cases_latent.cpp,
// cases_positions.cpp, cases_trees.cpp, cases_expressions.cpp, cases_masks.cpp) are made of:
// dimensions, types, requests, and the table that they fill.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "conformance/attention/cases.h"

namespace imbrex {

using Requests = std::vector<CaseRequest>;

struct Dims {
  int qk, v;
};
struct DTypes {
  DType q, kv;
};
inline constexpr DTypes kDTypes[] = {{DType::bf16, DType::bf16},     {DType::f32, DType::f32},  {DType::f16, DType::f16},
                                     {DType::bf16, DType::fp8_e4m3}, {DType::f32, DType::bf16}, {DType::f16, DType::fp8_e5m2}};

inline const Requests kDecode{{1, 19}, {1, 131}, {1, 1}}, kPrefill{{70, 70}, {3, 3}}, kChunked{{20, 150}, {33, 40}},
    kVerify{{5, 140}, {2, 2}, {4, 33}}, kMixed{{1, 100}, {0, 0}, {40, 40}, {0, 25}, {6, 71}, {1, 1}, {0, 0}};
struct NamedRequests {
  const char* name;
  const Requests& requests;
};
// The kinds of step; docs/terms.md says what they are.
inline const NamedRequests kSteps[] = {
    {"decode", kDecode}, {"prefill", kPrefill}, {"chunked", kChunked}, {"verify", kVerify}, {"mixed", kMixed}};

// Collects cases; gives each its seed and its requests their ids.
struct CaseTable {
  std::vector<Case> cases;

  Case& add(std::string name, int group, int kv_heads, Dims dims, DTypes types, const Requests& requests) {
    Case c;
    c.name = std::move(name);
    c.spec.num_q_heads = group * kv_heads;
    c.spec.num_kv_heads = kv_heads;
    c.spec.head_dim_qk = dims.qk;
    c.spec.head_dim_v = dims.v;
    c.spec.q_dtype = types.q;
    c.spec.kv_dtype = types.kv;
    c.requests = requests;
    for (int r = 0; r < int(requests.size()); ++r) c.requests[r].id = r;
    c.seed = cases.size() + 1;
    c.out_dtype = cases.size() % 4 == 3 ? DType::f32 : c.spec.out_dtypes().front();
    c.padding_tokens = int(cases.size() % 3);
    cases.push_back(std::move(c));
    return cases.back();
  }
  DTypes types() const { return kDTypes[cases.size() % std::size(kDTypes)]; }  // another one for each case
};

inline std::string dims_name(Dims dims) { return dims.qk == dims.v ? fmt::format("d{}", dims.qk) : fmt::format("d{}_{}", dims.qk, dims.v); }

struct NamedFeature {
  const char* name;
  int kv_heads;
  DTypes types;
  void (*set)(Case&);
};

void add_prefill_cases(CaseTable&);      // cases_prefill.cpp
void add_variant_cases(CaseTable&);      // cases_variants.cpp
void add_latent_cases(CaseTable&);       // cases_latent.cpp
void add_position_cases(CaseTable&);     // cases_positions.cpp
void add_tree_cases(CaseTable&);         // cases_trees.cpp
void add_expression_cases(CaseTable&);   // cases_expressions.cpp
void add_record_cases(CaseTable&);       // cases_latent.cpp
void add_latent_masks(CaseTable&);       // cases_latent.cpp
void add_packed_cases(CaseTable&);       // cases_variants.cpp
void add_wide_mask_cases(CaseTable&);    // cases_variants.cpp
void add_latent_tree_cases(CaseTable&);  // cases_trees.cpp
void add_mask_cases(CaseTable&);         // cases_masks.cpp

}  // namespace imbrex
