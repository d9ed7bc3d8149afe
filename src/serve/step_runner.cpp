// See step_runner.h.
#include "serve/step_runner.h"

#include <algorithm>
#include <array>
#include <limits>

#include "core/check.h"
#include "core/run_parallel.h"
#include "imbrex/select.h"
#include "serve/replay_setup.h"

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
  graph_tokens_ = std::min(options.max_num_seqs, options.max_num_batched_tokens);
  layers_.reserve(model.layers.size());
  for (size_t i = 0; i < model.layers.size(); ++i) {
    layers_.push_back({.kind = 0, .parameters = LayerParameters(model.layers[i].spec, options.seed, int(i))});
    place_parameters(layers_.back());
  }
  for (const ModelSpec::Kind& kind : model.kinds()) make_plans(model, kind, device, options, max_seq_len);
  make_tensors(options);
}

void StepRunner::make_plans(const ModelSpec& model, const ModelSpec::Kind& kind, const DeviceInfo& device, const ReplayOptions& options,
                            int max_seq_len) {
  const AttentionSpec& spec = kind.spec;
  SelectOptions select_options = options.select;
  select_options.phase = Phase::prefill;
  const Selection prefill = select(spec, device, select_options);
  select_options.phase = Phase::decode;
  const Selection decode = select(spec, device, select_options);
  check(prefill.backend != nullptr && decode.backend != nullptr, "replay.backend.none", "no backend runs {}:\n{}", spec.str(),
        prefill.str());
  const bool same = prefill.backend == decode.backend;
  PlanOptions plan_options;
  plan_options.limits = {
      .max_num_reqs = options.max_num_seqs, .max_num_tokens = options.max_num_batched_tokens, .max_seq_len = max_seq_len};
  plan_options.threads = threads_;
  plan_options.validate = options.validate;
  plan_options.out_dtype = DType::bf16;
  plan_options.workspace = workspace_;
  Kind made{.spec = spec, .group = model.layers[size_t(kind.layers.front())].kv_group, .report = {}, .plan = {}, .decode_plan = {}};
  made.plan = same ? prefill.backend->plan(spec, device, plan_options)
                   : plan_by_phase(*prefill.backend, *decode.backend, spec, device, plan_options);
  if (stream_->asynchronous()) {
    plan_options.limits.max_num_tokens = int(graph_tokens_);
    plan_options.limits.max_query_len = 1;
    made.decode_plan = decode.backend->plan(spec, device, plan_options);
  }
  ReplayKind& report = made.report;
  report.spec = spec.str();
  report.group = model.kv_groups[size_t(made.group)].name;
  report.layers = kind.layers;
  report.backend = same ? std::string(prefill.backend->name()) : fmt::format("{} + {}", prefill.backend->name(), decode.backend->name());
  report.rule = same ? prefill.rule : fmt::format("prefill: {}; decode: {}", prefill.rule, decode.rule);
  report.selection = prefill.str();
  for (const int layer : kind.layers) layers_[size_t(layer)].kind = kinds_.size();
  kinds_.push_back(std::move(made));
}

void StepRunner::make_tensors(const ReplayOptions& options) {
  const int64_t tokens = options.max_num_batched_tokens;
  int64_t heads = 0;  // rows to be made for a token of a layer
  for (const Kind& kind : kinds_) {
    const AttentionSpec& s = kind.spec;
    q_.largest = std::max(q_.largest, tokens * s.num_q_heads * s.head_dim_qk);
    k_.largest = std::max(k_.largest, tokens * s.num_kv_heads * s.head_dim_qk);
    v_.largest = std::max(v_.largest, tokens * s.num_kv_heads * s.head_dim_v);
    out_.largest = std::max(out_.largest, tokens * s.num_q_heads * s.head_dim_v);
    heads = std::max<int64_t>(heads, s.num_q_heads + 2 * s.num_kv_heads);
  }
  if (stream_->asynchronous()) {
    const int64_t bytes = (q_.largest + k_.largest + v_.largest + out_.largest) * size_of(DType::bf16);
    window_ = int(std::clamp<int64_t>(stream_->free_bytes() / kTensorShare / bytes, 1, int64_t(layers_.size())));
  }
  for (LayerRows* rows : {&q_, &k_, &v_, &out_}) rows->memory = stream_->tensor(DType::bf16, {window_, rows->largest});
  offsets_ = stream_->tensor(DType::i32, {window_ * tokens * heads});
  host_offsets_ = stream_->allocate_host(window_ * tokens * heads * size_of(DType::i32));
}

