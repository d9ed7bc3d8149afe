#pragma once
// The device side of a replay: plans, caches and the tensors of a step. Makes q, k and v where they are used, runs the layers without a
// word from the host in between, and fetches the outputs that somebody wants to see.
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"
#include "imbrex/model.h"
#include "serve/replay.h"
#include "serve/step_plan.h"
#include "serve/synthetic.h"

namespace imbrex::serve {

// Of one kind of layer. On a GPU keys and values are written between the launches of attention, and their time is part of it.
struct KindTimes {
  double plan_s = 0, kv_write_s = 0, attention_s = 0;
};

// The outputs of a token in a layer for one kv head: those of its q heads.
struct WantedRow {
  int layer = 0, token = 0, kv_head = 0;
};

// Wanted rows of one layer that are fetched together: offsets of a gather have 32 bits, a layer's outputs may have more elements.
struct RowGroup {
  size_t begin = 0, end = 0;  // of `wanted`
  int64_t base = 0;           // element of the layer's outputs that the offsets are counted from
};
// Cuts `wanted`, which is sorted by layer, into such groups, and writes each row's offset within its group. `row_start` is the element that
// a row begins at.
std::vector<RowGroup> group_rows(std::span<const WantedRow> wanted, const std::function<int64_t(const WantedRow&)>& row_start,
                                 int32_t* offsets);

class StepRunner {
 public:
  // Selects backends and makes plans, for requests of at most so many tokens. Error replay.backend.none, select.forced.
  StepRunner(const ModelSpec& deployed, const DeviceInfo&, const ReplayOptions&, int max_seq_len, const Synthetic&, const ParallelFor&);
  int64_t free_bytes() const { return stream_->free_bytes(); }  // that the caches can have
  void allocate(const ModelSpec& deployed, const std::vector<int>& num_blocks);

  // Layers whose tensors are there at the same time: one on a CPU, so that they stay in its caches, and all on a GPU, if they fit.
  int window() const { return window_; }
  void make_tokens(int first, int end, std::span<const uint64_t> keys);  // q, k, v of layers [first, end), a window at most
  void update(const StepPlan&);
  void run(int first, int end);  // writes keys and values, and attends
  // Outputs of those layers, [group_size, head_dim_v] a row; `wanted` is sorted by layer. They stay until the next call.
  std::span<const uint16_t* const> fetch(std::span<const WantedRow> wanted);
  std::vector<KindTimes> take_times();  // by kind, since the last call

  const std::vector<KvAllocation>& caches() const { return caches_; }  // by KV group
  std::vector<ReplayKind> reports() const;                             // by kind: what runs and why
  size_t kind_of(int layer) const { return layers_[size_t(layer)].kind; }
  const AttentionSpec& spec_of(int layer) const { return kinds_[kind_of(layer)].spec; }
  const LayerParameters& parameters_of(int layer) const { return layers_[size_t(layer)].parameters; }

 private:
  struct Kind {
    AttentionSpec spec;
    int group = 0;
    ReplayKind report;
    std::unique_ptr<Plan> plan;
    std::unique_ptr<Plan> decode_plan;  // on a GPU, for steps with one token a request: a graph of few launches. Null: `plan` is for all
  };
  struct Layer {
    size_t kind = 0;
    LayerParameters parameters;
    Inputs inputs;  // cache and parameters, where the device reads them
    std::vector<DeviceTensor> owned;
    DeviceGraph graph;  // of a decode step, this layer and those of its kind that follow it in the window
  };
  // What the layers of a window have side by side.
  struct LayerRows {
    DeviceTensor memory;  // bf16 [window, elements of the largest layer]
    int64_t largest = 0;
  };
  struct Span {
    size_t kind, from, to;  // marks of the stream
    double KindTimes::*part;
  };

  void make_plans(const ModelSpec&, const ModelSpec::Kind&, const DeviceInfo&, const ReplayOptions&, int max_seq_len);
  void make_tensors(const ReplayOptions&);
  void place_parameters(Layer&) const;
  TensorView rows(const LayerRows&, int layer, int64_t tokens, int64_t heads, int64_t dim) const;
  void write_kv(int layer, const Plan&, int64_t tokens) const;
  void attend(int layer, const Plan&, int64_t tokens) const;
  size_t mark() { return stream_->mark(num_marks_), num_marks_++; }

  const Synthetic& synthetic_;
  ParallelFor threads_;
  std::unique_ptr<DeviceStream> stream_;
  std::shared_ptr<Workspace> workspace_;  // of all plans
  std::vector<Kind> kinds_;
  std::vector<Layer> layers_;
  std::vector<KvAllocation> caches_;
  float fp8_scale_ = kFp8Scale;
  DeviceTensor pool_;  // Synthetic::pool
  LayerRows q_, k_, v_, out_;
  int window_ = 1, first_ = 0;  // of the layers that q_, k_, v_ and out_ have now
  int64_t num_tokens_ = 0;      // of the step
  int64_t graph_tokens_ = 0;    // that a decode step has at most
  bool decode_ = false;         // the step is one for decode_plan

  // Where rows begin in the pool or in an output: on the host to be filled, and on the device to be used.
  std::shared_ptr<void> host_offsets_;
  DeviceTensor offsets_;
  DeviceTensor staged_;  // fetched rows, and their copy on the host
  std::shared_ptr<void> host_staged_;
  std::vector<const uint16_t*> fetched_;
  size_t num_marks_ = 0;
  std::vector<Span> spans_;
};

}  // namespace imbrex::serve
