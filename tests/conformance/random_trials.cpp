// See random_trials.h. Cases are held to the reference, among poison and in memory of every kind, and to a law that their seed chooses.
#include "random_trials.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "attention/kv_codec.h"
#include "core/env.h"
#include "imbrex/merge.h"

namespace imbrex::test {

const Campaign& campaign() {
  static const Campaign the_campaign = [] {
    constexpr int kFamilies = 4;
    const auto seed = env::get("IMBREX_RANDOM_SEED"), seconds = env::get("IMBREX_RANDOM_SECONDS");
    return Campaign{.first = seed ? std::stoull(*seed) : 1,
                    .seconds = seconds ? std::stod(*seconds) / (kFamilies * kRandomParts) : 0,
                    .alone = seed && !seconds};
  }();
  return the_campaign;
}

// Calls failure_of(seed), which says what is wrong or nothing, with the seeds of one of the parts.
void for_each_seed(int part, int usual_count, const char* family, const std::function<std::string(uint64_t)>& failure_of) {
  using Clock = std::chrono::steady_clock;
  const Campaign& c = campaign();
  if (c.alone && part > 0) GTEST_SKIP() << "one seed, in the first part";
  const auto begin = Clock::now();
  const auto more = [&](int done) {
    if (c.alone) return done == 0;
    return c.seconds > 0 ? std::chrono::duration<double>(Clock::now() - begin).count() < c.seconds : done < usual_count / kRandomParts;
  };
  int done = 0, failed = 0;
  for (; more(done); ++done) {
    const uint64_t seed = c.first + uint64_t(part) + uint64_t(done) * kRandomParts;
    if (c.alone || c.seconds > 0)
      std::fprintf(stderr, "\r%s seed %llu ", family, static_cast<unsigned long long>(seed));  // in case that it crashes
    const std::string failure = failure_of(seed);
    if (failure.empty()) continue;
    ADD_FAILURE() << "IMBREX_RANDOM_SEED=" << seed << " " << family << ": " << failure;
    if (constexpr int kMostFailures = 5; ++failed == kMostFailures) break;
  }
  if (c.seconds > 0) std::fprintf(stderr, "\r%s: %d cases, %d failed\n", family, done, failed);
}

namespace {

std::string run_difference(const RunResult& second, const RunResult& first, const std::string& what) {
  return difference(second, bit_identical(second.out, first.out) && bit_identical(second.lse, first.lse), what);
}

// The tensors of a case; of every fourth one new keys and values are in the cache's type, so that they are copied as they are.
CaseInputs random_inputs(const Case& c) {
  CaseInputs in = make_inputs(c);
  if (c.seed % 4 != 0 || codec_of(c.spec).scales_inside || !in.k_rope_scale.empty()) return in;
  in.k = as_cached(in.k, c.spec.kv_dtype, in.k_scale);
  in.v = as_cached(in.v, c.spec.kv_dtype, in.v_scale);
  return in;
}

// One case on one target. `dice` chooses the memory that it is run in a second time, and its law.
class RandomTrial {
 public:
  RandomTrial(const Case& c, const CaseInputs& in, const Expected& expected, const Target& target)
      : case_(c), in_(in), expected_(expected), target_(target), dice_(c.seed ^ 0x5eed) {}

  std::string failure() {
    if (!options_for(case_, target_, options_)) return {};
    const AttentionSpec spec = run_spec(in_, options_);
    if (const auto reasons = target_.backend->unsupported(spec, target_.device); !reasons.empty())
      return refusal_failure(*target_.backend, spec, target_.device, reasons);
    result_ = run(in_, options_);
    if (const Judgement j = judge(expected_, result_); !j.pass()) return j.failure;
    options_.check_cache = false;
    if (std::string failure = in_other_memory(); !failure.empty()) return failure;
    switch (dice_.below(5)) {
      case 0: return in_chunks();
      case 1: return in_pieces();
      case 2: return with_blocks_in_common();
      case 3: return balanced();
      default: return among_others();
    }
  }

 private:
  RunResult run(const CaseInputs& in, const RunOptions& options) const { return run_case(*target_.backend, target_.device, in, options); }
  bool plain() const { return case_.values == ValuePattern::plain; }
  bool has_expressions() const { return !case_.spec.mask_mod.empty() || !case_.spec.score_mod.empty(); }
  bool is_decoder() const { return case_.spec.kind == AttentionKind::decoder; }

