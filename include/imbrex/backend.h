#pragma once
// The interface a backend implements: it says what it supports, and makes plans. Also all that a caller of a plan needs.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/device.h"
#include "imbrex/kv_cache.h"
#include "imbrex/parallel.h"
#include "imbrex/spec.h"
#include "imbrex/workspace.h"

namespace imbrex {

struct Inputs {
  TensorView q;              // [>= num_tokens, num_q_heads, head_dim_qk], spec.q_dtype, innermost stride 1
  TensorView q_scale;        // f32 [1] or [num_kv_heads], host or device; an fp8 element e of q stands for e * scale. Empty: 1
  KvCache kv;                // this layer's pages
  TensorView sinks;          // f32 [num_q_heads]; only with ScoreMod::sinks
  TensorView alibi_slopes;   // f32 [num_q_heads]; only with ScoreMod::alibi
  TensorView head_scales;    // f32 [num_q_heads]; only with ScoreMod::head_scales
  TensorView relative_bias;  // f32 [relative_buckets, num_q_heads]; only with ScoreMod::relative_buckets
};

struct Outputs {
  TensorView out;  // [>= num_tokens, num_q_heads, head_dim_v], one of spec.out_dtypes(), innermost stride 1
  TensorView lse;  // optional f32 [>= num_tokens, num_q_heads], natural log of the denominator (sink included); -inf and out 0 for
                   // a query that sees no key
};

struct PlanOptions {
  PlanLimits limits;
  ParallelFor threads;             // CPU backends; default: the calling thread
  bool balanced = false;           // split by load: faster for few long requests, results then depend on the batch
  bool validate = true;            // check every batch in update
  bool load_on_demand = false;     // GPU kernels are compiled and loaded by the first run() that needs them, not by plan(): for plans of
                                   // few batches. Such a plan cannot be captured into a graph
  bool on_device = false;          // update_on_device() will be called; not with `balanced`
  std::optional<DType> out_dtype;  // the one of spec.out_dtypes() that every output of run() will have: a GPU's plan makes no kernels for
                                   // others, and refuses them. Empty: any
  std::shared_ptr<Workspace> workspace;  // scratch that the plan shares with others; null: of its own
};

// One thing that keeps a backend from running a spec on a device, or a request from being planned.
struct Reason {
  std::string code;    // stable: "spec.head_dim_qk"; listed in docs/errors.md
  std::string wanted;  // "a multiple of 16, at most 256"
  std::string actual;  // "80"
  std::string str() const;
  friend bool operator==(const Reason&, const Reason&) = default;
};

// Everything one step needs, decided once and reused by every layer of the same spec. Not thread-safe; belongs to one stream.
class Plan {
 public:
  virtual ~Plan() = default;
  // Reads the batch's host arrays and keeps views of its device arrays, which must live until the next update. What fails leaves the plan
  // at the step before: run() then computes that one, bit for bit. Where a GPU's driver fails in the middle, and fails again when the last
  // step is sent once more, there is none: write_kv() and run() say plan.no_step until an update succeeds.
  virtual void update(const Batch&, Stream = nullptr) = 0;
  // The same from lengths that are on the device: launches one kernel that makes the lists there, waits for nothing, and may be captured
  // into a graph together with the layers of the step. The arrays are read when the kernel runs. A request beyond the limits, or of which
  // the arrays contradict each other, is left out: its outputs are not written, and device_problems() tells. When query_start_loc falls
  // or does not begin with 0, all requests are left out. Only with PlanOptions::on_device. Error update.on_device where a plan needs the
  // lengths on the host.
  virtual void update_on_device(const DeviceBatch&, Stream = nullptr);
  // Why requests were left out since the last call, a Reason for each rule that one broke, with the last that did. Waits for the stream.
  virtual std::vector<Reason> device_problems(Stream = nullptr);
  // Writes this step's k [num_tokens, num_kv_heads, head_dim_qk] and v (kv_dtype or one of new_kv_dtypes()) to the slots of slot_mapping.
  virtual void write_kv(const KvCache&, const TensorView& k, const TensorView& v, Stream = nullptr) const = 0;
  // Allocates nothing, compiles nothing.
  virtual void run(const Inputs&, const Outputs&, Stream = nullptr) const = 0;
  // Whether write_kv() and run() may be captured into a graph that replays later steps too. A plan of two phases may not, since what it
  // launches depends on the step: there they refuse a stream that is being captured (Error phase_plan.captured).
  virtual bool capturable() const { return false; }
  virtual std::string str() const = 0;  // "cpu_amx: 264 work items, 12 merges"
};

// Stateless; one object a backend. Backends outside this library derive from it too and register at run time.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;         // "cpu_amx"
  virtual std::string_view description() const = 0;  // one line for `imbrex select`
  // Every reason why this backend cannot run the spec on the device; empty when it can. Must not touch the device.
  virtual std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const = 0;
  // Only for a spec and a device that unsupported() has nothing against (Error backend.unsupported otherwise), and only for a device
  // that is present (Error backend.device_absent): kernels, scratch and threads belong to it.
  virtual std::unique_ptr<Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const = 0;
};

}  // namespace imbrex
