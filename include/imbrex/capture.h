#pragma once
// For callers who keep plans on behalf of others: which graph a stream is captured into, what that graph keeps alive, and an order between
// uses on several streams. All of it works on streams of any owner; on a CPU, which has no streams and graphs, it does nothing.
#include <cstdint>
#include <memory>

#include "imbrex/device.h"

namespace imbrex {

// The number of the capture that a stream is part of, never used twice in a process; 0: the stream captures nothing. Error stream.capture
// where a driver older than CUDA 12.3 captures: it cannot tell one capture from another.
uint64_t capture_of(const Device&, Stream);

// Makes the graph that a stream is captured into keep an object alive. The graph drops it when it and all graphs that were instantiated or
// cloned from it are destroyed. That happens on a thread of the driver, which may not free device memory; therefore the object is released
// by the next release_captured(). Error stream.capture unless the stream captures.
void keep_for_capture(const Device&, Stream, std::shared_ptr<void>);

// Releases the objects that graphs have dropped. To be called now and then while nothing is captured; it costs almost nothing when there is
// nothing to do.
void release_captured();

// Orders the uses of one object on several streams: work that is given to a stream between begin() and end() waits for the last use before
// it. Not thread-safe.
class StreamOrder {
 public:
  explicit StreamOrder(const Device&);
  ~StreamOrder();
  void begin(Stream) const;
  void end(Stream) const;
  void synchronize() const;  // the host waits for the last use

 private:
  struct LastUse;
  std::unique_ptr<const LastUse> last_;  // null on a CPU
};

}  // namespace imbrex