void StepRunner::place_parameters(Layer& layer) const {
  layer.parameters.view(layer.inputs, 0, layer.parameters.num_q_heads);
  for (TensorView* t : {&layer.inputs.sinks, &layer.inputs.alibi_slopes, &layer.inputs.head_scales, &layer.inputs.relative_bias}) {
    if (t->empty()) continue;
    layer.owned.push_back(stream_->copy_of(*t));
    *t = layer.owned.back().view;
  }
}

void StepRunner::allocate(const ModelSpec& model, const std::vector<int>& num_blocks) {
  for (size_t g = 0; g < model.kv_groups.size(); ++g) {
    const std::vector<int>& layers = model.kv_groups[g].layers;
    caches_.emplace_back(spec_of(layers.front()), int(layers.size()), num_blocks[g], "lbhtd", stream_.get());
    if (!stream_->asynchronous()) touch_pages(caches_.back(), threads_);
    for (size_t i = 0; i < layers.size(); ++i) {
      KvCache& cache = layers_[size_t(layers[i])].inputs.kv;
      cache = caches_.back().layer(int(i));
      if (is_fp8(caches_.back().spec().kv_dtype)) cache.k_scale = cache.v_scale = TensorView::contiguous(&fp8_scale_, DType::f32, {1});
    }
  }
}

TensorView StepRunner::rows(const LayerRows& of, int layer, int64_t tokens, int64_t heads, int64_t dim) const {
  uint16_t* const data = of.memory.view.as<uint16_t>() + (layer - first_) * of.largest;
  return TensorView::contiguous(data, DType::bf16, {tokens, heads, dim}, stream_->device());
}

void StepRunner::make_tokens(int first, int end, std::span<const uint64_t> keys) {
  struct Part {
    Side side;
    const LayerRows& rows;
    int heads, dim;
  };
  const auto parts = [&](int layer) {
    const AttentionSpec& s = spec_of(layer);
    return std::array<Part, 3>{{{Side::q, q_, s.num_q_heads, s.head_dim_qk},
                                {Side::k, k_, s.num_kv_heads, s.head_dim_qk},
                                {Side::v, v_, s.num_kv_heads, s.head_dim_v}}};
  };
  first_ = first;
  num_tokens_ = int64_t(keys.size());
  auto* const offsets = static_cast<int32_t*>(host_offsets_.get());
  run_parallel(threads_, [&](int worker) {
    const size_t begin = keys.size() * size_t(worker) / size_t(threads_.num_workers);
    const size_t last = keys.size() * (size_t(worker) + 1) / size_t(threads_.num_workers);
    int32_t* to = offsets;
    for (int layer = first; layer < end; ++layer) {
      for (const Part& part : parts(layer)) {
        synthetic_.offsets(part.side, layer, keys.subspan(begin, last - begin), part.heads, to + begin * size_t(part.heads));
        to += num_tokens_ * part.heads;
      }
    }
  });
  int64_t total = 0;
  for (int layer = first; layer < end; ++layer) {
    for (const Part& part : parts(layer)) total += num_tokens_ * part.heads;
  }
  stream_->upload(offsets_.view.data, offsets, total * size_of(DType::i32));
  int64_t at = 0;
  for (int layer = first; layer < end; ++layer) {
    for (const Part& part : parts(layer)) {
      const int64_t count = num_tokens_ * part.heads;
      stream_->gather(pool_.view, offsets_.view.slice(0, at, at + count), rows(part.rows, layer, 1, count, part.dim).select(0, 0));
      at += count;
    }
  }
  stream_->synchronize();  // the step's clock starts with nothing ahead of it
}

void StepRunner::update(const StepPlan& step) {
  decode_ = stream_->asynchronous() && step.num_tokens() == step.num_reqs();
  size_t from = mark();
  for (size_t i = 0; i < kinds_.size(); ++i) {
    const Kind& kind = kinds_[i];
    (decode_ ? kind.decode_plan : kind.plan)->update(step.batch(kind.group), stream_->get());
    const size_t to = mark();
    spans_.push_back({i, from, to, &KindTimes::plan_s});
    from = to;
  }
}

void StepRunner::write_kv(int layer, const Plan& plan, int64_t tokens) const {
  const AttentionSpec& s = spec_of(layer);
  plan.write_kv(layers_[size_t(layer)].inputs.kv, rows(k_, layer, tokens, s.num_kv_heads, s.head_dim_qk),
                rows(v_, layer, tokens, s.num_kv_heads, s.head_dim_v), stream_->get());
}

