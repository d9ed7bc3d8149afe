// See plan.h. update() decides which way each request takes and cuts those with expanded keys into rounds; run() computes the requests in
// latent space, then round after round.
#include "mla/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "attention/batch_part.h"
#include "attention/packed_mask.h"
#include "attention/split_plan.h"
#include "attention/step_plan.h"
#include "core/run_parallel.h"
#include "core/scratch_of_plans.h"
#include "imbrex/merge.h"
#include "mla/cache_rows.h"
#include "mla/expand.h"
#include "mla/rounds.h"
#include "mla/scratch.h"
#include "mla/step.h"

namespace imbrex {

std::unique_ptr<HeadProducts> cpu_head_products(CpuIsa, const ParallelFor&);  // cpu/head_products.cpp

namespace {

// The type of outputs in latent space: that of queries where products are fastest by it, as on GPUs, else f32.
DType output_type(const MlaSpec& spec, const HeadProducts* products) {
  return products != nullptr && spec.dtype == DType::bf16 ? products->row_type(spec.dtype) : DType::f32;
}

constexpr int kKeyUnit = 128;  // keys of a chunk are a multiple of it, as those of attention's blocks are

class CompositePlan final : public MlaPlan {
 public:
  CompositePlan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts)
      : spec_(spec),
        latent_spec_(spec.latent_spec()),
        device_(device),
        options_(options),
        parts_(std::move(parts)),
        chunk_(parts_.chunk_keys > 0 ? parts_.chunk_keys : parts_.hardware->chunk_keys(spec, options.limits)),
        scratch_(spec, options.limits.max_num_tokens, chunk_, latent_type(spec, parts_.products.get()),
                 output_type(spec, parts_.products.get())) {
    member_ = member_options(device, options);
    member_.workspace = std::make_shared<SharedScratch>();
    member_.out_dtype.reset();
    latent_ = step_plan(parts_.latent->plan(latent_spec_, device, member_));
    member_.limits.max_seq_len = std::min(member_.limits.max_seq_len, chunk_);
    member_.limits.min_query_len = 0;
  }

  void update(const Batch& given, Stream stream) override {
    if (options_.validate) validate(given, latent_spec_, options_.limits, -1);
    check_on_host(given);
    const Batch batch = with_mask_bytes(given, steps_.spare().mask_bytes);
    check(batch.num_tokens() <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
          options_.limits.max_num_tokens, batch.num_tokens());
    Step& next = steps_.spare();
    next.num_tokens = batch.num_tokens();
    next.slots = batch.slot_mapping;
    next.reach = reach_of(batch, latent_spec_, options_.validate);
    next.query_start_loc.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    find_keys(batch, next.keys);
    decide_ways(spec_, parts_.rules(), batch, next.ways);
    take_part(batch, next.latent, [&](int r) { return !next.ways.expands(r); });
    next.num_rounds = 0;
    for (int r = 0; r < batch.num_reqs(); ++r)
      if (next.ways.expands(r))
        add_pieces(batch, {r, batch.query_start_loc[r], batch.query_start_loc[r + 1]}, spec_.mask, chunk_, next.rounds, 0, next.num_rounds);

    committed_.clear();
    if (!next.latent.ranges.empty()) {
      latent_->prepare(batch_of(batch, next.latent), stream);
      committed_.push_back(latent_.get());
    }
    for (size_t i = 0; i < next.num_rounds; ++i) {
      if (i == rounds_.size()) rounds_.push_back(step_plan(parts_.expanded->plan(rounds_spec(spec_), device_, member_)));
      rounds_[i]->prepare(next.rounds[i].batch(), stream);
      committed_.push_back(rounds_[i].get());
    }
    std::stable_partition(committed_.begin(), committed_.end(), [](const StepPlan* plan) { return plan->can_revert(); });
    commit_together(committed_, stream);
    steps_.flip();
  }

  void write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream) const override {
    const Step& step = steps_.now();
    check_write(spec_, {}, cache, latent, rope, step.slots, step.num_tokens, step.reach);
    write_latents(latent_spec_, cache, latent, rope, step.slots, step.num_tokens, options_.threads);
  }

  void run(const MlaInputs& in, const MlaOutputs& out, Stream stream) const override {
    const Step& step = steps_.now();
    check_run(spec_, {}, in, out, step.num_tokens, step.reach);
    if (!step.latent.ranges.empty()) run_latent(step, in, out, stream);
    for (size_t i = 0; i < step.num_rounds; ++i) run_round(step, step.rounds[i], *rounds_[i], in, out, stream);
  }

  bool expands(int request) const override { return steps_.now().ways.expands(request); }

