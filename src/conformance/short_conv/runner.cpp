// See runner.h.
#include "conformance/short_conv/runner.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

// A view of rank 3 with one head, without it.
TensorView as_rows(TensorView t) {
  t.rank = 2;
  t.sizes = {t.size(0), t.size(2)};
  t.strides = {t.stride(0), 1};
  return t;
}

class ConvRunner {
 public:
  ConvRunner(ShortConvPlan& plan, const ShortConvCaseInputs& in, const ShortConvRunOptions& options)
      : plan_(plan),
        in_(in),
        options_(options),
        spec_(in.spec),
        num_slots_(5 * int64_t(in.requests.size()) + 5),
        state_(spec_.dtype, num_slots_, spec_.state_rows(), spec_.dim, options.poison, options.gaps),
        weight_(spec_.dtype, spec_.dim, 1, spec_.width, options.poison, options.gaps),
        slots_(in.requests, num_slots_, options.slot_seed, options.other_sources) {
    int64_t token = 0;
    for (const ShortConvCaseRequest& r : in.requests) {
      first_token_.push_back(token);
      token += r.q_len;
    }
    for (int d = 0; d < spec_.dim; ++d) weight_.copy_row(d, in.weight, d);
  }

  ShortConvRunResult run() {
    fill_slots();
    result_.out.assign(size_t(in_.num_tokens()) * size_t(spec_.dim), 0.f);
    result_.state = in_.state;
    for (const ShortConvParts& parts : options_.steps.empty() ? steps_of(in_.requests, options_.chunk) : options_.steps) run_step(parts);
    return std::move(result_);
  }

 private:
  size_t row_bytes() const { return size_t(spec_.dim * size_of(spec_.dtype)); }
  template <class Tensor>
  auto state_row(Tensor& t, size_t request, int row) const {
    return t.bytes.data() + (request * size_t(spec_.state_rows()) + size_t(row)) * row_bytes();
  }

  void fill_slots() {
    for (size_t r = 0; r < in_.requests.size(); ++r)
      for (int row = 0; in_.requests[r].context_len > 0 && row < spec_.state_rows(); ++row)
        std::memcpy(state_.at(slots_.read[r], row), state_row(in_.state, r, row), row_bytes());
  }

  void update(StateBatchLists& lists) {
    if (!options_.on_device) return plan_.update(lists.batch(spec_.num_drafts > 0));
    plan_.update_on_device(lists.device_batch(spec_.num_drafts > 0));
    for (const Reason& problem : plan_.device_problems()) result_.violations.push_back(problem.str());
  }

  // How many rows of the state lie between what two neighbouring drafts leave.
  int rows_of_draft() const { return spec_.tree_drafts ? spec_.width - 1 : 1; }

  // Rows of the state that the step does not read belong to no request before it, and are poisoned. Where a request has read another slot
  // once, that is as it was.
  void poison_unread(const ShortConvParts& parts) {
    for (size_t r = 0; r < parts.size(); ++r) {
      if (parts[r].begin == parts[r].end) continue;
      const bool fresh = in_.requests[r].is_padding || in_.requests[r].context_len + parts[r].begin == 0;
      const int first = parts[r].accepted * rows_of_draft(), last = fresh ? first : first + spec_.width - 1;
      for (int row = 0; row < spec_.state_rows(); ++row) {
        if (row < first || row >= last) state_.poison_row(slots_.read[r], row, options_.poison);
        if (slots_.read[r] != slots_.written[r]) state_.poison_row(slots_.written[r], row, options_.poison);
      }
    }
  }

