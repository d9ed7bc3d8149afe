// The AVX-512 and AMX kernels' work on one row of kBlockKeys logits, and on finished rows.

namespace imbrex::cpu {
namespace {

constexpr int kVecs = kBlockKeys / 16;

// Applies soft cap, biases and a score_mod to logits, each 16 of which are `pitch` floats apart, and returns the scale that makes them log2
// units. `bf16`: for products of bf16 the short soft cap is precise enough.
template <bool bf16>
__attribute__((noinline)) float modify_logits(const AttentionParams& a, const Row& row, int kb, float* s, long pitch) {
  const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const bool biased = row.slope != 0.f || row.bias;
  const int* const places = row.custom && row.key_positions ? row.key_positions + (kb - row.first_byte) : nullptr;
  if (a.modify_scores && a.soft_cap == 0.f && !biased) {
    modify_scores(a, row, kb, s, pitch, row.scale);
    return kLog2e;
  }
  // Biases come in natural units and are added before the change of base, and a score_mod is about those too.
  const float unit = biased || a.modify_scores ? 1.f : kLog2e;
  for (int t = 0; t < kVecs; ++t) {
    vf x = _mm512_load_ps(s + t * pitch);
    if (a.soft_cap > 0.f) {
      const float twice = row.scale * 2 * kLog2e / a.soft_cap, cap = a.soft_cap * unit;
      x = bf16 ? soft_cap_bf16(x, twice, cap) : soft_cap_f32(x, twice, cap);
    } else {
      x = _mm512_mul_ps(x, _mm512_set1_ps(row.scale * unit));
    }
    if (biased) {
      vi distance = _mm512_add_epi32(lane, _mm512_set1_epi32(kb + 16 * t - row.position));
      if (places) distance = _mm512_sub_epi32(_mm512_loadu_si512(places + 16 * t), _mm512_set1_epi32(row.position));
      if (row.slope != 0.f) {
        vf far = _mm512_cvtepi32_ps(distance);
        if (a.alibi_sqrt)
          far = _mm512_sub_ps(_mm512_setzero_ps(),
                              _mm512_sqrt_ps(_mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), far), _mm512_setzero_ps())));
        x = _mm512_fmadd_ps(_mm512_set1_ps(row.slope), far, x);
      }
      if (row.bias) {
        const vi reach = _mm512_set1_epi32(a.bias_reach);
        const vi index = _mm512_max_epi32(_mm512_min_epi32(distance, reach), _mm512_sub_epi32(_mm512_setzero_si512(), reach));
        x = _mm512_add_ps(x, _mm512_i32gather_ps(index, row.bias, 4));
      }
      if (!a.modify_scores) x = _mm512_mul_ps(x, _mm512_set1_ps(kLog2e));
    }
    _mm512_store_ps(s + t * pitch, x);
  }
  if (!a.modify_scores) return 1.f;
  modify_scores(a, row, kb, s, pitch, 1.f);
  return kLog2e;
}

// Keys of a block that a row sees, 16 to a mask; without its custom mask. Scalar arithmetic: vector operations are what is scarce.
IMBREX_INLINE void range_masks(const Row& row, int kb, __mmask16 seen[kVecs]) {
  auto below = [](int n) { return n >= 64 ? ~0ul : n <= 0 ? 0ul : (1ul << n) - 1; };
  const int lo = row.lo - kb, hi = row.hi - kb;
  const unsigned long front = below(hi) & ~below(lo), back = below(hi - 64) & ~below(lo - 64);
  for (int t = 0; t < kVecs; ++t) seen[t] = __mmask16((t < 4 ? front : back) >> t % 4 * 16);
}
IMBREX_INLINE void row_masks(const Row& row, int kb, __mmask16 seen[kVecs]) {
  range_masks(row, kb, seen);
  for (int t = 0; t < kVecs && row.custom; ++t) {
    if (seen[t])
      seen[t] &= _mm_test_epi8_mask(_mm_maskz_loadu_epi8(seen[t], row.custom + (kb - row.first_byte) + 16 * t), _mm_set1_epi8(-1));
  }
}

IMBREX_INLINE bool sees_all(const Row& row, int kb) { return row.lo <= kb && row.hi >= kb + kBlockKeys && !row.custom; }
// Scales of zero or below would turn a hidden key's -inf around; they take the general path.
IMBREX_INLINE bool is_plain(const AttentionParams& a, const Row& row) { return plain_logits(a) && row.scale > 0.f; }

