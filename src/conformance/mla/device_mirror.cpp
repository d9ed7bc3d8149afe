// See device_mirror.h.
#include "conformance/mla/device_mirror.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "conformance/mirror.h"

namespace imbrex {
namespace {

struct MlaMirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored k, k_rope, k_scale, k_rope_scale, latent, rope, q, kv_b, sinks, out, lse;
  std::deque<std::shared_ptr<MlaPlan>> kept;  // plans that are done with, so that their kernels stay loaded for the next one

  explicit MlaMirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
  TensorView take(Mirrored& to, const TensorView& t) { return to.take(t, *stream); }
  KvCache take(const KvCache& cache) {
    return {.k = take(k, cache.k),
            .v = {},
            .k_scale = take(k_scale, cache.k_scale),
            .v_scale = {},
            .k_rope = take(k_rope, cache.k_rope),
            .k_rope_scale = take(k_rope_scale, cache.k_rope_scale)};
  }
};

bool is_same_place(const TensorView& a, const TensorView& b) {
  return a.data == b.data && a.rank == b.rank && a.sizes == b.sizes && a.strides == b.strides;
}

class MlaMirrorPlan final : public MlaPlan {
 public:
  MlaMirrorPlan(std::shared_ptr<MlaPlan> plan, std::shared_ptr<MlaMirrorMemory> memory, const MlaMirrorOptions& options)
      : plan_(std::move(plan)), memory_(std::move(memory)), options_(options) {}

  void update(const Batch& batch, Stream) override {
    Batch step = batch;
    if ((batch.num_reqs() + batch.num_tokens()) % 2 == 1) {
      TensorView Batch::*const members[] = {&Batch::block_table,  &Batch::kv_indptr,   &Batch::kv_indices, &Batch::kv_last_page_len,
                                            &Batch::slot_mapping, &Batch::custom_mask, &Batch::packed_mask};
      size_t i = 0;
      for (const auto member : members) step.*member = memory_->take(arrays_[i++], batch.*member);
    }
    plan_->update(step, memory_->stream->get());
    memory_->stream->synchronize();
  }

  void write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream) const override {
    MlaMirrorMemory& m = *memory_;
    plan_->write_kv(m.take(cache), m.take(m.latent, latent), m.take(m.rope, rope), m.stream->get());
    m.k.give_back(cache.k, "k", *m.stream);
    if (!cache.k_rope.empty()) m.k_rope.give_back(cache.k_rope, "k_rope", *m.stream);
  }

  void run(const MlaInputs& in, const MlaOutputs& out, Stream) const override {
    MlaMirrorMemory& m = *memory_;
    const MlaInputs inputs{
        .q = m.take(m.q, in.q), .kv_b = m.take(m.kv_b, in.kv_b), .kv = m.take(in.kv), .sinks = m.take(m.sinks, in.sinks)};
    const MlaOutputs outputs{.out = m.take(m.out, out.out), .lse = m.take(m.lse, out.lse)};
    options_.in_graph && plan_->capturable() ? replay(inputs, outputs) : plan_->run(inputs, outputs, m.stream->get());
    m.out.give_back(out.out, "out", *m.stream);
    if (!out.lse.empty()) m.lse.give_back(out.lse, "lse", *m.stream);
  }

  bool expands(int request) const override { return plan_->expands(request); }
  bool capturable() const override { return plan_->capturable(); }
  std::string str() const override { return plan_->str(); }

 private:
  void replay(const MlaInputs& in, const MlaOutputs& out) const {
    const std::array<TensorView, 9> tensors{in.q,     in.kv_b, in.kv.k, in.kv.k_scale, in.kv.k_rope, in.kv.k_rope_scale,
                                            in.sinks, out.out, out.lse};
    if (!graph_ || !std::equal(tensors.begin(), tensors.end(), captured_.begin(), is_same_place)) {
      graph_ = memory_->stream->capture([&] { plan_->run(in, out, memory_->stream->get()); });
      captured_ = tensors;
    }
    memory_->stream->replay(graph_);
  }

  std::shared_ptr<MlaPlan> plan_;
  std::shared_ptr<MlaMirrorMemory> memory_;
  MlaMirrorOptions options_;
  std::array<Mirrored, 7> arrays_;
  mutable DeviceGraph graph_;
  mutable std::array<TensorView, 9> captured_;
};

// By device. Never destroyed, because the driver may be gone before static objects are.
struct Memories {
  std::mutex mutex;
  std::map<int, std::shared_ptr<MlaMirrorMemory>> of;
};
Memories& memories() {
  static auto& all = *new Memories;
  return all;
}

}  // namespace

std::unique_ptr<MlaPlan> device_mirror(std::unique_ptr<MlaPlan> plan, const DeviceInfo& device, const MlaMirrorOptions& options) {
  constexpr size_t kPlansKept = 8;
  const std::shared_ptr<MlaPlan> shared = std::move(plan);
  Memories& all = memories();
  const std::lock_guard lock(all.mutex);
  std::shared_ptr<MlaMirrorMemory>& memory = all.of[device.device.index];
  if (!memory) memory = std::make_shared<MlaMirrorMemory>(device);
  memory->kept.push_back(shared);
  if (memory->kept.size() > kPlansKept) memory->kept.pop_front();
  return std::make_unique<MlaMirrorPlan>(shared, memory, options);
}

void drop_mla_mirrors() {
  const std::lock_guard lock(memories().mutex);
  memories().of.clear();
}

}  // namespace imbrex
