#pragma once
// The memory of a model's cache groups in a replay: pages for keys and values, or slots for states.
#include <variant>

#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"
#include "imbrex/layer_spec.h"
#include "imbrex/parallel.h"

namespace imbrex::serve {

// States of the layers of a group, on the stream's device; not initialised.
class StateAllocation {
 public:
  StateAllocation(DType, int num_layers, int num_slots, int64_t slot_elements, const DeviceStream&);
  TensorView layer(int i) const { return memory_.view.select(0, i); }  // [num_slots, slot_elements]
  const TensorView& all() const { return memory_.view; }               // [num_layers, num_slots, slot_elements]
  int64_t bytes() const { return memory_.view.num_elements() * size_of(memory_.view.dtype); }

 private:
  DeviceTensor memory_;
};

using GroupCache = std::variant<KvAllocation, StateAllocation>;
int64_t bytes_of(const GroupCache&);

// Makes the cache of layers of this spec, with so many blocks or slots. On a CPU every memory page is written to once: the system allocates
// it at the first write, which a server has done long ago and a replay would count as work.
GroupCache make_cache(const AttentionSpec&, int num_layers, int num_blocks, const DeviceStream&, const ParallelFor&);
GroupCache make_cache(const ShortConvSpec&, int num_layers, int num_slots, const DeviceStream&, const ParallelFor&);
GroupCache make_cache(const MlaSpec&, int num_layers, int num_blocks, const DeviceStream&, const ParallelFor&);
GroupCache make_cache(const RecurrentSpec&, int num_layers, int num_slots, const DeviceStream&, const ParallelFor&);

}  // namespace imbrex::serve
