// See key_source.h.
#include "attention/key_source.h"

namespace imbrex {

void find_keys(const Batch& batch, KeySource& to) {
  const size_t num_reqs = size_t(batch.num_reqs());
  to.ids = {};
  if (!batch.kv_start_loc.empty()) {
    const auto* starts = batch.kv_start_loc.as<const int32_t>();
    to.start.assign(starts, starts + num_reqs);
  } else if (!batch.block_table.empty()) {
    to.ids = batch.block_table;
    to.start.resize(num_reqs);
    for (size_t r = 0; r < num_reqs; ++r) to.start[r] = long(r) * batch.block_table.stride(0);
  } else if (!batch.kv_indptr.empty()) {
    to.ids = batch.kv_indices;
    const auto* starts = batch.kv_indptr.as<const int32_t>();
    to.start.assign(starts, starts + num_reqs);
  } else {
    to.start.assign(num_reqs, 0);
  }
}

}  // namespace imbrex
