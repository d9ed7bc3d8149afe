#pragma once
// What a platform of devices may bring besides memory and streams: kernels that attention needs around its layers.
#include <memory>

#include "imbrex/device_platform.h"
#include "imbrex/kv_cache.h"
#include "imbrex/merge.h"

namespace imbrex {

// Of a DevicePlatform that is this too.
class DeviceOperations {
 public:
  virtual ~DeviceOperations() = default;
  virtual std::unique_ptr<BlockCopier> block_copier(const DeviceInfo&) const = 0;      // null: pieces are copied one after the other
  virtual std::unique_ptr<PartialMerger> partial_merger(const DeviceInfo&) const = 0;  // null: the device merges nothing
};

// Null where its platform has none. Error device.absent.
inline std::shared_ptr<const DeviceOperations> operations_of(const Device& device) {
  return std::dynamic_pointer_cast<const DeviceOperations>(platform_of(device));
}

}  // namespace imbrex
