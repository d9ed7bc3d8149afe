// See conformance/device_mirror.h.
#include "conformance/device_mirror.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "core/check.h"
#include "core/tensor_format.h"
#include "imbrex/device_stream.h"

namespace imbrex {
namespace {

constexpr int64_t kGuard = 256;   // bytes before and after a copy; keeps the alignment of what lies between
constexpr size_t kPlansKept = 8;  // plans that are done with, so that their kernels stay loaded for the next one
constexpr unsigned char kUnowned = 0xff;

// The bytes from a view's first element to its last.
struct Span {
  const char* begin = nullptr;
  int64_t bytes = 0, first = 0;  // first: where the view's own first element is among them
};
Span span_of(const TensorView& t) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.size(d) <= 0) return {.begin = t.as<const char>()};
    (t.stride(d) < 0 ? low : high) += (t.size(d) - 1) * t.stride(d);
  }
  const int64_t size = size_of(t.dtype);
  return {.begin = t.as<const char>() + low * size, .bytes = (high - low + 1) * size, .first = -low * size};
}

// A tensor on the device. Memory is kept from call to call.
class Mirrored {
 public:
  // Copies the host's bytes over; the view that the device is to be given.
  TensorView take(const TensorView& t, const DeviceStream& stream) {
    if (t.empty()) return t;
    host_ = span_of(t);
    const int64_t bytes = host_.bytes + 2 * kGuard;
    if (capacity_ < bytes) {
      capacity_ = std::max(bytes, 2 * capacity_);
      memory_ = stream.allocate(capacity_);
    }
    char* const data = static_cast<char*>(memory_.get());
    stream.fill(data, kUnowned, kGuard);
    stream.upload(data + kGuard, host_.begin, host_.bytes);
    stream.fill(data + kGuard + host_.bytes, kUnowned, kGuard);
    TensorView view = t;
    view.data = data + kGuard + host_.first;
    view.device = stream.device();
    return view;
  }
  // The other way, after the device has written; waits for it.
  void give_back(const TensorView& t, const char* name, const DeviceStream& stream) {
    if (t.empty() || host_.bytes == 0) return;
    back_.resize(size_t(host_.bytes + 2 * kGuard));
    stream.download(back_.data(), memory_.get(), int64_t(back_.size()));
    stream.synchronize();
    const auto is_clean = [](const unsigned char* guard) { return std::count(guard, guard + kGuard, kUnowned) == kGuard; };
    check(is_clean(back_.data()), "mirror.guard", "{}: bytes in front of {} were written", name, t);
    check(is_clean(back_.data() + kGuard + host_.bytes), "mirror.guard", "{}: bytes behind {} were written", name, t);
    std::memcpy(const_cast<char*>(host_.begin), back_.data() + kGuard, size_t(host_.bytes));
  }

 private:
  std::shared_ptr<void> memory_;
  int64_t capacity_ = 0;
  Span host_;
  std::vector<unsigned char> back_;
};

// Memory of one backend's calls: they run one after the other.
struct MirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored k, v, q_scale, k_scale, v_scale, new_k, new_v, q, out, lse, sinks, alibi_slopes, head_scales, relative_bias;

  explicit MirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
  TensorView take(Mirrored& to, const TensorView& t) { return to.take(t, *stream); }
  void give_back(Mirrored& from, const TensorView& t, const char* name) { from.give_back(t, name, *stream); }
  KvCache take(const KvCache& cache) {
    return {.k = take(k, cache.k), .v = take(v, cache.v), .k_scale = take(k_scale, cache.k_scale), .v_scale = take(v_scale, cache.v_scale)};
  }
};

class MirrorPlan final : public Plan {
 public:
  MirrorPlan(std::shared_ptr<Plan> plan, std::shared_ptr<MirrorMemory> memory) : plan_(std::move(plan)), memory_(std::move(memory)) {}

  void update(const Batch& batch, Stream) override {
    Batch step = batch;
    if ((batch.num_reqs() + batch.num_tokens()) % 2 == 1) {
      TensorView Batch::*const members[] = {&Batch::block_table,  &Batch::kv_indptr,    &Batch::kv_indices, &Batch::kv_last_page_len,
                                            &Batch::kv_start_loc, &Batch::slot_mapping, &Batch::custom_mask};
      size_t i = 0;
      for (const auto member : members) step.*member = memory_->take(arrays_[i++], batch.*member);
    }
    plan_->update(step, memory_->stream->get());
    memory_->stream->synchronize();
  }

  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream) const override {
    MirrorMemory& w = *memory_;
    plan_->write_kv(w.take(cache), w.take(w.new_k, k), w.take(w.new_v, v), w.stream->get());
    w.give_back(w.k, cache.k, "k");
    w.give_back(w.v, cache.v, "v");
  }

  void run(const Inputs& in, const Outputs& out, Stream) const override {
    MirrorMemory& w = *memory_;
    const Inputs inputs{.q = w.take(w.q, in.q),
                        .q_scale = w.take(w.q_scale, in.q_scale),
                        .kv = w.take(in.kv),
                        .sinks = w.take(w.sinks, in.sinks),
                        .alibi_slopes = w.take(w.alibi_slopes, in.alibi_slopes),
                        .head_scales = w.take(w.head_scales, in.head_scales),
                        .relative_bias = w.take(w.relative_bias, in.relative_bias)};
    plan_->run(inputs, {.out = w.take(w.out, out.out), .lse = w.take(w.lse, out.lse)}, w.stream->get());
    w.give_back(w.out, out.out, "out");
    w.give_back(w.lse, out.lse, "lse");
  }

  std::string str() const override { return plan_->str(); }

 private:
  std::shared_ptr<Plan> plan_;
  std::shared_ptr<MirrorMemory> memory_;
  std::array<Mirrored, 7> arrays_;
};

class MirrorBackend final : public Backend {
 public:
  explicit MirrorBackend(const Backend& backend) : backend_(backend) {}
  std::string_view name() const override { return backend_.name(); }
  std::string_view description() const override { return backend_.description(); }
  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    return backend_.unsupported(spec, device);
  }
  std::unique_ptr<Plan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    std::shared_ptr<Plan> plan = backend_.plan(spec, device, options);
    const std::lock_guard lock(mutex_);
    if (!memory_ || memory_->stream->device() != device.device) memory_ = std::make_shared<MirrorMemory>(device);
    kept_.push_back(plan);
    if (kept_.size() > kPlansKept) kept_.pop_front();
    return std::make_unique<MirrorPlan>(std::move(plan), memory_);
  }

 private:
  const Backend& backend_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<MirrorMemory> memory_;
  mutable std::deque<std::shared_ptr<Plan>> kept_;
};

}  // namespace

std::unique_ptr<Backend> device_mirror(const Backend& backend) { return std::make_unique<MirrorBackend>(backend); }

}  // namespace imbrex
