// See reference.h.
#include "recurrent/reference.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "core/float_types.h"
#include "recurrent/conv_plan.h"
#include "recurrent/step.h"

namespace imbrex {
namespace {

double get(const TensorView& t, std::initializer_list<int64_t> index) {
  int64_t at = 0;
  int d = 0;
  for (const int64_t i : index) at += i * t.stride(d++);
  return load_as_double(t.data, t.dtype, at);
}

// Of a head, or of one of its channels.
double parameter(const TensorView& t, bool of_channels, int head, int channel) {
  if (t.empty()) return 0;
  return of_channels ? get(t, {head, channel}) : get(t, {head});
}

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

class RecurrentReference final : public RecurrentPlan {
 public:
  RecurrentReference(const RecurrentSpec& spec, const PlanOptions& options) : spec_(spec), options_(options) {}

  void update(const Batch& batch, Stream) override {
    StateStep next;
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, next);
    step_ = std::move(next);
  }

  void run(const RecurrentInputs& in, const RecurrentOutputs& out, Stream) const override {
    if (step_.requests.empty() && step_.padding.empty()) return;
    check_run(spec_, {}, in, out, step_.num_tokens, step_.num_slots);
    zero_padding(step_, out.out);
    for (const StateRequest& r : step_.requests) {
      Row y(size_t(r.end - r.begin) * size_t(spec_.num_v_heads) * size_t(spec_.head_dim_v));
      for (int head = 0; head < spec_.num_v_heads; ++head) run_head(r, head, in, y);
      for (int token = r.begin; token < r.end; ++token) {
        const std::span<double> row = std::span(y).subspan(place_of(r, token, 0), size_t(spec_.num_v_heads) * size_t(spec_.head_dim_v));
        for (int head = 0; head < spec_.num_v_heads; head += spec_.norm_heads()) finish_group(in, token, head, row);
        for (int head = 0; head < spec_.num_v_heads; ++head)
          for (int v = 0; v < spec_.head_dim_v; ++v)
            store_from_double(out.out.data, spec_.dtype, token * out.out.stride(0) + head * out.out.stride(1) + v * out.out.stride(2),
                              row[size_t(head) * size_t(spec_.head_dim_v) + size_t(v)]);
      }
    }
  }

  int step_tokens() const override { return 0; }  // a state is rounded where a step ends
  std::string str() const override { return "reference: " + std::to_string(step_.requests.size()) + " requests"; }

 private:
  using Row = std::vector<double>;

  int64_t state_at(const TensorView& state, int slot, int row, int head, int k, int v) const {
    const bool k_first = spec_.layout == StateLayout::k_first;
    return slot * state.stride(0) + row * state.stride(1) + head * state.stride(2) + (k_first ? k : v) * state.stride(3) +
           (k_first ? v : k) * state.stride(4);
  }

  // The softplus of the gate, or the decay of a channel.
  double step_of(const RecurrentInputs& in, int token, int head, int channel) const {
    const double x = spec_.channel_gate ? get(in.gate, {token, head, channel}) : get(in.gate, {token, head});
    const double s = softplus(x + parameter(in.gate_bias, spec_.channel_gate, head, channel));
    return std::clamp(s, double(spec_.gate_min), spec_.gate_max > 0 ? double(spec_.gate_max) : HUGE_VAL);
  }
  double decay_of(const RecurrentInputs& in, int token, int head, int channel) const {
    const double rate = parameter(in.rates, spec_.channel_rates, head, channel);
    if (spec_.gate == RecurrentGate::fixed) return -rate;
    if (spec_.gate == RecurrentGate::softplus) return -std::exp(rate) * step_of(in, token, head, channel);
    const double x = spec_.channel_gate ? get(in.gate, {token, head, channel}) : get(in.gate, {token, head});
    if (spec_.gate == RecurrentGate::log) return x;
    return spec_.gate_min * sigmoid(std::exp(rate) * (x + parameter(in.gate_bias, spec_.channel_gate, head, channel)));
  }

  // q or k of a token.
  Row key_row(const TensorView& t, int token, int head, double factor) const {
    Row row(size_t(spec_.head_dim_k), 0.);
    double squares = 0;
    for (int i = 0; i < spec_.head_dim_k; ++i) {
      row[size_t(i)] = get(t, {token, head, i});
      squares += row[size_t(i)] * row[size_t(i)];
    }
    const double norm = spec_.qk_norm ? std::sqrt(squares + 1e-6) : 1;
    for (double& x : row) x *= factor / norm;
    return row;
  }

  // Where a head's outputs of a token are among those of a request.
  size_t place_of(const StateRequest& r, int token, int head) const {
    return (size_t(token - r.begin) * size_t(spec_.num_v_heads) + size_t(head)) * size_t(spec_.head_dim_v);
  }