// (max, sum, out) of all keys before joins those of one split. Not inlined, so that items and merges run the same instructions.
// The sums come reduced: merging is between complete splits.
__attribute__((noinline)) void fold(float* into, float* into_max, float* into_sum, const float* part, float part_max, float part_sum,
                                    int v) {
  const float top = part_max > *into_max ? part_max : *into_max;
  const float old_weight = exp2_exact(*into_max - top), new_weight = exp2_exact(part_max - top);
  for (int d = 0; d < v; d += 16) {
    const __mmask16 m = first(v - d);
    const vf x = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, part + d), _mm512_set1_ps(new_weight));
    _mm512_mask_storeu_ps(into + d, m, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(m, into + d), _mm512_set1_ps(old_weight), x));
  }
  *into_sum = __builtin_fmaf(*into_sum, old_weight, part_sum * new_weight);
  *into_max = top;
}

// Divides by the sum, joins the sink, writes output and LSE of one row.
__attribute__((noinline)) void write_row(const AttentionParams& a, int token, int head, const float* out, float max, float sum) {
  const int v = a.v.dim;
  const float v_scale = a.v.scales ? a.v.scales[head / a.group * a.v.scale_stride] : 1.f;
  float lse = -__builtin_inff(), factor = 0.f;
  if (sum > 0.f) {
    float weight = 1.f;
    if (a.sinks) {
      const float sink = a.sinks[head] * kLog2e, top = sink > max ? sink : max;
      weight = exp2_exact(max - top);
      sum = sum * weight + exp2_exact(sink - top);
      max = top;
    }
    factor = weight / sum * v_scale;
    if (a.lse) lse = (max + __builtin_log2f(sum)) * kLn2;
  } else if (sum != sum) {
    factor = lse = sum;  // NaN among the visible keys
  }
  char* to = a.out + token * a.out_token_stride + head * a.out_head_stride;
  const bool empty = factor == 0.f;
  for (int d = 0; d < v; d += 16) {
    const __mmask16 m = first(v - d), from = empty ? 0 : m;
    const vf x = _mm512_mul_ps(_mm512_maskz_loadu_ps(from, out + d), _mm512_set1_ps(factor));
    if (a.out_type == kF32) {
      _mm512_mask_storeu_ps(to + 4L * d, m, x);
    } else if (a.out_type == kF16) {
      _mm256_mask_storeu_epi16(to + 2L * d, m, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      _mm256_mask_storeu_epi16(to + 2L * d, m, round_bf16(x));
    }
  }
  if (a.lse) a.lse[token * a.lse_token_stride + head * a.lse_head_stride] = lse;
}

// Writes a finished row of an item to the output, or to the partial buffers. False when its output is not finite although its weights are.
IMBREX_INLINE bool finish_row(const AttentionParams& a, const WorkItem& item, const Row& row, const float* out, float max, float sum) {
  vf probe = _mm512_setzero_ps();
  for (int d = 0; d < a.v.dim; d += 16)
    probe = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(first(a.v.dim - d), out + d), _mm512_setzero_ps(), probe);
  const bool finite = sum != sum || _mm512_cmp_ps_mask(probe, probe, _CMP_UNORD_Q) == 0;
  if (item.partial < 0) {
    write_row(a, row.token, row.head, out, max, sum);
    return finite;
  }
  const long at = long(item.partial + row.entry) * a.num_q_heads + row.head;
  __builtin_memcpy(a.partial_out + at * a.v.dim, out, 4ul * a.v.dim);
  a.partial_state[2 * at] = max;
  a.partial_state[2 * at + 1] = sum;
  return finite;
}

void merge(const AttentionParams& a, const MergeItem& item, int head_begin, int head_end) {
  const int tokens = item.q_end - item.q_begin, v = a.v.dim;
  float out[kMaxDim];
  for (int t = 0; t < tokens; ++t) {
    for (int head = head_begin; head < head_end; ++head) {
      float max = kEmptyMax, sum = 0.f;
      for (int d = 0; d < v; ++d) out[d] = 0.f;
      for (int split = 0; split < item.num_splits; ++split) {
        const long at = partial_row(a, item, split, t) * a.num_q_heads + head;
        fold(out, &max, &sum, a.partial_out + at * v, a.partial_state[2 * at], a.partial_state[2 * at + 1], v);
      }
      write_row(a, item.q_begin + t, head, out, max, sum);
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu
