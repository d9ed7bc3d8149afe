// See step_runner.h.
#include "serve/step_runner.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/check.h"
#include "core/run_parallel.h"
#include "model/groups.h"

namespace imbrex::serve {

namespace {

constexpr int kTensorShare = 4;  // a window's tensors take at most one part in so many of a GPU's memory

}  // namespace

std::vector<RowGroup> group_rows(std::span<const WantedRow> wanted, const std::function<int64_t(const WantedRow&)>& row_start,
                                 int32_t* offsets) {
  constexpr int64_t kReach = int64_t(1) << 30;  // so that the rows themselves end within 31 bits
  std::vector<RowGroup> groups;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const int64_t start = row_start(wanted[i]), base = start / kReach * kReach;
    if (i == 0 || wanted[i].layer != wanted[i - 1].layer || base != groups.back().base) groups.push_back({i, i, base});
    groups.back().end = i + 1;
    offsets[i] = int32_t(start - base);
  }
  return groups;
}

StepRunner::StepRunner(const ModelSpec& model, const DeviceInfo& device, const ReplayOptions& options, int max_seq_len,
                       const Synthetic& synthetic, const ParallelFor& threads)
    : synthetic_(synthetic), threads_(threads), stream_(open_stream(device, threads)), workspace_(make_workspace(device)) {
  const auto pool = synthetic.pool();
  pool_ = stream_->copy_of(TensorView::contiguous(const_cast<uint16_t*>(pool.data()), DType::bf16, {int64_t(pool.size())}));
  graph_tokens_ = std::min(options.max_num_seqs * (1 + options.drafts.tokens), options.max_num_batched_tokens);
  make_kinds(model, device, options, max_seq_len);
  make_tensors(options);
}

void StepRunner::make_kinds(const ModelSpec& model, const DeviceInfo& device, const ReplayOptions& options, int max_seq_len) {
  PlanOptions plan_options;
  plan_options.limits = {.max_num_reqs = options.max_num_seqs,
                         .max_num_tokens = options.max_num_batched_tokens,
                         .max_seq_len = max_seq_len + options.drafts.tokens,  // a tree may have more than the request has tokens
                         .shared_prompts = options.prefix_sharing};
  plan_options.threads = threads_;
  plan_options.validate = options.validate;
  plan_options.out_dtype = DType::bf16;
  plan_options.workspace = workspace_;
  KindSetup setup{.model = model,
                  .device = device,
                  .options = options,
                  .stream = *stream_,
                  .plan = plan_options,
                  .decode_plan = plan_options,
                  .has_decode_plan = stream_->asynchronous()};
  setup.decode_plan.limits.max_num_tokens = int(graph_tokens_);
  setup.decode_plan.limits.max_query_len = 1 + options.drafts.tokens;
  layers_.resize(model.layers.size());
  for (const ModelSpec::Kind& kind : model.kinds()) {
    for (size_t i = 0; i < kind.layers.size(); ++i) layers_[size_t(kind.layers[i])] = {.kind = kinds_.size(), .of_kind = i, .graph = {}};
    kinds_.push_back(std::visit([&](const auto& spec) { return make_kind(spec, kind, setup); }, kind.spec));
  }
}

void StepRunner::make_tensors(const ReplayOptions& options) {
  const int64_t tokens = options.max_num_batched_tokens;
  int64_t heads = 0;  // rows to be made for a token of a layer
  for (const auto& kind : kinds_) {
    int64_t of_kind = 0;
    for (size_t i = 0; i < kind->parts().size(); ++i) {
      const InputPart& part = kind->parts()[i];
      in_[i].largest = std::max(in_[i].largest, tokens * part.heads * part.dim);
      of_kind += part.heads;
    }
    out_.largest = std::max(out_.largest, tokens * kind->out_rows() * kind->out_length());
    heads = std::max(heads, of_kind);
  }
  int64_t elements = out_.largest;
  for (const LayerRows& rows : in_) elements += rows.largest;
  if (stream_->asynchronous())
    window_ =
        int(std::clamp<int64_t>(stream_->free_bytes() / kTensorShare / (elements * size_of(DType::bf16)), 1, int64_t(layers_.size())));
  for (LayerRows& rows : in_)
    if (rows.largest > 0) rows.memory = stream_->tensor(DType::bf16, {window_, rows.largest});
  out_.memory = stream_->tensor(DType::bf16, {window_, out_.largest});
  offsets_ = stream_->tensor(DType::i32, {window_ * tokens * heads});
  host_offsets_ = stream_->allocate_host(window_ * tokens * heads * size_of(DType::i32));
}

