// Random cases of attention: see random_cases.h.
#include "random_cases.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "expression/random_expression.h"
#include "imbrex/error.h"

namespace imbrex::test {
namespace {

// Of models, many of which divide neither by 4 nor by 16.
constexpr std::pair<int, int> kHeads[] = {{40, 8}, {28, 4}, {96, 8},  {64, 8}, {32, 8}, {20, 20}, {71, 1}, {25, 5},
                                          {48, 4}, {14, 2}, {128, 8}, {64, 4}, {16, 1}, {20, 1},  {24, 2}, {36, 4}};
// Of windows and chunks: about tiles of 16, 64 and 128 keys, and in between.
constexpr int kSpans[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 30, 31, 63, 64, 65, 99, 127, 128, 129, 200, 300, 1000};
constexpr int kBlockSizes[] = {0, 1, 2, 3, 5, 8, 16, 16, 16, 32, 48, 64, 64, 100, 128, 256};

void draw_dims(AttentionSpec& s, Dice& dice) {
  constexpr std::pair<int, int> kPairs[] = {{192, 128}, {128, 64}, {64, 128}, {96, 64}, {72, 40}, {256, 128}, {320, 256}, {576, 512}};
  const int dim = dice.one_in(2) ? dice.pick({64, 128}) : dice.one_in(8) ? dice.pick({288, 320, 384, 512}) : 8 * dice.from_to(1, 32);
  s.head_dim_qk = s.head_dim_v = dim;
  if (dice.one_in(8)) std::tie(s.head_dim_qk, s.head_dim_v) = dice.pick(kPairs);
  if (dice.one_in(12)) s.head_dim_v = 8 * dice.from_to(1, 32);
}

void draw_types(AttentionSpec& s, Dice& dice) {
  s.q_dtype = dice.pick({DType::bf16, DType::bf16, DType::f16, DType::f32});
  s.kv_dtype = dice.one_in(2) ? s.q_dtype : dice.pick({DType::f32, DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2});
  if (dice.one_in(16)) s.q_dtype = s.kv_dtype = DType::fp8_e4m3;
}

void draw_mask(Mask& m, Dice& dice) {
  m.causal = !dice.one_in(4);
  if (dice.one_in(3)) m.window_left = dice.pick(kSpans);
  if (dice.one_in(m.causal ? 20 : 2)) m.window_right = dice.pick(kSpans);
  if (dice.one_in(8)) m.chunk = std::max(1, dice.pick(kSpans));
  if (m.chunk > 0 && dice.one_in(2)) m.chunk_lookback = dice.from_to(1, 4);
  switch (dice.below(12)) {
    case 0: m.custom = true; break;
    case 1: m.positions = true; break;
    case 2: m.positions = m.custom = true; break;
    case 3:
    case 4: m.tree = true; break;
    default: break;
  }
}

void draw_score(ScoreMod& s, Dice& dice) {
  s.head_scales = dice.one_in(10);
  if (dice.one_in(6)) s.soft_cap = dice.pick({2.f, 20.f, 30.f, 50.f});
  s.alibi = dice.one_in(8);
  s.alibi_sqrt = s.alibi && dice.one_in(3);
  if (dice.one_in(12)) {
    s.relative_bidirectional = dice.one_in(2);
    s.relative_buckets = 2 * dice.from_to(2, 20);
    s.relative_max_distance = s.relative_buckets + dice.from_to(0, 100);
  }
  s.sinks = dice.one_in(5);
}

// What an engine would say, with numbers of the dice.
std::string mask_text(Dice& dice) {
  const int a = dice.from_to(1, 90), b = dice.from_to(2, 40);
  switch (dice.below(9)) {  // with q_len > 0 backends do not take causality and windows for Mask's
    case 0: return dice.one_in(2) ? "kv <= q" : "q_len > 0 & kv <= q";
    case 1: return fmt::format("{}kv <= q & q - kv < {}", dice.one_in(2) ? "" : "q_len > 0 & ", a);
    case 2: return fmt::format("kv < {} | q - kv < {}", b, a);
    case 3: return "int doc[,]; doc[batch, q] == doc[batch, kv]";
    case 4: return "int prefix[]; kv < prefix[batch] | kv <= q";
    case 5: return fmt::format("q // {0} == kv // {0} + {1} | kv == q", a, b % 3);
    case 6: return fmt::format("head % {} == 0 | q - kv < {} & kv <= q", b % 5 + 1, a);
    case 7: return fmt::format("(q * {} + kv * 13) % {} < {}", a, b + 3, b / 2 + 1);
    default: return fmt::format("int image[,]; image[batch, q] == image[batch, kv] & image[batch, kv] % 2 == 1 | kv <= q & q - kv < {}", a);
  }
}

std::string score_text(Dice& dice) {
  const int a = dice.from_to(1, 60), b = dice.from_to(2, 9);
  switch (dice.below(8)) {
    case 0: return fmt::format("{} * score", 0.25 * b);
    case 1: return fmt::format("{0} * tanh(score / {0})", a);
    case 2: return "float slope[]; score + 0.01 * slope[head] * float(kv - q)";
    case 3: return "float bias[,]; score + bias[head, kv]";
    case 4: return "float bias[,,]; score + bias[head, q, kv]";
    case 5: return fmt::format("where(kv % {} == 1, score, -inf)", b);
    case 6: return fmt::format("where(q - kv < {}, score, score - 0.01 * abs(float(q - kv)))", a);
    default: return fmt::format("score * exp(-0.01 * float(head % {})) - 0.125 * float(kv_len - kv > {})", b, a);
  }
}

void draw_expressions(AttentionSpec& s, Dice& dice) {
  if (dice.one_in(8)) {
    if (dice.one_in(2)) {
      s.mask_mod = parse_expression(mask_text(dice));
    } else {
      const Expression any = RandomExpressions(unsigned(dice.next()), false).of(ExpressionType::boolean, dice.from_to(1, 4));
      s.mask_mod = any;
    }
  }
  if (dice.one_in(8)) s.score_mod = parse_expression(score_text(dice));
}

void draw_kind(AttentionSpec& s, Dice& dice) {
  s.kind = dice.pick({AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder});
  if (s.kind != AttentionKind::encoder_decoder) s.block_size = 0;
  s.mask.causal = dice.one_in(5);
  s.mask.tree = false;
}

void draw_format(AttentionSpec& s, Dice& dice) {
  s.kv_format = dice.pick({KvFormat::latent, KvFormat::latent, KvFormat::latent_rope, KvFormat::fp8_ds_mla});
  s.num_q_heads = s.group_size(), s.num_kv_heads = 1;
  if (s.kv_format == KvFormat::fp8_ds_mla) s.kv_dtype = DType::fp8_e4m3;
  if (s.kv_format == KvFormat::fp8_ds_mla || dice.one_in(4)) s.head_dim_qk = 576, s.head_dim_v = 512;
}

void draw_patterns(Case& c, Dice& dice) {
  const Mask& mask = c.spec.mask;
  if (mask.custom) c.custom = dice.pick({CustomPattern::random, CustomPattern::tree, CustomPattern::blind, CustomPattern::documents});
  c.packed_mask = mask.custom && dice.one_in(2);
  if (mask.positions) c.positions = dice.pick({PositionPattern::spans, PositionPattern::tree, PositionPattern::zigzag});
  if (mask.tree)
    c.tree = dice.pick(
        {TreePattern::binary, TreePattern::random, TreePattern::random, TreePattern::wide, TreePattern::forest, TreePattern::none});
  const bool plain_scale = c.spec.score.scale == 0 && !c.spec.score.head_scales && c.spec.q_dtype != DType::fp8_e4m3;
  const bool trend = plain_scale && dice.one_in(4);
  if (trend)
    c.values = dice.pick({ValuePattern::rising, ValuePattern::falling, ValuePattern::spike, ValuePattern::large, ValuePattern::constant});
  else if (dice.one_in(4) && !has_long_float_sums(c.spec))
    c.q_gain = dice.pick({0.1f, 3.f, c.spec.q_dtype == DType::f32 ? 2.f : 6.f});
  c.scale_per_head = c.spec.num_kv_heads < 12 && dice.one_in(3);  // the twelfth head's would be 0
  if (!trend && dice.one_in(4)) c.kv_scale = dice.pick({0.004f, 0.05f, 1.f});
  if (c.spec.kv_format == KvFormat::latent_rope && is_fp8(c.spec.kv_dtype)) c.rope_factor = dice.pick({1.f, 0.3f, 3.7f});
}

CaseRequest random_request(Dice& dice, int style, int most) {
  const int context = dice.below(most);
  switch (style < 4 ? style : dice.below(7)) {
    case 0: return {1, context + 1};
    case 1: return {context + 1, context + 1};
    case 2: return {dice.from_to(2, 9), context + 9};
    case 3: return {dice.from_to(1, most), context + most};
    case 4: return {0, 0};
    case 5: return {0, context};
    default: return {dice.from_to(1, 64), context + 64};
  }
}

void take_requests_of_kind(Case& c, Dice& dice) {
  const AttentionKind kind = c.spec.kind;
  for (CaseRequest& r : c.requests) {
    if (kind == AttentionKind::encoder || kind == AttentionKind::encoder_only) r.q_len = r.seq_len;
    if (kind == AttentionKind::encoder_decoder && dice.one_in(3)) r.q_len += dice.below(40);
  }
  for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = dice.one_in(3) ? dice.below(int(r) + 1) : int(r);
}

}  // namespace

AttentionSpec random_spec(Dice& dice) {
  AttentionSpec s;
  if (dice.one_in(3)) {
    std::tie(s.num_q_heads, s.num_kv_heads) = dice.pick(kHeads);
  } else {
    s.num_kv_heads = dice.pick({1, 1, 1, 2, 2, 3, 4, 5});
    s.num_q_heads = s.num_kv_heads * dice.from_to(1, 16);
  }
  draw_dims(s, dice);
  draw_types(s, dice);
  s.block_size = dice.pick(kBlockSizes);
  draw_mask(s.mask, dice);
  draw_score(s.score, dice);
  draw_expressions(s, dice);
  if (dice.one_in(8)) draw_kind(s, dice);
  if (dice.one_in(6)) draw_format(s, dice);
  if (dice.one_in(8)) s.score.scale = s.scale() * dice.pick({0.2f, 0.7f, -1.f, has_long_float_sums(s) ? 1.f : 1.5f});
  return s;
}

std::vector<CaseRequest> random_requests(Dice& dice) {
  std::vector<CaseRequest> requests(size_t(dice.pick({1, 1, 2, 3, 4, 5, 8, 13})));
  const int style = dice.below(8), most = dice.pick({4, 20, 70, 140, 140, 300, 600});
  for (size_t r = 0; r < requests.size(); ++r) {
    requests[r] = random_request(dice, style, most);
    requests[r].id = int(r);
  }
  if (dice.one_in(16)) requests.push_back({.q_len = dice.from_to(1, 8), .seq_len = dice.from_to(4080, 5200), .id = int(requests.size())});
  return requests;
}

void limit_work(Case& c, int64_t most) {
  while (c.work() > most) {
    const auto pairs = [](const CaseRequest& r) { return int64_t(r.q_len) * r.seq_len; };
    CaseRequest& largest = *std::ranges::max_element(c.requests, {}, pairs);
    const bool encoder = c.spec.kind == AttentionKind::encoder || c.spec.kind == AttentionKind::encoder_only;
    if (pairs(largest) == 1) {  // and so have all others
      c.requests.pop_back();
    } else if (c.spec.num_kv_heads > 1 && pairs(largest) < 4000) {
      c.spec.num_q_heads = c.spec.group_size(), c.spec.num_kv_heads = 1;
    } else if (encoder || largest.q_len == 1) {
      largest.seq_len = (largest.seq_len + 1) / 2;
      largest.q_len = encoder ? largest.seq_len : 1;
    } else {
      largest.q_len = (largest.q_len + 1) / 2;
    }
  }
}

Case random_case(uint64_t seed) {
  constexpr int64_t kMostWork = 2'500'000;
  Dice dice(seed);
  Case c;
  c.name = fmt::format("random_{}", seed);
  c.seed = seed;
  for (bool valid = false; !valid;) {
    c.spec = random_spec(dice);
    try {
      c.spec.validate();
      valid = true;
    } catch (const Error&) {
    }
  }
  c.requests = random_requests(dice);
  take_requests_of_kind(c, dice);
  draw_patterns(c, dice);
  limit_work(c, kMostWork);
  c.csr = dice.one_in(2);
  if (dice.one_in(2)) dice.shuffle(c.order);
  c.padding_tokens = dice.below(4);
  c.out_dtype = dice.pick(c.spec.out_dtypes());
  return c;
}

std::string describe(const Case& c) {
  std::string requests;
  for (const CaseRequest& r : c.requests)
    requests += fmt::format("{}{{{}, {}, {}}}", requests.empty() ? "" : ", ", r.q_len, r.seq_len, r.id);
  return fmt::format(
      "{} seed {} requests {{{}}} out {} {} {} padding {} gain {} scale {}{} rope {} custom {}{} positions {} tree {} values {}",
      c.spec.str(), c.seed, requests, to_string(c.out_dtype), c.csr ? "csr" : "dense", c.order, c.padding_tokens, c.q_gain, c.kv_scale,
      c.scale_per_head ? " per head" : "", c.rope_factor, int(c.custom), c.packed_mask ? " packed" : "", int(c.positions), int(c.tree),
      int(c.values));
}

std::vector<Case> simpler_cases(const Case& c) {
  std::vector<Case> all;
  const auto add = [&](const auto& change) {
    Case other = c;
    change(other);
    try {
      other.spec.validate();
    } catch (const Error&) {
      return;
    }
    if (std::ranges::find(other.spec.out_dtypes(), other.out_dtype) == other.spec.out_dtypes().end())
      other.out_dtype = other.spec.out_dtypes().front();
    if (other != c) all.push_back(std::move(other));
  };
  const bool encoder = c.spec.kind == AttentionKind::encoder || c.spec.kind == AttentionKind::encoder_only;
  for (size_t r = 0; r < c.requests.size(); ++r) {
    add([&](Case& o) { o.requests.erase(o.requests.begin() + long(r)); });
    for (const int less : {c.requests[r].q_len / 2, 1})  // of the query tokens, or of the context
      if (!encoder && less < c.requests[r].q_len) add([&](Case& o) { o.requests[r].q_len -= less; });
    for (const int less : {(c.requests[r].seq_len - c.requests[r].q_len) / 2, 1})
      if (c.requests[r].seq_len - less >= c.requests[r].q_len) add([&](Case& o) { o.requests[r].seq_len -= less; });
    for (const int less : {c.requests[r].seq_len / 2, 1})
      if (encoder && less < c.requests[r].seq_len)
        add([&](Case& o) { o.requests[r].seq_len -= less, o.requests[r].q_len = o.requests[r].seq_len; });
  }
  add([](Case& o) { o.spec.mask = {.causal = o.spec.mask.causal}, o.custom = {}, o.positions = {}, o.tree = {}, o.packed_mask = false; });
  add([](Case& o) { o.spec.mask.custom = o.packed_mask = false, o.custom = {}; });
  add([](Case& o) { o.spec.mask.positions = false, o.positions = {}; });
  add([](Case& o) { o.spec.mask.tree = false, o.tree = {}; });
  add([](Case& o) { o.tree = {}; });
  add([](Case& o) { o.spec.mask.window_left = -1; });
  add([](Case& o) { o.spec.mask.window_right = -1; });
  add([](Case& o) { o.spec.mask.chunk = o.spec.mask.chunk_lookback = 0; });
  add([](Case& o) { o.spec.mask.causal = true; });
  add([](Case& o) { o.spec.score = {}; });
  add([](Case& o) { o.spec.score.scale = 0; });
  add([](Case& o) { o.spec.score.soft_cap = 0; });
  add([](Case& o) { o.spec.score.head_scales = false; });
  add([](Case& o) { o.spec.score.alibi = o.spec.score.alibi_sqrt = false; });
  add([](Case& o) { o.spec.score.relative_buckets = o.spec.score.relative_max_distance = 0, o.spec.score.relative_bidirectional = false; });
  add([](Case& o) { o.spec.score.sinks = false; });
  add([](Case& o) { o.spec.mask_mod = {}; });
  add([](Case& o) { o.spec.score_mod = {}; });
  add([](Case& o) { o.values = ValuePattern::plain; });
  add([](Case& o) { o.q_gain = 1.f; });
  add([](Case& o) { o.spec.num_q_heads = o.spec.group_size(), o.spec.num_kv_heads = 1; });
  add([](Case& o) { o.spec.num_q_heads = o.spec.num_kv_heads; });
  add([](Case& o) { o.spec.head_dim_qk = o.spec.head_dim_v = 64; });
  add([](Case& o) { o.spec.q_dtype = DType::bf16; });
  add([](Case& o) { o.spec.kv_dtype = o.spec.q_dtype; });
  add([](Case& o) { o.kv_scale = 0.02f, o.scale_per_head = false; });
  add([](Case& o) { o.rope_factor = 1.f; });
  add([](Case& o) { o.spec.kv_format = KvFormat::strided; });
  if (c.spec.block_size > 0) add([](Case& o) { o.spec.block_size = 16; });
  add([](Case& o) { o.csr = false, o.order = "lbhtd"; });
  add([](Case& o) { o.padding_tokens = 0; });
  return all;
}

}  // namespace imbrex::test
