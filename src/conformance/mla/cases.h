#pragma once
// The table of MLA cases: every backend is run over it.
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "conformance/attention/judge.h"
#include "conformance/mla/device_mirror.h"
#include "imbrex/mla.h"

namespace imbrex {

struct MlaCase {
  MlaSpec spec;
  Case attention;  // spec.latent_spec(), and all that a case of attention says: requests, pages, mask patterns, name and seed
};

// Axes: shape, dtype, page, mask, sinks, absorbed, steps, tree, packed (first part of the name). Parts of a query and key are at most
// kv_lora_rank long.
std::span<const MlaCase> mla_cases();

// The tensors of a case. Those of `attention` are of its latent_spec(): k and v are latents, and the first q_dim() elements of a row of q
// are the query.
struct MlaCaseInputs {
  MlaSpec spec;
  CaseInputs attention;
  HostTensor kv_b;
};
MlaCaseInputs make_inputs(const MlaCase&);

// Makes a plan, by default with the backend's plan().
using MlaPlanMaker =
    std::function<std::unique_ptr<MlaPlan>(const BackendOf<MlaFamily>&, const MlaSpec&, const DeviceInfo&, const PlanOptions&)>;

// Runs a case as one of attention is run (run_case() of attention), on a GPU through a mirror. Rows of RunResult::out have out_dim()
// elements.
RunResult run_case(const BackendOf<MlaFamily>&, const DeviceInfo&, const MlaCaseInputs&, const RunOptions&, const MlaPlanMaker& = {},
                   const MlaMirrorOptions& = {});

// The result in double precision, from keys and values of all heads, by attention's reference; and the tolerance rule of attention for
// that. A plan in latent space rounds at other places than the naive computation, as often.
Expected expect(const MlaCaseInputs&);

}  // namespace imbrex