void StepRunner::allocate(const ModelSpec& model, const CacheSizes& sizes) {
  for (size_t g = 0; g < model.cache_groups.size(); ++g) {
    const CacheGroup& group = model.cache_groups[g];
    const auto make = [&](const auto& spec) {
      return make_cache(spec, int(group.layers.size()), sizes.places(group, g), *stream_, threads_);
    };
    caches_.push_back(std::visit(make, kind_of(group.layers.front()).spec()));
    for (size_t i = 0; i < group.layers.size(); ++i) {
      const Layer& layer = layers_[size_t(group.layers[i])];
      kinds_[layer.kind]->place_cache(layer.of_kind, caches_.back(), int(i));
    }
  }
}

int StepRunner::step_tokens() const {
  int all = 1;
  for (const auto& kind : kinds_) all = std::lcm(all, std::max(kind->step_tokens(), 1));
  return all;
}

TensorView StepRunner::rows(const LayerRows& of, int layer, std::initializer_list<int64_t> sizes) const {
  return TensorView::contiguous(of.memory.view.as<uint16_t>() + (layer - first_) * of.largest, DType::bf16, sizes, stream_->device());
}

StepTensors StepRunner::tensors(int layer, int64_t tokens) const {
  const LayerKind& kind = kind_of(layer);
  StepTensors result;
  for (size_t i = 0; i < kind.parts().size(); ++i) {
    const InputPart& part = kind.parts()[i];
    result.in[i] = rows(in_[i], layer, {tokens, part.heads, part.dim});
  }
  result.out = rows(out_, layer, {tokens * kind.out_rows(), kind.out_length()});
  return result;
}

void StepRunner::make_tokens(int first, int end, std::span<const uint64_t> keys) {
  first_ = first;
  num_tokens_ = int64_t(keys.size());
  auto* const offsets = static_cast<int32_t*>(host_offsets_.get());
  run_parallel(threads_, [&](int worker) {
    const size_t begin = keys.size() * size_t(worker) / size_t(threads_.num_workers);
    const size_t last = keys.size() * (size_t(worker) + 1) / size_t(threads_.num_workers);
    int32_t* to = offsets;
    for (int layer = first; layer < end; ++layer) {
      for (const InputPart& part : kind_of(layer).parts()) {
        synthetic_.offsets(part.side, layer, keys.subspan(begin, last - begin), part.heads, to + begin * size_t(part.heads));
        to += num_tokens_ * part.heads;
      }
    }
  });
  int64_t total = 0;
  for (int layer = first; layer < end; ++layer) {
    for (const InputPart& part : kind_of(layer).parts()) total += num_tokens_ * part.heads;
  }
  stream_->upload(offsets_.view.data, offsets, total * size_of(DType::i32));
  int64_t at = 0;
  for (int layer = first; layer < end; ++layer) {
    const std::span<const InputPart> parts = kind_of(layer).parts();
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t count = num_tokens_ * parts[i].heads;
      stream_->gather(pool_.view, offsets_.view.slice(0, at, at + count), rows(in_[i], layer, {count, parts[i].dim}));
      at += count;
    }
  }
  stream_->synchronize();  // the step's clock starts with nothing ahead of it
}

void StepRunner::update(const StepPlan& step) {
  decode_ = stream_->asynchronous() && step.decodes_only();
  moves_ = step.moves;
  size_t from = mark();
  for (size_t i = 0; i < kinds_.size(); ++i) {
    kinds_[i]->update(step.batch(kinds_[i]->group()), decode_);
    if (step.moves && paged_attention(kinds_[i]->spec())) kinds_[i]->update_kept(step.kept_batch(kinds_[i]->group()));
    const size_t to = mark();
    spans_.push_back({i, from, to, &KindTimes::plan_s});
    from = to;
  }
}

int StepRunner::next_kind(int layer, int end) const {
  int next = layer + 1;
  while (next < end && layers_[size_t(next)].kind == layers_[size_t(layer)].kind) ++next;
  return next;
}

