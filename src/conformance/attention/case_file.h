#pragma once
// Case files of attention: one .safetensors file is one case with its expected result, see docs/case-files.md. Read and run by `imbrex
// verify`.
#include <span>
#include <string>
#include <vector>

#include "conformance/attention/judge.h"
#include "conformance/case_fields.h"
#include "conformance/safetensors.h"
#include "conformance/verify_row.h"

namespace imbrex {

struct CaseFile {
  CaseInputs inputs;
  std::vector<float> out;  // [T, num_q_heads, head_dim_v]
  std::vector<float> lse;  // [T, num_q_heads], or empty
};

// The requests of query_start_loc and seq_lens. queries_are_keys: a request has at least as many keys as queries. Error
// case_file.seq_lens.*
std::vector<CaseRequest> case_requests(const HostTensor& starts, const HostTensor& lens, bool queries_are_keys);
// Takes parents of a case's queries, where `wanted`. Error case_file.draft_parents
HostTensor take_draft_parents(CaseTensors& tensors, bool wanted, std::span<const CaseRequest>);
// Takes positions of a case's queries, where `wanted`. Error case_file.positions
HostTensor take_positions(CaseTensors&, bool wanted, int64_t num_tokens);
// Refuses scales other than 1, or one for each of so many heads. Error case_file.scale.*
void check_case_scale(const HostTensor&, int heads);

// Error case_file.* or spec.*; a field or tensor that is not known is refused, never ignored.
CaseFile parse_case(const Safetensors&);
CaseFile load_case(const std::string& path);
Safetensors to_safetensors(const CaseFile&);
CaseFile make_case_file(const Case&);  // with the reference's result

// Every backend over page sizes, tables, layouts and formats, pages shuffled, everything else poisoned with NaN, then with 0xff.
// A backend that runs nothing of it has one row, with its reasons.
std::vector<VerifyRow> verify_case(const CaseFile&, const DeviceInfo&, std::span<const BackendOf<AttentionFamily>* const>);

}  // namespace imbrex
