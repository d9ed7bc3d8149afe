// The softmax of latents, for kernels that multiply pairs of bf16: a vector has 16 rows, and keys come one after the other.

namespace imbrex::cpu {
namespace {

// Probabilities of two keys for 16 rows, rounded: a pair for each row.
IMBREX_INLINE vi pair_weights(vf first, vf second) {
  const vi both = (vi)_mm512_cvtne2ps_pbh(second, first);
  return _mm512_permutexvar_epi16(_mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                                   19, 3, 18, 2, 17, 1, 16, 0),
                                  both);
}

// The softmax of a tile's rows over a chunk of 32 keys, in nine steps, so that products can be issued in between: the first finds the rows'
// reference, the others weigh four keys each. Parts of a step are public, so that products can be issued between them too.
class LatentSoftmax {
 public:
  // Chunk `chunk` of those that wait has these scores, [key][16 rows].
  void start(const LatentScratch& s, int t, int chunk, const float* scores) {
    scratch_ = &s, t_ = t, chunk_ = chunk, scores_ = scores, key_ = -1;
    const LatentTile& tile = s.tiles[t];
    const int first = first_key();
    whole_ = tile.plain && !tile.custom && tile.all_lo <= first && tile.all_hi >= first + 32;
  }
  bool begins() const { return key_ < 0; }
  bool done() const { return key_ >= 32; }
  bool whole() const { return whole_; }
  char* weights() const { return weights_of(chunk_); }

  template <class Products>
  IMBREX_INLINE void step() {
    if (begins()) {
      vf top = _mm512_set1_ps(-__builtin_inff());
      for (int part = 0; whole_ && part < 8; ++part) top = _mm512_max_ps(top, top_of(part));
      begin<Products>(top);
    } else if (__builtin_expect(whole_, 1)) {
      Keys four = keys();
      four.weigh();
      go_on(four);
    } else {
      weigh_some();
    }
  }

