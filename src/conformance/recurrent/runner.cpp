// See runner.h.
#include "conformance/recurrent/runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "conformance/error_stats.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

// A tensor of the case among poison, and the bytes that it had before a step. Where the case has none, it has no rows.
struct GivenTensor {
  const char* name;
  const HostTensor& source;
  SpreadTensor spread;
  std::vector<char> before;

  GivenTensor(const char* name, const HostTensor& source, int64_t rows, const RecurrentRunOptions& options)
      : name(name),
        source(source),
        spread(source.dtype, source.empty() ? 0 : rows, source.empty() ? 1 : source.sizes[1], source.empty() ? 1 : source.sizes[2],
               options.poison, options.gaps) {}
  void copy_row(int64_t row, int64_t token) {
    if (!source.empty()) spread.copy_row(row, source, token);
  }
  TensorView view() const { return source.empty() ? TensorView{} : spread.view; }
  TensorView without_heads() const {  // of one head
    TensorView t = view();
    if (source.empty()) return t;
    return t.rank = 2, t.sizes[1] = t.sizes[2], t.strides[1] = t.strides[2], t;
  }
};

class RecurrentRunner {
 public:
  RecurrentRunner(RecurrentPlan& plan, const RecurrentCaseInputs& in, const RecurrentRunOptions& options)
      : plan_(plan),
        in_(in),
        options_(options),
        spec_(in.spec),
        num_slots_(4 * int64_t(in.requests.size()) + 5),
        state_(spec_.state_dtype, num_slots_, spec_.state_rows() * int64_t(spec_.num_v_heads), in.head_numbers(), options.poison,
               options.gaps),
        conv_state_(spec_.dtype, in.has_conv() ? num_slots_ : 0, in.has_conv() ? spec_.conv_state_rows() : 1,
                    in.has_conv() ? spec_.conv_channels() : 1, options.poison, options.gaps),
        slots_(in.requests, num_slots_, options.slot_seed, options.other_sources) {
    int64_t token = 0;
    for (size_t r = 0; r < in.requests.size(); ++r) {
      first_token_.push_back(token);
      token += in.requests[r].q_len;
      for (int row = 0; in.requests[r].context_len > 0 && row < spec_.state_rows(); ++row)
        for_heads(state_, slots_.read[r], in.state, r, row, [&](const char* mine, char* slot) { std::memcpy(slot, mine, head_bytes()); });
      for (int row = 0; in.has_conv() && in.requests[r].context_len > 0 && row < spec_.conv_state_rows(); ++row)
        std::memcpy(conv_state_.at(slots_.read[r], row), conv_row(in.conv_state, r, row), conv_row_bytes());
    }
  }

  RecurrentRunResult run() {
    result_.out.assign(size_t(num_tokens(in_.requests)) * row_values(), 0.f);
    result_.state = in_.state, result_.conv_state = in_.conv_state;
    for (const StateParts& parts : options_.steps.empty() ? steps_of(in_.requests, options_.chunk) : options_.steps) run_step(parts);
    return std::move(result_);
  }

 private:
  size_t head_bytes() const { return size_t(in_.head_numbers() * size_of(spec_.state_dtype)); }
  size_t row_values() const { return size_t(spec_.num_v_heads) * size_t(spec_.head_dim_v); }

  size_t conv_row_bytes() const { return size_t(spec_.conv_channels() * size_of(spec_.dtype)); }
  auto conv_row(auto& t, size_t request, int row) const -> decltype(t.bytes.data()) {
    return t.bytes.data() + (request * size_t(spec_.conv_state_rows()) + size_t(row)) * conv_row_bytes();
  }
  // How many rows of the convolution's state lie between what two neighbouring drafts leave.
  int rows_of_draft() const { return spec_.tree_drafts ? spec_.conv_width - 1 : 1; }

  // Calls visit(bytes of `mine`, bytes of a slot) for each head of a row of the state.
  template <class Tensor>
  void for_heads(SpreadTensor& slots, int32_t slot, Tensor& mine, size_t request, int row, const auto& visit) const {
    for (int head = 0; head < spec_.num_v_heads; ++head) {
      const size_t at = (request * size_t(spec_.state_rows()) + size_t(row)) * size_t(spec_.num_v_heads) + size_t(head);
      visit(mine.bytes.data() + at * head_bytes(), slots.at(slot, row * int64_t(spec_.num_v_heads) + head));
    }
  }
  // [slots, state_rows, num_v_heads, two dimensions].
  TensorView state_view() const {
    const bool k_first = spec_.layout == StateLayout::k_first;
    const int64_t outer = k_first ? spec_.head_dim_k : spec_.head_dim_v, inner = k_first ? spec_.head_dim_v : spec_.head_dim_k;
    TensorView t = state_.view;
    const int64_t head = t.stride(1);
    t.rank = 5;
    t.sizes = {num_slots_, spec_.state_rows(), spec_.num_v_heads, outer, inner};
    t.strides = {t.stride(0), head * spec_.num_v_heads, head, inner, 1};
    return t;
  }

