// See reference.h.
#include "short_conv/reference.h"

#include <cmath>
#include <span>
#include <vector>

#include "core/float_types.h"
#include "short_conv/step.h"

namespace imbrex {
namespace {

class Reference final : public ShortConvPlan {
 public:
  Reference(const ShortConvSpec& spec, const PlanOptions& options) : spec_(spec), options_(options) {}

  void update(const Batch& batch, Stream) override {
    StateStep next;
    read_batch(StateDrafts(spec_), options_.limits, batch, options_.validate, next);
    step_ = std::move(next);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    if (step_.requests.empty() && step_.padding.empty()) return;
    check_run(spec_, {}, in, out, step_.num_tokens, step_.num_slots);
    zero_padding(step_, out.out);
    for (const StateRequest& r : step_.requests)
      for (int d = 0; d < spec_.dim; ++d) run_channel(r, d, in, out);
  }

  std::string str() const override { return "reference: " + std::to_string(step_.requests.size()) + " requests"; }

 private:
  // A column of `t`, from a row on.
  void load_column(const TensorView& t, int64_t first_row, int64_t column, std::span<double> to) const {
    load_as_doubles(t.data, spec_.dtype, first_row * t.stride(0) + column * t.stride(1), t.stride(0), to);
  }
  double rounded(double x) const {
    char element[8];
    store_from_double(element, spec_.dtype, 0, x);
    return load_as_double(element, spec_.dtype, 0);
  }

  void run_channel(const StateRequest& r, int d, const ShortConvInputs& in, const ShortConvOutputs& out) const {
    const size_t before = size_t(spec_.width) - 1, tokens = size_t(r.end - r.begin), drafts = size_t(r.drafts), certain = tokens - drafts;
    const int64_t dim = spec_.dim, row = in.state.stride(1);
    std::vector<double> mine(tokens), weight(before + 1), c(tokens, 1.);
    load_column(in.input, r.begin, d, mine);
    if (spec_.form == ShortConvForm::gated) {
      std::vector<double> x(tokens);
      load_column(in.input, r.begin, dim + d, c);
      load_column(in.input, r.begin, 2 * dim + d, x);
      for (size_t t = 0; t < tokens; ++t) mine[t] = rounded(mine[t] * x[t]);
    }
    load_as_doubles(in.weight.data, spec_.dtype, d * in.weight.stride(0), in.weight.stride(1), weight);
    const double bias = spec_.bias ? load_as_double(in.bias.data, spec_.dtype, d * in.bias.stride(0)) : 0.;
    // h of the last tokens, oldest first, and what it is in front of the first draft and behind each.
    std::vector<double> window(before);
    std::vector<std::vector<double>> windows(1 + drafts);
    if (!r.fresh) {
      const int64_t first = r.first_row * int64_t(spec_.tree_drafts ? before : 1);
      load_as_doubles(in.state.data, spec_.dtype, r.source * in.state.stride(0) + first * row + d, row, window);
    }
    windows[0] = window;
    for (size_t t = 0; t < tokens; ++t) {
      if (t >= certain && !step_.parent_rows.empty()) window = windows[size_t(step_.parent_rows[size_t(r.begin) + t])];
      window.push_back(mine[t]);
      double sum = bias;
      for (size_t i = 0; i < weight.size(); ++i) sum += weight[i] * window[i];
      c[t] *= spec_.activation == ShortConvActivation::silu ? sum / (1 + std::exp(-sum)) : sum;
      window.erase(window.begin());
      if (t + 1 >= certain) windows[t + 1 - certain] = window;
    }
    store_from_doubles(out.out.data, spec_.dtype, r.begin * out.out.stride(0) + d * out.out.stride(1), out.out.stride(0), c);
    // In a chain neighbouring windows share all but a row.
    const int64_t distance = spec_.tree_drafts ? int64_t(before) : 1;
    for (size_t i = 0; i <= drafts; ++i)
      store_from_doubles(in.state.data, spec_.dtype, r.slot * in.state.stride(0) + int64_t(i) * distance * row + d, row, windows[i]);
  }

  ShortConvSpec spec_;
  PlanOptions options_;
  StateStep step_;
};

class ShortConvReferenceBackend final : public BackendOf<ShortConvFamily> {
 public:
  std::string_view name() const override { return "reference"; }
  std::string_view description() const override { return "double precision, plain loops, every feature: the law the others are tested by"; }
  std::vector<Reason> unsupported(const ShortConvSpec&, const DeviceInfo& device) const override {
    if (device.device.type == DeviceType::cpu) return {};
    return {{"device.type", "cpu", to_string(device.device.type)}};
  }
  std::unique_ptr<ShortConvPlan> plan(const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<Reference>(spec, options);
  }
};

}  // namespace

const BackendOf<ShortConvFamily>& short_conv_reference() {
  static const ShortConvReferenceBackend backend;
  return backend;
}

}  // namespace imbrex
