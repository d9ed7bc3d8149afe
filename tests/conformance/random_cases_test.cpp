// Cases that nobody thought of: drawn from seeds, run on every backend and held to the reference, among poison, and to laws. What a backend
// refuses, it has to refuse with a reason. random_trials.h says how to run more of them.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "attention/reference.h"
#include "expect_error.h"
#include "mla_targets.h"
#include "random_trials.h"
#include "recurrent_targets.h"
#include "short_conv_targets.h"

namespace imbrex::test {
namespace {

// ---- latent attention ----

std::string mla_failure(const MlaCase& c, const MlaCaseInputs& in, const Expected& expected, const MlaTarget& target) {
  if (const auto reasons = target.backend->unsupported(c.spec, target.device); !reasons.empty())
    return refusal_failure(*target.backend, c.spec, target.device, reasons);
  Dice dice(c.attention.seed ^ 0x5eed);
  const bool on_gpu = target.device.device.type == DeviceType::cuda;
  RunOptions options = default_options(c.attention);
  const RunResult result = run_case(*target.backend, target.device, in, options);
  if (const Judgement j = judge(expected, result); !j.pass()) return j.failure;
  options.check_cache = false;
  RunOptions other = options;
  other.poison = dice.pick({Poison::zero, Poison::ones});
  other.page_seed += 1000;
  ThreadPool pool(dice.from_to(1, 4));
  if (!on_gpu) other.threads = pool.parallel_for();
  const RunResult second = run_case(*target.backend, target.device, in, other);
  const auto same = [](const RunResult& a, const RunResult& b) { return bit_identical(a.out, b.out) && bit_identical(a.lse, b.lse); };
  if (std::string failure = difference(second, same(second, result), to_string(other.poison)); !failure.empty()) return failure;
  if (is_composite(*target.backend) && !c.spec.absorbed) {
    const bool expand = dice.one_in(2);
    const int chunk = dice.from_to(17, 140);
    const MlaPlanMaker maker = on_gpu && dice.one_in(2) ? in_slices(expand, dice.from_to(1, 20), dice.from_to(1, 4))
                               : dice.one_in(3)         ? both_ways(chunk)
                                                        : forced_way(expand, chunk);
    if (const Judgement j = judge(expected, run_case(*target.backend, target.device, in, options, maker)); !j.pass())
      return fmt::format("{} by {}: {}", expand ? "expanded" : "in latent space", chunk, j.failure);
  }
  // One request alone.
  if (c.attention.requests.empty()) return {};
  const size_t r = size_t(dice.below(int(c.attention.requests.size())));
  MlaCase alone = c;
  alone.attention.requests = {c.attention.requests[r]};
  size_t token = 0;
  for (size_t i = 0; i < r; ++i) token += size_t(c.attention.requests[i].q_len);
  const size_t heads = size_t(c.spec.num_heads), width = heads * size_t(c.spec.out_dim()),
               end = token + size_t(alone.attention.num_tokens());
  RunResult rows;
  rows.out.assign(result.out.begin() + long(token * width), result.out.begin() + long(end * width));
  rows.lse.assign(result.lse.begin() + long(token * heads), result.lse.begin() + long(end * heads));
  const RunResult one = run_case(*target.backend, target.device, make_inputs(alone), options);
  return difference(one, same(one, rows), fmt::format("request {} alone", r));
}

std::string mla_failure(uint64_t seed) {
  const MlaCase c = random_mla_case(seed);
  const MlaCaseInputs in = make_inputs(c);
  Expected expected;
  if (std::string failure = caught([&] { return expected = expect(in), std::string(); }); !failure.empty())
    return describe(c) + " in the reference: " + failure;
  constexpr size_t kEach = 3;
  for (size_t i = 0; i < mla_targets().size(); ++i) {
    const MlaTarget& target = mla_targets()[i];
    if (!campaign().runs(seed, i, kEach)) continue;
    const std::string failure = caught([&] { return mla_failure(c, in, expected, target); });
    if (!failure.empty()) return fmt::format("{} on {}: {}\n  {}", c.attention.name, target.name(), failure, describe(c));
  }
  return {};
}

// ---- layers with a state ----

// A case in other slots, among other poison, with threads and other gaps, and one of its requests alone. `width` is of a token's outputs,
// `slot` of a request's states, in bytes.
template <class Case, class Inputs, class Options, class Result, class Target>
std::string state_law_failure(const Case& c, const Inputs& in, const Options& options, const Result& result, const Target& target,
                              size_t width, size_t slot) {
  Dice dice(c.seed ^ 0x5eed);
  Options other = options;
  other.poison = dice.pick({Poison::zero, Poison::ones});
  other.slot_seed += 1000;
  other.other_sources = !options.other_sources;
  ThreadPool pool(dice.from_to(1, 5));
  if (!target.on_gpu()) other.threads = pool.parallel_for(), other.gaps = dice.pick({Gaps::none, Gaps::aligned, Gaps::odd});
  const Result second = run_case(*target.backend, target.device, in, other);
  if (std::string failure = difference(second, same_bits(second, result), to_string(other.poison)); !failure.empty()) return failure;
  if (c.requests.empty()) return {};
  const size_t r = size_t(dice.below(int(c.requests.size())));
  Case alone = c;
  alone.requests = {c.requests[r]};
  size_t token = 0;
  for (size_t i = 0; i < r; ++i) token += size_t(c.requests[i].q_len);
  const Result one = run_case(*target.backend, target.device, make_inputs(alone), options);
  // Bytes: outputs beyond what an f16 holds may be NaN.
  const bool same = std::memcmp(one.out.data(), result.out.data() + token * width, one.out.size() * sizeof(float)) == 0 &&
                    std::equal(one.state.bytes.begin(), one.state.bytes.end(), result.state.bytes.begin() + long(r * slot));
  return same ? "" : fmt::format("request {} alone has other bits", r);
}

std::string state_failure(const RecurrentCase& c, const RecurrentCaseInputs& in, const RecurrentTarget& target) {
  if (const auto reasons = target.backend->unsupported(c.spec, target.device); !reasons.empty())
    return refusal_failure(*target.backend, c.spec, target.device, reasons);
  const RecurrentRunOptions options = default_options(c);
  const RecurrentRunResult result = run_case(*target.backend, target.device, in, options);
  const bool products = target.backend->plan(c.spec, target.device, {.limits = limits_of(c.requests)})->rounded_products();
  if (const RecurrentJudgement j = judge(expect(in, c.chunk, products), in, result); !j.pass()) return j.failure;
  const size_t slot = size_t(c.spec.state_rows()) * size_t(in.row_numbers()) * size_t(size_of(c.spec.state_dtype));
  return state_law_failure(c, in, options, result, target, size_t(c.spec.num_v_heads) * size_t(c.spec.head_dim_v), slot);
}

std::string state_failure(const ShortConvCase& c, const ShortConvCaseInputs& in, const ShortConvTarget& target) {
  if (const auto reasons = target.backend->unsupported(c.spec, target.device); !reasons.empty())
    return refusal_failure(*target.backend, c.spec, target.device, reasons);
  const ShortConvRunOptions options = default_options(c);
  const ShortConvRunResult result = run_case(*target.backend, target.device, in, options);
  if (const ShortConvJudgement j = judge(expect(in), in, result); !j.pass()) return j.failure;
  return state_law_failure(c, in, options, result, target, size_t(c.spec.dim), size_t(c.spec.state_bytes()));
}

template <class Case, class Target>
std::string state_failure(const Case& c, const std::vector<Target>& targets) {
  const auto in = make_inputs(c);
  constexpr size_t kEach = 2;
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!campaign().runs(c.seed, i, kEach)) continue;
    const std::string failure = caught([&] { return state_failure(c, in, targets[i]); });
    if (!failure.empty()) return fmt::format("{} on {}: {}\n  {}", c.name, targets[i].name(), failure, describe(c));
  }
  return {};
}

