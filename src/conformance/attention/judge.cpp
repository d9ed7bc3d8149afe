// See conformance.h.
#include "conformance/attention/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "attention/mask.h"
#include "attention/position_bias.h"
#include "attention/reference.h"
#include "conformance/precision.h"
#include "core/check.h"
#include "core/float_types.h"
#include "imbrex/bound_expression.h"

namespace imbrex {
namespace {

// Relative error that a kernel's exponential may have. For 16-bit types it is hidden under the rounding of probabilities (2^-9, 2^-12).
constexpr double kExpErrorFloat = 1e-6, kExpErrorHalf = 2e-4;
// The keys of a row that one lane adds, one after the other, as a share of all: the lanes that share a row's keys are four at least.
constexpr double kKeysOfLane = 0.25;
// The error of a logit that is a sum of products of bytes: a hundred addends cut at 2^-13 of the largest, whose errors have both signs.
constexpr double kByteSumError = 0x1p-10, kByteSumFloor = 0x1p-7;

// The type that a framework would compute in.
DType working_dtype(const AttentionSpec& spec) { return spec.out_dtypes().front(); }
bool has_fp8_queries(const AttentionSpec& spec) { return spec.q_dtype == DType::fp8_e4m3; }

float round_to(DType dtype, float x) {
  char bytes[sizeof(int64_t)];  // of the widest type
  store_from_float(bytes, dtype, 0, x);
  return load_as_float(bytes, dtype, 0);
}

std::vector<float> rounded(const HostTensor& t, DType dtype, const HostTensor& scale) {
  std::vector<float> values(static_cast<size_t>(t.num_elements()));
  const int64_t heads = t.sizes[1], dim = t.sizes[2];
  HostTensor rounding = HostTensor::make(dtype, {dim});
  std::vector<double> row(static_cast<size_t>(dim));
  for (int64_t i = 0, count = t.num_elements(); i < count; i += dim) {
    const float factor = scale_of_head(t, scale, i / dim % heads);
    load_as_doubles(t.bytes.data(), t.dtype, i, 1, row);
    for (double& x : row) x = double(float(x) * factor);
    rounding.set_row(0, row);
    load_as_doubles(rounding.bytes.data(), dtype, 0, 1, row);
    std::copy(row.begin(), row.end(), values.begin() + i);
  }
  return values;
}

// Keys or values as a framework would have them, from a cache of the spec's format.
std::vector<float> read_as(const CaseInputs& in, KvPart part, DType dtype) {
  if (in.spec.kv_format != KvFormat::strided && in.spec.kv_format != KvFormat::latent) return rounded(as_read(in, part), dtype, {});
  const HostTensor &t = part == KvPart::k ? in.k : in.v, &scale = part == KvPart::k ? in.k_scale : in.v_scale;
  return rounded(as_cached(t, in.spec.kv_dtype, scale), dtype, scale);
}

float dot(const float* a, const float* b, int count) {
  float sum = 0;
  for (int d = 0; d < count; ++d) sum += a[d] * b[d];
  return sum;
}

// One query row against the keys of its request.
class NaiveRow {
 public:
  NaiveRow(const CaseInputs& in, const float* keys, const float* values) : in_(in), spec_(in.spec), keys_(keys), values_(values) {
    const std::vector<NamedTensor> tensors = in.named_tensors();
    if (!spec_.score_mod.empty()) score_mod_.emplace(spec_.score_mod, tensors);
    if (!spec_.mask_mod.empty()) mask_mod_.emplace(spec_.mask_mod, tensors);
  }

  // Of query number i of a request whose first query is row `first` of q. `first_key` is the request's first row in k and v, `shown` the
  // query's custom mask row or null.
  // Returns how many keys it sees.
  int compute(const CaseRequest& r, int64_t first, int i, int head, const float* q, int64_t first_key, const char* shown, float* out) {
    const int64_t position = in_.position_of(r, first, i);
    const int heads = spec_.num_kv_heads, kv_head = head / spec_.group_size(), dim_qk = spec_.head_dim_qk, dim_v = spec_.head_dim_v;
    seen_.clear();
    logits_.clear();
    for (int64_t j = 0; j < r.seq_len; ++j) {
      const int64_t place = in_.key_position_of(r, first, j);
      if (!in_.tree_shows(r, first, i, j) || !mask_allows(spec_.mask, position, place) || (shown != nullptr && shown[j] == 0)) continue;
      ExpressionVariables at{
          .batch = int(&r - in_.requests.data()), .head = head, .q = int(position), .kv = int(j), .q_len = r.q_len, .kv_len = r.seq_len};
      if (mask_mod_ && !mask_mod_->evaluate(at).boolean()) continue;
      seen_.push_back(first_key + j);
      logits_.push_back(logit(dot(q, keys_ + ((first_key + j) * heads + kv_head) * dim_qk, dim_qk), head, place - position));
      at.score = logits_.back();
      if (score_mod_) logits_.back() = score_mod_->evaluate(at).real();
    }
    std::fill_n(out, dim_v, 0.f);
    const int num_seen = int(seen_.size());
    if (seen_.empty()) return 0;
    float maximum = *std::max_element(logits_.begin(), logits_.end()), denominator = 0;
    if (maximum == -std::numeric_limits<float>::infinity()) return num_seen;
    if (spec_.score.sinks) {
      const float sink = float(in_.sinks.get(head));
      maximum = std::max(maximum, sink);
      denominator = std::exp(sink - maximum);
    }
    for (float& x : logits_) denominator += x = std::exp(x - maximum);
    for (size_t i = 0; i < seen_.size(); ++i) {
      const float weight = weight_of(logits_[i], denominator);
      const float* row = values_ + (seen_[i] * heads + kv_head) * dim_v;
      for (int d = 0; d < dim_v; ++d) out[d] += weight * row[d];
    }
    for (int d = 0; d < dim_v; ++d) out[d] = round_to(dtype_, out[d]);
    return num_seen;
  }