  std::string str() const override {
    const Step& step = steps_.now();
    std::string text = parts_.name + ":";
    if (step.latent.num_tokens > 0)
      text += fmt::format(" {} tokens in latent space ({}){}", step.latent.num_tokens, latent_->str(), step.ways.largest[0].str());
    if (step.num_rounds > 0)
      text += fmt::format("{} {} tokens with expanded keys in {} round{} of {} keys at most ({}){}", step.latent.num_tokens > 0 ? ";" : "",
                          step.num_tokens - step.latent.num_tokens, step.num_rounds, step.num_rounds == 1 ? "" : "s", chunk_,
                          rounds_[0]->str(), step.ways.largest[1].str());
    return step.num_tokens == 0 ? text + " nothing" : text;
  }

 private:
  struct Step {
    int num_tokens = 0;
    TensorView slots;
    BatchReach reach;
    KeySource keys;
    std::vector<int> query_start_loc;
    std::vector<uint8_t> mask_bytes;  // of a packed mask
    MlaWays ways;
    BatchPart latent;
    std::vector<MlaRound> rounds;  // the first num_rounds
    size_t num_rounds = 0;
  };

  // Rows of heads of some tokens, as out.lse has them too.
  static TensorView rows(const TensorView& t, int64_t begin, int64_t end) { return t.empty() ? t : t.slice(0, begin, end); }
  TensorView w_uk(const MlaInputs& in) const { return in.kv_b.slice(1, 0, spec_.qk_nope_dim); }
  TensorView w_uv(const MlaInputs& in) const { return in.kv_b.slice(1, spec_.qk_nope_dim, in.kv_b.size(1)); }

  void run_latent(const Step& step, const MlaInputs& in, const MlaOutputs& out, Stream stream) const {
    const BatchPart& part = step.latent;
    const TokenRange all{part.ranges.front().begin, part.ranges.back().end};
    AttentionInputs inputs{.q = {}, .kv = in.kv, .sinks = in.sinks};
    if (spec_.absorbed) {  // of all requests: their tokens are in one piece
      inputs.q = rows(in.q, all.begin, all.end);
      return latent_->run(inputs, {.out = rows(out.out, all.begin, all.end), .lse = rows(out.lse, all.begin, all.end)}, stream);
    }
    inputs.q = rows(scratch_.latent_q, 0, part.num_tokens);
    const TensorView latent_out = rows(scratch_.latent_out, 0, part.num_tokens);
    const bool own_lse = !out.lse.empty() && !part.contiguous();
    const TensorView lse = own_lse ? rows(scratch_.latent_lse, 0, part.num_tokens) : rows(out.lse, all.begin, all.end);
    for_ranges(part.ranges, [&](const TokenRange& tokens, int row, int end) {
      const TensorView q = rows(in.q, tokens.begin, tokens.end), absorbed = rows(inputs.q, row, end);
      parts_.products->by_columns(q.slice(2, 0, spec_.qk_nope_dim), w_uk(in), absorbed.slice(2, 0, spec_.kv_lora_rank));
      copy_rows(q.slice(2, spec_.qk_nope_dim, spec_.qk_dim()), absorbed.slice(2, spec_.kv_lora_rank, spec_.latent_dim()), options_.threads);
    });
    latent_->run(inputs, {.out = latent_out, .lse = lse}, stream);
    for_ranges(part.ranges, [&](const TokenRange& tokens, int row, int end) {
      parts_.products->by_rows(rows(latent_out, row, end), w_uv(in), rows(out.out, tokens.begin, tokens.end));
      for (int t = row; own_lse && t < end; ++t) copy_row(lse, t, out.lse, tokens.begin + t - row);
    });
  }

  // body(tokens, their first row, the row after the last).
  template <class Body>
  static void for_ranges(const std::vector<TokenRange>& ranges, const Body& body) {
    int row = 0;
    for (const TokenRange& tokens : ranges) {
      const int end = row + tokens.end - tokens.begin;
      body(tokens, row, end);
      row = end;
    }
  }