class RandomCases : public testing::TestWithParam<int> {};

TEST_P(RandomCases, OfAttentionAgreeWithTheReferenceAndKeepItsLaws) {
  constexpr size_t kEach = 6;
  for_each_seed(GetParam(), 320, "attention", [](uint64_t seed) { return random_attention_failure(seed, targets(), kEach); });
}
TEST_P(RandomCases, OfLatentAttentionAgreeWithTheReference) {
  for_each_seed(GetParam(), 64, "mla", [](uint64_t seed) { return mla_failure(seed); });
}
TEST_P(RandomCases, OfRecurrentLayersAgreeWithTheReference) {
  for_each_seed(GetParam(), 64, "recurrent", [](uint64_t seed) { return state_failure(random_recurrent_case(seed), recurrent_targets()); });
}
TEST_P(RandomCases, OfTheShortConvolutionAgreeWithTheReference) {
  for_each_seed(GetParam(), 64, "short_conv",
                [](uint64_t seed) { return state_failure(random_short_conv_case(seed), short_conv_targets()); });
}

INSTANTIATE_TEST_SUITE_P(Part, RandomCases, testing::Range(0, kRandomParts), testing::PrintToStringParamName());

// Whatever the spec and the device, machines that are not here included: an invalid one is an error of its own for every backend, and of a
// valid one each backend says why it does not run it, or which kernels it has.
TEST(RandomSpecs, AreRefusedByNameOrHaveKernels) {
  std::vector<DeviceInfo> devices;
  for (const char* name : {"cpu", "avx2,4 threads", "avx512,4 threads", "amx,4 threads", "a100", "l40s", "h200", "b200", "rtx5090"})
    devices.push_back(describe_device(name));
  const std::string nothing = "nothing thrown";
  int invalid = 0, refused = 0, taken = 0;
  for (uint64_t seed = campaign().first; seed < campaign().first + 1500; ++seed) {
    Dice dice(seed);
    const AttentionSpec spec = random_spec(dice);
    const std::string wrong = error_code([&] { spec.validate(); });
    EXPECT_TRUE(wrong == nothing || wrong.starts_with("spec.")) << wrong;
    const DeviceInfo& device = dice.pick(devices);
    for (const BackendOf<AttentionFamily>* backend : backends()) {
      const std::string what = fmt::format("IMBREX_RANDOM_SEED={} {} on {}: {}", seed, backend->name(), device.str(), spec.str());
      const std::string code = error_code([&] { backend->plan(spec, device, {.limits = {1, 1, 1}, .threads = {}}); });
      const auto reasons = backend->unsupported(spec, device);
      if (wrong != nothing) {
        EXPECT_EQ(code, wrong) << what;
        ++invalid;
      } else if (!reasons.empty()) {
        EXPECT_EQ(refusal_failure(*backend, spec, device, reasons), "") << what;
        ++refused;
      } else {
        EXPECT_EQ(code, device.present ? nothing : "backend.device_absent") << what;
        EXPECT_EQ(backend->kernel_choices(spec, device).empty(), backend == &reference_backend()) << what;
        ++taken;
      }
    }
  }
  EXPECT_GT(invalid, 100);
  EXPECT_GT(refused, 1000);
  EXPECT_GT(taken, 1000);
}

}  // namespace
}  // namespace imbrex::test
