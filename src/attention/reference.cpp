// The reference backend: double precision, plain loops, every feature. Written to be read against spec.h, not to be fast.
#include "attention/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "attention/key_source.h"
#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "attention/packed_mask.h"
#include "attention/plan_checks.h"
#include "attention/position_bias.h"
#include "attention/reference_tree.h"
#include "attention/step_plan.h"
#include "core/check.h"
#include "core/float_types.h"
#include "imbrex/bound_expression.h"

namespace imbrex {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t offset(const TensorView& t, int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0) {
  return a * t.strides[0] + b * t.strides[1] + c * t.strides[2] + d * t.strides[3];
}

// One row of `count` elements, `stride` apart, as doubles.
void load_row(const TensorView& t, int64_t first, int64_t stride, int count, double scale, double* row) {
  load_as_doubles(t.data, t.dtype, first, stride, {row, size_t(count)});
  for (int d = 0; d < count; ++d) row[d] *= scale;
}

double parameter(const TensorView& t, int64_t index) { return t.as<const float>()[index * t.strides[0]]; }

class ReferencePlan final : public StepPlan {
 public:
  ReferencePlan(const AttentionSpec& spec, const PlanOptions& options) : spec_(spec), codec_(codec_of(spec)), options_(options) {
    k_row_.resize(spec.head_dim_qk);
    v_row_.resize(spec.head_dim_v);
    q_rows_.resize(size_t(spec.group_size()) * spec.head_dim_qk);
    sums_.resize(size_t(spec.group_size()) * spec.head_dim_v);
  }

