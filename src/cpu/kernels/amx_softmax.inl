// Softmax of one row of an AMX job, with places between its vectors for tile products of other jobs.

namespace imbrex::cpu {
namespace {

enum Logits { kAny, kPlain, kCapped };  // kAny: with biases, or under a custom mask

template <bool edges>
struct Edges {};
constexpr int kParts = kVecs / 2;  // of a row's softmax: places between its vectors for tile products

struct NoProducts {
  void operator()(int) const {}
};

// cap * tanh(x / cap) as x times a polynomial in x^2, where |x / cap| is at most kSteep: four operations in place of thirteen, and the
// product is one with the subtraction of the reference. Rows with a larger logit in a block take the long way for that block.
// Absolute error cap * 2.1e-6.
constexpr float kSteep = 0.7f;
inline CapCurve cap_curve(float scale, float cap) {
  constexpr float tanh_over_y[4] = {0.999972692f, -0.332557384f, 0.127290994f, -0.0357212542f};  // minimax for y * p(y^2)
  const float y = scale / cap;
  CapCurve out{};
  float power = scale * kLog2e;
  for (int i = 0; i < 4; ++i, power *= y * y) out.c[i] = tanh_over_y[i] * power;
  out.bound = power - power == 0.f ? kSteep * kSteep / (y * y) : -1.f;  // a polynomial beyond fp32 is not used
  return out;
}

IMBREX_INLINE vf sum_of(const vf p[kVecs]) {
  return _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])),
                       _mm512_add_ps(_mm512_add_ps(p[4], p[5]), _mm512_add_ps(p[6], p[7])));
}

// So much of the sum lies above the running maximum that the maximum must move.
IMBREX_INLINE bool is_large(vf sum) { return _mm512_cmp_ps_mask(sum, _mm512_set1_ps(kLargeSum), _CMP_GT_OQ); }

IMBREX_INLINE void store_probabilities(float* s, const vf p[kVecs]) {
  IMBREX_UNROLL(4)
  for (int c = 0; c < kChunks; ++c) _mm512_store_si512(s + 512 * c, (vi)_mm512_cvtne2ps_pbh(p[2 * c + 1], p[2 * c]));
}

// The scores of a row that are visible. `edges`: the row may not see all keys; with kAny that is always possible.
template <Logits logits, bool edges>
IMBREX_INLINE void seen_scores(const Row& row, const Job& job, __mmask16 seen[kVecs]) {
  if constexpr (logits == kAny) {
    row_masks(row, job.kb, seen);
    for (int t = 0; t < kVecs; ++t) {
      if (t < 2 * job.c0 || t >= 2 * job.c1) seen[t] = 0;  // not computed
    }
  } else if (edges) {
    range_masks(row, job.kb, seen);
  }
}

// The curve's factor of a score with square u.
IMBREX_INLINE vf cap_factor(const CapCurve& curve, vf u) {
  const vf c0 = _mm512_set1_ps(curve.c[0]), c1 = _mm512_set1_ps(curve.c[1]), c2 = _mm512_set1_ps(curve.c[2]),
           c3 = _mm512_set1_ps(curve.c[3]);
  return _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_fmadd_ps(c3, u, c2), u, c1), u, c0);
}

