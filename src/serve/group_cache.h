#pragma once
// The memory of a model's cache groups in a replay: pages for keys and values, or slots for states.
#include <span>
#include <variant>
#include <vector>

#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"
#include "imbrex/layer_spec.h"
#include "imbrex/parallel.h"

namespace imbrex::serve {

// States of the layers of a group, on the stream's device; not initialised. A layer has one state in a slot, or two parts of different
// types: a recurrence, and the convolution in front of it.
class StateAllocation {
 public:
  struct Part {
    DType dtype;
    int64_t slot_elements;
  };
  StateAllocation(std::span<const Part>, int num_layers, int num_slots, const DeviceStream&);
  size_t num_parts() const { return memory_.size(); }
  TensorView layer(int i, size_t part = 0) const { return all(part).select(0, i); }  // [num_slots, slot_elements]
  const TensorView& all(size_t part) const { return memory_[part].view; }            // [num_layers, num_slots, slot_elements]
  int64_t bytes() const;

 private:
  std::vector<DeviceTensor> memory_;  // of each part
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
