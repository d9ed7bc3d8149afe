#pragma once
// The device side of a replay: the kinds of layers, caches and the tensors of a step. Makes the inputs of layers in the device's memory,
// runs the layers without a copy from the host in between, and fetches the outputs that are asked for.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "imbrex/device_stream.h"
#include "imbrex/model.h"
#include "serve/group_cache.h"
#include "serve/layer_kind.h"
#include "serve/replay.h"
#include "serve/replay_setup.h"
#include "serve/step_plan.h"
#include "serve/synthetic.h"

namespace imbrex::serve {

// The times of one kind of layer. On a GPU keys and values are written between the launches of attention, whose time includes that.
struct KindTimes {
  double plan_s = 0, kv_write_s = 0, run_s = 0;
};

// A row of a token's output in a layer, which is fetched by itself: of attention, the q heads of a kv head.
struct WantedRow {
  int layer = 0, token = 0, out_row = 0;
};

// Wanted rows of one layer that are fetched by one gather: its offsets have 32 bits, and a layer's outputs may have more elements.
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
  int step_tokens() const;                                      // LayerKind::step_tokens() of all
  void allocate(const ModelSpec& deployed, const CacheSizes&);

  // Layers whose tensors are there at the same time: one on a CPU, so that they stay in its caches, and all on a GPU, if they fit.
  int window() const { return window_; }
  void make_tokens(int first, int end, std::span<const uint64_t> keys);  // inputs of layers [first, end), a window at most
  void update(const StepPlan&);
  void run(int first, int end);  // writes keys and values, runs the layers, and moves keys of kept drafts
  // Outputs of those layers, [out_length] a row; `wanted` is sorted by layer. They stay until the next call.
  std::span<const uint16_t* const> fetch(std::span<const WantedRow> wanted);
  // A copy of what a target checks of the state in a slot, part by part; empty where it checks none.
  std::vector<char> fetch_state(int layer, int out_row, int slot, int row) const;  // row: behind which draft; 0: behind none
  std::vector<KindTimes> take_times();                                             // by kind, since the last call

  const std::vector<GroupCache>& caches() const { return caches_; }  // by cache group
  std::vector<ReplayKind> reports() const;                           // by kind: what runs and why
  const std::vector<std::unique_ptr<LayerKind>>& kinds() const { return kinds_; }
  const LayerKind& kind_of(int layer) const { return *kinds_[layers_[size_t(layer)].kind]; }
  VerifyTarget target(int layer, int out_row) const { return kind_of(layer).target(layers_[size_t(layer)].of_kind, out_row); }

 private:
  struct Layer {
    size_t kind = 0, of_kind = 0;  // which kind, and which of its layers
    DeviceGraph graph;             // of a decode step, this layer and those of its kind that follow it in the window
  };
  // The tensors of all layers of a window, one after the other in memory.
  struct LayerRows {
    DeviceTensor memory;  // bf16 [window, elements of the largest layer]
    int64_t largest = 0;
  };
  struct Span {
    size_t kind, from, to;  // marks of the stream
    double KindTimes::*part;
  };

  void make_kinds(const ModelSpec&, const DeviceInfo&, const ReplayOptions&, int max_seq_len);
  void make_tensors(const ReplayOptions&);
  TensorView rows(const LayerRows&, int layer, std::initializer_list<int64_t> sizes) const;
  StepTensors tensors(int layer, int64_t tokens) const;
  int next_kind(int layer, int end) const;  // the first layer that is of another kind, or `end`
  size_t mark() { return stream_->mark(num_marks_), num_marks_++; }

  const Synthetic& synthetic_;
  ParallelFor threads_;
  std::unique_ptr<DeviceStream> stream_;
  std::shared_ptr<Workspace> workspace_;  // of all plans
  std::vector<std::unique_ptr<LayerKind>> kinds_;
  std::vector<Layer> layers_;
  std::vector<GroupCache> caches_;
  DeviceTensor pool_;  // Synthetic::pool
  std::array<LayerRows, kMostInputs> in_;
  LayerRows out_;
  int window_ = 1, first_ = 0;  // of the layers that in_ and out_ have now
  int64_t num_tokens_ = 0;      // of the step
  int64_t graph_tokens_ = 0;    // that a decode step has at most
  bool decode_ = false;         // the step is one for plans of decode
  bool moves_ = false;          // StepPlan::moves

  // The offsets of rows in the pool or in an output: made on the host, used on the device.
  std::shared_ptr<void> host_offsets_;
  DeviceTensor offsets_;
  DeviceTensor staged_;  // fetched rows, and their copy on the host
  std::shared_ptr<void> host_staged_;
  std::vector<const uint16_t*> fetched_;
  size_t num_marks_ = 0;
  std::vector<Span> spans_;
};

}  // namespace imbrex::serve