  // Rows of the state that the step does not read belong to no request before it, and are poisoned. Where a request has read another slot
  // once, that is as it was.
  void poison_unread(const StateParts& parts) {
    for (size_t r = 0; r < parts.size(); ++r) {
      const bool fresh = in_.requests[r].is_padding || in_.requests[r].context_len + parts[r].begin == 0;
      for (int row = 0; parts[r].end > parts[r].begin && row < spec_.state_rows(); ++row)
        for (int head = 0; head < spec_.num_v_heads; ++head) {
          const int64_t at = row * int64_t(spec_.num_v_heads) + head;
          if (fresh || row != parts[r].accepted) state_.poison_row(slots_.read[r], at, options_.poison);
          if (slots_.read[r] != slots_.written[r]) state_.poison_row(slots_.written[r], at, options_.poison);
        }
      const int first = parts[r].accepted * rows_of_draft(), last = fresh ? first : first + spec_.conv_width - 1;
      for (int row = 0; in_.has_conv() && parts[r].end > parts[r].begin && row < spec_.conv_state_rows(); ++row) {
        if (row < first || row >= last) conv_state_.poison_row(slots_.read[r], row, options_.poison);
        if (slots_.read[r] != slots_.written[r]) conv_state_.poison_row(slots_.written[r], row, options_.poison);
      }
    }
  }

  void update(StateBatchLists& lists) {
    if (!options_.on_device) return plan_.update(lists.batch(spec_.num_drafts > 0));
    plan_.update_on_device(lists.device_batch(spec_.num_drafts > 0));
    for (const Reason& problem : plan_.device_problems()) result_.violations.push_back(problem.str());
  }

  void run_step(const StateParts& parts) {
    StateBatchLists lists(in_.requests, parts, slots_.slots(), options_.poison);
    const int64_t tokens = lists.query_start_loc.back(), rows = options_.rows > 0 ? options_.rows : tokens + options_.padding_tokens;
    GivenTensor q("q", in_.q, rows, options_), k("k", in_.k, rows, options_), v("v", in_.v, rows, options_),
        gate("gate", in_.gate, rows, options_), beta("beta", in_.beta, rows, options_), z("z", in_.z, rows, options_),
        input("input", in_.input, rows, options_);
    const std::array<GivenTensor*, 7> of_tokens{&q, &k, &v, &gate, &beta, &z, &input};
    SpreadTensor out(spec_.dtype, rows, spec_.num_v_heads, spec_.head_dim_v, options_.poison, options_.gaps);
    int64_t row = 0;
    for (size_t r = 0; r < parts.size(); ++r)
      for (int t = parts[r].begin; t < parts[r].end; ++t, ++row)
        for (GivenTensor* given : of_tokens) given->copy_row(row, first_token_[r] + t);
    poison_unread(parts);
    for (GivenTensor* given : of_tokens) given->before = given->spread.bytes;
    std::vector<char> state_before = state_.bytes, conv_before = conv_state_.bytes;
    update(lists);
    plan_.run({.q = q.view(),
               .k = k.view(),
               .v = v.view(),
               .gate = spec_.channel_gate ? gate.view() : gate.without_heads(),
               .beta = beta.without_heads(),
               .rates = in_.rates.view(),
               .gate_bias = in_.gate_bias.view(),
               .skip = in_.skip.view(),
               .state = state_view(),
               .z = z.view(),
               .norm_weight = in_.norm_weight.view(),
               .input = input.without_heads(),
               .conv_weight = in_.conv_weight.view(),
               .conv_bias = in_.conv_bias.view(),
               .conv_state = in_.has_conv() ? conv_state_.view : TensorView{}},
              {.out = out.view});
    for (const GivenTensor* given : of_tokens)
      if (given->spread.bytes != given->before) result_.violations.push_back(fmt::format("{} was written", given->name));
    take_outputs(parts, out, tokens);
    take_states(parts, state_before);
    if (in_.has_conv()) take_conv_states(parts, conv_before);
    slots_.next_step(parts);
  }

