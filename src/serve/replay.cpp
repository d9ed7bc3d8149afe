// Replays a trace through the attention layers of a model (see replay.h): set-up, the loop over steps, and the result.
#include "serve/replay.h"

#include <algorithm>
#include <memory>

#include "core/check.h"
#include "core/run_parallel.h"
#include "imbrex/kv_cache.h"
#include "imbrex/parallel.h"
#include "serve/replay_account.h"
#include "serve/replay_setup.h"
#include "serve/scheduler.h"
#include "serve/synthetic.h"
#include "serve/timer.h"
#include "serve/verify.h"

namespace imbrex::serve {

namespace {

constexpr uint64_t kSampleTag = 0x73616d70;

struct Kind {
  AttentionSpec spec;
  int group = 0;
  std::unique_ptr<Plan> plan;
};

struct Layer {
  size_t kind = 0;
  KvCache cache;
  LayerParameters parameters;
};

class Replay {
 public:
  Replay(const ModelSpec& model, const Trace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        threads_(options.num_threads),
        parallel_(threads_.parallel_for()),
        synthetic_(options.seed),
        series_(options.max_series_points) {
    device_ = probe_cpu();
    device_.num_workers = threads_.num_threads();
    std::string note;
    model_ = deploy_model(model, options, device_, note);
    result_.notes = model_.notes;
    result_.notes.push_back(note);
    result_.model_layers = int(model.layers.size());
    num_blocks_ = blocks_per_group(model_, trace, options, device_);
    allocate();
    select_backends();
    if (options.verify_fraction > 0) {
      verifier_ = std::make_unique<Verifier>(synthetic_, options.seed, trace.prefix_block, options.kv_dtype, parallel_);
    }
    make_scheduler();
  }

  ReplayResult run();

 private:
  void allocate();
  void select_backends();
  void make_scheduler();
  void run_step(double schedule_s);
  void run_layer(int index, ReplayWork& sort);
  void prepare_rows();
  void check_layer(int index);
  bool report_progress(double wall_s);
  void finish();  // fills what the result still lacks
  TensorView rows(std::vector<uint16_t>& buffer, int heads, int dim) {
    return TensorView::contiguous(buffer.data(), DType::bf16, {plan_.num_tokens(), heads, dim});
  }

  const Trace& trace_;
  const ReplayOptions& options_;
  ThreadPool threads_;
  ParallelFor parallel_;
  Synthetic synthetic_;
  Series series_;
  DeviceInfo device_;
  ModelSpec model_;
  std::vector<int> num_blocks_;
  std::vector<KvAllocation> caches_;  // per group
  std::vector<Kind> kinds_;
  std::vector<Layer> layers_;
  float fp8_scale_ = kFp8Scale;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Verifier> verifier_;
  StepPlan plan_;
  std::vector<uint16_t> q_, k_, v_, out_;  // bf16, a step's rows
  std::vector<uint64_t> keys_;             // token_key of every token of the step
  struct Row {
    int request, position, token;
  };
  std::vector<Row> tokens_;   // of the step
  std::vector<Row> outputs_;  // those that an output token is made from
  std::vector<VerifySample> samples_;
  std::vector<uint64_t> digests_, decode_digests_;  // per worker
  std::vector<double> step_seconds_, step_requests_;
  std::vector<double> occupancy_time_;  // per group
  Timer wall_;
  double clock_ = 0, next_progress_ = 0;
  int64_t total_tokens_ = 0;
  ReplayResult result_;
};

void Replay::allocate() {
  for (size_t g = 0; g < model_.kv_groups.size(); ++g) {
    const KvGroup& group = model_.kv_groups[g];
    const AttentionSpec& spec = model_.layers[size_t(group.layers.front())].spec;
    caches_.emplace_back(spec, int(group.layers.size()), num_blocks_[g]);
    touch_pages(caches_.back(), parallel_);
    result_.groups.push_back(
        {.name = group.name, .num_layers = int(group.layers.size()), .num_blocks = num_blocks_[g], .bytes = caches_.back().bytes()});
    result_.kv_bytes += caches_.back().bytes();
  }
  size_t q = 0, k = 0, v = 0, out = 0;
  const size_t tokens = size_t(options_.max_num_batched_tokens);
  for (const ModelSpec::Kind& kind : model_.kinds()) {
    const AttentionSpec& s = kind.spec;
    q = std::max(q, tokens * size_t(s.num_q_heads) * size_t(s.head_dim_qk));
    k = std::max(k, tokens * size_t(s.num_kv_heads) * size_t(s.head_dim_qk));
    v = std::max(v, tokens * size_t(s.num_kv_heads) * size_t(s.head_dim_v));
    out = std::max(out, tokens * size_t(s.num_q_heads) * size_t(s.head_dim_v));
  }
  q_.resize(q), k_.resize(k), v_.resize(v), out_.resize(out);
  occupancy_time_.assign(caches_.size(), 0);
  digests_.assign(size_t(parallel_.num_workers), 0);
  decode_digests_.assign(size_t(parallel_.num_workers), 0);
}

void Replay::select_backends() {
  PlanOptions plan_options;
  plan_options.limits = {.max_num_reqs = options_.max_num_seqs,
                         .max_num_tokens = options_.max_num_batched_tokens,
                         .max_seq_len = int(std::max<int64_t>(longest_request(trace_), 2))};
  plan_options.threads = parallel_;
  plan_options.validate = options_.validate;
  layers_.reserve(model_.layers.size());
  for (size_t i = 0; i < model_.layers.size(); ++i) {
    const AttentionSpec& spec = model_.layers[i].spec;
    layers_.push_back({.kind = 0, .cache = {}, .parameters = LayerParameters(spec, options_.seed, int(i))});
  }
  for (const ModelSpec::Kind& kind : model_.kinds()) {
    const AttentionSpec& spec = kind.spec;
    if (options_.verify_fraction > 0) Verifier::check_spec(spec);
    SelectOptions select_options = options_.select;
    select_options.phase = Phase::prefill;
    const Selection prefill = select(spec, device_, select_options);
    select_options.phase = Phase::decode;
    const Selection decode = select(spec, device_, select_options);
    check(prefill.backend != nullptr && decode.backend != nullptr, "replay.backend.none", "no backend runs {}:\n{}", spec.str(),
          prefill.str());
    const bool same = prefill.backend == decode.backend;
    const int group = model_.layers[size_t(kind.layers.front())].kv_group;
    kinds_.push_back({.spec = spec,
                      .group = group,
                      .plan = same ? prefill.backend->plan(spec, device_, plan_options)
                                   : plan_by_phase(*prefill.backend, *decode.backend, spec, device_, plan_options)});
    ReplayKind report;
    report.spec = spec.str();
    report.group = model_.kv_groups[size_t(group)].name;
    report.layers = kind.layers;
    report.backend = same ? std::string(prefill.backend->name()) : fmt::format("{} + {}", prefill.backend->name(), decode.backend->name());
    report.rule = same ? prefill.rule : fmt::format("prefill: {}; decode: {}", prefill.rule, decode.rule);
    report.selection = prefill.str();
    result_.kinds.push_back(std::move(report));
    const std::vector<int>& in_group = model_.kv_groups[size_t(group)].layers;
    for (const int layer : kind.layers) {
      Layer& l = layers_[size_t(layer)];
      l.kind = kinds_.size() - 1;
      l.cache = caches_[size_t(group)].layer(int(std::find(in_group.begin(), in_group.end(), layer) - in_group.begin()));
      if (spec.kv_dtype == DType::fp8_e4m3 || spec.kv_dtype == DType::fp8_e5m2) {
        l.cache.k_scale = l.cache.v_scale = TensorView::contiguous(&fp8_scale_, DType::f32, {1});
      }
    }
  }
}

void Replay::make_scheduler() {
  SchedulerOptions o;
  o.max_num_batched_tokens = options_.max_num_batched_tokens;
  o.max_num_seqs = options_.max_num_seqs;
  o.max_seq_len = int(std::max<int64_t>(longest_request(trace_), 2));
  o.num_blocks = num_blocks_;
  o.prefix_block = trace_.prefix_block;
  o.prefix_sharing = options_.prefix_sharing;
  o.seed = options_.seed;
  scheduler_ = std::make_unique<Scheduler>(model_, std::move(o));
  const double begin = trace_.requests.empty() ? 0 : trace_.requests.front().arrival_s;
  for (size_t i = 0; i < trace_.requests.size(); ++i) {
    const TraceRequest& request = trace_.requests[i];
    if (const std::string reason = scheduler_->too_long(request); !reason.empty()) {
      check(options_.skip_too_long, "replay.request.too_long", "{}, request {}: {}; give the cache more memory or leave such requests out",
            trace_.source, i, reason);
      ++result_.skipped_requests;
      continue;
    }
    const double arrival = options_.pacing == Pacing::saturate ? 0 : (request.arrival_s - begin) / options_.rate_scale;
    scheduler_->add(request, int(i), arrival);
    ++result_.requests;
    total_tokens_ += int64_t(request.input_length) + request.output_length;
  }
}

// What every layer of the step needs to know of its tokens.
void Replay::prepare_rows() {
  tokens_.clear(), keys_.clear(), outputs_.clear();
  for (int r = 0; r < plan_.num_reqs(); ++r) {
    const int id = plan_.request_ids[size_t(r)];
    for (int p = plan_.first_positions[size_t(r)]; p < plan_.seq_lens[size_t(r)]; ++p) {
      keys_.push_back(token_key(token_id(options_.seed, trace_.requests[size_t(id)], trace_.prefix_block, id, p), p));
      tokens_.push_back({id, p, int(tokens_.size())});
    }
    if (plan_.makes_token[size_t(r)]) outputs_.push_back(tokens_.back());
  }
}

// One layer of the step: synthesis, KV write, attention, and the proof. Times go to the result.
void Replay::run_layer(int index, ReplayWork& sort) {
  const Layer& layer = layers_[size_t(index)];
  const Kind& kind = kinds_[layer.kind];
  const AttentionSpec& spec = kind.spec;
  ReplayKind& report = result_.kinds[layer.kind];
  Timer timer;
  synthetic_.fill(Side::q, index, keys_, spec.num_q_heads, spec.head_dim_qk, q_.data(), parallel_);
  synthetic_.fill(Side::k, index, keys_, spec.num_kv_heads, spec.head_dim_qk, k_.data(), parallel_);
  synthetic_.fill(Side::v, index, keys_, spec.num_kv_heads, spec.head_dim_v, v_.data(), parallel_);
  Inputs inputs;
  inputs.q = rows(q_, spec.num_q_heads, spec.head_dim_qk);
  inputs.kv = layer.cache;
  layer.parameters.view(inputs, 0, spec.num_q_heads);
  const Outputs outputs{.out = rows(out_, spec.num_q_heads, spec.head_dim_v), .lse = {}};
  const TensorView k = rows(k_, spec.num_kv_heads, spec.head_dim_qk), v = rows(v_, spec.num_kv_heads, spec.head_dim_v);
  result_.times.synth_s += timer.lap();
  kind.plan->write_kv(layer.cache, k, v);
  const double write_s = timer.lap();
  kind.plan->run(inputs, outputs);
  const double attention_s = timer.lap();

  const LayerWork work = layer_work(spec, plan_);
  sort.attention_s += attention_s;
  sort.flops += work.flops;
  sort.kv_read_bytes += work.kv_read_bytes;
  report.attention_s += attention_s;
  report.kv_write_s += write_s;
  report.flops += work.flops;
  report.kv_read_bytes += work.kv_read_bytes;
  result_.times.kv_write_s += write_s;
  result_.times.attention_s += attention_s;
  result_.kv_written_bytes += double(plan_.num_tokens()) * double(spec.kv_bytes_per_token());
  check_layer(index);
  result_.times.verify_s += timer.lap();
}

void Replay::check_layer(int index) {
  const Layer& layer = layers_[size_t(index)];
  const AttentionSpec& spec = kinds_[layer.kind].spec;
  const size_t row_size = size_t(spec.num_q_heads) * size_t(spec.head_dim_v);
  run_parallel(parallel_, [&](int worker) {
    for (size_t i = size_t(worker); i < outputs_.size(); i += size_t(parallel_.num_workers)) {
      const Row& row = outputs_[i];
      const uint64_t digest =
          digest_row(row.request, row.position, index, out_.data() + size_t(row.token) * row_size, row_size * sizeof(uint16_t));
      digests_[size_t(worker)] += digest;
      if (row.position >= trace_.requests[size_t(row.request)].input_length) decode_digests_[size_t(worker)] += digest;
    }
  });
  if (!verifier_) return;
  samples_.clear();
  for (const Row& row : tokens_) {
    const uint64_t h = hash_numbers(options_.seed, kSampleTag, uint64_t(row.request), uint64_t(row.position), uint64_t(index));
    if (double(h >> 11) * 0x1p-53 >= options_.verify_fraction) continue;
    const int kv_head = int(mix_bits(h) % uint64_t(spec.num_kv_heads));
    samples_.push_back(
        {.request = row.request,
         .trace = &trace_.requests[size_t(row.request)],
         .position = row.position,
         .layer = index,
         .kv_head = kv_head,
         .spec = &spec,
         .parameters = &layer.parameters,
         .actual = out_.data() + size_t(row.token) * row_size + size_t(kv_head) * size_t(spec.group_size()) * size_t(spec.head_dim_v)});
  }
  verifier_->run(samples_);
}

bool Replay::report_progress(double wall_s) {
  if (!options_.progress || wall_s < next_progress_) return true;
  next_progress_ = wall_s + options_.progress_interval_s;
  const SchedulerStats& s = scheduler_->stats();
  ReplayProgress p;
  p.finished_requests = int64_t(scheduler_->finished().size());
  p.total_requests = result_.requests;
  p.total_tokens = total_tokens_;
  p.finished_tokens =
      std::min(total_tokens_, s.prefix_hit_tokens + s.prefill_tokens + s.decode_tokens - s.recomputed_tokens + p.finished_requests);
  p.steps = s.steps;
  p.running = scheduler_->num_running();
  p.waiting = scheduler_->num_waiting();
  p.wall_s = wall_s;
  p.clock_s = clock_;
  return options_.progress(p);
}

// Everything that belongs to the step under way except its synthetic data and its proof is on the replay's clock.
void Replay::run_step(double schedule_s) {
  const double before = result_.times.step_s(), attention_before = result_.times.attention_s;
  result_.times.schedule_s += schedule_s;
  Timer timer;
  prepare_rows();
  result_.times.synth_s += timer.lap();
  for (size_t i = 0; i < kinds_.size(); ++i) {
    kinds_[i].plan->update(plan_.batch(kinds_[i].group));
    const double plan_s = timer.lap();
    result_.kinds[i].plan_s += plan_s;
    result_.times.plan_s += plan_s;
  }
  const bool decode_only = plan_.num_tokens() == plan_.num_reqs();
  ReplayWork& sort = decode_only ? result_.decode_steps : result_.prefill_steps;
  ++sort.steps;
  sort.tokens += plan_.num_tokens();
  for (int i = 0; i < int(layers_.size()); ++i) run_layer(i, sort);

  ReplayPoint point;
  point.steps = 1;
  point.running = scheduler_->num_running();
  point.waiting = scheduler_->num_waiting();
  for (int g = 0; g < int(caches_.size()); ++g) point.occupancy.push_back(scheduler_->occupancy(g));
  const SchedulerStats tokens_before = scheduler_->stats();
  timer.lap();
  // The tokens are there when the step's measured part is over; the scheduler's own books come after that.
  const double computed_s = result_.times.step_s() - before;
  scheduler_->finish_step(clock_ + (options_.fixed_step_s > 0 ? options_.fixed_step_s : computed_s));
  result_.times.schedule_s += timer.lap();
  const double step_s = options_.fixed_step_s > 0 ? options_.fixed_step_s : result_.times.step_s() - before;
  clock_ += step_s;

  point.clock_s = clock_;
  point.step_s = step_s;
  point.attention_s = result_.times.attention_s - attention_before;
  point.prefill_tokens = scheduler_->stats().prefill_tokens - tokens_before.prefill_tokens;
  point.decode_tokens = scheduler_->stats().decode_tokens - tokens_before.decode_tokens;
  for (size_t g = 0; g < caches_.size(); ++g) {
    occupancy_time_[g] += point.occupancy[g] * step_s;
    result_.groups[g].peak_occupancy = std::max(result_.groups[g].peak_occupancy, point.occupancy[g]);
  }
  step_seconds_.push_back(step_s);
  step_requests_.push_back(plan_.num_reqs());
  series_.add(std::move(point));
}

ReplayResult Replay::run() {
  while (!scheduler_->done()) {
    const double wall_s = wall_.elapsed();
    if (!report_progress(wall_s)) {
      result_.stopped = "cancelled";
      break;
    }
    if (options_.time_limit_s > 0 && wall_s > options_.time_limit_s) {
      result_.stopped = "time limit";
      break;
    }
    Timer timer;
    const bool any = scheduler_->step(clock_, plan_);
    if (any) {
      run_step(timer.lap());
      continue;
    }
    const double arrival = *scheduler_->next_arrival();  // there is one, or the scheduler would be done
    result_.idle_s += arrival - clock_;
    clock_ = arrival;
  }
  finish();
  return std::move(result_);
}

void Replay::finish() {
  ReplayResult& r = result_;
  r.model = model_.name;
  r.family = model_.family;
  r.trace = trace_.source;
  r.trace_format = trace_.format;
  r.device = device_.str();
  r.num_layers = int(layers_.size());
  r.num_threads = threads_.num_threads();
  r.kv_format = to_string(kinds_.front().spec.kv_format);
  add_options(options_, r);
  r.complete = scheduler_->done();
  add_counts(scheduler_->stats(), r);
  r.clock_s = clock_;

  add_latencies(scheduler_->finished(), r);
  r.step = percentiles(std::move(step_seconds_));
  r.batch = percentiles(std::move(step_requests_));
  for (size_t g = 0; g < caches_.size(); ++g) {
    r.groups[g].mean_occupancy = r.busy_s() > 0 ? occupancy_time_[g] / r.busy_s() : 0;
    r.groups[g].evictions = scheduler_->pool(int(g)).stats().evictions;
  }
  for (size_t i = 0; i < kinds_.size(); ++i) r.kinds[i].plan = kinds_[i].plan->str();
  for (size_t w = 0; w < digests_.size(); ++w) {
    r.digest += digests_[w];
    r.decode_digest += decode_digests_[w];
  }
  if (verifier_) {
    r.verified_outputs = verifier_->summary().outputs;
    r.verified_values = verifier_->summary().values;
    r.verify_max_error = verifier_->summary().max_error;
    r.verify_max_ratio = verifier_->summary().max_ratio;
  }
  r.series = series_.points();
  r.wall_s = wall_.elapsed();
}

}  // namespace

ReplayResult replay(const ModelSpec& model, const Trace& trace, const ReplayOptions& options) {
  check_options(options);
  check(!trace.requests.empty(), "replay.trace.empty", "{} has no requests", trace.source);
  check(longest_request(trace) <= (1 << 25), "replay.trace.length", "a request of {} has {} tokens, {} are too many", trace.source,
        longest_request(trace), 1 << 25);
  return Replay(model, trace, options).run();
}

}  // namespace imbrex::serve