 private:
  float weight_of(float exponential, float denominator) const {
    constexpr float kByteOne = 256.f;
    if (has_fp8_queries(spec_)) return round_to(DType::fp8_e4m3, kByteOne * exponential) / (kByteOne * denominator);
    return round_to(dtype_, exponential / denominator);
  }

  float logit(float product, int head, int64_t distance) const {
    const ScoreMod& score = spec_.score;
    float x = product * spec_.scale();
    if (score.head_scales) x *= float(in_.head_scales.get(head));
    x = round_to(dtype_, x);
    if (score.soft_cap > 0.f) x = round_to(dtype_, score.soft_cap * std::tanh(x / score.soft_cap));
    if (score.alibi) x += float(in_.alibi_slopes.get(head)) * float(alibi_distance(score, double(distance)));
    if (score.relative_buckets > 0)
      x += float(in_.relative_bias.get(int64_t(relative_bucket(score, int(distance))) * spec_.num_q_heads + head));
    return x;
  }

  const CaseInputs& in_;
  const AttentionSpec& spec_;
  const DType dtype_ = working_dtype(spec_);
  const float *keys_, *values_;
  std::optional<BoundExpression> score_mod_, mask_mod_;
  std::vector<int64_t> seen_;
  std::vector<float> logits_;
};

// The error of a logit where keys have a scale for the part behind their value: backends whose products have 16 bits round the queries
// there once more, after they have multiplied them by what is between the scales. Four standard deviations, of roundings to f16's 11 bits.
double rope_error(const CaseInputs& in, DType dtype) {
  if (in.k_rope_scale.empty() || dtype == DType::f32) return 0;
  constexpr double kDeviations = 4, kRounding = 0x1p-11 / 3.4641;  // uniform between +-2^-12 of an element's size
  const int qk = in.spec.head_dim_qk, v = in.spec.head_dim_v;
  const std::vector<float> keys = read_as(in, KvPart::k, dtype);
  double q_squares = 0, k_squares = 0;
  const int64_t q_rows = in.q.num_elements() / qk, k_rows = int64_t(keys.size()) / qk;
  for (int64_t row = 0; row < q_rows; ++row)
    for (int d = v; d < qk; ++d) q_squares += in.q.get(row * qk + d) * in.q.get(row * qk + d);
  for (int64_t row = 0; row < k_rows; ++row)
    for (int d = v; d < qk; ++d) k_squares += double(keys[size_t(row * qk + d)]) * double(keys[size_t(row * qk + d)]);
  const double both = q_squares / double(std::max<int64_t>(q_rows, 1)) * (k_squares / double(std::max<int64_t>(k_rows, 1)));
  return kDeviations * kRounding * std::abs(double(in.spec.scale())) * std::sqrt(both / double(std::max(qk - v, 1)));
}

// What rounding makes of a sum of so many exponentials, as a share of it, and so of its logarithm. They are positive, so that the sum never
// was larger than it is, and each addition of floats in a lane's chain takes it off by a rounding of that at most.
double sum_error(int keys) { return kKeysOfLane * kFloatRounding * keys; }

Bounds bounds_of(const CaseInputs& in, const std::vector<float>& expected, const ErrorStats& naive) {
  double max_factor = 2, mean_factor = 1.5, largest_value = 0, storing = 0;
  if (in.spec.score.soft_cap > 0.f) max_factor = 3;
  if (is_fp8(in.spec.kv_dtype)) max_factor = 4, mean_factor = 3;
  const DType dtype = working_dtype(in.spec);
  const std::vector<float> values = read_as(in, KvPart::v, dtype);
  for (float v : values) largest_value = std::max(largest_value, double(std::abs(v)));
  for (float x : expected) storing = std::max(storing, std::abs(double(round_to(dtype, x + 0.3f)) - (double(x) + 0.3)));
  const bool half = dtype != DType::f32, bytes = has_fp8_queries(in.spec);
  const double exp_error = half ? kExpErrorHalf : kExpErrorFloat, floor = 2 * storing + exp_error * largest_value;
  // A tanh is good to a rounding of 1, which the cap multiplies.
  const double cap_error = double(in.spec.score.soft_cap) * 0x1p-23;
  return {
      .max = max_factor * naive.max + floor,
      .mean = mean_factor * naive.mean + floor / 4,
      .lse_absolute = (half ? 1.5 * kExpErrorHalf : 4 * kExpErrorFloat) + cap_error + rope_error(in, dtype) + (bytes ? kByteSumFloor : 0),
      .lse_relative = 0x1p-21 + (bytes ? kByteSumError : 0)};  // four roundings of a float of the logits' size
}

}  // namespace

std::vector<float> naive_attention(const CaseInputs& in, std::vector<int>* keys_seen) {
  const AttentionSpec& spec = in.spec;
  const int heads = spec.num_q_heads;
  const DType dtype = working_dtype(spec);
  const std::vector<float> q = rounded(in.q, dtype, in.q_scale);
  const std::vector<float> k = read_as(in, KvPart::k, dtype);
  const std::vector<float> v = read_as(in, KvPart::v, dtype);
  std::vector<float> out(size_t(in.num_tokens()) * heads * spec.head_dim_v);
  std::vector<int> seen(size_t(in.num_tokens()) * heads);
  NaiveRow row(in, k.data(), v.data());
  int64_t token = 0, key = 0, mask = 0;
  for (const CaseRequest& r : in.requests) {
    for (int i = 0; i < r.q_len; ++i, ++token, mask += r.seq_len)
      for (int h = 0; h < heads; ++h)
        seen[size_t(token * heads + h)] = row.compute(r, token - i, i, h, &q[size_t((token * heads + h) * spec.head_dim_qk)], key,
                                                      spec.mask.custom ? in.custom_mask.bytes.data() + mask : nullptr,
                                                      &out[size_t((token * heads + h) * spec.head_dim_v)]);
    key += r.seq_len;
  }
  if (keys_seen != nullptr) *keys_seen = std::move(seen);
  return out;
}

Expected expect(const CaseInputs& in) {
  RunOptions options;
  if (!holds(KvFormat::strided, in.spec)) options.kv_format = in.spec.kv_format;
  options.block_size = in.spec.block_size;
  options.poison = Poison::nan;
  options.out_dtype = DType::f32;
  options.check_cache = false;
  RunResult law = run_case(reference_backend(), probe_cpu(), in, options);
  Expected expected{.out = std::move(law.out), .lse = std::move(law.lse), .keys_seen = {}, .naive = {}, .bounds = {}};
  expected.naive = compare(naive_attention(in, &expected.keys_seen), expected.out);
  expected.bounds = bounds_of(in, expected.out, expected.naive);
  return expected;
}

Expected expect(const CaseInputs& in, std::vector<float> out, std::vector<float> lse) {
  Expected expected = expect(in);
  expected.out = std::move(out);
  expected.lse = std::move(lse);
  return expected;
}

Judgement judge(const Expected& expected, const RunResult& result) {
  const Bounds& bounds = expected.bounds;
  Judgement j{.out = compare(result.out, expected.out), .lse = 0, .failure = {}};
  if (!expected.lse.empty()) {
    check(result.lse.size() == expected.lse.size(), "conformance.size", "expected {} values, got {}", expected.lse.size(),
          result.lse.size());
    for (size_t i = 0; i < expected.lse.size(); ++i) {
      const double a = result.lse[i], b = expected.lse[i];
      if (a == b) continue;
      const double share = std::abs(a - b) / (bounds.lse_absolute + sum_error(expected.keys_seen[i]) + bounds.lse_relative * std::abs(b));
      j.lse = std::max(j.lse, std::isfinite(a) && std::isfinite(b) ? share : std::numeric_limits<double>::infinity());
    }
  }
  // Negated, so that a NaN fails.
  if (!result.violations.empty())
    j.failure = result.violations.front();
  else if (!(j.out.max <= bounds.max))
    j.failure = fmt::format("max error {:.3g} is above {:.3g} (naive: {:.3g})", j.out.max, bounds.max, expected.naive.max);
  else if (!(j.out.mean <= bounds.mean))
    j.failure = fmt::format("mean error {:.3g} is above {:.3g} (naive: {:.3g})", j.out.mean, bounds.mean, expected.naive.mean);
  else if (!(j.lse <= 1))
    j.failure = fmt::format("log-sum-exp error is {:.3g} times what is allowed", j.lse);
  return j;
}

}  // namespace imbrex
