#pragma once
// The CUDA context that a thread's calls go to: the caller's, or one that is retained. A thread's current context is restored afterwards.
#include <memory>
#include <new>

#include "cuda/driver/driver.h"

namespace imbrex::cuda {

// A device's context, shared by everything that lives in it. The caller's own, if the thread that asks has one current for that
// device; otherwise the primary context (the one PyTorch and the CUDA runtime use), retained until the last user is gone.
class Context {
 public:
  // Error cuda.device for a device that is not there; cuda.driver_missing, cuda.driver.
  static std::shared_ptr<const Context> of_device(int index);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  CUcontext get() const { return context_; }
  int device() const { return device_; }
  unsigned long long id() const { return id_; }  // never used twice in a process, unlike the address

 private:
  explicit Context(int device);
  CUcontext context_ = nullptr;
  int device_ = 0;
  unsigned long long id_ = 0;
  bool retained_ = false;
};

// Makes a context current for a scope, then the one before it again.
class CurrentContext {
 public:
  explicit CurrentContext(const Context&);
  CurrentContext(const Context&, std::nothrow_t) noexcept;  // for destructors: does nothing where it fails
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;  // false: it was current already
};

// For a scope, the thread may allocate, free, load and wait although some thread captures a stream. None of it becomes part of the graph;
// without this, the driver refuses such calls and breaks the capture, also one of another thread.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept;
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int mode_;  // the thread's, to be put back
};

}  // namespace imbrex::cuda
