// See device_mirror.h.
#include "conformance/short_conv/device_mirror.h"

#include <algorithm>
#include <array>
#include <utility>

#include "conformance/mirror.h"

namespace imbrex {
namespace {

struct ConvMirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored input, weight, bias, state, out;

  explicit ConvMirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
};

bool same_place(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.rank == b.rank && a.sizes == b.sizes && a.strides == b.strides;
}

class ConvMirrorPlan final : public ShortConvPlan {
 public:
  using Memory = ConvMirrorMemory;
  ConvMirrorPlan(std::shared_ptr<ShortConvPlan> plan, std::shared_ptr<Memory> memory, const ShortConvMirrorOptions& options)
      : plan_(std::move(plan)), memory_(std::move(memory)), options_(options) {}

  void update(const Batch& batch, Stream) override {
    plan_->update(batch, memory_->stream->get());
    memory_->stream->synchronize();
  }

  void update_on_device(const DeviceBatch& batch, Stream) override {
    DeviceBatch step = batch;
    TensorView DeviceBatch::*const members[] = {&DeviceBatch::query_start_loc, &DeviceBatch::seq_lens, &DeviceBatch::state_slots,
                                                &DeviceBatch::num_drafts, &DeviceBatch::accepted_drafts};
    static_assert(std::size(members) == std::tuple_size_v<decltype(lists_)>);
    size_t i = 0;
    for (const auto member : members) step.*member = lists_[i++].take(batch.*member, *memory_->stream);
    plan_->update_on_device(step, memory_->stream->get());
    memory_->stream->synchronize();
  }

  std::vector<Reason> device_problems(Stream) override { return plan_->device_problems(memory_->stream->get()); }
  bool capturable() const override { return plan_->capturable(); }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    Memory& m = *memory_;
    const DeviceStream& stream = *m.stream;
    const ShortConvInputs inputs{.input = m.input.take(in.input, stream),
                                 .weight = m.weight.take(in.weight, stream),
                                 .bias = m.bias.take(in.bias, stream),
                                 .state = m.state.take(in.state, stream)};
    const ShortConvOutputs outputs{.out = m.out.take(out.out, stream)};
    options_.in_graph ? replay(inputs, outputs) : plan_->run(inputs, outputs, stream.get());
    m.out.give_back(out.out, "out", stream);
    m.state.give_back(in.state, "state", stream);
  }

  std::string str() const override { return plan_->str(); }

 private:
  void replay(const ShortConvInputs& in, const ShortConvOutputs& out) const {
    const std::array<TensorView, 5> tensors{in.input, in.weight, in.bias, in.state, out.out};
    if (!graph_ || !std::equal(tensors.begin(), tensors.end(), captured_.begin(), same_place)) {
      graph_ = memory_->stream->capture([&] { plan_->run(in, out, memory_->stream->get()); });
      captured_ = tensors;
      if (options_.captures != nullptr) ++*options_.captures;
    }
    memory_->stream->replay(graph_);
  }

  std::shared_ptr<ShortConvPlan> plan_;
  std::shared_ptr<Memory> memory_;
  ShortConvMirrorOptions options_;
  std::array<Mirrored, 5> lists_;
  mutable DeviceGraph graph_;
  mutable std::array<TensorView, 5> captured_;
};

}  // namespace

std::unique_ptr<BackendOf<ShortConvFamily>> device_mirror(const BackendOf<ShortConvFamily>& backend,
                                                          const ShortConvMirrorOptions& options) {
  return std::make_unique<MirrorBackend<ShortConvFamily, ConvMirrorPlan, ShortConvMirrorOptions>>(backend, options);
}

}  // namespace imbrex
