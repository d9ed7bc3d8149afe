// What other engines once got wrong about layers that keep a state of each request: short convolutions and recurrences. See
// attention_quirks_test.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "imbrex/recurrent.h"
#include "imbrex/short_conv.h"
#include "quirks/step.h"

namespace imbrex::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// The first request begins with a prompt in a slot full of NaN, verifies kDrafts drafts, of which some are kept, and then as many again.
// The second has no tokens, and its slot 2 has to stay as it is. The third is new in the last step, its slot full of NaN too.
constexpr int kDrafts = 3;

struct StateSteps {
  std::vector<int32_t> starts, lens, slots, drafts, accepted;
  Batch batch;

  StateSteps(int tokens, int seq_len, int num_drafts, int accepted_drafts, int slot, int others)
      : starts{0, tokens, tokens, tokens + others},
        lens{seq_len, 9, others},
        slots{slot, 2, 3},
        drafts{num_drafts, 0, 0},
        accepted{accepted_drafts, 0, 0} {
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.state_slots = slots, batch.num_drafts = drafts;
    batch.accepted_drafts = accepted;
  }
  StateSteps(const StateSteps&) = delete;
  StateSteps& operator=(const StateSteps&) = delete;
};

// vLLM's convolution for CPUs begins at the oldest row of a state whatever num_accepted says (mamba_kernels.hpp), kernels of FLA leave out
// slots that are 0 or less and their outputs, and a new request's slot may hold NaN of the one before (has_initial_state).
TEST(StateQuirks, AConvolutionGoesOnBehindTheDraftsThatWereKept) {
  constexpr int64_t kDim = 40, kWidth = 4, kPrompt = 5;
  const ShortConvSpec spec{.dim = kDim, .width = kWidth, .dtype = DType::f32, .num_drafts = kDrafts, .form = ShortConvForm::plain};
  const int runs = for_each_cpu_target<ShortConvFamily>(spec, [&](const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device) {
    const auto plan = backend.plan(spec, device, {});
    for (int kept = 0; kept <= kDrafts; ++kept) {
      std::mt19937 random(3);
      const Elements weight(DType::f32, eighths(random, kDim * kWidth), {kDim, kWidth});
      std::vector<float> start(4 * size_t(spec.state_rows()) * kDim, kNaN);
      const Elements state(DType::f32, start, {4, spec.state_rows(), kDim});
      std::vector<std::vector<float>> past;  // kept tokens of the first request
      const auto step = [&](int tokens, int drafts, int accepted, int others) {
        const StateSteps now(tokens, int(past.size()) + tokens, drafts, accepted, 0, others);
        const Elements x(DType::f32, eighths(random, size_t(tokens + others) * kDim), {tokens + others, kDim});
        const Elements out(DType::f32, std::vector<float>(size_t(tokens + others) * kDim, -7.f), {tokens + others, kDim});
        plan->update(now.batch);
        plan->run({.input = x.view, .weight = weight.view, .bias = {}, .state = state.view}, {.out = out.view});
        const auto row = [&](int t) {
          std::vector<float> result;
          for (int64_t d = 0; d < kDim; ++d) result.push_back(float(x.at(size_t(t * kDim + d))));
          return result;
        };
        std::vector<std::vector<float>> other;
        for (int t = 0; t < tokens + others; ++t) {
          std::vector<std::vector<float>>& history = t < tokens ? past : other;
          history.push_back(row(t));
          for (int64_t d = 0; d < kDim; ++d) {
            double sum = 0;
            for (int64_t i = 0; i < kWidth && i < int64_t(history.size()); ++i)
              sum += weight.at(size_t(d * kWidth + kWidth - 1 - i)) * double(history[history.size() - 1 - size_t(i)][size_t(d)]);
            ASSERT_NEAR(out.at(size_t(t * kDim + d)), sum, 1e-5) << backend.name() << ", " << kept << " kept, token " << t;
          }
        }
      };
      step(kPrompt, 0, 0, 0);
      step(1 + kDrafts, kDrafts, 0, 0);
      past.resize(past.size() - size_t(kDrafts - kept));
      step(1 + kDrafts, kDrafts, kept, 7);
      for (int64_t n = 2 * spec.state_rows() * kDim; n < 3 * spec.state_rows() * kDim; ++n)
        ASSERT_TRUE(std::isnan(state.at(size_t(n)))) << backend.name() << " writes the state of a request without tokens";
    }
  });
  EXPECT_GE(runs, 2);
}

constexpr int kKeyDim = 16;  // of keys and values, so that a transposed state has the same shape

// A recurrence of one head by its definition.
struct NaiveState {
  bool delta;
  double s[kKeyDim][kKeyDim] = {};

  std::vector<double> token(const double* q, const double* k, const double* v, double g, double beta) {
    std::vector<double> out;
    for (auto& row : s)
      for (double& x : row) x = g < -700 ? 0 : x * std::exp(g);
    for (int j = 0; j < kKeyDim; ++j) {
      double u = v[j];
      for (int i = 0; i < kKeyDim && delta; ++i) u -= s[i][j] * k[i];
      // What S has for the key is taken off before any of its elements in this column is changed.
      for (int i = 0; i < kKeyDim; ++i) s[i][j] += k[i] * u * (delta ? beta : 1);
      double sum = 0;
      for (int i = 0; i < kKeyDim; ++i) sum += q[i] * s[i][j];
      out.push_back(sum / std::sqrt(double(kKeyDim)));
    }
    return out;
  }
};

struct RecurrentQuirk {
  RecurrentSpec spec{.num_k_heads = 1,
                     .num_v_heads = 1,
                     .head_dim_k = kKeyDim,
                     .head_dim_v = kKeyDim,
                     .gate = RecurrentGate::log,
                     .delta = true,
                     .num_drafts = kDrafts};
  int prompt = 70;
  std::vector<float> gates{-0.125f};  // of the tokens, in turn
};

