// The kernel of the short convolution, in vectors as wide as the instruction set that it is compiled for has.
// Roofline: three rows are read for one that is written, in the plain form one, with 2 * width + 2 operations an element, so memory is the
// limit. SiLU takes 30 operations more.
#include "cpu/short_conv_params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/vectors.inl"
#include "cpu/kernels/exp_vectors.inl"
// clang-format on

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace imbrex::cpu {
namespace {

// Vectors of a row, a cache line longer than its channels: rows at distances of whole memory pages would all use the same few lines of L1.
constexpr int kRowVectors = (kShortConvDims * 4 + 64) / int(sizeof(Floats));

// Channels of one call: weights by tap, and the last `width` rows of h, in a ring.
struct ShortConvTile {
  Floats taps[kShortConvWidth][kRowVectors];
  Floats bias[kRowVectors];
  Floats h[kShortConvWidth][kRowVectors];
};

// What is computed, besides the type: a kernel is compiled for each.
enum ShortConvCode { kGated, kPlain, kPlainSilu };
constexpr int parts_of(int code) { return code == kGated ? 3 : 1; }  // rows of `dim` channels that the input has of a token

// Computes h of n channels of a token, from its B on; rounded as the state is. In the plain form it is there.
template <int type, int code>
inline Floats load_h(const ShortConvParams& p, const char* b, int n) {
  constexpr long size = type == kF32 ? 4 : 2;
  if constexpr (code != kGated) return load_vector<type>(b, n);
  const Floats product = load_vector<type>(b, n) * load_vector<type>(b + 2L * p.dim * size, n);
  if constexpr (type == kF32) return product;
  if constexpr (type == kBf16) return (Floats)(to_codes<type>(product) << 16);
  const Halves codes = __builtin_convertvector(to_codes<type>(product), Halves);
  return load_vector<type>(reinterpret_cast<const char*>(&codes), kLanes);
}

// Calls visit(i, offset in bytes, n) for each vector of n channels.
template <int type, class Visit>
inline void for_vectors(int dims, const Visit& visit) {
  constexpr long size = type == kF32 ? 4 : 2;
  int i = 0;
  for (; (i + 1) * kLanes <= dims; ++i) visit(i, i * kLanes * size, kLanes);
  if (i * kLanes < dims) visit(i, i * kLanes * size, dims - i * kLanes);
}

// What becomes of the sums of n channels of a token, which has its C at `c`.
template <int type, int code>
inline Floats output_of(Floats sum, const char* c, int n) {
  if constexpr (code == kGated) return sum * load_vector<type>(c, n);
  if constexpr (code == kPlainSilu) return sum / (exp_vector(-sum) + 1.f);
  return sum;
}

// Past the caches, lines are not read before they are written.
template <int type>
inline void store_output([[maybe_unused]] const ShortConvParams& p, Floats y, int n, char* to) {
#if defined(__AVX2__)
  if (p.past_caches && n == kLanes) {
    if constexpr (type == kF32) {
#if defined(__AVX512F__)
      return _mm512_stream_ps(reinterpret_cast<float*>(to), (__m512)y);
#else
      return _mm256_stream_ps(reinterpret_cast<float*>(to), (__m256)y);
#endif
    } else {
      const Halves codes = __builtin_convertvector(to_codes<type>(y), Halves);
#if defined(__AVX512F__)
      return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)codes);
#else
      return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)codes);
#endif
    }
  }
#endif
  store_vector<type>(y, n, to);
}
// What was stored past the caches is there for other threads.
inline void end_outputs([[maybe_unused]] const ShortConvParams& p) {
#if defined(__AVX2__)
  if (p.past_caches) _mm_sfence();
#endif
}

constexpr int kTogether = 4;  // tokens of the plain form whose sums are computed side by side: they share weights, and most of their h

