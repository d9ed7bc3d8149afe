#pragma once
// Which backends exist, in order of preference, and which one runs a spec on a device, with every reason.
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/backend.h"

namespace imbrex {

// Built-in backends best first, then registered ones in front of them in the order of registration. `reference` is the last.
std::vector<const Backend*> backends();
const Backend* find_backend(std::string_view name);     // nullptr when there is none of that name
void register_backend(std::shared_ptr<const Backend>);  // Error registry.duplicate when the name is taken; thread-safe
void unregister_backend(std::string_view name);         // only registered ones; Error registry.unknown

// A name that users of vLLM ("FLASH_ATTN") or SGLang ("fa3") know, and which of ours serve it, in order of preference.
struct BackendAlias {
  std::string_view origin;                 // "vllm", "sglang"
  std::string_view name;                   // compared without case
  std::vector<std::string_view> backends;  // of ours; empty: nothing yet, see `note`
  std::string_view note;                   // what that backend is for, and which later part of imbrex it waits for
};
std::span<const BackendAlias> backend_aliases();

enum class Phase : uint8_t { any, prefill, decode };
const char* to_string(Phase);

struct SelectOptions {
  std::string forced;          // a backend or alias for every phase; empty: IMBREX_BACKEND, else by order
  std::string forced_prefill;  // for one phase only, stronger than `forced`
  std::string forced_decode;
  Phase phase = Phase::any;
};

struct Candidate {
  const Backend* backend = nullptr;
  std::vector<Reason> reasons;  // empty: it could run the spec
};

struct Selection {
  const Backend* backend = nullptr;    // null when nothing runs it
  std::string rule;                    // "first of 2 that run it", "forced by IMBREX_BACKEND"
  std::vector<Candidate> candidates;   // every backend, in order
  std::vector<std::string> proposals;  // changes of the spec after which something runs ("kv_dtype bf16: cpu_amx")
  std::string str() const;             // the table that `imbrex select` prints
};

// Never throws for a spec that nothing runs: `backend` is null then. Throws Error select.forced when a forced backend does not
// exist or has reasons against it; the message lists them.
Selection select(const AttentionSpec&, const DeviceInfo&, const SelectOptions& = {});

// Plan that sends requests with at most `decode_max_q` query tokens to one backend and the others to another. An update is taken by both or
// by none. On a GPU the requests of a phase have to be next to each other (Error phase_plan.interleaved), and the plan is no part of a
// graph: Plan::capturable() is false, and write_kv() and run() refuse a stream that is being captured (Error phase_plan.captured).
std::unique_ptr<Plan> plan_by_phase(const Backend& prefill, const Backend& decode, const AttentionSpec&, const DeviceInfo&,
                                    const PlanOptions&, int decode_max_q = 1);

}  // namespace imbrex
