// The reference backend of MLA: double precision, plain loops. Written to be read against imbrex/mla.h, not to be fast.
#include "mla/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/key_source.h"
#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "attention/packed_mask.h"
#include "attention/reference_tree.h"
#include "attention/step_plan.h"
#include "core/check.h"
#include "core/float_types.h"
#include "mla/cache_rows.h"
#include "mla/step.h"

namespace imbrex {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();

class MlaReference final : public MlaPlan {
 public:
  MlaReference(const MlaSpec& spec, const PlanOptions& options) : spec_(spec), attention_(spec.latent_spec()), options_(options) {}

  void update(const Batch& batch, Stream) override {
    if (options_.validate) validate(batch, attention_, options_.limits, -1);
    check_on_host(batch);
    Step& next = steps_.spare();
    next.query_start_loc.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    next.seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    next.positions.assign(batch.positions.begin(), batch.positions.end());
    if (spec_.mask.tree) next.tree.set(batch);
    if (spec_.mask.custom) find_mask_starts(batch, next.mask_start);
    next.batch = batch;
    next.batch.query_start_loc = next.query_start_loc;
    next.batch.seq_lens = next.seq_lens;
    next.batch.positions = next.positions;
    find_keys(batch, next.keys);
    next.reach = reach_of(batch, attention_, true);  // whoever vouches for the batch
    steps_.flip();
  }

  void write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream) const override {
    const Batch& batch = steps_.now().batch;
    check_write(spec_, {}, cache, latent, rope, batch.slot_mapping, batch.num_tokens(), steps_.now().reach);
    write_latents(attention_, cache, latent, rope, batch.slot_mapping, batch.num_tokens(), {});
  }

  void run(const MlaInputs& in, const MlaOutputs& out, Stream) const override {
    const Batch& batch = steps_.now().batch;
    check_run(spec_, {}, in, out, batch.num_tokens(), steps_.now().reach);
    for (int r = 0; r < batch.num_reqs(); ++r) {
      if (batch.query_len(r) == 0) continue;
      const Rows latents = latents_of(in.kv, r);
      for (int h = 0; h < spec_.num_heads; ++h) {
        const Head head = spec_.absorbed ? Head{latents, first_elements(latents, spec_.kv_lora_rank)} : expand(in.kv_b, h, latents);
        for (int64_t i = 0; i < batch.query_len(r); ++i) attend(in, out, head, r, i, h);
      }
    }
  }

  std::string str() const override {
    return fmt::format("reference: {} requests, {} tokens", steps_.now().batch.num_reqs(), steps_.now().batch.num_tokens());
  }

 private:
  struct Step {
    std::vector<int32_t> query_start_loc{0}, seq_lens, positions;
    ReferenceTree tree;            // of a spec whose queries are trees
    std::vector<long> mask_start;  // of each request, where it has a custom mask
    Batch batch;
    KeySource keys;
    BatchReach reach;
  };
  struct Rows {
    int64_t count = 0, dim = 0;
    std::vector<double> data;
    double* row(int64_t i) { return data.data() + i * dim; }
    const double* row(int64_t i) const { return data.data() + i * dim; }
  };
  static Rows rows(int64_t count, int64_t dim) { return {count, dim, std::vector<double>(size_t(count * dim))}; }
  struct Head {
    Rows keys, values;
  };

  Rows latents_of(const KvCache& cache, int r) const {
    const Step& step = steps_.now();
    Rows latents = rows(step.seq_lens[size_t(r)], spec_.latent_dim());
    for (int64_t j = 0; j < latents.count; ++j)
      codec_of(attention_).decode(attention_, cache, KvPart::k, place_of(step.keys, attention_, r, j), latents.row(j));
    return latents;
  }

  static Rows first_elements(const Rows& all, int dim) {
    Rows first = rows(all.count, dim);
    for (int64_t j = 0; j < all.count; ++j) std::copy_n(all.row(j), dim, first.row(j));
    return first;
  }

  // Keys and values of one head. The sums over the latent are taken for all rows of the weight at a time.
  Head expand(const TensorView& kv_b, int h, const Rows& latents) const {
    const int rank = spec_.kv_lora_rank, nope = spec_.qk_nope_dim, made = nope + spec_.v_dim;
    std::vector<double> weight(size_t(rank) * size_t(made)), sums(static_cast<size_t>(made));  // transposed
    for (int n = 0; n < made; ++n)
      for (int c = 0; c < rank; ++c)
        weight[size_t(c) * size_t(made) + size_t(n)] =
            load_as_double(kv_b.data, kv_b.dtype, h * kv_b.stride(0) + n * kv_b.stride(1) + c * kv_b.stride(2));
    Head head{rows(latents.count, spec_.qk_dim()), rows(latents.count, spec_.v_dim)};
    for (int64_t j = 0; j < latents.count; ++j) {
      std::fill(sums.begin(), sums.end(), 0.);
      for (int c = 0; c < rank; ++c)
        for (int n = 0; n < made; ++n) sums[size_t(n)] += latents.row(j)[c] * weight[size_t(c) * size_t(made) + size_t(n)];
      std::copy_n(sums.data(), nope, head.keys.row(j));
      std::copy_n(latents.row(j) + rank, spec_.qk_rope_dim, head.keys.row(j) + nope);
      std::copy_n(sums.data() + nope, spec_.v_dim, head.values.row(j));
    }
    return head;
  }