void StepRunner::run(int first, int end) {
  const auto launch = [&](int begin, int next, int64_t tokens) {
    for (int layer = begin; layer < next; ++layer) {
      const StepTensors step = tensors(layer, tokens);
      kind_of(layer).write_cache(layers_[size_t(layer)].of_kind, step);
      kind_of(layer).run(layers_[size_t(layer)].of_kind, step);
    }
  };
  const auto captured = [&](int layer) { return decode_ && kind_of(layer).capturable(); };
  for (int layer = first; decode_ && layer < end; layer = next_kind(layer, end)) {
    DeviceGraph& graph = layers_[size_t(layer)].graph;
    if (captured(layer) && !graph) graph = stream_->capture([&] { launch(layer, next_kind(layer, end), graph_tokens_); });
  }

  size_t from = mark();
  const auto until_here = [&](int layer, double KindTimes::*part) {
    const size_t to = mark();
    spans_.push_back({layers_[size_t(layer)].kind, from, to, part});
    from = to;
  };
  for (int layer = first, next = 0; layer < end; layer = next) {
    if (!stream_->asynchronous()) {
      next = layer + 1;
      const StepTensors step = tensors(layer, num_tokens_);
      if (kind_of(layer).write_cache(layers_[size_t(layer)].of_kind, step)) until_here(layer, &KindTimes::kv_write_s);
      kind_of(layer).run(layers_[size_t(layer)].of_kind, step);
    } else {  // a mark between two launches would keep the second from starting before the first has ended
      next = next_kind(layer, end);
      if (captured(layer)) {
        stream_->replay(layers_[size_t(layer)].graph);
      } else {
        launch(layer, next, num_tokens_);
      }
    }
    until_here(layer, &KindTimes::run_s);
    bool moved = false;
    for (int of_kind = layer; moves_ && of_kind < next; ++of_kind)
      moved |= kind_of(of_kind).write_kept(layers_[size_t(of_kind)].of_kind, tensors(of_kind, num_tokens_));
    if (moved) until_here(layer, &KindTimes::kv_write_s);
  }
  stream_->synchronize();  // what follows is not part of the step
}

std::vector<KindTimes> StepRunner::take_times() {
  std::vector<KindTimes> times(kinds_.size());
  for (const Span& span : spans_) times[span.kind].*span.part += stream_->seconds(span.from, span.to);
  spans_.clear();
  num_marks_ = 0;
  return times;
}

std::span<const uint16_t* const> StepRunner::fetch(std::span<const WantedRow> wanted) {
  auto* const offsets = static_cast<int32_t*>(host_offsets_.get());
  const auto row_start = [&](const WantedRow& wanted_row) {
    const LayerKind& kind = kind_of(wanted_row.layer);
    return (int64_t(wanted_row.token) * kind.out_rows() + wanted_row.out_row) * kind.out_length();
  };
  const std::vector<RowGroup> groups = group_rows(wanted, row_start, offsets);
  int64_t total = 0;  // elements
  for (const WantedRow& row : wanted) total += kind_of(row.layer).out_length();
  if (staged_.view.size(0) < total) {
    staged_ = stream_->tensor(DType::bf16, {2 * total});
    host_staged_ = stream_->allocate_host(2 * total * size_of(DType::bf16));
  }
  stream_->upload(offsets_.view.data, offsets, int64_t(wanted.size()) * size_of(DType::i32));
  fetched_.clear();
  int64_t at = 0;
  for (const RowGroup& group : groups) {
    const int layer = wanted[group.begin].layer;
    const int64_t count = int64_t(group.end - group.begin), length = kind_of(layer).out_length();
    const TensorView to = TensorView::contiguous(staged_.view.as<uint16_t>() + at, DType::bf16, {count, length}, stream_->device());
    const int64_t elements = num_tokens_ * kind_of(layer).out_rows() * length;
    const TensorView near =
        rows(out_, layer, {elements}).slice(0, group.base, std::min(elements, group.base + std::numeric_limits<int32_t>::max()));
    stream_->gather(near, offsets_.view.slice(0, int64_t(group.begin), int64_t(group.end)), to);
    for (int64_t i = 0; i < count; ++i, at += length) fetched_.push_back(static_cast<const uint16_t*>(host_staged_.get()) + at);
  }
  stream_->download(host_staged_.get(), staged_.view.data, total * size_of(DType::bf16));
  stream_->synchronize();
  return fetched_;
}

std::vector<char> StepRunner::fetch_state(int layer, int out_row, int slot, int row) const {
  const std::vector<TensorView> parts = kind_of(layer).states_of(layers_[size_t(layer)].of_kind, out_row, slot, row);
  const auto bytes_of = [](const TensorView& t) { return t.num_elements() * size_of(t.dtype); };
  std::vector<char> copy;
  for (const TensorView& part : parts) copy.resize(copy.size() + size_t(bytes_of(part)));
  int64_t at = 0;
  for (const TensorView& part : parts) {
    stream_->download(copy.data() + at, part.data, bytes_of(part));
    at += bytes_of(part);
  }
  if (!parts.empty()) stream_->synchronize();
  return copy;
}

std::vector<ReplayKind> StepRunner::reports() const {
  std::vector<ReplayKind> all;
  for (const auto& kind : kinds_) all.push_back(kind->report());
  return all;
}

}  // namespace imbrex::serve