// The softmax of a row whose reference has to change, or whose scores are too steep for the curve. It starts again from the scores. Because
// this happens once in a few blocks, it is not in the unrolled loops of softmax_row().
template <Logits logits, bool edges>
__attribute__((noinline)) void softmax_row_again(const AttentionParams& a, const Row& row, const Job& job, float* s, float* max, float* sum,
                                                 float factor, const CapCurve* curve, bool steep, float* out, int dim_tiles) {
  const vf hidden = _mm512_set1_ps(-__builtin_inff());
  const float twice = row.scale * 2 * kLog2e / a.soft_cap, cap = a.soft_cap * kLog2e;
  __mmask16 seen[kVecs];
  seen_scores<logits, edges>(row, job, seen);
  vf x[kVecs], p[kVecs];
  IMBREX_UNROLL(8)
  for (int t = 0; t < kVecs; ++t) {
    x[t] = _mm512_load_ps(s + 256 * t);
    if constexpr (logits == kCapped)
      x[t] = steep ? soft_cap_bf16(x[t], twice, cap) : _mm512_mul_ps(x[t], cap_factor(*curve, _mm512_mul_ps(x[t], x[t])));
    if (logits == kAny || edges) x[t] = _mm512_mask_mov_ps(hidden, seen[t], x[t]);
  }
  if constexpr (logits == kCapped) factor = 1.f;
  const vf scale = _mm512_set1_ps(factor);
  auto probabilities = [&](float max_of_row) {
    IMBREX_UNROLL(8)
    for (int t = 0; t < kVecs; ++t) {
      const vf m = _mm512_set1_ps(max_of_row);
      const bool large = __builtin_fabsf(max_of_row) >= kLargeLogit;
      p[t] = exp2_bf16(large ? _mm512_sub_ps(rounded_product(x[t], scale), m) : _mm512_fmsub_ps(x[t], scale, m));
    }
    return sum_of(p);
  };
  vf total = vf{};
  if (steep) total = probabilities(*max);
  if (!steep || is_large(total)) {
    const vf top = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])),
                                 _mm512_max_ps(_mm512_max_ps(x[4], x[5]), _mm512_max_ps(x[6], x[7])));
    const float new_max = _mm512_reduce_max_ps(top) * factor;
    const vf rescale = _mm512_set1_ps(exp2_exact(*max - new_max));
    *max = new_max;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale));
    for (int t = 0; t < dim_tiles && !job.fresh; ++t) {
      _mm512_store_ps(out + 256 * t, _mm512_mul_ps(_mm512_load_ps(out + 256 * t), rescale));
    }
    total = probabilities(new_max);
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
  store_probabilities(s, p);
}

// Scores of one row to probabilities (bf16, in the even tiles).
// `products` is called kParts times on the way, to issue tile products of other jobs.
template <Logits logits, bool edges = false, class Products = NoProducts>
IMBREX_INLINE void softmax_row(const AttentionParams& a, const Row& row, const Job& job, float* s, float* max, float* sum,
                               const float* scale, const CapCurve* curve, float* out, int dim_tiles, Products products = {}) {
  float factor = *scale;
  if (logits == kAny && !is_plain(a, row)) factor = modify_logits<true>(a, row, job.kb, s, 256);
  __mmask16 seen[kVecs];
  seen_scores<logits, edges>(row, job, seen);
  const vf hidden = _mm512_set1_ps(-__builtin_inff()), m = _mm512_set1_ps(*max), vscale = _mm512_set1_ps(factor);
  vf x[kVecs], p[kVecs], largest = _mm512_setzero_ps();
  IMBREX_UNROLL(8)
  for (int t = 0; t < kVecs; ++t) {
    const bool masked = logits == kAny || (logits == kPlain && edges);
    x[t] = masked ? _mm512_mask_load_ps(hidden, seen[t], s + 256 * t) : _mm512_load_ps(s + 256 * t);
  }
  IMBREX_UNROLL(8)
  for (int t = 0; t < kVecs; ++t) {
    if (t % 2 == 0) products(t / 2);
    if constexpr (logits == kCapped) {
      const vf u = edges ? _mm512_maskz_mul_ps(seen[t], x[t], x[t]) : _mm512_mul_ps(x[t], x[t]);
      largest = _mm512_max_ps(largest, u);
      p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], cap_factor(*curve, u), m));
      if (edges) p[t] = _mm512_maskz_mov_ps(seen[t], p[t]);
    } else {
      p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], vscale, m));
    }
  }
  const vf total = sum_of(p);
  const bool steep = logits == kCapped && _mm512_cmp_ps_mask(largest, _mm512_set1_ps(curve->bound), _CMP_GT_OQ);
  if (__builtin_expect(steep || is_large(total), 0)) {
    softmax_row_again<logits, edges>(a, row, job, s, max, sum, factor, curve, steep, out, dim_tiles);
    return;
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
  store_probabilities(s, p);
}

}  // namespace
}  // namespace imbrex::cpu
