// Inputs of MLA cases, and how they are run and judged: see cases.h.
#include <algorithm>
#include <cmath>

#include "conformance/case_random.h"
#include "conformance/mla/cases.h"
#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

// The first `dim` elements of each row of the last dimension of `t`.
TensorView first_of_rows(const TensorView& t, int dim) { return t.slice(t.rank - 1, 0, dim); }

// A plan of MLA that looks like one of attention in latent space, so that attention's runner can run it. Of its outputs only the first
// elements of each row are written.
class MlaAsAttention final : public BackendOf<AttentionFamily> {
 public:
  MlaAsAttention(const BackendOf<MlaFamily>& backend, const MlaCaseInputs& in, const MlaPlanMaker& make, const MlaMirrorOptions& mirror)
      : backend_(backend), in_(in), make_(make), mirror_(mirror) {}
  std::string_view name() const override { return backend_.name(); }
  std::string_view description() const override { return backend_.description(); }
  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    return backend_.unsupported(mla_of(spec), device);
  }
  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    const MlaSpec mla = mla_of(spec);
    std::unique_ptr<MlaPlan> made = make_ ? make_(backend_, mla, device, options) : backend_.plan(mla, device, options);
    if (device.device.type == DeviceType::cuda) made = device_mirror(std::move(made), device, mirror_);
    return std::make_unique<Plan>(mla, std::move(made), in_);
  }

 private:
  class Plan final : public AttentionPlan {
   public:
    Plan(const MlaSpec& spec, std::unique_ptr<MlaPlan> plan, const MlaCaseInputs& in) : spec_(spec), plan_(std::move(plan)), in_(in) {}
    void update(const Batch& batch, Stream stream) override { plan_->update(batch, stream); }
    void write_kv(const KvCache& cache, const TensorView& k, const TensorView&, Stream stream) const override {
      const TensorView row = k.select(1, 0);
      const TensorView rope = spec_.qk_rope_dim > 0 ? row.slice(1, spec_.kv_lora_rank, spec_.latent_dim()) : TensorView{};
      plan_->write_kv(cache, first_of_rows(row, spec_.kv_lora_rank), rope, stream);
    }
    void run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const override {
      const MlaInputs inputs{.q = first_of_rows(in.q, spec_.q_dim()), .kv_b = in_.kv_b.view(), .kv = in.kv, .sinks = in.sinks};
      plan_->run(inputs, {.out = first_of_rows(out.out, spec_.out_dim()), .lse = out.lse}, stream);
    }
    std::string str() const override { return plan_->str(); }

   private:
    MlaSpec spec_;
    std::unique_ptr<MlaPlan> plan_;
    const MlaCaseInputs& in_;
  };

  // The case's spec as a step of the runner has it.
  MlaSpec mla_of(const AttentionSpec& spec) const {
    MlaSpec mla = in_.spec;
    mla.kv_format = spec.kv_format;
    mla.block_size = spec.block_size;
    mla.mask = spec.mask;
    mla.sinks = spec.score.sinks;
    return mla;
  }

  const BackendOf<MlaFamily>& backend_;
  const MlaCaseInputs& in_;
  const MlaPlanMaker& make_;
  MlaMirrorOptions mirror_;
};

// Rows of `dim` elements, of those of `length` in `all`.
template <class T>
std::vector<T> first_elements(const std::vector<T>& all, int64_t length, int64_t dim) {
  std::vector<T> first;
  for (size_t row = 0; row < all.size(); row += size_t(length))
    first.insert(first.end(), all.begin() + long(row), all.begin() + long(row) + dim);
  return first;
}

// What rounding of keys, or of queries in latent space, to 16 bits does to a logit: each element of a sum has an error of its own, of which
// four standard deviations are allowed. Attention's own bound is for exact products.
double logit_error(const CaseInputs& expanded) {
  if (expanded.spec.q_dtype == DType::f32) return 0;
  const double rounding = expanded.spec.q_dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
  const auto largest_row = [](const HostTensor& t) {  // root of the mean square
    const int64_t dim = t.sizes[2];
    double largest = 0;
    for (int64_t row = 0; row < t.num_elements(); row += dim) {
      double sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += t.get(row + d) * t.get(row + d);
      largest = std::max(largest, sum / double(dim));
    }
    return std::sqrt(largest);
  };
  return 4 * rounding / std::sqrt(3.) * double(expanded.spec.scale()) * std::sqrt(double(expanded.spec.head_dim_qk)) *
         largest_row(expanded.q) * largest_row(expanded.k);
}

}  // namespace