  void take_outputs(const StateParts& parts, SpreadTensor& out, int64_t tokens) {
    std::vector<double> stored(size_t(spec_.head_dim_v), 0.);
    int64_t row = 0;
    for (size_t r = 0; r < parts.size(); ++r)
      for (int t = parts[r].begin; t < parts[r].end; ++t, ++row)
        for (int head = 0; head < spec_.num_v_heads; ++head) {
          load_as_doubles(out.at(row, head), spec_.dtype, 0, 1, stored);
          const size_t at = size_t(first_token_[r] + t) * row_values() + size_t(head) * stored.size();
          std::copy(stored.begin(), stored.end(), result_.out.begin() + long(at));
          out.poison_row(row, head, options_.poison);
        }
    if (std::string written = foreign_write("out", out, options_.poison, tokens); !written.empty())
      result_.violations.push_back(std::move(written));
  }

  // The rows that the step was to write go to the result; every other byte must be what it was.
  void take_states(const StateParts& parts, std::vector<char>& before) {
    for (size_t r = 0; r < parts.size(); ++r) {
      if (parts[r].begin == parts[r].end || in_.requests[r].is_padding) continue;
      const size_t row_bytes = head_bytes() * size_t(spec_.num_v_heads), slot_bytes = row_bytes * size_t(spec_.state_rows());
      std::memset(result_.state.bytes.data() + r * slot_bytes, 0, slot_bytes);
      for (int row = 0; row <= parts[r].drafts; ++row)
        for_heads(state_, slots_.written[r], result_.state, r, row, [&](char* mine, const char* slot) {
          std::memcpy(mine, slot, head_bytes());
          std::memcpy(before.data() + (slot - state_.bytes.data()), slot, head_bytes());
        });
    }
    if (state_.bytes == before) return;
    const int64_t byte = std::mismatch(before.begin(), before.end(), state_.bytes.begin()).first - before.begin();
    const int64_t element = byte / size_of(spec_.state_dtype), slot = state_.view.stride(0),
                  row = state_.view.stride(1) * spec_.num_v_heads;
    result_.violations.push_back(
        fmt::format("state: row {} of slot {} was written, of which no request writes that row", element % slot / row, element / slot));
  }

  void take_conv_states(const StateParts& parts, std::vector<char>& before) {
    for (size_t r = 0; r < parts.size(); ++r) {
      if (parts[r].begin == parts[r].end || in_.requests[r].is_padding) continue;
      std::memset(conv_row(result_.conv_state, r, 0), 0, conv_row_bytes() * size_t(spec_.conv_state_rows()));
      for (int row = 0; row < spec_.conv_width - 1 + parts[r].drafts * rows_of_draft(); ++row) {
        const char* const written = conv_state_.at(slots_.written[r], row);
        std::memcpy(conv_row(result_.conv_state, r, row), written, conv_row_bytes());
        std::memcpy(before.data() + (written - conv_state_.bytes.data()), written, conv_row_bytes());
      }
    }
    if (conv_state_.bytes != before) result_.violations.emplace_back("conv_state: a row was written that no request writes");
  }

  RecurrentPlan& plan_;
  const RecurrentCaseInputs& in_;
  const RecurrentRunOptions& options_;
  const RecurrentSpec& spec_;
  int64_t num_slots_;
  SpreadTensor state_, conv_state_;  // the second without slots where there is no convolution in front
  StateSlotLists slots_;
  std::vector<int64_t> first_token_;
  RecurrentRunResult result_;
};

}  // namespace

RecurrentRunOptions default_options(const RecurrentCase& c) {
  return {.gaps = c.gaps,
          .padding_tokens = c.padding_tokens,
          .slot_seed = c.seed,
          .chunk = c.chunk,
          .other_sources = c.other_sources,
          .threads = {},
          .steps = {}};
}

bool same_bits(const RecurrentRunResult& a, const RecurrentRunResult& b) {
  return bit_identical(a.out, b.out) && a.state.bytes == b.state.bytes && a.conv_state.bytes == b.conv_state.bytes;
}

RecurrentRunResult run_case(const BackendOf<RecurrentFamily>& backend, const DeviceInfo& device, const RecurrentCaseInputs& in,
                            const RecurrentRunOptions& options) {
  PlanOptions plan_options;
  plan_options.limits = limits_of(in.requests);
  plan_options.threads = options.threads;
  plan_options.on_device = options.on_device;
  const auto plan = backend.plan(in.spec, device, plan_options);
  return run_case(*plan, in, options);
}

RecurrentRunResult run_case(RecurrentPlan& plan, const RecurrentCaseInputs& in, const RecurrentRunOptions& options) {
  return RecurrentRunner(plan, in, options).run();
}

}  // namespace imbrex