  std::string in_other_memory() {
    RunOptions other = options_;
    other.poison = dice_.pick({Poison::zero, Poison::ones});
    other.page_seed += 1000;
    other.padding_tokens = dice_.below(4);
    ThreadPool pool(dice_.from_to(1, 5));
    if (!target_.on_gpu()) {  // where other strides have other kernels
      other.csr = dice_.one_in(2), other.packed_mask = dice_.one_in(2);
      other.threads = pool.parallel_for();
      dice_.shuffle(other.order);
      const int block_size = block_size_in(target_.kv_format, dice_.pick({1, 3, 16, 64, 128}));
      if (options_.block_size > 0 && fits(case_.spec, target_.kv_format, block_size)) other.block_size = block_size;
    }
    return run_difference(run(in_, other), result_,
                          fmt::format("{} in blocks of {} {} {} and {} mask", to_string(other.poison), other.block_size,
                                      other.csr ? "csr" : "dense", other.order, other.packed_mask ? "a packed" : "an unpacked"));
  }

  // Steps of some queries of each request. A GPU has other kernels for other numbers of them.
  std::string in_chunks() {
    const AttentionSpec& s = case_.spec;
    const auto counts = [](const Expression& e) {
      return !e.empty() && (e.uses(ExpressionVariable::q_len) || e.uses(ExpressionVariable::kv_len));
    };
    const bool fixed = is_decoder() && s.mask.causal && !s.mask.tree && !s.mask.positions && !counts(s.mask_mod) && !counts(s.score_mod);
    if (!fixed || options_.block_size == 0) return among_others();
    RunOptions other = options_;
    other.chunk = dice_.pick({1, 2, 7, 16, 63, 64, 129});
    const RunResult chunked = run(in_, other);
    if (!target_.on_gpu()) return run_difference(chunked, result_, fmt::format("steps of {}", other.chunk));
    const Judgement j = judge(expected_, chunked);
    return j.pass() ? "" : fmt::format("steps of {}: {}", other.chunk, j.failure);
  }

  // Keys that masks deal out to parts, whose results are merged; a sink is one more part.
  std::string in_pieces() {
    CaseInputs part = in_;
    part.spec.mask.custom = true;
    if (case_.spec.mask.tree || !case_.spec.mask_mod.empty()) return {};
    if (!target_.backend->unsupported(run_spec(part, options_), target_.device).empty()) return {};
    int64_t pairs = 0;
    for (const CaseRequest& r : case_.requests) pairs += int64_t(r.q_len) * r.seq_len;
    HostTensor all = in_.custom_mask;
    if (all.empty()) all = HostTensor::make(DType::u8, {pairs}), std::ranges::fill(all.bytes, char(1));
    const int parts = dice_.from_to(2, 4), run_length = dice_.pick({1, 5, 100, 1000});
    part.spec.score.sinks = false, part.sinks = {};
    std::vector<RunResult> results;
    for (int p = 0; p < parts; ++p) {
      part.custom_mask = all;
      for (size_t i = 0; i < size_t(pairs); ++i)
        if (splitmix(case_.seed + i / size_t(run_length)) % uint64_t(parts) != uint64_t(p)) part.custom_mask.bytes[i] = 0;
      results.push_back(run(part, options_));
    }
    const int64_t heads = case_.spec.num_q_heads;
    if (case_.spec.score.sinks) {
      results.push_back(results.front());
      std::ranges::fill(results.back().out, 0.f);
      for (size_t i = 0; i < expected_.lse.size(); ++i)  // a query that sees no key has none
        results.back().lse[i] = std::isinf(expected_.lse[i]) ? expected_.lse[i] : float(in_.sinks.get(int64_t(i) % heads));
    }
    const int64_t tokens = case_.num_tokens(), dim = case_.spec.head_dim_v;
    if (tokens == 0) return {};
    RunResult whole = results.front();
    const auto out = [&](RunResult& r) { return TensorView::contiguous(r.out.data(), DType::f32, {tokens, heads, dim}); };
    const auto lse = [&](RunResult& r) { return TensorView::contiguous(r.lse.data(), DType::f32, {tokens, heads}); };
    std::vector<PartialResult> partial;
    for (RunResult& r : results) partial.push_back({out(r), lse(r)});
    merge_partial_results(partial, out(whole), lse(whole));
    const Judgement j = judge(expected_, whole);
    return j.pass() ? "" : fmt::format("{} pieces: {}", parts, j.failure);
  }

