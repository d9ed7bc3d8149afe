#pragma once
// What a replay decides before its first step: the deployed model, the cache format and how many blocks each KV group gets.
#include <cstdint>
#include <string>
#include <vector>

#include "imbrex/device.h"
#include "imbrex/kv_cache.h"
#include "imbrex/model.h"
#include "imbrex/parallel.h"
#include "serve/replay.h"

namespace imbrex::serve {

void check_options(const ReplayOptions&);  // Error replay.* for values out of range

// The first layers of the model in the formats of the options. Error replay.model.* for layers that are not decoder
// self-attention. `note` says why the cache format was chosen where the options left it open.
ModelSpec deploy_model(const ModelSpec&, const ReplayOptions&, const DeviceInfo&, std::string& note);

// Blocks per KV group for the cache memory of the options: as many tokens as fit, where a group with a window needs only what
// max_num_seqs windows and one chunk take, twice over (the other half keeps prefixes). Not more than the whole trace can use.
// `memory` is what it may have where the options do not say. Error replay.kv_bytes when not even one block a group fits.
std::vector<int> blocks_per_group(const ModelSpec& deployed, const Trace&, const ReplayOptions&, int64_t memory);

int64_t longest_request(const Trace&);  // tokens

// The system hands out pages at the first write. A server has that behind it; in a replay it would be counted as KV writes.
void touch_pages(const KvAllocation&, const ParallelFor&);

}  // namespace imbrex::serve