  void prepare(const Batch& batch, Stream) override {
    if (options_.validate) validate(batch, spec_, options_.limits, -1);
    check_on_host(batch);
    Step& next = steps_.spare();
    next.query_start_loc.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    next.seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    next.batch = batch;
    next.positions.assign(batch.positions.begin(), batch.positions.end());
    if (spec_.mask.tree) next.tree.set(batch);
    next.batch.query_start_loc = next.query_start_loc;
    next.batch.seq_lens = next.seq_lens;
    next.batch.positions = next.positions;
    find_keys(batch, next.keys);
    if (spec_.mask.custom) find_mask_starts(batch, next.mask_start);
    next.mask_mod.reset();
    if (!spec_.mask_mod.empty()) next.mask_mod.emplace(spec_.mask_mod, batch.mask_tensors);
    next.reach = reach_of(batch, spec_, true);  // whoever vouches for the batch
    // Shared by both steps, and never smaller than one of them needs.
    const size_t keys = size_t(std::max(batch.max_seq_len(), 0));
    if (weights_.size() < size_t(spec_.group_size()) * keys) weights_.resize(size_t(spec_.group_size()) * keys);
    seen_.reserve(keys);
  }
  void commit(Stream) noexcept override { steps_.flip(); }
  void revert(Stream) noexcept override { steps_.flip(); }

  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream) const override {
    const Step& step = steps_.now();
    const int tokens = step.batch.num_tokens();
    check_write(spec_, {}, cache, k, v, step.batch.slot_mapping, tokens, step.reach);
    for (int t = 0; t < tokens; ++t) {
      const int64_t slot = slot_of(t);
      if (slot == -1) continue;
      for (int h = 0; h < spec_.num_kv_heads; ++h) {
        const KvPlace place{.block = slot / spec_.block_size, .offset = slot % spec_.block_size, .head = h};
        codec_.encode(spec_, cache, KvPart::k, place, row_of(k, t, h));
        if (!codec_.values_in_keys) codec_.encode(spec_, cache, KvPart::v, place, row_of(v, t, h));
      }
    }
  }

  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream) const override {
    const Batch& batch = steps_.now().batch;
    check_run(spec_, {}, in, out, batch.num_tokens(), steps_.now().reach);
    if (!spec_.score_mod.empty()) score_mod_.emplace(spec_.score_mod, in.score_tensors);
    for (int r = 0; r < batch.num_reqs(); ++r)
      for (int token = batch.query_start_loc[r]; token < batch.query_start_loc[r + 1]; ++token)
        for (int head = 0; head < spec_.num_kv_heads; ++head) attend(in, out, r, token, head);
  }

  std::string str() const override {
    return fmt::format("reference: {} requests, {} tokens", steps_.now().batch.num_reqs(), steps_.now().batch.num_tokens());
  }

 private:
  struct Step {
    std::vector<int32_t> query_start_loc{0}, seq_lens, positions;
    ReferenceTree tree;  // of a spec whose queries are trees
    Batch batch;
    KeySource keys;
    BatchReach reach;
    std::vector<long> mask_start;             // of each request, where it has a custom mask
    std::optional<BoundExpression> mask_mod;  // whose tensors are the caller's
  };

  static KvRow row_of(const TensorView& t, int token, int head) {
    return {.data = t.data, .dtype = t.dtype, .first = offset(t, token, head), .stride = t.stride(2)};
  }

  int64_t slot_of(int token) const {
    const TensorView& slots = steps_.now().batch.slot_mapping;
    return slots.as<int64_t>()[token * slots.stride(0)];
  }

  // Where key `j` of request `r` lies, and its value.
  KvPlace place_of(int r, int64_t j, int head) const {
    const KeySource& keys = steps_.now().keys;
    if (spec_.block_size == 0) return {.block = keys.start[size_t(r)] + j, .offset = 0, .head = head};
    return {.block = keys.ids_of(r)[j / spec_.block_size], .offset = j % spec_.block_size, .head = head};
  }

  // Of query number `query` of request `r`.
  int64_t position_of(int r, int64_t query) const {
    const Batch& batch = steps_.now().batch;
    if (spec_.mask.tree) return batch.context_len(r) + steps_.now().tree.depth(r, query);
    return spec_.mask.positions ? batch.positions[size_t(batch.query_start_loc[r] + query)] : batch.context_len(r) + query;
  }

  // Of key `j` of request `r`: under a tree, the key of a query has the query's.
  int64_t position_of_key(int r, int64_t j) const {
    const int64_t context = steps_.now().batch.context_len(r);
    return spec_.mask.tree && j >= context ? position_of(r, j - context) : j;
  }

  // Where an expression is computed, of a q head.
  ExpressionVariables place_of_expression(int r, int head, int64_t position, int64_t j) const {
    const Batch& batch = steps_.now().batch;
    return {.batch = r, .head = head, .q = int(position), .kv = int(j), .q_len = batch.query_len(r), .kv_len = batch.seq_lens[size_t(r)]};
  }

  bool visible(int r, int q_head, int64_t query, int64_t position, int64_t j) const {
    const Step& step = steps_.now();
    const int64_t context = step.batch.context_len(r);
    if (spec_.mask.tree && j >= context && !step.tree.is_above(r, j - context, query)) return false;
    if (!mask_allows(spec_.mask, position, position_of_key(r, j))) return false;
    if (step.mask_mod && !step.mask_mod->evaluate(place_of_expression(r, q_head, position, j)).boolean()) return false;
    return !spec_.mask.custom || mask_shows(step.batch, step.mask_start[r] + query * step.batch.seq_lens[r] + j);
  }

  // The logit of one query and key, from their dot product to the position bias.
  double logit(const AttentionInputs& in, double dot, int q_head, int64_t distance) const {
    const ScoreMod& score = spec_.score;
    double x = dot * double(spec_.scale());
    if (score.head_scales) x *= parameter(in.head_scales, q_head);
    if (score.soft_cap > 0.f) x = score.soft_cap * std::tanh(x / score.soft_cap);
    if (score.alibi) x += parameter(in.alibi_slopes, q_head) * alibi_distance(score, double(distance));
    if (score.relative_buckets > 0) {
      const TensorView& bias = in.relative_bias;
      x += bias.as<const float>()[offset(bias, relative_bucket(score, int(distance)), q_head)];
    }
    return x;
  }

  // The outputs of one token for the q heads that share kv head `head`: all together, since they see the same keys, or each alone.
  void attend(const AttentionInputs& in, const AttentionOutputs& out, int r, int token, int head) const {
    const int group = spec_.group_size();
    const int together = !spec_.mask_mod.empty() && spec_.mask_mod.uses(ExpressionVariable::head) ? 1 : group;
    for (int first = head * group; first < (head + 1) * group; first += together) attend_heads(in, out, r, token, head, first, together);
  }

  // Those of `group` of the q heads, from first_head on.
  void attend_heads(const AttentionInputs& in, const AttentionOutputs& out, int r, int token, int head, int first_head, int group) const {
    const int dim_qk = spec_.head_dim_qk, dim_v = spec_.head_dim_v;
    const Batch& batch = steps_.now().batch;
    const int64_t keys = batch.seq_lens[r], query = token - batch.query_start_loc[r], position = position_of(r, query);
    const double q_scale = scale_of_head(in.q_scale, spec_.q_dtype, head);

    for (int g = 0; g < group; ++g) load_row(in.q, offset(in.q, token, first_head + g), 1, dim_qk, q_scale, &q_rows_[size_t(g) * dim_qk]);
    seen_.clear();
    for (int64_t j = 0; j < keys; ++j)
      if (visible(r, first_head, query, position, j)) seen_.push_back(j);
    for (int64_t j : seen_) {
      codec_.decode(spec_, in.kv, KvPart::k, place_of(r, j, head), k_row_.data());
      for (int g = 0; g < group; ++g) {
        double dot = 0;
        for (int d = 0; d < dim_qk; ++d) dot += q_rows_[size_t(g) * dim_qk + d] * k_row_[d];
        double& x = weights_[size_t(g) * keys + j] = logit(in, dot, first_head + g, position_of_key(r, j) - position);
        if (score_mod_) {
          ExpressionVariables at = place_of_expression(r, first_head + g, position, j);
          at.score = float(x);
          x = score_mod_->evaluate(at).real();
        }
      }
    }

    for (int g = 0; g < group; ++g) {
      double* weights = &weights_[size_t(g) * keys];
      double maximum = -kInfinity, denominator = 0;
      bool empty = true;  // a sink alone does not make a distribution over keys
      for (int64_t j : seen_) {
        if (weights[j] != -kInfinity) empty = false;
        if (weights[j] > maximum) maximum = weights[j];
      }
      if (spec_.score.sinks && !empty) {
        const double sink = parameter(in.sinks, first_head + g);
        maximum = std::max(maximum, sink);
        denominator = std::exp(sink - maximum);
      }
      for (int64_t j : seen_) denominator += weights[j] = empty ? 0.0 : std::exp(weights[j] - maximum);
      for (int64_t j : seen_) weights[j] = empty ? 0.0 : weights[j] / denominator;
      if (!out.lse.empty())
        store_from_float(out.lse.data, DType::f32, offset(out.lse, token, first_head + g),
                         float(empty ? -kInfinity : maximum + std::log(denominator)));
    }

    std::fill(sums_.begin(), sums_.end(), 0.0);
    for (int64_t j : seen_) {
      codec_.decode(spec_, in.kv, KvPart::v, place_of(r, j, head), v_row_.data());
      for (int g = 0; g < group; ++g)
        for (int d = 0; d < dim_v; ++d) sums_[size_t(g) * dim_v + d] += weights_[size_t(g) * keys + j] * v_row_[d];
    }
    for (int g = 0; g < group; ++g)
      store_from_doubles(out.out.data, out.out.dtype, offset(out.out, token, first_head + g), 1,
                         {&sums_[size_t(g) * dim_v], size_t(dim_v)});
  }

  AttentionSpec spec_;
  const KvCodec& codec_;
  PlanOptions options_;
  TwoSteps<Step> steps_;
  mutable std::optional<BoundExpression> score_mod_;           // with the tensors of a call
  mutable std::vector<double> k_row_, v_row_, q_rows_, sums_;  // scratch of attend
  mutable std::vector<double> weights_;                        // [group, keys of the request]: logits, then probabilities
  mutable std::vector<int64_t> seen_;                          // keys that the query sees
};

class ReferenceBackend final : public BackendOf<AttentionFamily> {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view description() const override { return "double precision, plain loops, every feature: the law the others are tested by"; }

  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo& device) const override {
    std::vector<Reason> reasons;
    if (device.device.type != DeviceType::cpu)
      reasons.push_back({"device.type", to_string(DeviceType::cpu), to_string(device.device.type)});
    return reasons;
  }

  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<ReferencePlan>(spec, options);
  }
};

}  // namespace

const BackendOf<AttentionFamily>& reference_backend() {
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace imbrex
