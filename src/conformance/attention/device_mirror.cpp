// See conformance/attention/device_mirror.h.
#include "conformance/attention/device_mirror.h"

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "conformance/mirror.h"

namespace imbrex {
namespace {

struct MirrorMemory {
  std::unique_ptr<DeviceStream> stream;
  Mirrored k, v, k_rope, q_scale, k_scale, v_scale, k_rope_scale, new_k, new_v, q, out, lse, sinks, alibi_slopes, head_scales,
      relative_bias;

  std::map<std::string, Mirrored> score_tensors;

  explicit MirrorMemory(const DeviceInfo& device) : stream(open_stream(device)) {}
  TensorView take(Mirrored& to, const TensorView& t) { return to.take(t, *stream); }
  void give_back(Mirrored& from, const TensorView& t, const char* name) { from.give_back(t, name, *stream); }
  KvCache take(const KvCache& cache) {
    return {.k = take(k, cache.k),
            .v = take(v, cache.v),
            .k_scale = take(k_scale, cache.k_scale),
            .v_scale = take(v_scale, cache.v_scale),
            .k_rope = take(k_rope, cache.k_rope),
            .k_rope_scale = take(k_rope_scale, cache.k_rope_scale)};
  }
};

struct NoOptions {};

class MirrorPlan final : public AttentionPlan {
 public:
  using Memory = MirrorMemory;
  MirrorPlan(std::shared_ptr<AttentionPlan> plan, std::shared_ptr<Memory> memory, NoOptions)
      : plan_(std::move(plan)), memory_(std::move(memory)) {}

  void update(const Batch& batch, Stream) override {
    Batch step = batch;
    if ((batch.num_reqs() + batch.num_tokens()) % 2 == 1) {
      TensorView Batch::*const members[] = {&Batch::block_table,  &Batch::kv_indptr,    &Batch::kv_indices,  &Batch::kv_last_page_len,
                                            &Batch::kv_start_loc, &Batch::slot_mapping, &Batch::custom_mask, &Batch::packed_mask};
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
    if (!cache.v.empty()) w.give_back(w.v, cache.v, "v");
    if (!cache.k_rope.empty()) w.give_back(w.k_rope, cache.k_rope, "k_rope");
  }

  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream) const override {
    MirrorMemory& w = *memory_;
    std::vector<NamedTensor> score_tensors;
    for (const auto& [name, tensor] : in.score_tensors) score_tensors.push_back({name, w.take(w.score_tensors[name], tensor)});
    const AttentionInputs inputs{.q = w.take(w.q, in.q),
                                 .q_scale = w.take(w.q_scale, in.q_scale),
                                 .kv = w.take(in.kv),
                                 .sinks = w.take(w.sinks, in.sinks),
                                 .alibi_slopes = w.take(w.alibi_slopes, in.alibi_slopes),
                                 .head_scales = w.take(w.head_scales, in.head_scales),
                                 .relative_bias = w.take(w.relative_bias, in.relative_bias),
                                 .score_tensors = score_tensors};
    plan_->run(inputs, {.out = w.take(w.out, out.out), .lse = w.take(w.lse, out.lse)}, w.stream->get());
    w.give_back(w.out, out.out, "out");
    w.give_back(w.lse, out.lse, "lse");
  }

  std::string str() const override { return plan_->str(); }

 private:
  std::shared_ptr<AttentionPlan> plan_;
  std::shared_ptr<MirrorMemory> memory_;
  std::array<Mirrored, 8> arrays_;
};

}  // namespace

std::unique_ptr<BackendOf<AttentionFamily>> device_mirror(const BackendOf<AttentionFamily>& backend) {
  return std::make_unique<MirrorBackend<AttentionFamily, MirrorPlan, NoOptions>>(backend, NoOptions{});
}

}  // namespace imbrex