  void run_step(const ShortConvParts& parts) {
    StateBatchLists lists(in_.requests, parts, slots_.slots(), options_.poison);
    const int64_t tokens = lists.query_start_loc.back(), rows = options_.rows > 0 ? options_.rows : tokens + options_.padding_tokens;
    SpreadTensor input(spec_.dtype, rows, 1, spec_.input_channels(), options_.poison, options_.gaps),
        out(spec_.dtype, rows, 1, spec_.dim, options_.poison, options_.gaps);
    int64_t row = 0;
    for (size_t r = 0; r < parts.size(); ++r)
      for (int t = parts[r].begin; t < parts[r].end; ++t) input.copy_row(row++, in_.input, first_token_[r] + t);
    poison_unread(parts);
    const std::vector<char> input_before = input.bytes;
    std::vector<char> state_before = state_.bytes;
    update(lists);
    const ShortConvInputs inputs{
        .input = as_rows(input.view), .weight = as_rows(weight_.view), .bias = in_.bias.view(), .state = state_.view};
    const ShortConvOutputs outputs{.out = as_rows(out.view)};
    options_.run ? options_.run(plan_, inputs, outputs) : plan_.run(inputs, outputs);
    if (input.bytes != input_before) result_.violations.emplace_back("input was written");
    row = 0;
    std::vector<double> stored(static_cast<size_t>(spec_.dim));
    for (size_t r = 0; r < parts.size(); ++r)
      for (int t = parts[r].begin; t < parts[r].end; ++t, ++row) {
        load_as_doubles(out.at(row, 0), spec_.dtype, 0, 1, stored);
        std::copy(stored.begin(), stored.end(), result_.out.begin() + (first_token_[r] + t) * spec_.dim);
        out.poison_row(row, 0, options_.poison);
      }
    if (std::string written = foreign_write("out", out, options_.poison, tokens); !written.empty())
      result_.violations.push_back(std::move(written));
    take_states(parts, state_before);
    slots_.next_step(parts);
  }

  // The rows that the step was to write go to the result; every other byte must be what it was.
  void take_states(const ShortConvParts& parts, std::vector<char>& before) {
    for (size_t r = 0; r < parts.size(); ++r) {
      if (parts[r].begin == parts[r].end || in_.requests[r].is_padding) continue;
      std::memset(state_row(result_.state, r, 0), 0, row_bytes() * size_t(spec_.state_rows()));
      for (int row = 0; row < spec_.width - 1 + parts[r].drafts * rows_of_draft(); ++row) {
        const char* const written = state_.at(slots_.written[r], row);
        std::memcpy(state_row(result_.state, r, row), written, row_bytes());
        std::memcpy(before.data() + (written - state_.bytes.data()), written, row_bytes());
      }
    }
    if (state_.bytes == before) return;
    const int64_t byte = std::mismatch(before.begin(), before.end(), state_.bytes.begin()).first - before.begin();
    const int64_t element = byte / size_of(spec_.dtype), slot = element / state_.view.stride(0);
    result_.violations.push_back(fmt::format("state: row {} of slot {} was written, of which no request writes that row",
                                             element % state_.view.stride(0) / state_.view.stride(1), slot));
  }

  ShortConvPlan& plan_;
  const ShortConvCaseInputs& in_;
  const ShortConvRunOptions& options_;
  const ShortConvSpec& spec_;
  int64_t num_slots_;
  SpreadTensor state_, weight_;
  std::vector<int64_t> first_token_;
  StateSlotLists slots_;
  ShortConvRunResult result_;
};

}  // namespace

ShortConvRunOptions default_options(const ShortConvCase& c) {
  ShortConvRunOptions options;
  options.gaps = c.gaps;
  options.padding_tokens = c.padding_tokens;
  options.slot_seed = c.seed;
  options.chunk = c.chunk;
  options.other_sources = c.other_sources;
  return options;
}

ShortConvRunResult run_case(const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device, const ShortConvCaseInputs& in,
                            const ShortConvRunOptions& options) {
  PlanOptions plan_options;
  plan_options.limits = limits_of(in.requests);
  plan_options.threads = options.threads;
  plan_options.on_device = options.on_device;
  plan_options.load_on_demand = true;
  const auto plan = backend.plan(in.spec, device, plan_options);
  return run_case(*plan, in, options);
}

ShortConvRunResult run_case(ShortConvPlan& plan, const ShortConvCaseInputs& in, const ShortConvRunOptions& options) {
  return ConvRunner(plan, in, options).run();
}

}  // namespace imbrex
