#pragma once
// What the plans of every layer family have in common: how they are made, updated once a step, and asked about themselves. The call that
// computes a layer belongs to the family's own plan (attention.h, short_conv.h).
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "imbrex/batch.h"
#include "imbrex/device.h"
#include "imbrex/parallel.h"
#include "imbrex/workspace.h"

namespace imbrex {

struct PlanOptions {
  PlanLimits limits;
  ParallelFor threads;             // CPU backends; default: the calling thread
  bool balanced = false;           // split by load: faster for few long requests, results then depend on the batch
  bool validate = true;            // check every batch in update
  bool load_on_demand = false;     // GPU kernels are compiled and loaded by the first run() that needs them, not by plan(): for plans of
                                   // few batches. Such a plan cannot be captured into a graph
  bool on_device = false;          // update_on_device() will be called; not with `balanced`
  std::optional<DType> out_dtype;  // the one of spec.out_dtypes() that every output of run() will have: a GPU's plan makes no kernels for
                                   // other types, and refuses them. Empty: any
  std::shared_ptr<Workspace> workspace;  // scratch that the plan shares with others; null: scratch of its own
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
class BasicPlan {
 public:
  virtual ~BasicPlan() = default;
  // Makes the batch the plan's step: reads its host arrays and keeps views of its device arrays, which must live until the next update. An
  // update that fails leaves the plan at the step before, which it then computes bit for bit. There is one exception: where a GPU's driver
  // fails in the middle, and fails again when the plan sends the step before once more, the plan has no step, and every call is Error
  // plan.no_step until an update succeeds.
  virtual void update(const Batch&, Stream = nullptr) = 0;
  // An update from lengths that are on the device: launches one kernel that makes the lists there, waits for nothing, and may be captured
  // into a graph together with the layers of the step. The arrays are read when the kernel runs. A request beyond the limits, or one whose
  // arrays contradict each other, is left out: its outputs are not written, and device_problems() reports it. When query_start_loc falls
  // or does not begin with 0, all requests are left out. Only with PlanOptions::on_device. Error update.on_device where a plan needs the
  // lengths on the host.
  virtual void update_on_device(const DeviceBatch&, Stream = nullptr);
  // Why requests were left out since the last call: a Reason for each rule that some request broke, with the values of the last such
  // request. Waits for the stream.
  virtual std::vector<Reason> device_problems(Stream = nullptr);
  // Whether the plan's launches of a layer may be captured into a graph that replays later steps too. A plan of two phases says false,
  // since its launches depend on the step: it refuses a stream that is being captured (Error phase_plan.captured).
  virtual bool capturable() const { return false; }
  virtual std::string str() const = 0;  // "cpu_amx: 264 work items, 12 merges"
};

}  // namespace imbrex
