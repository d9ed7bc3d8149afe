#pragma once
// A device of CUDA as the rest of the library sees one: memory, copies, streams, events and graphs in a context.
#include "cuda/driver/memory.h"
#include "imbrex/device_platform.h"

namespace imbrex::cuda {

class ContextDevice : public OpenDevice {
 public:
  explicit ContextDevice(ContextPtr context) : context_(std::move(context)) {}
  Device device() const override;
  int64_t free_bytes() const override;
  std::shared_ptr<void> allocate(int64_t bytes) const override;
  std::shared_ptr<void> allocate_host(int64_t bytes) const override;
  std::shared_ptr<void> make_stream() const override;
  void synchronize(Stream) const override;
  void upload(void* to, const void* from, int64_t bytes, Stream) const override;
  void download(void* to, const void* from, int64_t bytes, Stream) const override;
  void copy(void* to, const void* from, int64_t bytes, Stream) const override;
  void fill(void* to, unsigned char value, int64_t bytes, Stream) const override;
  std::shared_ptr<void> make_event(bool timed) const override;
  void record(void* event, Stream) const override;
  void wait(void* event, Stream) const override;
  void synchronize_event(void* event) const override;
  double seconds(void* begin, void* end) const override;
  std::shared_ptr<void> capture(Stream, const std::function<void()>& launches) const override;
  void launch(void* graph, Stream) const override;

 protected:
  ContextPtr context_;
};

}  // namespace imbrex::cuda
