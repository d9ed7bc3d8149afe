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

// Scores of one row to probabilities (bf16, in the even tiles). `edges`: the row may not see all keys (kAny: it never need).
// `products` is called kParts times on the way, to issue tile products of other jobs.
template <Logits logits, bool edges = false, class Products = NoProducts>
IMBREX_INLINE void softmax_row(const AttentionParams& a, const Row& row, const Job& job, float* s, float* max, float* sum,
                               const float* scale, float* out, int dim_tiles, Products products = {}) {
  vf x[kVecs], p[kVecs];
  float factor = *scale;
  if constexpr (logits == kAny) {
    if (!is_plain(a, row)) {
      float* parts[kVecs];
      for (int t = 0; t < kVecs; ++t) parts[t] = s + 256 * t;
      modify_logits<true>(a, row, job.kb, parts);
      factor = 1.f;
    }
    __mmask16 seen[kVecs];
    row_masks(row, job.kb, seen);
    for (int t = 0; t < kVecs; ++t) {
      if (t < 2 * job.c0 || t >= 2 * job.c1) seen[t] = 0;  // not computed
      x[t] = _mm512_mask_load_ps(_mm512_set1_ps(-__builtin_inff()), seen[t], s + 256 * t);
    }
  } else {
    IMBREX_UNROLL(8)
    for (int t = 0; t < kVecs; ++t) x[t] = _mm512_load_ps(s + t * 256);
    if constexpr (logits == kCapped) {
      const float twice = row.scale * 2 * kLog2e / a.soft_cap, cap = a.soft_cap * kLog2e;
      IMBREX_UNROLL(8)
      for (int t = 0; t < kVecs; ++t) {
        if (t % 2 == 0) products(t / 2);
        x[t] = soft_cap_bf16(x[t], twice, cap);
      }
      factor = 1.f;
    }
    if constexpr (edges) {
      const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      IMBREX_UNROLL(8)
      for (int t = 0; t < kVecs; ++t) {
        const __mmask16 below = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(row.hi - job.kb - 16 * t));
        const __mmask16 seen = _mm512_mask_cmpge_epi32_mask(below, lane, _mm512_set1_epi32(row.lo - job.kb - 16 * t));
        x[t] = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, x[t]);
      }
    }
  }
  const vf vscale = _mm512_set1_ps(factor), m = _mm512_set1_ps(*max);
  IMBREX_UNROLL(8)
  for (int t = 0; t < kVecs; ++t) {
    if (logits != kCapped && t % 2 == 0) products(t / 2);
    p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], vscale, m));
  }
  vf total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])),
                           _mm512_add_ps(_mm512_add_ps(p[4], p[5]), _mm512_add_ps(p[6], p[7])));
  if (__builtin_expect(_mm512_cmp_ps_mask(total, _mm512_set1_ps(kLargeSum), _CMP_GT_OQ), 0)) {
    const vf top = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])),
                                 _mm512_max_ps(_mm512_max_ps(x[4], x[5]), _mm512_max_ps(x[6], x[7])));
    const float new_max = _mm512_reduce_max_ps(top) * factor;
    const vf rescale = _mm512_set1_ps(exp2_exact(*max - new_max)), n = _mm512_set1_ps(new_max);
    *max = new_max;
    _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), rescale));
    for (int t = 0; t < dim_tiles && !job.fresh; ++t) {
      _mm512_store_ps(out + 256 * t, _mm512_mul_ps(_mm512_load_ps(out + 256 * t), rescale));
    }
    for (int t = 0; t < kVecs; ++t) p[t] = exp2_bf16(_mm512_fmsub_ps(x[t], vscale, n));
    total = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])),
                          _mm512_add_ps(_mm512_add_ps(p[4], p[5]), _mm512_add_ps(p[6], p[7])));
  }
  _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
  IMBREX_UNROLL(4)
  for (int c = 0; c < kChunks; ++c) _mm512_store_si512(s + 512 * c, (vi)_mm512_cvtne2ps_pbh(p[2 * c + 1], p[2 * c]));
}

}  // namespace
}  // namespace imbrex::cpu