// So many tokens from `input` on, as run_item() computes one. `next`: the rows that are read soon; `newest`: where the ring takes the next
// row. Rows at distances of whole memory pages use the same few lines of L1, so they are fetched no further than L2. In the gated form
// there would be too many of them at a time.
template <int type, int code, int width>
void run_together(const ShortConvParams& p, const char* input, const char* const (&next)[kTogether], char* out, int newest, int dims,
                  ShortConvTile& tile) {
  static_assert(code != kGated && kTogether >= width - 1);
  constexpr int before = width - 1;
  const Floats* old[before];  // oldest first
  Floats* kept[before];
  for (int i = 0; i < before; ++i) {
    old[i] = tile.h[(newest + 1 + i) % width];
    kept[i] = tile.h[(newest + kTogether - before + i) % width];
  }
  for_vectors<type>(
      dims, [&](int i, long at, int n) __attribute__((always_inline)) {
        Floats taps[width], h[before + kTogether];
        for (int tap = 0; tap < width; ++tap) taps[tap] = tile.taps[tap][i];
        for (int k = 0; k < before; ++k) h[k] = old[k][i];
        for (int t = 0; t < kTogether; ++t) {
          __builtin_prefetch(next[t] + at, 0, 2);
          h[before + t] = load_vector<type>(input + t * p.input_stride + at, n);
        }
        for (int t = 0; t < kTogether; ++t) {
          Floats y = tile.bias[i];
          for (int tap = 0; tap < width; ++tap) y += taps[tap] * h[t + tap];
          store_output<type>(p, output_of<type, code>(y, nullptr, n), n, out + t * p.out_stride + at);
        }
        for (int k = 0; k < before; ++k) kept[k][i] = h[kTogether + k];
      });
}

// A token's output. `newest`: where the ring takes the token's h; it becomes the place for the next one's. `next`: the rows that are read
// soon.
template <int type, int code>
inline __attribute__((always_inline)) void run_token(const ShortConvParams& p, int token, const char* next, int dim, int dims, int& newest,
                                                     ShortConvTile& tile) {
  constexpr long size = type == kF32 ? 4 : 2;
  const char* const b = p.input + token * p.input_stride + dim * size;
  char* const out = p.out + token * p.out_stride + dim * size;
  const Floats* rows[kShortConvWidth];  // oldest first
  for (int i = 0, row = newest; i < p.width; ++i) rows[i] = tile.h[row = row + 1 == p.width ? 0 : row + 1];
  Floats* const mine = tile.h[newest];
  for_vectors<type>(dims, [&](int i, long at, int n) {
    // Rows of different tokens are memory pages apart, so the processor does not prefetch them.
    for (int part = 0; part < parts_of(code); ++part) __builtin_prefetch(next + at + long(part) * p.dim * size);
    mine[i] = load_h<type, code>(p, b + at, n);
    Floats y = tile.bias[i];
    for (int tap = 0; tap < p.width; ++tap) y += tile.taps[tap][i] * rows[tap][i];
    store_output<type>(p, output_of<type, code>(y, b + at + p.dim * size, n), n, out + at);
  });
  newest = newest + 1 == p.width ? 0 : newest + 1;
}

// Drafts that may be a tree: each begins from the rows of the token that it follows, and leaves its own.
template <int type, int code>
__attribute__((noinline)) void run_drafts(const ShortConvParams& p, const ShortConvItem& item, const char* after, int dim, int dims,
                                          ShortConvTile& tile) {
  constexpr long size = type == kF32 ? 4 : 2;
  const int before = p.width - 1;
  char* const state = p.state + item.slot * p.state_slot_stride + dim * size;
  for (int number = 1; number <= item.drafts; ++number) {
    const int token = item.request_end + number - 1, from = p.parent_rows != nullptr ? p.parent_rows[token] : number - 1;
    for (int i = 0; i < before; ++i)
      for_vectors<type>(
          dims, [&](int v, long at, int n) { tile.h[i][v] = load_vector<type>(state + (from * before + i) * p.state_row_stride + at, n); });
    int newest = before;
    run_token<type, code>(p, token, after, dim, dims, newest, tile);
    for (int i = 0; i < before; ++i)
      for_vectors<type>(dims, [&](int v, long at, int n) {
        store_vector<type>(tile.h[1 + i][v], n, state + (number * before + i) * p.state_row_stride + at);
      });
  }
}

template <int type, int code>
void run_item(const ShortConvParams& p, const ShortConvItem& item, const char* after, int dim, int dims, ShortConvTile& tile) {
  constexpr long size = type == kF32 ? 4 : 2;
  const int before = p.width - 1;
  char* const state = p.state + item.slot * p.state_slot_stride + dim * size;
  const char* const source =
      p.state + item.source * p.state_slot_stride + item.first_row * (p.tree ? before : 1) * p.state_row_stride + dim * size;
  const auto row_of = [&](int token) { return p.input + token * p.input_stride + dim * size; };
  // The row of h of a token of the step, or of an earlier token.
  const auto load_row_h = [&](int token, Floats* h) {
    const char* const b = row_of(token < item.request_begin ? item.request_begin : token);
    const char* const gone = source + (before - (item.request_begin - token)) * p.state_row_stride;
    for_vectors<type>(dims, [&](int i, long at, int n) {
      h[i] = token >= item.request_begin ? load_h<type, code>(p, b + at, n) : item.fresh ? Floats{} : load_vector<type>(gone + at, n);
    });
  };
  for (int i = 0; i < before; ++i) load_row_h(item.begin - before + i, tile.h[i]);
  int newest = before, t = item.begin;  // where the ring takes the next row
  if constexpr (code != kGated) {       // of the usual widths
    const auto run = p.width == 3 ? run_together<type, code, 3> : p.width == 4 ? run_together<type, code, 4> : nullptr;
    for (; run != nullptr && t + kTogether <= item.end; t += kTogether) {
      const char* next[kTogether];
      for (int i = 0; i < kTogether; ++i) next[i] = t + kTogether + i < item.end ? row_of(t + kTogether + i) : after;
      run(p, row_of(t), next, p.out + t * p.out_stride + dim * size, newest, dims, tile);
      newest = (newest + kTogether) % p.width;
    }
  }
  for (; t < item.end; ++t) run_token<type, code>(p, t, t + 1 < item.end ? row_of(t + 1) : after, dim, dims, newest, tile);
  if (item.begin != item.request_begin) return;
  // Row i of the state becomes a later one of the old state, which is not written yet, or h of a token.
  const int drafts = p.tree ? 0 : item.drafts;
  for (int i = 0; i < before + drafts; ++i) {
    Floats* const h = tile.h[0];
    load_row_h(item.request_end - drafts - before + i, h);
    for_vectors<type>(dims, [&](int v, long at, int n) { store_vector<type>(h[v], n, state + i * p.state_row_stride + at); });
  }
  if (p.tree && item.drafts > 0) run_drafts<type, code>(p, item, after, dim, dims, tile);
}

template <int type, int code>
void run_items(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end) {
  constexpr long size = type == kF32 ? 4 : 2;
  const int dims = dim_end - dim_begin;
  ShortConvTile tile;
  for (int tap = 0; tap < p.width; ++tap) {
    float* const taps = reinterpret_cast<float*>(tile.taps[tap]);
    for (int d = 0; d < dims; ++d)
      taps[d] = load_element(p.weight + (dim_begin + d) * p.weight_dim_stride + tap * p.weight_tap_stride, type);
  }
  for_vectors<type>(dims, [&](int i, long at, int n) {
    tile.bias[i] = p.bias == nullptr ? Floats{} : load_vector<type>(p.bias + dim_begin * size + at, n);
  });
  for (int i = 0; i < count; ++i) {
    const int after = items[i + 1 < count ? i + 1 : i].begin;  // the token that is asked for at the end
    run_item<type, code>(p, items[i], p.input + after * p.input_stride + dim_begin * size, dim_begin, dims, tile);
  }
  end_outputs(p);
}

template <int code>
void run_code(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end) {
  switch (p.type) {
    case kF32: run_items<kF32, code>(p, items, count, dim_begin, dim_end); break;
    case kF16: run_items<kF16, code>(p, items, count, dim_begin, dim_end); break;
    default: run_items<kBf16, code>(p, items, count, dim_begin, dim_end); break;
  }
}

void run_short_conv(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end) {
  const auto run = p.gated ? run_code<kGated> : p.silu ? run_code<kPlainSilu> : run_code<kPlain>;
  run(p, items, count, dim_begin, dim_end);
}

}  // namespace
}  // namespace imbrex::cpu
