#pragma once
// The parts of mirrors, for any family. A mirror is a backend for callers whose tensors are in host memory: it copies a call's tensors to
// the device, runs a GPU backend there, and copies the results back. It is correct and slow; conformance tests and case files run GPU
// backends through it.
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "imbrex/device_stream.h"
#include "imbrex/family.h"

namespace imbrex {

// A tensor on the device: all bytes from the first to the last element of a view of the host's, gaps included, between guards. Bytes that a
// kernel must not read hold what the host has there, or 0xff. Memory is kept from call to call.
class Mirrored {
 public:
  // Copies the host's bytes to the device, and returns the view of them there.
  TensorView take(const TensorView& host, const DeviceStream&);
  // Copies the device's bytes back to the host, after waiting for the device. Error mirror.guard when a guard was written to.
  void give_back(const TensorView& host, const char* name, const DeviceStream&);

 private:
  // The bytes from a view's first element to its last.
  struct Span {
    const char* begin = nullptr;
    int64_t bytes = 0, first = 0;  // first: where the view's own first element is among them
  };
  static Span span_of(const TensorView&);

  std::shared_ptr<void> memory_;
  int64_t capacity_ = 0;
  Span host_;
  std::vector<unsigned char> back_;
};

// The backend of a MirrorPlan, which is a plan of Family, has a type Memory with a member `stream`, made of a DeviceInfo and shared by all
// plans of the backend, whose calls run one after the other; and is made of the real plan, that memory and the options.
template <class Family, class MirrorPlan, class Options>
class MirrorBackend final : public BackendOf<Family> {
 public:
  MirrorBackend(const BackendOf<Family>& backend, const Options& options) : backend_(backend), options_(options) {}
  std::string_view name() const override { return backend_.name(); }
  std::string_view description() const override { return backend_.description(); }
  std::vector<Reason> unsupported(const typename Family::Spec& spec, const DeviceInfo& device) const override {
    return backend_.unsupported(spec, device);
  }
  std::unique_ptr<typename Family::Plan> plan(const typename Family::Spec& spec, const DeviceInfo& device,
                                              const PlanOptions& options) const override {
    std::shared_ptr<typename Family::Plan> plan = backend_.plan(spec, device, options);
    const std::lock_guard lock(mutex_);
    if (!memory_ || memory_->stream->device() != device.device) memory_ = std::make_shared<typename MirrorPlan::Memory>(device);
    kept_.push_back(plan);
    if (kept_.size() > kPlansKept) kept_.pop_front();
    return std::make_unique<MirrorPlan>(std::move(plan), memory_, options_);
  }

 private:
  static constexpr size_t kPlansKept = 8;  // plans that are done with, so that their kernels stay loaded for the next one

  const BackendOf<Family>& backend_;
  Options options_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<typename MirrorPlan::Memory> memory_;
  mutable std::deque<std::shared_ptr<typename Family::Plan>> kept_;
};

}  // namespace imbrex
