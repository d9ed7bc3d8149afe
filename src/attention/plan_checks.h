#pragma once
// Checks of the tensors that a plan is given, for plans on any device: types, shapes, the device whose memory they are in, and whether the
// batch's block ids and slots are inside the cache. Used by the plans of all hardware folders.
#include <string_view>

#include "imbrex/attention.h"

namespace imbrex {

// The checks that an attention backend makes before it makes a plan: the spec, the limits and the number of threads are valid,
// unsupported() has no reasons, and the device is present. Errors spec.*, limits.*, threads.num_workers, backend.unsupported,
// backend.device_absent. Then a line is written to the log, in which the plan's kernels are called `kernels`.
void begin_plan(const BackendOf<AttentionFamily>&, const AttentionSpec&, const DeviceInfo&, const PlanOptions&,
                std::string_view kernels = {});

// Checks that a tensor is in the memory of a device; an empty view passes. `code` is the error's: update.device, run.device, ...
void check_memory(const TensorView&, const char* name, std::string_view code, Device);
// Checks that all arrays of a batch are in host memory. Error update.device.
void check_on_host(const Batch&);

// Reasons of a backend that runs no score_mod and no mask_mod.
std::vector<Reason> refuse_expressions(const AttentionSpec&);

// The largest block id and slot in a batch's host arrays. update() does not know the size of the cache, so run() and write_kv() compare
// these with it.
struct BatchReach {
  int64_t block = -1;  // largest block id that a request needs; -1: there is none, or ids were not read
  int64_t slot = -1;   // largest slot; -1: there is none, or slots were not read
  int64_t rows = 0;    // the least number of rows of ragged k and v
};
// Computes it. A negative id or slot, which validate() refuses, counts as beyond every cache. Block ids and slots are read only with `all`,
// because there is one for each block or token; a plan that does not validate its batches trusts the caller.
BatchReach reach_of(const Batch&, const AttentionSpec&, bool all);

// Checks AttentionInputs::q_scale. Error run.q_scale.
void check_q_scale(const AttentionSpec&, Device, const TensorView&);

// Checks all arguments of AttentionPlan::run, relative_bias included; returns the type of the output. Errors run.*, kv_cache.*.
DType check_run(const AttentionSpec&, Device, const AttentionInputs&, const AttentionOutputs&, int num_tokens, const BatchReach&);

// Checks all arguments of AttentionPlan::write_kv; returns the type of k and v, kv_dtype or one of new_kv_dtypes(). Errors write_kv.*,
// kv_cache.*.
DType check_write(const AttentionSpec&, Device, const KvCache&, const TensorView& k, const TensorView& v, const TensorView& slot_mapping,
                  int num_tokens, const BatchReach&);

}  // namespace imbrex