  // Of query number i of request r.
  int64_t position_of(int r, int64_t i) const {
    const Step& step = steps_.now();
    if (spec_.mask.positions) return step.positions[size_t(step.query_start_loc[size_t(r)] + i)];
    return step.batch.context_len(r) + (spec_.mask.tree ? step.tree.depth(r, i) : i);
  }

  // Whether query number i of request r, at such a position, sees key j. Under a tree the key of a query has that query's position.
  bool sees(int r, int64_t i, int64_t position, int64_t j) const {
    const Step& step = steps_.now();
    const int64_t keys = step.batch.seq_lens[r], of_step = j - step.batch.context_len(r);
    if (spec_.mask.custom && !mask_shows(step.batch, step.mask_start[size_t(r)] + i * keys + j)) return false;
    if (!spec_.mask.tree || of_step < 0) return mask_allows(spec_.mask, position, j);
    return step.tree.is_above(r, of_step, i) && mask_allows(spec_.mask, position, position_of(r, of_step));
  }

  // Query number i of request r, one head.
  void attend(const MlaInputs& in, const MlaOutputs& out, const Head& head, int r, int64_t i, int h) const {
    const Batch& batch = steps_.now().batch;
    const int64_t token = batch.query_start_loc[r] + i;
    const int64_t position = position_of(r, i);
    std::vector<std::pair<int64_t, double>> seen;  // keys and their logits, then their weights
    double maximum = -kUnbounded;
    for (int64_t j = 0; j < head.keys.count; ++j) {
      if (!sees(r, i, position, j)) continue;
      double dot = 0;
      for (int64_t d = 0; d < head.keys.dim; ++d)
        dot +=
            load_as_double(in.q.data, in.q.dtype, token * in.q.stride(0) + h * in.q.stride(1) + d * in.q.stride(2)) * head.keys.row(j)[d];
      seen.emplace_back(j, dot * double(spec_.logit_scale()));
      maximum = std::max(maximum, seen.back().second);
    }
    const bool empty = maximum == -kUnbounded && std::none_of(seen.begin(), seen.end(), [](const auto& s) { return std::isnan(s.second); });
    double denominator = 0;
    if (spec_.sinks && !empty) {
      const double sink = in.sinks.as<const float>()[h * in.sinks.stride(0)];
      maximum = std::max(maximum, sink);
      denominator = std::exp(sink - maximum);
    }
    for (auto& [j, weight] : seen) denominator += weight = empty ? 0. : std::exp(weight - maximum);
    std::vector<double> sums(size_t(head.values.dim), 0.);
    for (const auto& [j, weight] : seen)
      for (int64_t d = 0; !empty && d < head.values.dim; ++d) sums[size_t(d)] += weight / denominator * head.values.row(j)[d];
    for (int64_t d = 0; d < head.values.dim; ++d)
      store_from_double(out.out.data, out.out.dtype, token * out.out.stride(0) + h * out.out.stride(1) + d * out.out.stride(2),
                        sums[size_t(d)]);
    if (!out.lse.empty())
      out.lse.as<float>()[token * out.lse.stride(0) + h * out.lse.stride(1)] = float(empty ? -kUnbounded : maximum + std::log(denominator));
  }

  MlaSpec spec_;
  AttentionSpec attention_;
  PlanOptions options_;
  TwoSteps<Step> steps_;
};

class MlaReferenceBackend final : public BackendOf<MlaFamily> {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view description() const override { return "double precision, plain loops, every feature: the law the others are tested by"; }
  std::vector<Reason> unsupported(const MlaSpec&, const DeviceInfo& device) const override {
    if (device.device.type == DeviceType::cpu) return {};
    return {{"device.type", "cpu", to_string(device.device.type)}};
  }
  std::unique_ptr<MlaPlan> plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<MlaReference>(spec, options);
  }
};

}  // namespace

const BackendOf<MlaFamily>& mla_reference() {
  static const MlaReferenceBackend backend;
  return backend;
}

}  // namespace imbrex
