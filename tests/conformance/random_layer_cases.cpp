// Random cases of latent attention and of layers with a state: see random_cases.h.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "conformance/attention/case_table.h"
#include "imbrex/error.h"
#include "random_cases.h"

namespace imbrex::test {
namespace {

// ---- latent attention ----

void draw_mla_dims(MlaSpec& s, Dice& dice) {
  s.num_heads = dice.one_in(6) ? dice.pick({20, 40, 64, 128}) : dice.from_to(1, 17);
  s.kv_lora_rank = dice.one_in(3) ? 512 : dice.one_in(3) ? dice.pick({256, 384, 320}) : 8 * dice.from_to(2, 20);
  s.qk_rope_dim = 8 * dice.from_to(0, std::min(8, s.kv_lora_rank / 8));
  const int most = std::min(24, s.kv_lora_rank / 8 - s.qk_rope_dim / 8);  // parts of a query and key are at most as long as a latent
  s.qk_nope_dim = 8 * dice.from_to(1, std::max(1, most));
  s.v_dim = 8 * dice.from_to(1, std::min(24, s.kv_lora_rank / 8));
}

MlaSpec random_mla_spec(Dice& dice) {
  MlaSpec s;
  draw_mla_dims(s, dice);
  s.dtype = dice.pick({DType::bf16, DType::bf16, DType::f16, DType::f32});
  s.kv_dtype = dice.one_in(2) ? s.dtype : dice.pick({DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2});
  s.kv_format = dice.pick({KvFormat::latent, KvFormat::latent, KvFormat::latent_rope, KvFormat::fp8_ds_mla});
  if (s.kv_format == KvFormat::fp8_ds_mla)
    s.kv_dtype = DType::fp8_e4m3, s.kv_lora_rank = 512, s.qk_rope_dim = 64, s.qk_nope_dim = std::min(s.qk_nope_dim, 128);
  s.block_size = dice.pick({1, 2, 5, 16, 16, 48, 64, 64, 128});
  const AttentionSpec like = random_spec(dice);
  s.mask = like.mask;
  s.sinks = like.score.sinks;
  s.absorbed = dice.one_in(4);
  if (dice.one_in(4)) s.scale = s.logit_scale() * dice.pick({0.2f, 0.7f, 1.5f});
  // Logits in latent space are sums of more floats than the rule for their log-sum-exp counts on: no larger ones.
  if (s.absorbed && s.dtype == DType::f32) s.scale = 1 / std::sqrt(float(s.latent_dim()));
  return s;
}

// ---- recurrent layers ----

void draw_recurrent_settings(RecurrentSpec& s, Dice& dice) {
  if (dice.one_in(6)) s.gate = dice.pick({RecurrentGate::fixed, RecurrentGate::log, RecurrentGate::softplus, RecurrentGate::sigmoid});
  if (s.gate == RecurrentGate::sigmoid && s.gate_min == 0) s.gate_min = -4;
  if (s.gate == RecurrentGate::softplus && dice.one_in(6)) s.gate_min = 0.2f, s.gate_max = 0.6f;
  if (dice.one_in(6)) s.channel_gate = !s.channel_gate;
  if (dice.one_in(6)) s.channel_rates = !s.channel_rates;
  if (dice.one_in(8)) s.skip = !s.skip;
  if (dice.one_in(8)) s.scale = 0.3f;
  if (s.delta && dice.one_in(6)) s.beta_scale = 2;
  if (s.delta && dice.one_in(6)) s.sigmoid_beta = false;
}

void draw_recurrent_surroundings(RecurrentSpec& s, Dice& dice) {
  if (dice.one_in(2)) {
    s.out_gate = dice.pick({OutputGate::none, OutputGate::silu, OutputGate::sigmoid});
    s.out_norm = dice.pick({OutputNorm::none, OutputNorm::before_gate, OutputNorm::after_gate});
    if (s.out_norm != OutputNorm::none && dice.one_in(2)) s.norm_groups = dice.pick({1, 2, s.num_v_heads});
    s.norm_eps = dice.pick({1e-6f, 1e-5f, 0.1f});
  }
  if (dice.one_in(3)) {
    s.conv = dice.pick({RecurrentConv::qkv, RecurrentConv::vkq});
    s.conv_width = dice.from_to(2, 8);
    s.conv_bias = dice.one_in(2), s.conv_silu = !dice.one_in(4);
  }
  if (dice.one_in(3)) s.num_drafts = dice.from_to(1, 9);
  s.tree_drafts = s.num_drafts > 0 && dice.one_in(2);
}

RecurrentSpec random_recurrent_spec(Dice& dice) {
  RecurrentSpec s = recurrent_layer(dice.pick({"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"}));
  const bool narrow = s.head_dim_v == 1;
  if (narrow) {
    s.num_k_heads = dice.from_to(1, 3), s.num_v_heads = s.num_k_heads * dice.from_to(1, 90), s.head_dim_k = dice.pick({4, 8, 16, 16, 40});
  } else {
    s.num_k_heads = dice.from_to(1, 4), s.num_v_heads = s.num_k_heads * dice.pick({1, 1, 2, 3, 4, 5});
    s.head_dim_k = dice.one_in(2) ? dice.pick({64, 128}) : dice.from_to(1, dice.one_in(4) ? 256 : 100);
    s.head_dim_v = dice.one_in(2) ? s.head_dim_k : dice.from_to(1, 130);
  }
  s.dtype = dice.pick({DType::bf16, DType::bf16, DType::f16, DType::f32});
  s.state_dtype = dice.pick({DType::f32, DType::f32, DType::bf16, DType::f16});
  s.layout = dice.pick({StateLayout::k_first, StateLayout::v_first});
  draw_recurrent_settings(s, dice);
  draw_recurrent_surroundings(s, dice);
  return s;
}

template <class Spec>
StateCaseRequest random_state_request(const Spec& spec, Dice& dice, int most) {
  StateCaseRequest r{.q_len = dice.one_in(8)   ? 0
                              : dice.one_in(3) ? dice.from_to(1, 5)
                                               : dice.from_to(1, most),
                     .context_len = dice.one_in(3) ? 0 : dice.from_to(1, 300)};
  if (spec.num_drafts == 0 || r.q_len == 0) return r;
  r.drafts = dice.below(std::min(r.q_len, spec.num_drafts) + 1);
  if (r.context_len > 0) r.accepted = dice.below(std::min(spec.num_drafts, r.context_len) + 1);
  if (!spec.tree_drafts || r.drafts == 0 || dice.one_in(3)) return r;
  const int certain = r.q_len - r.drafts;  // a draft follows the last certain token, or a draft in front of it
  for (int i = 0; i < r.drafts; ++i) r.parents.push_back(dice.from_to(certain - 1, certain + i - 1));
  return r;
}

bool has_drafts(const StateCaseRequests& requests) {
  return std::ranges::any_of(requests, [](const StateCaseRequest& r) { return r.drafts > 0 || r.accepted > 0; });
}

ShortConvSpec random_short_conv_spec(Dice& dice) {
  ShortConvSpec s{.dim = dice.one_in(2) ? 8 * dice.from_to(1, 80) : dice.from_to(1, 300), .width = dice.from_to(2, 8)};
  s.bias = dice.one_in(2);
  s.dtype = dice.pick({DType::bf16, DType::f16, DType::f32});
  s.form = dice.pick({ShortConvForm::gated, ShortConvForm::plain});
  if (s.form == ShortConvForm::plain) s.activation = dice.pick({ShortConvActivation::none, ShortConvActivation::silu});
  if (dice.one_in(2)) s.num_drafts = dice.from_to(1, 9);
  s.tree_drafts = s.num_drafts > 0 && dice.one_in(2);
  return s;
}

template <class Spec, class Draw>
Spec valid_spec(Dice& dice, const Draw& draw) {
  while (true) {
    const Spec spec = draw(dice);
    try {
      spec.validate();
      return spec;
    } catch (const Error&) {
    }
  }
}

}  // namespace

MlaCase random_mla_case(uint64_t seed) {
  constexpr int64_t kMostWork = 1'000'000, kMostExpansion = 12'000'000;
  Dice dice(seed);
  MlaCase c{.spec = valid_spec<MlaSpec>(dice, random_mla_spec), .attention = {}};
  Case& a = c.attention;
  a.name = fmt::format("random_mla_{}", seed);
  a.seed = seed;
  a.spec = c.spec.latent_spec();
  a.requests = random_requests(dice);
  if (a.spec.mask.custom) a.custom = dice.pick({CustomPattern::random, CustomPattern::tree, CustomPattern::blind});
  if (a.spec.mask.positions) a.positions = dice.pick({PositionPattern::spans, PositionPattern::tree, PositionPattern::zigzag});
  if (a.spec.mask.tree) a.tree = dice.pick({TreePattern::binary, TreePattern::random, TreePattern::wide, TreePattern::forest});
  a.packed_mask = a.spec.mask.custom && dice.one_in(2);
  if (dice.one_in(4) && !has_long_float_sums(a.spec)) a.q_gain = dice.pick({0.2f, 3.f});
  limit_work(a, kMostWork);
  const int64_t expansion = int64_t(c.spec.num_heads) * (c.spec.qk_nope_dim + c.spec.v_dim) * c.spec.kv_lora_rank;  // of a key
  while (a.num_keys() > 1 && a.num_keys() * expansion > kMostExpansion) {
    CaseRequest& longest = *std::ranges::max_element(a.requests, {}, &CaseRequest::seq_len);
    longest.seq_len = (longest.seq_len + 1) / 2, longest.q_len = std::min(longest.q_len, longest.seq_len);
    if (longest.seq_len == 1) a.requests.resize(1);
  }
  a.csr = dice.one_in(2);
  a.order = dice.pick({"lbhtd", "lbthd", "lbhdt", "blhtd"});
  a.padding_tokens = dice.below(4);
  a.out_dtype = dice.pick({c.spec.dtype, DType::f32});
  return c;
}

RecurrentCase random_recurrent_case(uint64_t seed) {
  constexpr int64_t kMostWork = 1'500'000;  // numbers of states, for each token once
  Dice dice(seed);
  RecurrentCase c{.name = fmt::format("random_recurrent_{}", seed), .spec = valid_spec<RecurrentSpec>(dice, random_recurrent_spec)};
  c.seed = seed;
  const int most = dice.pick({3, 20, 70, 140});
  const int64_t numbers = int64_t(c.spec.num_v_heads) * c.spec.head_dim_k * c.spec.head_dim_v;
  int64_t work = 0;
  for (int left = dice.pick({1, 2, 3, 5, 9, 17}); left > 0; --left) {
    StateCaseRequest r = random_state_request(c.spec, dice, most);
    if (work += (r.q_len + c.spec.state_rows()) * numbers; work > kMostWork && !c.requests.empty()) break;
    r.id = int(c.requests.size());
    c.requests.push_back(std::move(r));
  }
  if (!has_drafts(c.requests) && dice.one_in(3)) c.chunk = dice.from_to(1, 70);
  c.gaps = dice.pick({Gaps::none, Gaps::aligned, Gaps::odd});
  c.padding_tokens = dice.below(4);
  c.float_gates = dice.one_in(2), c.shared_weight = dice.one_in(3), c.other_sources = dice.one_in(3);
  if (dice.one_in(3)) c.values = dice.pick({RecurrentValues::none, RecurrentValues::forgetful, RecurrentValues::same_keys});
  // Extreme gates make values that are multiplied by a step larger than an f16 can be.
  const bool overflows = c.spec.scaled_values && c.spec.dtype == DType::f16;
  if (!overflows && dice.one_in(8)) c.values = RecurrentValues::extreme;
  return c;
}

ShortConvCase random_short_conv_case(uint64_t seed) {
  Dice dice(seed);
  ShortConvCase c{
      .name = fmt::format("random_short_conv_{}", seed), .spec = valid_spec<ShortConvSpec>(dice, random_short_conv_spec), .requests = {}};
  c.seed = seed;
  const int most = dice.pick({3, 20, 70, 140});
  for (int left = dice.pick({1, 2, 3, 5, 9, 17}); left > 0; --left) {
    c.requests.push_back(random_state_request(c.spec, dice, most));
    c.requests.back().id = int(c.requests.size());
  }
  if (!has_drafts(c.requests) && dice.one_in(3)) c.chunk = dice.from_to(1, 70);
  c.gaps = dice.pick({Gaps::none, Gaps::aligned, Gaps::odd});
  c.padding_tokens = dice.below(4);
  c.other_sources = dice.one_in(3);
  if (dice.one_in(3)) c.values = dice.pick({ShortConvValues::steep, ShortConvValues::tiny, ShortConvValues::large});
  return c;
}

std::string describe(const MlaCase& c) { return c.spec.str() + "; " + describe(c.attention); }

static std::string text_of(const StateCaseRequests& requests) {
  std::string text;
  for (const StateCaseRequest& r : requests) {
    text += fmt::format("{}{{{}, {}, {}, {}", text.empty() ? "" : ", ", r.q_len, r.context_len, r.drafts, r.accepted);
    for (size_t i = 0; i < r.parents.size(); ++i) text += fmt::format("{} {}", i == 0 ? ", parents" : "", r.parents[i]);
    text += "}";
  }
  return text;
}

std::string describe(const RecurrentCase& c) {
  return fmt::format("{} seed {} requests {{{}}} chunk {} gaps {} padding {} {} gates{}{} values {}", c.spec.str(), c.seed,
                     text_of(c.requests), c.chunk, to_string(c.gaps), c.padding_tokens, c.float_gates ? "float" : "narrow",
                     c.shared_weight ? " shared weight" : "", c.other_sources ? " other sources" : "", int(c.values));
}

std::string describe(const ShortConvCase& c) {
  return fmt::format("{} seed {} requests {{{}}} chunk {} gaps {} padding {}{} values {}", c.spec.str(), c.seed, text_of(c.requests),
                     c.chunk, to_string(c.gaps), c.padding_tokens, c.other_sources ? " other sources" : "", int(c.values));
}

}  // namespace imbrex::test