  void run_round(const Step& step, const MlaRound& round, const StepPlan& plan, const MlaInputs& in, const MlaOutputs& out,
                 Stream stream) const {
    const int64_t num_keys = round.num_keys(), num_rows = round.num_rows();
    const TensorView latents = rows(scratch_.latents, 0, num_keys);
    const KvCache kv{.k = rows(scratch_.k, 0, num_keys), .v = rows(scratch_.v, 0, num_keys)};
    read_latents(spec_, in.kv, step.keys, round, latents, kv.k, options_.threads);
    TensorView each_head = latents;
    each_head.sizes[1] = spec_.num_heads, each_head.strides[1] = 0;
    parts_.products->by_rows(each_head, w_uk(in), kv.k.slice(2, 0, spec_.qk_nope_dim));
    parts_.products->by_rows(each_head, w_uv(in), kv.v);

    const bool contiguous = round.ranges.size() == 1;
    const TokenRange tokens = round.ranges.front();
    AttentionInputs inputs{.q = contiguous ? rows(in.q, tokens.begin, tokens.end) : rows(scratch_.q, 0, num_rows), .kv = kv};
    if (!contiguous) for_rows(options_.threads, round.ranges, [&](int row, int token) { copy_row(in.q, token, inputs.q, row); });
    if (contiguous && round.complete() && !spec_.sinks)
      return plan.run(inputs, {.out = rows(out.out, tokens.begin, tokens.end), .lse = rows(out.lse, tokens.begin, tokens.end)}, stream);
    const PartialResult part{.out = rows(scratch_.part_out, 0, num_rows), .lse = rows(scratch_.part_lse, 0, num_rows)};
    plan.run(inputs, {.out = part.out, .lse = part.lse}, stream);
    for (const MlaPiece& piece : round.pieces) {
      const int row_end = piece.row + piece.q_end - piece.q_begin;
      const PartialResult mine{.out = rows(part.out, piece.row, row_end), .lse = rows(part.lse, piece.row, row_end)};
      PartialResult done = mine;  // of a request without other pieces
      if (!piece.first || !piece.last) {
        const PartialResult sum{.out = rows(scratch_.sum_out, piece.q_begin, piece.q_end),
                                .lse = rows(scratch_.sum_lse, piece.q_begin, piece.q_end)};
        const PartialResult both[] = {sum, mine};
        merge_partial_results(std::span(both).last(piece.first ? 1 : 2), sum.out, sum.lse, options_.threads);
        const int first = step.query_start_loc[size_t(piece.request)];  // earlier queries have no part of the last pieces
        done = {.out = rows(scratch_.sum_out, first, piece.q_end), .lse = rows(scratch_.sum_lse, first, piece.q_end)};
      }
      if (!piece.last) continue;
      const int64_t count = done.out.size(0);
      finish(done, in.sinks, rows(out.out, piece.q_end - count, piece.q_end), rows(out.lse, piece.q_end - count, piece.q_end),
             options_.threads);
    }
  }

  MlaSpec spec_;
  AttentionSpec latent_spec_;
  DeviceInfo device_;
  PlanOptions options_, member_;
  MlaParts parts_;
  int chunk_;
  MlaScratch scratch_;
  std::unique_ptr<StepPlan> latent_;
  std::vector<std::unique_ptr<StepPlan>> rounds_;  // as many as any step had
  std::vector<StepPlan*> committed_;               // of one update
  TwoSteps<Step> steps_;
};

}  // namespace

DType latent_type(const MlaSpec& spec, const HeadProducts* products) {
  return products != nullptr && spec.kv_dtype == DType::bf16 && spec.dtype == DType::bf16 ? products->row_type(spec.dtype) : DType::f32;
}

AttentionSpec rounds_spec(const MlaSpec& spec) {
  AttentionSpec rounds = spec.expanded_spec();
  rounds.mask = round_mask(spec.mask);
  rounds.score.sinks = false;
  return rounds;
}

namespace {

// As many as fit kExpandedBytes.
int chunk_keys_on_host(const MlaSpec& spec, const PlanLimits& limits) {
  constexpr int64_t kExpandedBytes = int64_t{128} << 20;
  const int64_t key_bytes = int64_t(spec.num_heads) * (spec.qk_dim() + spec.v_dim) * size_of(spec.dtype);
  const int64_t most = std::max<int64_t>(kExpandedBytes / key_bytes, 1), wanted = std::min<int64_t>(most, limits.max_seq_len);
  return int((wanted + kKeyUnit - 1) / kKeyUnit * kKeyUnit);
}

std::unique_ptr<MlaPlan> plan_on_host(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts) {
  return std::make_unique<CompositePlan>(spec, device, options, std::move(parts));
}

}  // namespace

const MlaHardware mla_on_cpus{
    .refusals = [](const MlaSpec&, const DeviceInfo&) { return std::vector<Reason>(); },
    .products = [](const MlaSpec&, const DeviceInfo& device,
                   const PlanOptions& options) { return cpu_head_products(device.isa, options.threads); },
    .can_expand = can_expand,
    .rounds = [](const MlaSpec& spec) { return std::vector<AttentionSpec>{rounds_spec(spec)}; },
    .chunk_keys = chunk_keys_on_host,
    .plan = plan_on_host,
    .workspace_bytes = [](const MlaSpec&, const DeviceInfo&, const PlanOptions&, const MlaParts&) { return int64_t{0}; }};

std::unique_ptr<MlaPlan> make_mla_plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts) {
  const MlaHardware& hardware = *parts.hardware;
  return hardware.plan(spec, device, options, std::move(parts));
}

}  // namespace imbrex
