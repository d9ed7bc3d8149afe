// imbrex/capture.h: captures as platforms know them, and an order between streams by their events.
#include "imbrex/capture.h"

#include "core/check.h"
#include "core/stream_capture.h"
#include "core/tensor_format.h"
#include "imbrex/device_platform.h"

namespace imbrex {
namespace {

// The null stream cannot be captured.
bool may_be_captured(const Device& device, Stream stream) { return device.type != DeviceType::cpu && stream != nullptr; }

}  // namespace

bool is_captured(const Device& device, Stream stream) {
  return may_be_captured(device, stream) && platform_of(device)->is_captured(device, stream);
}

uint64_t capture_of(const Device& device, Stream stream) {
  return may_be_captured(device, stream) ? platform_of(device)->capture_of(device, stream) : 0;
}

void keep_for_capture(const Device& device, Stream stream, std::shared_ptr<void> share) {
  check(may_be_captured(device, stream), "stream.capture", "expected a stream that is captured, got one of {} that is not", device);
  platform_of(device)->keep_for_capture(device, stream, std::move(share));
}

struct StreamOrder::LastUse {
  explicit LastUse(OpenDevicePtr on) : device(std::move(on)), end(device->make_event(false)) {}
  OpenDevicePtr device;
  std::shared_ptr<void> end;
};

StreamOrder::StreamOrder(const Device& device)
    : last_(device.type == DeviceType::cpu ? nullptr : std::make_unique<LastUse>(platform_of(device)->open(device))) {}
StreamOrder::~StreamOrder() = default;

// Streams are not compared: the address of one that is gone may be that of a new one.
void StreamOrder::begin(Stream stream) const {
  if (last_) last_->device->wait(last_->end.get(), stream);
}

void StreamOrder::end(Stream stream) const {
  if (last_) last_->device->record(last_->end.get(), stream);
}

void StreamOrder::synchronize() const {
  if (last_) last_->device->synchronize_event(last_->end.get());
}

}  // namespace imbrex
