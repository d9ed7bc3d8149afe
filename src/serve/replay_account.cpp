// The books of a replay (see replay_account.h).
#include "serve/replay_account.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "attention/mask.h"
#include "mla/cost.h"
#include "serve/hash.h"
#include "serve/recurrent_bench.h"

namespace imbrex::serve {

namespace {

void add_to(ReplayPoint& sum, const ReplayPoint& p) {
  sum.clock_s = p.clock_s;
  sum.steps += p.steps;
  sum.step_s += p.step_s;
  sum.attention_s += p.attention_s;
  sum.prefill_tokens += p.prefill_tokens;
  sum.decode_tokens += p.decode_tokens;
  sum.running += p.running;
  sum.waiting += p.waiting;
  for (size_t g = 0; g < sum.occupancy.size(); ++g) sum.occupancy[g] += p.occupancy[g];
}

// What the queries of requests see.
struct Seen {
  int64_t pairs = 0, keys = 0;  // (query, visible key); keys that any query of a request sees
};

Seen seen_by(const StepPlan& plan, int request, const Mask& mask) {
  const int queries = plan.query_start_loc[size_t(request) + 1] - plan.query_start_loc[size_t(request)];
  Seen seen;
  int64_t first = plan.seq_lens[size_t(request)];
  for (int query = 0; query < queries; ++query) {
    const int p = plan.position(request, query);
    const int64_t first_of_query = first_visible_key(mask, p);
    seen.pairs += p + 1 - first_of_query;
    first = std::min(first, first_of_query);
  }
  seen.keys = plan.seq_lens[size_t(request)] - first;
  return seen;
}

}  // namespace

LayerWork layer_work(const AttentionSpec& spec, const StepPlan& plan) {
  int64_t pairs = 0, keys = 0;
  for (int r = 0; r < plan.num_reqs(); ++r) {
    const Seen seen = seen_by(plan, r, spec.mask);
    pairs += seen.pairs, keys += seen.keys;
  }
  return {.flops = double(pairs) * 2.0 * double(spec.num_q_heads) * double(spec.head_dim_qk + spec.head_dim_v),
          .bytes = double(keys) * double(spec.kv_bytes_per_token()),
          .kv_written_bytes = double(plan.num_tokens()) * double(spec.kv_bytes_per_token())};
}

LayerWork layer_work(const ShortConvSpec& spec, const StepPlan& plan) {
  int64_t states = 0;  // read and written
  for (const int first : plan.first_positions) states += first > 0 ? 2 : 1;
  const double channels = double(plan.num_tokens()) * spec.dim, size = double(size_of(spec.dtype));
  const bool gated = spec.form == ShortConvForm::gated;
  // B times x; width products and their sum, to which the bias comes; times C. B, C and x are read, in the plain form x; y is written.
  return {.flops = channels * (2 * spec.width - 1 + (gated ? 2 : 0) + (spec.bias ? 1 : 0)),
          .bytes = channels * (gated ? 4 : 2) * size + double(states) * double(spec.width - 1) * spec.dim * size,
          .kv_written_bytes = 0};
}

LayerWork layer_work(const MlaSpec& spec, const StepPlan& plan, const MlaPlan& ways) {
  LayerWork work = layer_work(spec.latent_spec(), plan);  // its bytes are of latents, which both ways read
  const auto [product, latent_pair, expanded_pair] = operations_of(spec);
  work.flops = 0;
  for (int r = 0; r < plan.num_reqs(); ++r) {
    const Seen seen = seen_by(plan, r, spec.mask);
    const double queries = double(plan.seq_lens[size_t(r)] - plan.first_positions[size_t(r)]);
    work.flops += ways.expands(r) ? double(seen.pairs) * expanded_pair + double(seen.keys) * product
                                  : double(seen.pairs) * latent_pair + queries * product;
  }
  return work;
}

LayerWork layer_work(const RecurrentSpec& spec, const StepPlan& plan) {
  std::vector<BenchRequest> requests;
  requests.reserve(size_t(plan.num_reqs()));
  for (int r = 0; r < plan.num_reqs(); ++r)
    requests.push_back({.q_len = plan.seq_lens[size_t(r)] - plan.first_positions[size_t(r)], .seq_len = plan.seq_lens[size_t(r)]});
  const RecurrentWork work = work_of(spec, requests, spec.dtype);
  const int64_t row_bytes = spec.state_bytes() / spec.state_rows();  // written behind each draft
  const auto drafts = std::accumulate(plan.num_drafts.begin(), plan.num_drafts.end(), int64_t(0));
  return {.flops = work.flops, .bytes = work.state_bytes + work.token_bytes + double(drafts * row_bytes), .kv_written_bytes = 0};
}

HeldBytes held_bytes(const ModelSpec& model, const Scheduler& scheduler, const StepPlan& plan, int block_size) {
  double empty = 0;  // tokens that fit behind those that are there
  for (const int tokens : plan.seq_lens) empty += double((block_size - tokens % block_size) % block_size);
  HeldBytes held;
  for (size_t g = 0; g < model.cache_groups.size(); ++g) {
    const CacheGroup& group = model.cache_groups[g];
    const BlockPool& pool = scheduler.pool(int(g));
    const double places = double(pool.num_blocks() - pool.num_free());
    held.all += places * double(group.holds_states() ? group.bytes_per_slot : group.bytes_per_token * block_size);
    held.unfilled += empty * double(group.bytes_per_token);
  }
  return held;
}

void Series::add(ReplayPoint step) {
  if (!points_.empty() && points_.back().steps < steps_per_point_) {
    add_to(points_.back(), step);
    return;
  }
  if (points_.size() == max_points_) {
    std::vector<ReplayPoint> merged;
    for (size_t i = 0; i < points_.size(); ++i) {
      if (i % 2 == 0) {
        merged.push_back(std::move(points_[i]));
      } else {
        add_to(merged.back(), points_[i]);
      }
    }
    points_ = std::move(merged);
    steps_per_point_ *= 2;
    add(std::move(step));
    return;
  }
  points_.push_back(std::move(step));
}

std::vector<ReplayPoint> Series::points() const {
  std::vector<ReplayPoint> means = points_;
  for (ReplayPoint& p : means) {
    p.running /= double(p.steps);
    p.waiting /= double(p.steps);
    for (double& share : p.occupancy) share /= double(p.steps);
  }
  return means;
}

uint64_t digest_row(int request, int position, int layer, const void* row, size_t bytes) {
  // Four chains, because one is bound by the latency of its product.
  uint64_t chain[4] = {1, 2, 3, 4};
  const char* at = static_cast<const char*>(row);
  while (bytes > 0) {
    for (uint64_t& c : chain) {
      uint64_t word = 0;
      const size_t n = std::min<size_t>(bytes, sizeof(word));
      std::memcpy(&word, at, n);
      at += n;
      bytes -= n;
      c = (c ^ word) * 0x9e3779b97f4a7c15u;
      c ^= c >> 32;
    }
  }
  return hash_numbers(uint64_t(request), uint64_t(position), uint64_t(layer), chain[0], chain[1], chain[2], chain[3]);
}

void add_options(const ReplayOptions& options, ReplayResult& r) {
  r.seed = options.seed;
  r.max_num_batched_tokens = options.max_num_batched_tokens;
  r.max_num_seqs = options.max_num_seqs;
  r.block_size = options.block_size;
  r.q_dtype = to_string(options.q_dtype);
  r.kv_dtype = to_string(options.kv_dtype);
  r.pacing = to_string(options.pacing);
  r.rate_scale = options.rate_scale;
  r.verify_fraction = options.verify_fraction;
}

void add_counts(const SchedulerStats& s, ReplayResult& r) {
  r.steps = s.steps;
  r.preemptions = s.preemptions;
  r.prompt_tokens = s.prompt_tokens;
  r.prefix_hit_tokens = s.prefix_hit_tokens;
  r.prefill_tokens = s.prefill_tokens;
  r.decode_tokens = s.decode_tokens;
  r.recomputed_tokens = s.recomputed_tokens;
  r.output_tokens = s.output_tokens;
  r.kept_states = s.kept_states;
  r.drafts = s.drafts, r.kept_drafts = s.kept_drafts;
}

void add_latencies(std::span<const RequestRecord> finished, ReplayResult& r) {
  std::vector<double> ttft, tpot, e2e, queue;
  for (const RequestRecord& record : finished) {
    ttft.push_back(record.first_token_s - record.arrival_s);
    e2e.push_back(record.last_token_s - record.arrival_s);
    queue.push_back(record.first_scheduled_s - record.arrival_s);
    if (record.output_length > 1) tpot.push_back((record.last_token_s - record.first_token_s) / (record.output_length - 1));
  }
  r.finished_requests = int64_t(finished.size());
  r.ttft = percentiles(std::move(ttft));
  r.tpot = percentiles(std::move(tpot));
  r.e2e = percentiles(std::move(e2e));
  r.queue = percentiles(std::move(queue));
}

}  // namespace imbrex::serve
