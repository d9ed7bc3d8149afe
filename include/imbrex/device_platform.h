#pragma once
// A kind of devices, and what a vendor's driver has to bring for it: memory, copies, streams, events and graphs. CUDA stands behind this
// interface, and so do devices that a plug-in registers; DeviceStream, caches, block copies and replays are written against it.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/device.h"
#include "imbrex/workspace.h"

namespace imbrex {

// A device that is ready for use. Any number of threads may call it; a stream belongs to one of them at a time. Calls with a stream are
// carried out in its order and may return before: host memory that a copy names must stay as it is until then. What is handed out keeps
// the device open, and gives itself back.
class OpenDevice {
 public:
  virtual ~OpenDevice() = default;
  virtual Device device() const = 0;
  virtual int64_t free_bytes() const = 0;  // that allocate() can hand out

  // Not initialised. Error *.memory for what cannot be had. allocate_host(): of the host, pinned where that makes copies fast.
  virtual std::shared_ptr<void> allocate(int64_t bytes) const = 0;
  virtual std::shared_ptr<void> allocate_host(int64_t bytes) const = 0;

  virtual std::shared_ptr<void> make_stream() const = 0;                               // get() is the Stream
  virtual void synchronize(Stream) const = 0;                                          // waits for everything so far
  virtual void upload(void* to, const void* from, int64_t bytes, Stream) const = 0;    // host to device
  virtual void download(void* to, const void* from, int64_t bytes, Stream) const = 0;  // device to host
  virtual void copy(void* to, const void* from, int64_t bytes, Stream) const = 0;      // on the device; the two do not overlap
  virtual void fill(void* to, unsigned char value, int64_t bytes, Stream) const = 0;
  // DeviceStream::gather() of tensors that have been checked. Here: the host reads the offsets, waiting for the stream, and copies rows.
  virtual void gather(const TensorView& from, const TensorView& offsets, const TensorView& to, Stream) const;

  // Events: points of streams. get() is what the others take.
  virtual std::shared_ptr<void> make_event(bool timed) const = 0;
  virtual void record(void* event, Stream) const = 0;        // the point that the stream is at
  virtual void wait(void* event, Stream) const = 0;          // what the stream is given from here on comes after the event
  virtual void synchronize_event(void* event) const = 0;     // the host waits for it; for one never recorded, it does not
  virtual double seconds(void* begin, void* end) const = 0;  // between two timed ones that are done

  virtual bool has_graphs() const { return true; }  // whether capture() can do anything but fail
  // What `launches` gives to the stream, as a graph that launch() does again; get() is the graph. Error stream.capture where nothing can
  // be captured; what `launches` throws ends the capture.
  virtual std::shared_ptr<void> capture(Stream, const std::function<void()>& launches) const = 0;
  virtual void launch(void* graph, Stream) const = 0;

  // Scratch that plans share, see make_workspace(). Here: plans keep theirs, and it has 0 bytes.
  virtual std::shared_ptr<Workspace> make_workspace() const;
  virtual std::shared_ptr<Workspace> make_workspace(void* memory, int64_t bytes) const;
};
using OpenDevicePtr = std::shared_ptr<const OpenDevice>;

// All devices of one kind.
class DevicePlatform {
 public:
  virtual ~DevicePlatform() = default;
  // A lower-case letter, then lower-case letters, digits and _: "toy" has devices toy:0, toy:1, ...
  virtual std::string_view name() const = 0;
  // Those that are there, at most kMostDevices; none, and the reason in `why` (may be null). Of a plug-in's, `device` is set by who asks.
  virtual std::vector<DeviceInfo> devices(std::string* why) const = 0;
  virtual OpenDevicePtr open(const Device&) const = 0;

  // imbrex/capture.h. Here: nothing is captured, and a graph can keep nothing.
  virtual bool is_captured(const Device&, Stream) const;
  virtual uint64_t capture_of(const Device&, Stream) const;
  virtual void keep_for_capture(const Device&, Stream, std::shared_ptr<void>&&) const;
};

inline constexpr int kMostDevices = 64;  // of a platform that is registered

// Devices of a platform from outside are {DeviceType::plugin, index}: the platforms count from 0 in the order of their registration, and
// index / kMostDevices is the platform's count, index % kMostDevices the device's number. No count is used twice in a process.
// Thread-safe. Errors registry.null, registry.name (no such name, or one that describe_device() knows already), registry.duplicate.
void register_platform(std::shared_ptr<const DevicePlatform>);
// Later, its devices are Error device.absent; what is open of them stays usable. Error registry.unknown.
void unregister_platform(std::string_view name);

// What has registered, in that order.
std::vector<std::shared_ptr<const DevicePlatform>> platforms();
// The devices of all of them.
std::vector<DeviceInfo> probe_plugins();
// The platform of a device that is no CPU, which may be one that is not there. Error device.absent for one that is not registered.
std::shared_ptr<const DevicePlatform> platform_of(const Device&);
// The device's count among those of its platform: of a CUDA device its index.
int number_of(const Device&);
// Error backend.device_absent for a device that is only described, device.absent.
OpenDevicePtr open_device(const DeviceInfo&);

}  // namespace imbrex