// Runs a prompt, drafts of which some are kept, and drafts again, on every CPU backend, and compares outputs and the state of the prompt.
void check_recurrence(RecurrentQuirk quirk) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RecurrentSpec& spec = quirk.spec;
    spec.dtype = dtype;
    const double bound = dtype == DType::f32 ? 2e-5 : 2e-2;
    const int runs = for_each_cpu_target<RecurrentFamily>(spec, [&](const BackendOf<RecurrentFamily>& backend, const DeviceInfo& device) {
      const auto plan = backend.plan(spec, device, {});
      for (int kept = 0; kept <= kDrafts; kept += kDrafts) {
        const std::string where = std::string(backend.name()) + " " + to_string(device.isa) + " " + spec.str();
        std::mt19937 random(5);
        const size_t state_size = kKeyDim * kKeyDim, slot_size = size_t(spec.state_rows()) * state_size;
        const Elements state(DType::f32, std::vector<float>(4 * slot_size, kNaN), {4, spec.state_rows(), 1, kKeyDim, kKeyDim});
        std::vector<NaiveState> past{{spec.delta}};  // of the first request, behind each of its tokens
        const auto step = [&](int tokens, int drafts, int accepted, int others) {
          const int all = tokens + others;
          const StateSteps now(tokens, int(past.size()) - 1 + tokens, drafts, accepted, 0, others);
          const auto rows = [&](float factor) { return eighths(random, size_t(all * kKeyDim), factor); };
          const Elements q(dtype, rows(1), {all, 1, kKeyDim}), k(dtype, rows(0.25f), {all, 1, kKeyDim}),
              v(dtype, rows(1), {all, 1, kKeyDim});
          std::vector<float> gate_values;
          for (int t = 0; t < all; ++t) gate_values.push_back(quirk.gates[size_t(t) % quirk.gates.size()]);
          const Elements gate(DType::f32, gate_values, {all, 1}), beta(DType::f32, std::vector<float>(size_t(all), 0.5f), {all, 1});
          const Elements out(dtype, std::vector<float>(size_t(all * kKeyDim), -7.f), {all, 1, kKeyDim});
          plan->update(now.batch);
          RecurrentInputs in;
          in.q = q.view, in.k = k.view, in.v = v.view, in.gate = gate.view, in.state = state.view;
          if (spec.delta) in.beta = beta.view;
          plan->run(in, {.out = out.view});
          std::vector<NaiveState> other{{spec.delta}};
          for (int t = 0; t < all; ++t) {
            std::vector<NaiveState>& states = t < tokens ? past : other;
            states.push_back(states.back());
            double at[3][kKeyDim];
            for (int d = 0; d < kKeyDim; ++d)
              at[0][d] = q.at(size_t(t * kKeyDim + d)), at[1][d] = k.at(size_t(t * kKeyDim + d)), at[2][d] = v.at(size_t(t * kKeyDim + d));
            const std::vector<double> wanted = states.back().token(at[0], at[1], at[2], double(gate_values[size_t(t)]), 0.5);
            for (int d = 0; d < kKeyDim; ++d)
              ASSERT_NEAR(out.at(size_t(t * kKeyDim + d)), wanted[size_t(d)], bound) << where << ", " << kept << " kept, token " << t;
          }
        };
        step(quirk.prompt, 0, 0, 0);
        for (int i = 0; i < kKeyDim; ++i)
          for (int j = 0; j < kKeyDim; ++j)
            ASSERT_NEAR(state.at(size_t(spec.layout == StateLayout::k_first ? i * kKeyDim + j : j * kKeyDim + i)), past.back().s[i][j],
                        bound)
                << where;
        step(1 + kDrafts, kDrafts, 0, 0);
        past.erase(past.end() - (kDrafts - kept), past.end());
        step(1 + kDrafts, kDrafts, kept, 7);
        for (size_t n = 2 * slot_size; n < 3 * slot_size; ++n)
          ASSERT_TRUE(std::isnan(state.at(n))) << where << " writes the state of a request without tokens";
      }
    });
    EXPECT_GE(runs, 2);
  }
}

// A state that is transposed has the same shape where keys and values have as many dimensions, and nothing says that it is wrong: FLA has
// keys first, vLLM and FlashInfer values (special.md 0.3).
TEST(StateQuirks, AStateLiesAsItsLayoutSays) {
  for (const StateLayout layout : {StateLayout::k_first, StateLayout::v_first}) {
    RecurrentQuirk quirk;
    quirk.spec.layout = layout;
    check_recurrence(quirk);
  }
}

// SGLang's reference of lightning attention has a formula of states that is right for one token alone (special.md 25): verify steps of
// several tokens and prompts have to give what their tokens give one by one, and drafts that are taken back leave nothing.
TEST(StateQuirks, StepsOfSeveralTokensAreTheirTokens) {
  for (const int prompt : {1, 2, 63, 64, 65, 130}) {
    RecurrentQuirk quirk;
    quirk.spec.delta = false;
    quirk.prompt = prompt;
    check_recurrence(quirk);
  }
}

// Kernels in chunks that multiply keys by exp of a sum of decays have 0 times infinity where a token forgets all (special.md 0.4).
TEST(StateQuirks, ForgettingAllIsZeroAndNoNaN) {
  for (const bool delta : {false, true}) {
    RecurrentQuirk quirk;
    quirk.spec.delta = delta;
    quirk.gates = {-0.125f, 0.f, -80.f, -0.25f, -1e4f, 0.f, -200.f};
    check_recurrence(quirk);
  }
}

}  // namespace
}  // namespace imbrex::test
