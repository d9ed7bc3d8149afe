#pragma once
// The interface a backend implements, for any family of layers: it says what it supports, and makes plans.
//
// A family is a struct of a name and two types: Spec, what a layer computes, fixed for the life of a model, and Plan, which derives from
// BasicPlan and adds the calls of a layer. Backends, the registry and select() are the same for all families. layer_spec.h lists them.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/plan.h"

namespace imbrex {

// A kernel that a plan would run, and the sizes that the backend has chosen for it: what `imbrex select -v` prints.
struct KernelChoice {
  struct Size {
    std::string name;  // "tile_rows"; defined in docs/terms.md
    int64_t value;
  };
  std::string requests;                             // those of a step that it runs: "decode", "verify", "prefill"; "all"
  int least_queries = 1, most_queries = INT32_MAX;  // by their number of queries
  std::string kernel;                               // "attention_sm90_decode" for a GPU, "avx512_bf16" for a CPU
  std::vector<Size> sizes;                          // in the order in which they are printed
  std::string str() const;                          // "prefill (17 queries or more): attention_sm90 with tile_rows 128, tile_keys 128, ..."
};

// What every backend says of itself.
class BasicBackend {
 public:
  virtual ~BasicBackend() = default;
  virtual std::string_view name() const = 0;         // "cpu_amx"
  virtual std::string_view description() const = 0;  // one line for `imbrex select`
};

// Stateless; one object a backend. Backends outside this library derive from it too and register at run time.
template <class Family>
class BackendOf : public BasicBackend {
 public:
  // Every reason why this backend cannot run the spec on the device; empty when it can. Must not touch the device.
  virtual std::vector<Reason> unsupported(const typename Family::Spec&, const DeviceInfo&) const = 0;
  // Makes a plan. Only for a spec and a device that unsupported() has no reasons against (Error backend.unsupported otherwise), and only
  // for a device that is present (Error backend.device_absent): kernels, scratch and threads belong to it.
  virtual std::unique_ptr<typename Family::Plan> plan(const typename Family::Spec&, const DeviceInfo&, const PlanOptions&) const = 0;
  // How many bytes of a workspace (workspace.h) such a plan takes, without making one: the device may be one that is only described. Plans
  // that share a workspace take as much as the largest of them. 0: the plan keeps scratch of its own, or has none. Only for a spec and a
  // device that unsupported() has no reasons against.
  virtual int64_t workspace_bytes(const typename Family::Spec&, const DeviceInfo&, const PlanOptions&) const { return 0; }
  // The kernels of such a plan, for tensors that lie as usual; none where a backend has nothing to choose. The device may be one that is
  // only described. Only for a spec and a device that unsupported() has no reasons against.
  virtual std::vector<KernelChoice> kernel_choices(const typename Family::Spec&, const DeviceInfo&) const { return {}; }
};

// All backends of a family, in order of preference: registered ones first, in the order of registration, then the built-in ones, best
// first. The family's reference is the last.
template <class Family>
std::vector<const BackendOf<Family>*> backends();
template <class Family>
const BackendOf<Family>* find_backend(std::string_view name);  // nullptr when there is none of that name
template <class Family>
void register_backend(std::shared_ptr<const BackendOf<Family>>);  // Error registry.duplicate when the name is taken; thread-safe
template <class Family>
void unregister_backend(std::string_view name);  // only registered ones; Error registry.unknown

// A name that users of vLLM ("FLASH_ATTN") or SGLang ("fa3") know, and the backends of imbrex that serve it, in order of preference.
struct BackendAlias {
  std::string_view origin;                 // "vllm", "sglang"
  std::string_view name;                   // compared without case
  std::vector<std::string_view> backends;  // names of backends here; empty: there is none, see `note`
  std::string_view note;                   // what that backend is for, and which later part of imbrex it waits for
  std::string_view family;                 // the family of these backends: "attention"; empty: none
};
std::span<const BackendAlias> backend_aliases();

// What selection is asked for: a backend for all steps, or for those of one phase (plan_by_phase()).
enum class Phase : uint8_t { any, prefill, decode };
const char* to_string(Phase);

// Names may be of backends and of aliases, and are compared without case. A model may have layers of several families while the user gives
// one name: a name that only another family has forces a backend there, and this family chooses by its order, as SelectionOf::rule says.
struct SelectOptions {
  std::string forced;          // a backend or alias for every phase; empty: IMBREX_BACKEND, else by order
  std::string forced_prefill;  // for one phase only, stronger than `forced`
  std::string forced_decode;
  Phase phase = Phase::any;
};

template <class Family>
struct CandidateOf {
  const BackendOf<Family>* backend = nullptr;
  std::vector<Reason> reasons;  // empty: it could run the spec
};

template <class Family>
struct SelectionOf {
  const BackendOf<Family>* backend = nullptr;   // null when nothing runs it
  std::string rule;                             // "first of 2 that run it", "forced by IMBREX_BACKEND"
  std::vector<CandidateOf<Family>> candidates;  // every backend, in order
  std::vector<std::string> proposals;           // changes of the spec after which something runs ("kv_dtype bf16: cpu_amx")
  std::string str() const;                      // the table that `imbrex select` prints
};

// Never throws for a spec that nothing runs: `backend` is null then. Throws Error select.forced when a forced backend exists in no family,
// or in this one and has reasons against it; the message lists them.
template <class Family>
SelectionOf<Family> select(const typename Family::Spec&, const DeviceInfo&, const SelectOptions& = {});

}  // namespace imbrex
