#pragma once
// A stream of a device, with memory, copies, times and graphs in its order: what a program needs around plans to work on a GPU without its
// vendor's headers. On a CPU the same calls work on the host's memory, and are done when they return.
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>

#include "imbrex/device.h"
#include "imbrex/parallel.h"

namespace imbrex {

using DeviceGraph = std::shared_ptr<void>;  // captured launches; belongs to the stream that captured them

// A tensor and its memory, which lives until the last copy is gone.
struct DeviceTensor {
  TensorView view;
  std::shared_ptr<void> memory;
};

// Calls are carried out in order. On a GPU they return before that: the host memory of a copy must not change until synchronize(). One
// thread at a time may use a stream.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual Device device() const = 0;
  virtual Stream get() const = 0;          // for Plan::update, write_kv and run
  virtual bool asynchronous() const = 0;   // false: all is done when a call returns, and nothing can be captured
  virtual int64_t free_bytes() const = 0;  // what allocate() can still hand out
  virtual void synchronize() const = 0;    // waits for everything so far

  // Memory that is not initialised; Error cuda.memory or stream.memory if there is not enough. Memory of the host is pinned where that
  // makes copies fast.
  virtual std::shared_ptr<void> allocate(int64_t bytes) const = 0;
  virtual std::shared_ptr<void> allocate_host(int64_t bytes) const = 0;

  virtual void upload(void* to, const void* from, int64_t bytes) const = 0;    // host to device
  virtual void download(void* to, const void* from, int64_t bytes) const = 0;  // device to host
  virtual void fill(void* to, unsigned char value, int64_t bytes) const = 0;
  // Rows from anywhere in an array, as an embedding is looked up: to[i, :] = from[offsets[i] + :]. All on the device and contiguous; from
  // [any], offsets i32 [rows] in elements, to [rows, row length] of from's type. Error stream.gather.
  virtual void gather(const TensorView& from, const TensorView& offsets, const TensorView& to) const = 0;

  // Marks are points of the stream, numbered by the caller; a number that is used again stands for the later point.
  virtual void mark(size_t number) = 0;
  virtual double seconds(size_t from, size_t to) const = 0;  // between two marks; waits for the later one

  // Calls `launches` and captures what it gives to the stream (runs and writes of plans; no update, no copy from the host) into a graph for
  // replay(). Error stream.capture where nothing can be captured.
  virtual DeviceGraph capture(const std::function<void()>& launches) const = 0;
  virtual void replay(const DeviceGraph&) const = 0;

  DeviceTensor tensor(DType, std::initializer_list<int64_t> sizes) const;  // contiguous, not initialised
  DeviceTensor copy_of(const TensorView& host) const;                      // contiguous tensors only; waits until it is there
};

// Makes a stream. `threads` are for a CPU's gather. Error backend.device_absent for a device that is only described.
std::unique_ptr<DeviceStream> open_stream(const DeviceInfo&, const ParallelFor& threads = {});

}  // namespace imbrex