MlaCaseInputs make_inputs(const MlaCase& c) {
  MlaCaseInputs in{.spec = c.spec, .attention = make_inputs(c.attention), .kv_b = {}};
  if (c.spec.absorbed) return in;
  const int64_t rows = int64_t(c.spec.qk_nope_dim) + c.spec.v_dim, rank = c.spec.kv_lora_rank;
  in.kv_b = HostTensor::make(c.spec.dtype, {c.spec.num_heads, rows, rank});
  const uint64_t seed = splitmix(c.attention.seed * 977 + 5);
  for (int64_t i = 0; i < in.kv_b.num_elements(); ++i)  // keys and values then are as large as their latents
    in.kv_b.set(i, normal(splitmix(seed + uint64_t(i))) / std::sqrt(double(rank)));
  return in;
}

RunResult run_case(const BackendOf<MlaFamily>& backend, const DeviceInfo& device, const MlaCaseInputs& in, const RunOptions& options,
                   const MlaPlanMaker& make, const MlaMirrorOptions& mirror) {
  RunResult result = run_case(MlaAsAttention(backend, in, make, mirror), device, in.attention, options);
  result.out = first_elements(result.out, in.spec.kv_lora_rank, in.spec.out_dim());
  return result;
}

Expected expect(const MlaCaseInputs& in) {
  if (in.spec.absorbed) return expect(in.attention);
  const MlaSpec& spec = in.spec;
  const CaseInputs& latent = in.attention;
  const int64_t heads = spec.num_heads, rank = spec.kv_lora_rank, nope = spec.qk_nope_dim, rope = spec.qk_rope_dim, v = spec.v_dim;
  CaseInputs all = latent;  // requests, masks, positions and sinks are the same
  all.spec = spec.expanded_spec();
  all.spec.kv_dtype = DType::f32;  // rounded by nothing but the naive computation
  all.k_scale = all.v_scale = all.k_rope_scale = {};
  const HostTensor cached = as_read(latent, KvPart::k);
  const int64_t keys = cached.sizes[0], tokens = latent.q.sizes[0];
  all.k = HostTensor::make(DType::f32, {keys, heads, nope + rope});
  all.v = HostTensor::make(DType::f32, {keys, heads, v});
  std::vector<double> weight(static_cast<size_t>(in.kv_b.num_elements())), row(size_t(rank + rope));
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = in.kv_b.get(int64_t(i));
  for (int64_t j = 0; j < keys; ++j) {
    for (int64_t d = 0; d < rank + rope; ++d) row[size_t(d)] = cached.get(j * (rank + rope) + d);
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t n = 0; n < nope + v; ++n) {
        const double* const w = &weight[size_t((h * (nope + v) + n) * rank)];
        double sum = 0;
        for (int64_t d = 0; d < rank; ++d) sum += w[d] * row[size_t(d)];
        n < nope ? all.k.set((j * heads + h) * (nope + rope) + n, sum) : all.v.set((j * heads + h) * v + n - nope, sum);
      }
      for (int64_t d = 0; d < rope; ++d) all.k.set((j * heads + h) * (nope + rope) + nope + d, row[size_t(rank + d)]);
    }
  }
  all.q = HostTensor::make(spec.dtype, {tokens, heads, nope + rope});
  for (int64_t i = 0; i < tokens * heads; ++i)
    for (int64_t d = 0; d < nope + rope; ++d) all.q.set(i * (nope + rope) + d, latent.q.get(i * (rank + rope) + d));
  Expected expected = expect(all);
  expected.bounds.lse_absolute += logit_error(all);
  return expected;
}

}  // namespace imbrex
