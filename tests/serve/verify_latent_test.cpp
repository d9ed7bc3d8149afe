// The bound that replays have for latent attention: what a plan rounds, in either way of computing it, is within it at any length, and
// mistakes of a plan are not. A plan is played by loops in double precision that round where plans do.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/float_types.h"
#include "expect_error.h"
#include "serve/step_plan.h"
#include "serve/verify.h"

namespace imbrex::serve {
namespace {

constexpr uint64_t kSeed = 11;
constexpr int kLayer = 2, kLong = 32768, kLonger = 65536;
constexpr MlaSpec kLatent{.num_heads = 4, .kv_lora_rank = 64, .qk_nope_dim = 32, .qk_rope_dim = 0, .v_dim = 64, .block_size = 32};

double rounded(double x) { return bf16_to_float(float_to_bf16(float(x))); }
// With fewer bits than bf16 has.
double without_bits(double x, int bits) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(mantissa, 8 - bits)), exponent - 8 + bits);
}

enum class Way : uint8_t { latent, expanded };

// What a plan does, and may do wrong.
struct Roundings {
  Way way = Way::latent;
  std::function<double(double)> of_query = rounded, of_weight = rounded, of_sum = rounded;
  int wrong_page = -1;  // a page that is another request's
};

// A request of one prompt whose last token is checked.
class LongRequest {
 public:
  explicit LongRequest(int keys, const MlaSpec& spec = kLatent)
      : spec_(spec),
        synthetic_(kSeed),
        parameters_(spec, kSeed, kLayer),
        trace_{.input_length = keys, .output_length = 1, .prefix_ids = {}} {
    for (int j = 0; j < keys; ++j) keys_.push_back(token_key(token_id(kSeed, trace_, 0, 0, j), j));
  }

  // The largest share of what is allowed; Error replay.verify where that is above 1.
  double verify(const Roundings& roundings) const {
    Verifier verifier(synthetic_, kSeed, 0, DType::bf16, {});
    std::vector<VerifySample> samples;
    for (int head = 0; head < spec_.num_heads; ++head)
      samples.push_back({.request = 0,
                         .trace = &trace_,
                         .position = trace_.input_length - 1,
                         .layer = kLayer,
                         .name = "decoder.2",
                         .target = MlaTarget{.spec = &spec_, .parameters = &parameters_, .head = head},
                         .state = {},
                         .actual = output(head, roundings)});
    verifier.run(samples);
    return verifier.summary().max_ratio;
  }

 private:
  double weight(int head, int row, int d) const {
    const int rows = spec_.qk_nope_dim + spec_.v_dim;
    return bf16_to_float(parameters_.kv_b[size_t((head * rows + row) * spec_.kv_lora_rank + d)]);
  }

  std::vector<uint16_t> output(int head, const Roundings& r) const {
    const int rank = spec_.kv_lora_rank, nope = spec_.qk_nope_dim, latent = spec_.latent_dim(), v_dim = spec_.v_dim;
    const uint16_t* const pool = synthetic_.pool().data();
    const uint16_t* const q = pool + synthetic_.offset(Side::q, kLayer, head, keys_.back());
    const bool in_latent_space = r.way == Way::latent;
    const int dim = in_latent_space ? rank : v_dim;
    std::vector<double> query(size_t(latent), 0), sum(size_t(dim), 0), value(static_cast<size_t>(dim));
    for (int d = 0; d < rank; ++d) {
      for (int n = 0; n < nope; ++n) query[size_t(d)] += double(bf16_to_float(q[n])) * weight(head, n, d);
      query[size_t(d)] = r.of_query(query[size_t(d)]);
    }
    for (int d = rank; d < latent; ++d) query[size_t(d)] = bf16_to_float(q[nope + d - rank]);

    double total = 0;
    for (size_t j = 0; j < keys_.size(); ++j) {
      const bool wrong = int(j) / spec_.block_size == r.wrong_page;
      const uint16_t* const c = pool + synthetic_.offset(Side::k, kLayer, 0, keys_[j] + uint64_t(wrong));
      double logit = 0;
      if (in_latent_space) {
        for (int d = 0; d < latent; ++d) logit += query[size_t(d)] * double(bf16_to_float(c[d]));
        for (int d = 0; d < rank; ++d) value[size_t(d)] = bf16_to_float(c[d]);
      } else {
        for (int n = 0; n < nope + v_dim; ++n) {
          double product = 0;
          for (int d = 0; d < rank; ++d) product += weight(head, n, d) * double(bf16_to_float(c[d]));
          product = rounded(product);
          if (n < nope) {
            logit += double(bf16_to_float(q[n])) * product;
          } else {
            value[size_t(n - nope)] = product;
          }
        }
        for (int d = 0; d < spec_.qk_rope_dim; ++d) logit += double(bf16_to_float(q[nope + d])) * double(bf16_to_float(c[rank + d]));
      }
      const double p = std::exp(logit * double(spec_.logit_scale()));
      total += p;
      for (int d = 0; d < dim; ++d) sum[size_t(d)] += r.of_weight(p) * value[size_t(d)];
    }
    std::vector<uint16_t> out;
    for (int n = 0; n < v_dim; ++n) {
      double x = 0;
      for (int d = 0; in_latent_space && d < rank; ++d) x += weight(head, nope + n, d) * r.of_sum(sum[size_t(d)] / total);
      out.push_back(float_to_bf16(float(in_latent_space ? x : sum[size_t(n)] / total)));
    }
    return out;
  }

  MlaSpec spec_;
  Synthetic synthetic_;
  MlaParameters parameters_;
  TraceRequest trace_;
  std::vector<uint64_t> keys_;
};

// Errors of the query and of the sum of latents do not become less with the number of keys, as those of weights do. The bound is no wider
// than they are: some are a good part of it.
TEST(VerifyLatent, RoundingsAreWithinTheBoundAtAnyLength) {
  MlaSpec with_rope = kLatent;
  with_rope.qk_rope_dim = 16;
  for (const int keys : {1, 2, 40, 1000}) {
    SCOPED_TRACE(keys);
    for (const MlaSpec& spec : {kLatent, with_rope}) {
      const LongRequest request(keys, spec);
      for (const Way way : {Way::latent, Way::expanded}) EXPECT_LT(request.verify({.way = way}), 0.7);
    }
  }
  const double of_long = LongRequest(kLonger).verify({});
  EXPECT_LT(of_long, 0.7);
  EXPECT_GT(of_long, 0.3);
}

TEST(VerifyLatent, MistakesAreNoticed) {
  const LongRequest request(kLong), shorter(1000);
  const auto noticed = [](const LongRequest& of, const Roundings& roundings) {
    return test::error_code([&] { of.verify(roundings); }) == "replay.verify";
  };
  const auto coarse = [](double x) { return without_bits(x, 3); };
  EXPECT_TRUE(noticed(request, {.wrong_page = 17}));  // of 1024
  EXPECT_TRUE(noticed(request, {.of_query = coarse}));
  EXPECT_TRUE(noticed(request, {.of_sum = coarse}));
  EXPECT_TRUE(noticed(shorter, {.of_weight = coarse}));
}

}  // namespace
}  // namespace imbrex::serve