  std::string with_blocks_in_common() {
    if (!plain() || options_.block_size == 0 || !is_decoder()) return among_others();
    Case c = case_;
    for (CaseRequest& r : c.requests) r.id = 0;
    const CaseInputs in = random_inputs(c);
    RunOptions together = options_;
    together.share_blocks = true;
    if (std::string failure = run_difference(run(in, together), run(in, options_), "blocks in common"); !failure.empty()) return failure;
    together.balanced = true;
    const Judgement j = judge(expect(in), run(in, together));
    return j.pass() ? "" : "balanced, with blocks in common: " + j.failure;
  }

  std::string balanced() {
    if (target_.on_gpu()) return among_others();
    ThreadPool pool(dice_.from_to(1, 7));
    RunOptions other = options_;
    other.balanced = true, other.threads = pool.parallel_for();
    const Judgement j = judge(expected_, run(in_, other));
    return j.pass() ? "" : "balanced: " + j.failure;
  }

  // The requests in another order, or some of them alone.
  std::string among_others() {
    if (has_expressions()) return {};  // of numbers of requests, or with tensors whose contents have them
    std::vector<size_t> order(case_.requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    dice_.shuffle(order);
    if (order.size() > 1 && dice_.one_in(2)) order.resize(size_t(dice_.from_to(1, int(order.size()) - 1)));
    Case other = case_;
    other.requests.clear();
    RunResult picked;
    const size_t heads = size_t(case_.spec.num_q_heads), width = heads * size_t(case_.spec.head_dim_v);
    for (const size_t r : order) {
      size_t token = 0;
      for (size_t i = 0; i < r; ++i) token += size_t(case_.requests[i].q_len);
      const size_t end = token + size_t(case_.requests[r].q_len);
      picked.out.insert(picked.out.end(), result_.out.begin() + long(token * width), result_.out.begin() + long(end * width));
      picked.lse.insert(picked.lse.end(), result_.lse.begin() + long(token * heads), result_.lse.begin() + long(end * heads));
      other.requests.push_back(case_.requests[r]);
    }
    return run_difference(run(random_inputs(other), options_), picked, fmt::format("{} requests in another order", order.size()));
  }

  const Case& case_;
  const CaseInputs& in_;
  const Expected& expected_;
  const Target& target_;
  Dice dice_;
  RunOptions options_;
  RunResult result_;
};

std::string attention_failure(const Case& c, const Target& target) {
  return caught([&] {
    const CaseInputs in = random_inputs(c);
    return RandomTrial(c, in, expect(in), target).failure();
  });
}

// The simplest case that fails on the target, as far as single steps lead to it.
Case simplest(Case c, const Target& target) {
  for (int tries = 0; tries < 400;) {
    const std::vector<Case> simpler = simpler_cases(c);
    const auto fails = std::ranges::find_if(simpler, [&](const Case& other) { return ++tries, !attention_failure(other, target).empty(); });
    if (fails == simpler.end()) break;
    c = *fails;
  }
  return c;
}

}  // namespace

std::string random_attention_failure(uint64_t seed, std::span<const Target> targets, size_t each) {
  const Case c = random_case(seed);
  const CaseInputs in = random_inputs(c);
  Expected expected;
  if (std::string failure = caught([&] { return expected = expect(in), std::string(); }); !failure.empty())
    return describe(c) + " in the reference: " + failure;
  for (size_t i = 0; i < targets.size(); ++i) {
    const Target& target = targets[i];
    if (!campaign().runs(seed, i, each)) continue;
    const std::string failure = caught([&] { return RandomTrial(c, in, expected, target).failure(); });
    if (failure.empty()) continue;
    const Case least = simplest(c, target);
    return fmt::format("{}\n  on {}: {}\n  {}\n  simplest: {}\n  {}", c.name, target.name(), failure, describe(c), describe(least),
                       attention_failure(least, target));
  }
  return {};
}

}  // namespace imbrex::test
