// Replays a trace through the layers of a model (see replay.h): set-up, the loop over steps, and the result.
#include "serve/replay.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "core/check.h"
#include "core/run_parallel.h"
#include "imbrex/parallel.h"
#include "model/groups.h"
#include "serve/replay_account.h"
#include "serve/replay_setup.h"
#include "serve/scheduler.h"
#include "serve/step_runner.h"
#include "serve/synthetic.h"
#include "serve/timer.h"
#include "serve/verify.h"

namespace imbrex::serve {

namespace {

constexpr uint64_t kSampleTag = 0x73616d70, kDraftTag = 0x64726166;
// Samples wait until there are so many, or their states take so much, since those of one step have lengths too different to keep all
// workers busy until the last ends.
constexpr int kSamplesOfWorker = 32;
constexpr int64_t kMostSampleBytes = 256 << 20;

class Replay {
 public:
  Replay(const ModelSpec& model, const Trace& trace, const ReplayOptions& options)
      : trace_(trace),
        options_(options),
        threads_(options.num_threads),
        parallel_(threads_.parallel_for()),
        synthetic_(options.seed),
        series_(options.max_series_points),
        device_(describe_device(options.device)) {
    const bool on_cpu = device_.device.type == DeviceType::cpu;
    if (on_cpu) device_.num_workers = threads_.num_threads();
    std::string note;
    model_ = deploy_model(model, has_images(trace), options, device_, note);
    result_.notes = model_.notes;
    if (!note.empty()) result_.notes.push_back(note);
    if (!on_cpu) result_.notes.push_back("times of the device are its own clock's; KV writes are counted as attention");
    result_.model_layers = model.num_layers;
    if (options.verify_fraction > 0 || options.verify_last > 0) {
      for (const ModelSpec::Kind& kind : model_.kinds()) Verifier::check_spec(kind.spec);
      verifier_ = std::make_unique<Verifier>(synthetic_, options.seed, trace.prefix_block, options.kv_dtype, parallel_);
    }
    runner_ = std::make_unique<StepRunner>(model_, device_, options, longest(trace), synthetic_, parallel_);
    result_.kinds = runner_->reports();
    sizes_ = cache_sizes(model_, trace, options, on_cpu ? device_.memory_bytes / 4 : runner_->free_bytes() / 10 * 9);
    runner_->allocate(model_, sizes_);
    list_groups();
    make_scheduler();
  }

  ReplayResult run();

 private:
  struct Row {
    int request, position, token;
    int slot;             // of the request's state, where it is the one behind this token; -1: it is behind later ones, or there is none
    int row = 0;          // of the slot: 0, and behind a draft its number
    int parent = 0;       // of a draft, the token of the step that it follows
    bool is_kept = true;  // a token of the request; false: a draft that does not become one
  };
  static int longest(const Trace& trace) { return int(std::max<int64_t>(longest_request(trace), 2)); }
  void list_groups();
  void make_scheduler();
  void run_step(double schedule_s);
  void prepare_rows();
  std::vector<uint64_t> keys_of_path(Row) const;
  void count(ReplayWork& sort);
  void check_layers(int first, int end);
  void verify();
  bool report_progress(double wall_s);
  void finish();  // fills what the result still lacks

