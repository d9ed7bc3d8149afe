// See reference.h.
#include "short_conv/reference.h"

#include <vector>

#include "core/float_types.h"
#include "short_conv/step.h"

namespace imbrex {
namespace {

class Reference final : public ShortConvPlan {
 public:
  Reference(const ShortConvSpec& spec, const PlanOptions& options) : spec_(spec), options_(options) {}

  void update(const Batch& batch, Stream) override {
    ShortConvStep next;
    read_batch(spec_, options_.limits, batch, options_.validate, next);
    step_ = std::move(next);
  }

  void run(const ShortConvInputs& in, const ShortConvOutputs& out, Stream) const override {
    if (step_.requests.empty()) return;
    check_run(spec_, {}, in, out, step_.num_tokens, step_.num_slots);
    for (const ShortConvRequest& r : step_.requests)
      for (int d = 0; d < spec_.dim; ++d) run_channel(r, d, in, out);
  }

  std::string str() const override { return "reference: " + std::to_string(step_.requests.size()) + " requests"; }

 private:
  double load(const TensorView& t, int64_t row, int64_t column) const {
    return load_as_double(t.data, spec_.dtype, row * t.stride(0) + column * t.stride(1));
  }
  double rounded(double x) const {
    char element[8];
    store_from_double(element, spec_.dtype, 0, x);
    return load_as_double(element, spec_.dtype, 0);
  }

  void run_channel(const ShortConvRequest& r, int d, const ShortConvInputs& in, const ShortConvOutputs& out) const {
    const int before = spec_.width - 1, q_len = r.end - r.begin;
    const int64_t state = r.slot * in.state.stride(0) + d;
    std::vector<double> h;
    h.reserve(size_t(before) + size_t(q_len));
    for (int i = 0; i < before; ++i)
      h.push_back(r.fresh ? 0. : load_as_double(in.state.data, spec_.dtype, state + (r.first_row + i) * in.state.stride(1)));
    for (int t = r.begin; t < r.end; ++t) h.push_back(rounded(load(in.bcx, t, d) * load(in.bcx, t, 2 * int64_t(spec_.dim) + d)));
    for (int t = 0; t < q_len; ++t) {
      double sum = spec_.bias ? load_as_double(in.bias.data, spec_.dtype, d * in.bias.stride(0)) : 0.;
      for (int i = 0; i < spec_.width; ++i) sum += load(in.weight, d, i) * h[size_t(t) + size_t(i)];
      store_from_double(out.out.data, spec_.dtype, (r.begin + t) * out.out.stride(0) + d * out.out.stride(1),
                        sum * load(in.bcx, r.begin + t, int64_t(spec_.dim) + d));
    }
    for (int i = 0; i < before + r.drafts; ++i)
      store_from_double(in.state.data, spec_.dtype, state + i * in.state.stride(1), h[size_t(q_len - r.drafts) + size_t(i)]);
  }

  ShortConvSpec spec_;
  PlanOptions options_;
  ShortConvStep step_;
};

class ReferenceBackend final : public BackendOf<ShortConvFamily> {
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
  static const ReferenceBackend backend;
  return backend;
}

}  // namespace imbrex
