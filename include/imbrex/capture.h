#pragma once
// For callers who keep plans on behalf of others: which graph a stream is captured into, what that graph keeps alive, and an order between
// uses on several streams. All of it works on streams of any owner; on a CPU, which has neither, it does nothing.
#include <cstdint>
#include <memory>

#include "imbrex/device.h"

namespace imbrex {

// The number of the capture that a stream is part of, never used twice in a process; 0: the stream captures nothing. Error stream.capture
// where a driver older than CUDA 12.3 captures: it cannot tell one capture from another.
uint64_t capture_of(const Device&, Stream);

// Gives the graph that a stream is captured into a share of something. The graph lets go of it when it and all that was instantiated or
// cloned from it are destroyed; that happens on a thread of the driver, which may not free what lives on a device, so the share is given
// back by the next release_captured(). Error stream.capture unless the stream captures.
void keep_for_capture(const Device&, Stream, std::shared_ptr<void>);

// Gives back what graphs have let go of. To be called now and then while nothing is captured; almost free when there is nothing to do.
void release_captured();

// Uses of one thing on several streams, one after the other: what a stream is given between begin() and end() waits for the last use.
// Not thread-safe.
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