  const Trace& trace_;
  const ReplayOptions& options_;
  ThreadPool threads_;
  ParallelFor parallel_;
  Synthetic synthetic_;
  Series series_;
  DeviceInfo device_;
  ModelSpec model_;
  CacheSizes sizes_;
  std::unique_ptr<StepRunner> runner_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Verifier> verifier_;
  StepPlan plan_;
  std::vector<uint64_t> keys_;  // token_key of every token of the step
  std::vector<Row> tokens_;     // of the step
  std::vector<Row> outputs_;    // those that an output token is made from
  std::vector<WantedRow> wanted_;
  std::vector<VerifySample> samples_;               // not recomputed yet
  int64_t sample_bytes_ = 0;                        // of their states
  std::vector<uint64_t> digests_, decode_digests_;  // per worker
  std::vector<double> step_seconds_, step_requests_;
  std::vector<double> occupancy_time_;  // per group
  HeldBytes held_time_;                 // bytes times seconds
  Timer wall_;
  double clock_ = 0, next_progress_ = 0;
  int64_t total_tokens_ = 0;
  ReplayResult result_;
};

void Replay::list_groups() {
  for (size_t g = 0; g < model_.cache_groups.size(); ++g) {
    const CacheGroup& group = model_.cache_groups[g];
    ReplayGroup& report = result_.groups.emplace_back();
    report.name = group.name;
    report.num_layers = int(group.layers.size());
    report.num_blocks = sizes_.num_blocks[g];
    report.num_slots = group.holds_states() ? sizes_.num_slots : 0;
    report.bytes = bytes_of(runner_->caches()[g]);
    result_.kv_bytes += report.bytes;
    result_.padding_bytes += report.bytes - sizes_.needed_bytes(group, g, options_.block_size);
  }
  result_.rest_bytes = sizes_.rest;
  occupancy_time_.assign(result_.groups.size(), 0);
  digests_.assign(size_t(parallel_.num_workers), 0);
  decode_digests_.assign(size_t(parallel_.num_workers), 0);
}

void Replay::make_scheduler() {
  SchedulerOptions o;
  o.max_num_batched_tokens = options_.max_num_batched_tokens;
  o.max_num_seqs = options_.max_num_seqs;
  o.max_seq_len = longest(trace_);
  o.num_blocks = sizes_.num_blocks;
  o.num_slots = sizes_.num_slots;
  o.prefix_block = trace_.prefix_block;
  o.prefix_sharing = result_.prefix_sharing = options_.prefix_sharing && (sizes_.num_slots == 0 || keeps_states(trace_, options_));
  if (options_.prefix_sharing && !o.prefix_sharing)
    result_.notes.push_back("no state is kept behind a prefix: the trace does not say which prompts begin alike");
  if (sizes_.num_slots > 0) o.state_unit = std::lcm(options_.block_size, runner_->step_tokens());
  o.drafts = options_.drafts;
  o.images = has_images(trace_);
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

// Prepares the rows of the step's tokens, which all layers use.
void Replay::prepare_rows() {
  tokens_.clear(), keys_.clear(), outputs_.clear();
  for (int r = 0; r < plan_.num_reqs(); ++r) {
    const int id = plan_.request_ids[size_t(r)];
    const auto own_key = [&](int p) {
      return token_key(token_id(options_.seed, trace_.requests[size_t(id)], trace_.prefix_block, id, p), p);
    };
    const int slot = sizes_.num_slots > 0 ? plan_.state_slots[size_t(r)] : -1;
    const int first = plan_.first_positions[size_t(r)], end = first + plan_.certain_tokens(r);
    for (int p = first; p < end; ++p) {
      keys_.push_back(own_key(p));
      tokens_.push_back({id, p, int(tokens_.size()), p + 1 == end ? slot : -1});
    }
    if (plan_.makes_token[size_t(r)]) outputs_.push_back(tokens_.back());
    if (plan_.drafts.empty()) continue;
    const Drafts& drafts = plan_.drafts[size_t(r)];
    const int certain = int(tokens_.size()) - 1;
    for (int i = 0; i < drafts.count(); ++i) {
      const bool is_kept = std::ranges::find(drafts.kept, i) != drafts.kept.end();
      const int p = end - 1 + drafts.depths[size_t(i)];
      keys_.push_back(is_kept ? own_key(p) : hash_numbers(options_.seed, kDraftTag, uint64_t(id), uint64_t(end), uint64_t(i)));
      tokens_.push_back({id, p, int(tokens_.size()), slot, i + 1, certain + 1 + drafts.parents[size_t(i)], is_kept});
      if (is_kept) outputs_.push_back(tokens_.back());
    }
  }
}

// The keys of the drafts on the path to one, its own last.
std::vector<uint64_t> Replay::keys_of_path(Row row) const {
  std::vector<uint64_t> keys;
  for (; row.row > 0; row = tokens_[size_t(row.parent)]) keys.push_back(keys_[size_t(row.token)]);
  std::ranges::reverse(keys);
  return keys;
}

// The books of a step that has run.
void Replay::count(ReplayWork& sort) {
  const std::vector<KindTimes> times = runner_->take_times();
  ++sort.steps;
  sort.tokens += plan_.num_tokens();
  for (size_t i = 0; i < times.size(); ++i) {
    ReplayKind& report = result_.kinds[i];
    const LayerKind& kind = *runner_->kinds()[i];
    const LayerWork work = kind.work(plan_);
    const double layers = double(report.layers.size());
    const bool states = model_.cache_groups[size_t(kind.group())].holds_states();
    ReplayWork& of_sort = states ? result_.state_layers : sort;
    of_sort.run_s += times[i].run_s;
    of_sort.flops += layers * work.flops;
    of_sort.bytes += layers * work.bytes;
    report.plan_s += times[i].plan_s;
    report.kv_write_s += times[i].kv_write_s;
    report.run_s += times[i].run_s;
    report.flops += layers * work.flops;
    report.bytes += layers * work.bytes;
    result_.times.plan_s += times[i].plan_s;
    result_.times.kv_write_s += times[i].kv_write_s;
    (states ? result_.times.state_s : result_.times.attention_s) += times[i].run_s;
    result_.kv_written_bytes += layers * work.kv_written_bytes;
  }
  if (sizes_.num_slots == 0) return;
  ++result_.state_layers.steps;
  result_.state_layers.tokens += plan_.num_tokens();
}

// Digests of the outputs that tokens are made from, and a sample of all outputs recomputed.
void Replay::check_layers(int first, int end) {
  wanted_.clear();
  const size_t first_sample = samples_.size();
  std::vector<size_t> digest_begin, sampled;  // of a layer's outputs_, and of each sample, in wanted_
  for (int layer = first; layer < end; ++layer) {
    const int out_rows = runner_->kind_of(layer).out_rows();
    digest_begin.push_back(wanted_.size());
    for (const Row& row : outputs_) {
      for (int r = 0; r < out_rows; ++r) wanted_.push_back({layer, row.token, r});
    }
    if (!verifier_) continue;
    for (const Row& row : tokens_) {
      const uint64_t h = hash_numbers(options_.seed, kSampleTag, uint64_t(row.request), uint64_t(row.position), uint64_t(layer),
                                      uint64_t(row.is_kept ? 0 : row.row));
      const TraceRequest& of = trace_.requests[size_t(row.request)];
      const bool is_last =
          row.is_kept && row.position + 2 == of.input_length + of.output_length;  // nothing is computed from the last output token
      if (double(h >> 11) * 0x1p-53 >= std::max(options_.verify_fraction, is_last ? options_.verify_last : 0)) continue;
      const int out_row = int(mix_bits(h) % uint64_t(out_rows));
      sampled.push_back(wanted_.size());
      wanted_.push_back({layer, row.token, out_row});
      samples_.push_back({.request = row.request,
                          .trace = &of,
                          .position = row.position,
                          .drafts = keys_of_path(row),
                          .layer = layer,
                          .name = model_.layers[size_t(layer)].name,
                          .target = runner_->target(layer, out_row),
                          .state = row.slot < 0 ? std::vector<char>() : runner_->fetch_state(layer, out_row, row.slot, row.row)});
      sample_bytes_ += int64_t(samples_.back().state.size());
    }
  }
  if (wanted_.empty()) return;
  const auto fetched = runner_->fetch(wanted_);
  run_parallel(parallel_, [&](int worker) {
    for (int layer = first; layer < end; ++layer) {
      const LayerKind& kind = runner_->kind_of(layer);
      const size_t row_bytes = size_t(kind.out_rows()) * size_t(kind.out_length()) * sizeof(uint16_t);
      for (size_t i = size_t(worker); i < outputs_.size(); i += size_t(parallel_.num_workers)) {
        const Row& row = outputs_[i];
        const uint16_t* const out = fetched[digest_begin[size_t(layer - first)] + i * size_t(kind.out_rows())];  // its other rows follow
        const uint64_t digest = digest_row(row.request, row.position, layer, out, row_bytes);
        digests_[size_t(worker)] += digest;
        if (row.position >= trace_.requests[size_t(row.request)].input_length) decode_digests_[size_t(worker)] += digest;
      }
    }
  });
  for (size_t i = 0; i < sampled.size(); ++i) {
    VerifySample& sample = samples_[first_sample + i];
    sample.actual.assign(fetched[sampled[i]], fetched[sampled[i]] + runner_->kind_of(sample.layer).out_length());
  }
  if (samples_.size() >= size_t(kSamplesOfWorker) * size_t(parallel_.num_workers) || sample_bytes_ >= kMostSampleBytes) verify();
}

// Recomputes what was sampled since the last call.
void Replay::verify() {
  if (verifier_) verifier_->run(samples_);
  samples_.clear();
  sample_bytes_ = 0;
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
  const int num_layers = int(model_.layers.size());
  for (int first = 0, end = 0; first < num_layers; first = end) {
    end = std::min(first + runner_->window(), num_layers);
    runner_->make_tokens(first, end, keys_);
    result_.times.synth_s += timer.lap();
    if (first == 0) runner_->update(plan_);
    runner_->run(first, end);
    timer.lap();
    check_layers(first, end);
    result_.times.verify_s += timer.lap();
  }
  count(plan_.decodes_only() ? result_.decode_steps : result_.prefill_steps);

  ReplayPoint point;
  point.steps = 1;
  point.running = scheduler_->num_running();
  point.waiting = scheduler_->num_waiting();
  for (int g = 0; g < int(result_.groups.size()); ++g) point.occupancy.push_back(scheduler_->occupancy(g));
  const HeldBytes held = held_bytes(model_, *scheduler_, plan_, options_.block_size);
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
  for (size_t g = 0; g < result_.groups.size(); ++g) {
    occupancy_time_[g] += point.occupancy[g] * step_s;
    result_.groups[g].peak_occupancy = std::max(result_.groups[g].peak_occupancy, point.occupancy[g]);
  }
  held_time_.all += held.all * step_s, held_time_.unfilled += held.unfilled * step_s;
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
  Timer timer;
  verify();
  r.times.verify_s += timer.lap();
  r.model = model_.name;
  r.family = model_.family;
  r.trace = trace_.source;
  r.trace_format = trace_.format;
  r.device = device_.str();
  r.num_layers = model_.num_layers;
  r.num_threads = threads_.num_threads();
  for (const ModelLayer& layer : model_.layers)
    if (const auto spec = paged_attention(layer.spec)) r.kv_format = to_string(spec->kv_format);
  add_options(options_, r);
  r.complete = scheduler_->done();
  add_counts(scheduler_->stats(), r);
  r.clock_s = clock_;

  add_latencies(scheduler_->finished(), r);
  r.step = percentiles(std::move(step_seconds_));
  r.batch = percentiles(std::move(step_requests_));
  for (size_t g = 0; g < result_.groups.size(); ++g) {
    r.groups[g].mean_occupancy = r.busy_s() > 0 ? occupancy_time_[g] / r.busy_s() : 0;
    r.groups[g].evictions = scheduler_->pool(int(g)).stats().evictions;
  }
  if (held_time_.all > 0) r.unfilled_share = held_time_.unfilled / held_time_.all;
  const std::vector<ReplayKind> reports = runner_->reports();
  for (size_t i = 0; i < r.kinds.size(); ++i) r.kinds[i].plan = reports[i].plan;
  for (size_t w = 0; w < digests_.size(); ++w) {
    r.digest += digests_[w];
    r.decode_digest += decode_digests_[w];
  }
  if (verifier_) {
    r.verified_outputs = verifier_->summary().outputs;
    r.verified_values = verifier_->summary().values;
    r.verified_states = verifier_->summary().states;
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
