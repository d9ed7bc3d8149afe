#pragma once
// What a plan asks of the tensors it is given, on whatever device it runs: types, shapes, whose memory they are in, and whether the
// batch's block ids and slots lie inside the cache. Used by the plans of all hardware folders.
#include <string_view>

#include "imbrex/backend.h"

namespace imbrex {

// What every backend's plan() begins with: the spec is one, the backend runs it, the device is there. Errors spec.*, backend.unsupported,
// backend.device_absent. Logs a line, with `kernels` as what they are called.
void begin_plan(const Backend&, const AttentionSpec&, const DeviceInfo&, std::string_view kernels = {});

// An empty view passes. `code` is the caller's: update.device, run.device, ...
void check_memory(const TensorView&, const char* name, std::string_view code, Device);

// Host block tables know more than validate(): a batch does not know how large the cache is, so run() and write_kv() compare.
struct BatchReach {
  int block = -1;     // largest block id that a request needs; -1: none, or not on the host
  int64_t slot = -1;  // largest slot
};
BatchReach reach_of(const Batch&, const AttentionSpec&);

// Inputs::q_scale. Error run.q_scale.
void check_q_scale(const AttentionSpec&, Device, const TensorView&);

// Everything about the arguments of Plan::run; returns the type of the output. relative_bias is checked too. Errors run.*, kv_cache.*.
DType check_run(const AttentionSpec&, Device, const Inputs&, const Outputs&, int num_tokens, const BatchReach&);

// Everything about the arguments of Plan::write_kv; returns the type of k and v, kv_dtype or one of new_kv_dtypes(). Errors write_kv.*,
// kv_cache.*.
DType check_write(const AttentionSpec&, Device, const KvCache&, const TensorView& k, const TensorView& v, const TensorView& slot_mapping,
                  int num_tokens, const BatchReach&);

}  // namespace imbrex
