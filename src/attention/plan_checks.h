#pragma once
// What a plan asks of the tensors it is given, on whatever device it runs: types, shapes, whose memory they are in, and whether the
// batch's block ids and slots lie inside the cache. Used by the plans of all hardware folders.
#include <string_view>

#include "imbrex/backend.h"

namespace imbrex {

// What every backend asks before it makes a plan: that the spec, the limits and the number of threads are some, that unsupported() has
// nothing against it, and that the device is present. Errors spec.*, limits.*, threads.num_workers, backend.unsupported,
// backend.device_absent. Then the log gets a line, with `kernels` as what they are called.
void begin_plan(const Backend&, const AttentionSpec&, const DeviceInfo&, const PlanOptions&, std::string_view kernels = {});

// An empty view passes. `code` is the caller's: update.device, run.device, ...
void check_memory(const TensorView&, const char* name, std::string_view code, Device);
// The arrays of a batch that a plan reads on the host: all of them there. Error update.device.
void check_on_host(const Batch&);

// How far a batch's host arrays reach into a cache. A batch does not know how large that is, so run() and write_kv() compare.
struct BatchReach {
  int64_t block = -1;  // largest block id that a request needs; -1: none, or nobody has looked
  int64_t slot = -1;   // largest slot; likewise
  int64_t rows = 0;    // of ragged k and v: so many at least
};
// Negative ones, which validate() refuses, reach beyond every cache. Block ids and slots are looked at with `all` alone, since that is a
// walk over each of them; of a plan that does not validate its batches, the caller has vouched for them.
BatchReach reach_of(const Batch&, const AttentionSpec&, bool all);

// Inputs::q_scale. Error run.q_scale.
void check_q_scale(const AttentionSpec&, Device, const TensorView&);

// Everything about the arguments of Plan::run; returns the type of the output. relative_bias is checked too. Errors run.*, kv_cache.*.
DType check_run(const AttentionSpec&, Device, const Inputs&, const Outputs&, int num_tokens, const BatchReach&);

// Everything about the arguments of Plan::write_kv; returns the type of k and v, kv_dtype or one of new_kv_dtypes(). Errors write_kv.*,
// kv_cache.*.
DType check_write(const AttentionSpec&, Device, const KvCache&, const TensorView& k, const TensorView& v, const TensorView& slot_mapping,
                  int num_tokens, const BatchReach&);

}  // namespace imbrex
