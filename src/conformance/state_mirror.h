#pragma once
// The plan of a mirror (mirror.h) for families that keep a state of each request in a slot: a step's lists, and calls that run from a
// graph.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "conformance/mirror.h"

namespace imbrex {

struct StateMirrorOptions {
  // run() captures the plan's launches into a graph, once, and replays it as long as the tensors have the same shapes and the same places
  // on the device. Only for plans that are capturable().
  bool in_graph = false;
  int* captures = nullptr;  // counts them
};

// `Memory` has a member `stream` besides a family's tensors. A family adds run().
template <class Family, class TensorMemory>
class StateMirrorPlan : public Family::Plan {
 public:
  using Memory = TensorMemory;
  StateMirrorPlan(std::shared_ptr<typename Family::Plan> plan, std::shared_ptr<Memory> memory, const StateMirrorOptions& options)
      : plan_(std::move(plan)), memory_(std::move(memory)), options_(options) {}

  void update(const Batch& batch, Stream) override {
    plan_->update(batch, memory_->stream->get());
    memory_->stream->synchronize();
  }
  void update_on_device(const DeviceBatch& batch, Stream) override {
    DeviceBatch step = batch;
    TensorView DeviceBatch::*const members[] = {&DeviceBatch::query_start_loc, &DeviceBatch::seq_lens,        &DeviceBatch::state_slots,
                                                &DeviceBatch::num_drafts,      &DeviceBatch::accepted_drafts, &DeviceBatch::source_slots,
                                                &DeviceBatch::draft_parents};
    static_assert(std::size(members) == std::tuple_size_v<decltype(lists_)>);
    size_t i = 0;
    for (const auto member : members) step.*member = lists_[i++].take(batch.*member, *memory_->stream);
    plan_->update_on_device(step, memory_->stream->get());
    memory_->stream->synchronize();
  }
  std::vector<Reason> device_problems(Stream) override { return plan_->device_problems(memory_->stream->get()); }
  bool capturable() const override { return plan_->capturable(); }
  std::string str() const override { return plan_->str(); }

 protected:
  // Calls run(stream), or replays what it launched when it was captured with the same `tensors`.
  void launch(const std::vector<TensorView>& tensors, const std::function<void(Stream)>& run) const {
    const DeviceStream& stream = *memory_->stream;
    if (!options_.in_graph) return run(stream.get());
    if (!graph_ || !std::ranges::equal(tensors, captured_, same_place)) {
      graph_ = memory_->stream->capture([&] { run(stream.get()); });
      captured_ = tensors;
      if (options_.captures != nullptr) ++*options_.captures;
    }
    memory_->stream->replay(graph_);
  }

  std::shared_ptr<typename Family::Plan> plan_;
  std::shared_ptr<Memory> memory_;

 private:
  static bool same_place(const TensorView& a, const TensorView& b) {
    return a.data == b.data && a.rank == b.rank && a.sizes == b.sizes && a.strides == b.strides;
  }

  StateMirrorOptions options_;
  std::array<Mirrored, 7> lists_;
  mutable DeviceGraph graph_;
  mutable std::vector<TensorView> captured_;
};

}  // namespace imbrex