  // The gate and the norm of the outputs of a group of heads.
  void finish_group(const RecurrentInputs& in, int token, int first_head, std::span<double> row) const {
    const bool normed = spec_.out_norm != OutputNorm::none;
    const auto for_group = [&](const auto& visit) {
      for (int head = first_head; head < first_head + spec_.norm_heads(); ++head)
        for (int v = 0; v < spec_.head_dim_v; ++v) visit(row[size_t(head) * size_t(spec_.head_dim_v) + size_t(v)], head, v);
    };
    const auto gate = [&](double& x, int head, int v) {
      if (spec_.out_gate == OutputGate::none) return;
      const double z = get(in.z, {token, head, v});
      x *= (spec_.out_gate == OutputGate::silu ? z : 1) * sigmoid(z);
    };
    if (spec_.out_norm != OutputNorm::before_gate) for_group(gate);
    if (!normed) return;
    double squares = 0;
    for_group([&](double x, int, int) { squares += x * x; });
    const double root = std::sqrt(squares / (spec_.norm_heads() * spec_.head_dim_v) + double(spec_.norm_eps));
    for_group([&](double& x, int head, int v) {
      x *= (in.norm_weight.rank == 1 ? get(in.norm_weight, {v}) : get(in.norm_weight, {head, v})) / root;
    });
    if (spec_.out_norm == OutputNorm::before_gate) for_group(gate);
  }

  void run_head(const StateRequest& r, int head, const RecurrentInputs& in, Row& out) const {
    const int dim_k = spec_.head_dim_k, dim_v = spec_.head_dim_v, k_head = head / (spec_.num_v_heads / spec_.num_k_heads);
    std::vector<Row> s(size_t(dim_k), Row(size_t(dim_v), 0.));
    const auto for_state = [&](int slot, int row, const auto& visit) {
      for (int k = 0; k < dim_k; ++k)
        for (int v = 0; v < dim_v; ++v) visit(s[size_t(k)][size_t(v)], state_at(in.state, slot, row, head, k, v));
    };
    const auto load_row = [&](int slot, int row) {
      for_state(slot, row, [&](double& x, int64_t at) { x = load_as_double(in.state.data, spec_.state_dtype, at); });
    };
    const auto store_row = [&](int row) {
      for_state(r.slot, row, [&](double x, int64_t at) { store_from_double(in.state.data, spec_.state_dtype, at, x); });
      if (spec_.tree_drafts) load_row(r.slot, row);  // drafts begin from what the rows keep
    };
    if (!r.fresh) load_row(r.source, r.first_row);
    const double skip = spec_.skip ? get(in.skip, {head}) : 0;
    // What is read of the slot has been read.
    if (r.end - r.begin == r.drafts) store_row(0);
    for (int token = r.begin; token < r.end; ++token) {
      const int row = token + 1 - (r.end - r.drafts);
      if (row > 0 && !step_.parent_rows.empty()) load_row(r.slot, step_.parent_rows[size_t(token)]);
      const Row q = key_row(in.q, token, k_head, double(spec_.query_scale())), k = key_row(in.k, token, k_head, 1);
      Row u(size_t(dim_v), 0.), y(size_t(dim_v), 0.);
      for (int v = 0; v < dim_v; ++v) {
        u[size_t(v)] = get(in.v, {token, head, v});
        y[size_t(v)] = skip * u[size_t(v)];
        if (spec_.scaled_values) u[size_t(v)] *= step_of(in, token, head, 0);
      }
      for (int i = 0; i < dim_k; ++i) {
        const double factor = std::exp(decay_of(in, token, head, i));
        for (double& x : s[size_t(i)]) x *= factor;
      }
      if (spec_.delta) {
        double beta = get(in.beta, {token, head});
        beta = (spec_.sigmoid_beta ? sigmoid(beta) : beta) * double(spec_.beta_scale);
        for (int v = 0; v < dim_v; ++v) {
          double known = 0;
          for (int i = 0; i < dim_k; ++i) known += s[size_t(i)][size_t(v)] * k[size_t(i)];
          u[size_t(v)] = beta * (u[size_t(v)] - known);
        }
      }
      for (int i = 0; i < dim_k; ++i)
        for (int v = 0; v < dim_v; ++v) {
          double& x = s[size_t(i)][size_t(v)];
          x += k[size_t(i)] * u[size_t(v)];
          y[size_t(v)] += q[size_t(i)] * x;
        }
      std::ranges::copy(y, out.begin() + long(place_of(r, token, head)));
      if (row >= 0) store_row(row);
    }
  }

  RecurrentSpec spec_;
  PlanOptions options_;
  StateStep step_;
};

class RecurrentReferenceBackend final : public BackendOf<RecurrentFamily> {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view description() const override {
    return "double precision, token by token, every feature: the law the others are tested by";
  }
  std::vector<Reason> unsupported(const RecurrentSpec&, const DeviceInfo& device) const override {
    if (device.device.type == DeviceType::cpu) return {};
    return {{"device.type", "cpu", to_string(device.device.type)}};
  }
  std::unique_ptr<RecurrentPlan> plan(const RecurrentSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    if (spec.conv != RecurrentConv::none) return make_conv_plan(*this, spec, device, options, conv_rows_of_host(spec, options.limits));
    return std::make_unique<RecurrentReference>(spec, options);
  }
};

}  // namespace

const BackendOf<RecurrentFamily>& recurrent_reference() {
  static const RecurrentReferenceBackend backend;
  return backend;
}

}  // namespace imbrex