void StepRunner::attend(int layer, const Plan& plan, int64_t tokens) const {
  const AttentionSpec& s = spec_of(layer);
  Inputs inputs = layers_[size_t(layer)].inputs;
  inputs.q = rows(q_, layer, tokens, s.num_q_heads, s.head_dim_qk);
  plan.run(inputs, {.out = rows(out_, layer, tokens, s.num_q_heads, s.head_dim_v), .lse = {}}, stream_->get());
}

void StepRunner::run(int first, int end) {
  const auto next_kind = [&](int layer) {
    int next = layer + 1;
    while (next < end && kind_of(next) == kind_of(layer)) ++next;
    return next;
  };
  const auto launch = [&](int begin, int next, const Plan& plan, int64_t tokens) {
    for (int layer = begin; layer < next; ++layer) write_kv(layer, plan, tokens), attend(layer, plan, tokens);
  };
  for (int layer = first; decode_ && layer < end; layer = next_kind(layer)) {
    DeviceGraph& graph = layers_[size_t(layer)].graph;
    if (!graph) graph = stream_->capture([&] { launch(layer, next_kind(layer), *kinds_[kind_of(layer)].decode_plan, graph_tokens_); });
  }

  size_t from = mark();
  const auto until_here = [&](size_t kind, double KindTimes::*part) {
    const size_t to = mark();
    spans_.push_back({kind, from, to, part});
    from = to;
  };
  for (int layer = first, next = 0; layer < end; layer = next) {
    const size_t kind = kind_of(layer);
    if (!stream_->asynchronous()) {
      next = layer + 1;
      write_kv(layer, *kinds_[kind].plan, num_tokens_);
      until_here(kind, &KindTimes::kv_write_s);
      attend(layer, *kinds_[kind].plan, num_tokens_);
    } else {  // a mark between two launches would keep the second from starting before the first has ended
      next = next_kind(layer);
      if (decode_) {
        stream_->replay(layers_[size_t(layer)].graph);
      } else {
        launch(layer, next, *kinds_[kind].plan, num_tokens_);
      }
    }
    until_here(kind, &KindTimes::attention_s);
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
  const auto row_length = [&](const WantedRow& row) { return int64_t(spec_of(row.layer).group_size()) * spec_of(row.layer).head_dim_v; };
  const auto row_start = [&](const WantedRow& row) {
    return (int64_t(row.token) * spec_of(row.layer).num_kv_heads + row.kv_head) * row_length(row);
  };
  const std::vector<RowGroup> groups = group_rows(wanted, row_start, offsets);
  int64_t total = 0;  // elements
  for (const WantedRow& row : wanted) total += row_length(row);
  if (staged_.view.size(0) < total) {
    staged_ = stream_->tensor(DType::bf16, {2 * total});
    host_staged_ = stream_->allocate_host(2 * total * size_of(DType::bf16));
  }
  stream_->upload(offsets_.view.data, offsets, int64_t(wanted.size()) * size_of(DType::i32));
  fetched_.clear();
  int64_t at = 0;
  for (const RowGroup& group : groups) {
    const int layer = wanted[group.begin].layer;
    const int64_t count = int64_t(group.end - group.begin), length = row_length(wanted[group.begin]);
    const TensorView to = TensorView::contiguous(staged_.view.as<uint16_t>() + at, DType::bf16, {count, length}, stream_->device());
    const int64_t elements = num_tokens_ * spec_of(layer).num_kv_heads * length;
    const TensorView out = rows(out_, layer, 1, 1, elements).select(0, 0).select(0, 0);
    const TensorView near = out.slice(0, group.base, std::min(elements, group.base + std::numeric_limits<int32_t>::max()));
    stream_->gather(near, offsets_.view.slice(0, int64_t(group.begin), int64_t(group.end)), to);
    for (int64_t i = 0; i < count; ++i, at += length) fetched_.push_back(static_cast<const uint16_t*>(host_staged_.get()) + at);
  }
  stream_->download(host_staged_.get(), staged_.view.data, total * size_of(DType::bf16));
  stream_->synchronize();
  return fetched_;
}

std::vector<ReplayKind> StepRunner::reports() const {
  std::vector<ReplayKind> all;
  for (const Kind& kind : kinds_) {
    all.push_back(kind.report);
    all.back().plan = (decode_ ? kind.decode_plan : kind.plan)->str();
  }
  return all;
}

}  // namespace imbrex::serve