  // The largest score of an eighth of the keys, for begin() where all are seen.
  IMBREX_INLINE vf top_of(int part) const {
    const float* const from = scores_ + 64 * part;
    return _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(from), _mm512_load_ps(from + 16)),
                         _mm512_max_ps(_mm512_load_ps(from + 32), _mm512_load_ps(from + 48)));
  }
  template <class Products>
  IMBREX_INLINE void begin(vf top) {
    LatentTile& tile = scratch_->tiles[t_];
    key_ = 0;
    scale_ = _mm512_load_ps(tile.scale), max_ = _mm512_load_ps(tile.max), sum_ = _mm512_load_ps(tile.sum);
    if (whole_) {
      top = _mm512_mul_ps(top, scale_);
    } else {
      find_seen();
      top = _mm512_set1_ps(-__builtin_inff());
      for (int j = 0; j < 32; ++j) top = _mm512_mask_max_ps(top, seen_[j], top, _mm512_mul_ps(_mm512_load_ps(scores_ + 16 * j), scale_));
    }
    if (const __mmask16 grown = _mm512_cmp_ps_mask(top, _mm512_add_ps(max_, _mm512_set1_ps(kLatentLazy)), _CMP_GT_OQ)) {
      const vf larger = _mm512_mask_mov_ps(max_, grown, top), factor = exp2_f32(_mm512_sub_ps(max_, larger));
      max_ = larger, sum_ = _mm512_mul_ps(sum_, factor);
      _mm512_store_ps(tile.max, larger);
      if (!tile.fresh) Products::rescale(*scratch_, t_, factor);
      // Weights of earlier chunks wait for their values. What rounding them again changes is a part of 2^-8 of them.
      for (int c = 0; c < chunk_; ++c) Products::rescale_weights(weights_of(c), factor);
    }
    large_ = _mm512_cmp_ps_mask(_mm512_abs_ps(max_), _mm512_set1_ps(kLargeLogit), _CMP_GE_OQ) &
             _mm512_cmp_ps_mask(max_, _mm512_set1_ps(kEmptyMax), _CMP_NEQ_OQ);
    if (whole_ && large_) {
      find_seen();
      whole_ = false;
    }
  }

  // The next keys, four at a time, where all are seen.
  struct Keys {
    const float* scores;
    char *to, *end;
    vf scale, max, sum;
    bool done() const { return to == end; }
    IMBREX_INLINE vf weight(int i) const { return exp2_bf16(_mm512_fmsub_ps(_mm512_load_ps(scores + 16 * i), scale, max)); }
    // Keeps the weights of the first or the second two of four.
    IMBREX_INLINE void keep(int pair, vf first, vf second) const { _mm512_store_si512(to + 64 * pair, pair_weights(first, second)); }
    IMBREX_INLINE void weigh() {
      vf p[4];
      IMBREX_UNROLL(4)
      for (int i = 0; i < 4; ++i) p[i] = weight(i);
      keep(0, p[0], p[1]);
      keep(1, p[2], p[3]);
      next(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])));
    }
    IMBREX_INLINE void next(vf sum_of_four) { scores += 64, to += 128, sum = _mm512_add_ps(sum, sum_of_four); }
  };
  IMBREX_INLINE Keys keys() const { return {scores_ + 16 * key_, weights() + 32 * key_, weights() + 1024, scale_, max_, sum_}; }
  IMBREX_INLINE void go_on(const Keys& keys) {
    key_ = 32 - int(keys.end - keys.to) / 32, sum_ = keys.sum;
    if (done()) _mm512_store_ps(scratch_->tiles[t_].sum, sum_);
  }
  // A step where some row does not see all keys.
  __attribute__((noinline)) void weigh_some() {
    vf p[4];
    for (int i = 0; i < 4; ++i) p[i] = weight_of(key_ + i);
    Keys four = keys();
    four.keep(0, p[0], p[1]);
    four.keep(1, p[2], p[3]);
    four.next(_mm512_add_ps(_mm512_add_ps(p[0], p[1]), _mm512_add_ps(p[2], p[3])));
    go_on(four);
  }

 private:
  char* weights_of(int chunk) const { return scratch_->weights + (long(t_) * scratch_->most_chunks + chunk) * 1024; }
  int first_key() const { return scratch_->chunks->chunk[chunk_].key; }

  // seen_[j]: the rows that see key j of the chunk.
  __attribute__((noinline)) void find_seen() {
    const LatentTile& tile = scratch_->tiles[t_];
    const int first = first_key();
    const vi lo = _mm512_load_si512(tile.lo), hi = _mm512_load_si512(tile.hi);
    for (int j = 0; j < 32; ++j) {
      const vi key = _mm512_set1_epi32(first + j);
      seen_[j] = _mm512_cmp_epi32_mask(key, lo, _MM_CMPINT_NLT) & _mm512_cmp_epi32_mask(key, hi, _MM_CMPINT_LT);
    }
    for (int r = 0; tile.custom && r < kLatentRows; ++r) {
      const Row& row = scratch_->rows[t_ * kLatentRows + r];
      for (int j = 0; row.custom && j < 32; ++j)
        if ((seen_[j] >> r & 1) && row.custom[first + j - row.first_byte] == 0) seen_[j] &= __mmask16(~(1u << r));
    }
  }
  vf weight_of(int j) const {
    const vf x = _mm512_load_ps(scores_ + 16 * j);
    vf exponent = _mm512_fmsub_ps(x, scale_, max_);
    exponent = _mm512_mask_sub_ps(exponent, large_, rounded_product(x, scale_), max_);
    return _mm512_maskz_mov_ps(seen_[j], exp2_bf16(exponent));
  }

  const LatentScratch* scratch_ = nullptr;
  const float* scores_ = nullptr;
  int t_ = 0, chunk_ = 0, key_ = 32;  // key_: the next one; -1: the reference comes first
  bool whole_ = false;                // every row sees all keys, in the plain way
  __mmask16 large_ = 0;
  vf scale_, max_, sum_;
  __mmask16 seen_[32];
};

// Rounds products of pairs of weights with factors.
IMBREX_INLINE vi rescaled_pairs(vi pairs, vf factors) {
  const vf first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  const vf second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))));
  return pair_weights(_mm512_mul_ps(first, factors), _mm512_mul_ps(second, factors));
}

}  // namespace
}  // namespace imbrex::cpu
