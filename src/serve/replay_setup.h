#pragma once
// The decisions of a replay before its first step: the deployed model, the cache format, and how many blocks and slots its caches have.
#include <cstdint>
#include <string>
#include <vector>

#include "imbrex/device.h"
#include "imbrex/model.h"
#include "serve/replay.h"

namespace imbrex::serve {

void check_options(const ReplayOptions&);  // Error replay.* for values out of range

// The first layers of the model in the formats of the options. Error replay.model.* for layers of attention that are not a
// decoder's self-attention. `images`: of requests, for which layers of attention are told positions. `note` says why the cache format was
// chosen where the options left it open.
ModelSpec deploy_model(const ModelSpec&, bool images, const ReplayOptions&, const DeviceInfo&, std::string& note);

struct CacheSizes {
  std::vector<int> num_blocks;  // of each of the model's cache groups; 0: it is of states
  int num_slots = 0;            // of states: a request's slot is the same in all groups of states. 0: the model keeps none
  int64_t rest = 0;             // bytes of the memory that are left because one more block of each group does not fit

  int places(const CacheGroup& group, size_t index) const { return group.holds_states() ? num_slots : num_blocks[index]; }
  // Of the states, keys and values that a group has room for; the group's memory is larger by what is padding.
  int64_t needed_bytes(const CacheGroup& group, size_t index, int block_size) const {
    return places(group, index) * (group.holds_states() ? group.bytes_per_slot : group.bytes_per_token * block_size);
  }
};
// Divides the cache memory of the options. States come first: a slot for each of max_num_seqs requests, and as many to keep prefixes, or as
// many as half of the memory holds. The rest is for pages, for as many tokens as fit. A group with a window gets no more than twice what
// max_num_seqs windows and one chunk take (one half keeps prefixes). No group gets more than the whole trace can use. `memory` is the size
// where the options name none. Error replay.kv_bytes.small when not even a slot and one block a group fit.
CacheSizes cache_sizes(const ModelSpec& deployed, const Trace&, const ReplayOptions&, int64_t memory);

int64_t longest_request(const Trace&);  // tokens
// Whether states are kept behind prefixes of a model that has states. Unlike blocks they cost copies and room, for nothing where prompts
// have no prefixes in common.
bool keeps_states(const Trace&, const ReplayOptions&);

}  // namespace imbrex::serve
