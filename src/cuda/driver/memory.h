#pragma once
// Objects that own device memory, pinned host memory, a stream or an event. Each belongs to a context and frees what it owns.
// The caller's context is current again after every call. All of them may be made, waited for and freed while a stream is captured.
#include <cstddef>
#include <memory>
#include <utility>

#include "cuda/driver/context.h"
#include "imbrex/device.h"

namespace imbrex::cuda {

using ContextPtr = std::shared_ptr<const Context>;

// A handle of the driver in a context, given back once by `give_back`; movable.
template <class Handle, CUresult (*give_back)(const DriverApi&, Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    const DriverApi* const cu = handle_ == Handle{} ? nullptr : driver();
    if (cu == nullptr) return;
    const CurrentContext current(*context_, std::nothrow);
    const RelaxedCapture relaxed;
    // The result is not checked: when the process ends, or the context's owner has destroyed it, the object is gone already.
    give_back(*cu, handle_);
  }
  Handle get() const { return handle_; }
  const ContextPtr& context() const { return context_; }
  explicit operator bool() const { return handle_ != Handle{}; }

 protected:
  explicit Owned(ContextPtr context) : context_(std::move(context)) {}
  ContextPtr context_;
  Handle handle_{};
};

inline CUresult free_device(const DriverApi& cu, CUdeviceptr address) { return cu.cuMemFree_v2(address); }
inline CUresult free_pinned(const DriverApi& cu, void* data) { return cu.cuMemFreeHost(data); }
inline CUresult destroy_stream(const DriverApi& cu, CUstream stream) { return cu.cuStreamDestroy_v2(stream); }
inline CUresult destroy_event(const DriverApi& cu, CUevent event) { return cu.cuEventDestroy_v2(event); }

// Device memory, not initialised. The object owns it, and waits for the device before it frees it (Error cuda.memory); or it is memory that
// somebody else owns.
class DeviceBuffer : public Owned<CUdeviceptr, free_device> {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(ContextPtr, size_t bytes);  // 0 bytes: nothing
  DeviceBuffer(ContextPtr context, CUdeviceptr lent, size_t bytes) : Owned(std::move(context)), lent_(lent), bytes_(bytes) {}
  size_t bytes() const { return bytes_; }
  CUdeviceptr address() const { return lent_ != 0 ? lent_ : get(); }
  template <class T = void>
  T* as() const {
    return reinterpret_cast<T*>(address());  // NOLINT(performance-no-int-to-ptr): the driver's addresses are numbers
  }

 private:
  CUdeviceptr lent_ = 0;
  size_t bytes_ = 0;
};

// Device memory that is filled when the call returns, for every stream. Not through the legacy default stream, which must not be used while
// another stream is captured, but through one that lives as long as the call.
DeviceBuffer zeroed(const ContextPtr&, size_t bytes);
DeviceBuffer copy_of(const ContextPtr&, const void* from, size_t bytes);

// Host memory that copies to and from every device without a detour. Error cuda.memory.
class PinnedBuffer : public Owned<void*, free_pinned> {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(ContextPtr, size_t bytes);
  size_t bytes() const { return bytes_; }
  template <class T = void>
  T* as() const {
    return static_cast<T*>(get());
  }

 private:
  size_t bytes_ = 0;
};

// A stream of our own that does not wait for the legacy default stream. Callers' streams are used as they come: see cu_stream().
class OwnedStream : public Owned<CUstream, destroy_stream> {
 public:
  OwnedStream() = default;
  explicit OwnedStream(ContextPtr);
  void synchronize() const;
};

class Event : public Owned<CUevent, destroy_event> {
 public:
  Event() = default;
  explicit Event(ContextPtr, bool timing = false);
  void record(CUstream) const;
  bool done() const;         // everything before the last record()
  void synchronize() const;  // waits for it
};

// Of events of any owner.
void record_event(const Context&, CUevent, CUstream);
bool is_done(CUevent);
void wait_for_event(CUevent);
float elapsed_ms(CUevent begin, CUevent end);  // both with timing, and done
inline float elapsed_ms(const Event& begin, const Event& end) { return elapsed_ms(begin.get(), end.get()); }
void wait_for_stream(CUstream);

bool is_captured(CUstream);  // what it is given goes into a graph; false for the null stream

inline CUstream cu_stream(Stream stream) { return static_cast<CUstream>(stream); }
inline CUdeviceptr device_address(const void* p) { return reinterpret_cast<CUdeviceptr>(p); }

// Copies in the order of the stream. Host memory must be pinned for the copy to overlap with the host, and must live until it is done.
void copy_to_device(CUdeviceptr to, const void* from, size_t bytes, CUstream);
void copy_to_host(void* to, CUdeviceptr from, size_t bytes, CUstream);
void copy_on_device(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream);
void fill_bytes(CUdeviceptr to, unsigned char value, size_t bytes, CUstream);

}  // namespace imbrex::cuda
