// The kernel of the short convolution, in vectors as wide as the instruction set that it is compiled for has.
// Roofline: three rows are read for one that is written, in the plain form one, with 2 * width + 2 operations an element, so memory is the
// limit. SiLU takes 30 operations more.
#include "cpu/short_conv_params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/vectors.inl"
#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/exp_vectors.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

// What is computed, besides the type: a kernel is compiled for each.
enum ShortConvCode { kGated, kPlain, kPlainSilu };
constexpr int parts_of(int code) { return code == kGated ? 3 : 1; }  // rows of `dim` channels that the input has of a token

// The rows of floats that a call works with, of its channels: weights by tap, biases, h of the `width` - 1 tokens in front of the next one,
// oldest first, and a row for what is at hand. They are a line of the cache longer than the channels: at distances of whole memory pages
// they would all use the same few lines of L1.
class ShortConvRows {
 public:
  static long row_bytes(int dims) { return (dims + kPairLanes - 1) / kPairLanes * long(sizeof(Pair)) + 64; }
  static long bytes(int dims, int width) { return (2 * width + 1) * row_bytes(dims); }
  ShortConvRows(char* memory, int dims, int width) : memory_(memory), row_bytes_(row_bytes(dims)), width_(width) {}
  Pair* taps(int tap) const { return at(tap); }
  Pair* bias() const { return at(width_); }
  Pair* h(int i) const { return at(width_ + 1 + i); }  // i of `width` - 1: the row at hand

 private:
  Pair* at(int row) const { return reinterpret_cast<Pair*>(memory_ + row * row_bytes_); }
  char* memory_;
  long row_bytes_;
  int width_;
};

// Calls visit(i, offset in bytes, n) for each pair of n channels.
template <int type, class Visit>
inline void for_pairs(int dims, const Visit& visit) {
  constexpr long size = type == kF32 ? 4 : 2;
  int i = 0;
  for (; (i + 1) * kPairLanes <= dims; ++i) visit(i, i * kPairLanes * size, kPairLanes);
  if (i * kPairLanes < dims) visit(i, i * kPairLanes * size, dims - i * kPairLanes);
}

// Computes h of n channels of a token, from its B on; rounded as the state is. In the plain form it is there.
template <int type, int code>
inline Pair load_h(const ShortConvParams& p, const char* b, int n) {
  constexpr long size = type == kF32 ? 4 : 2;
  const Pair first = load_pair<type>(b, n);
  if constexpr (code != kGated) return first;
  const Pair x = load_pair<type>(b + 2L * p.dim * size, n), product = {first.a * x.a, first.b * x.b};
  if constexpr (type == kF32) return product;
  return pair_of<type>(codes_of<type>(product));
}

// What becomes of the sums of n channels of a token, which has its C at `c`.
template <int type, int code>
inline Pair output_of(const Pair& sum, const char* c, int n) {
  if constexpr (code == kGated) {
    const Pair gate = load_pair<type>(c, n);
    return {sum.a * gate.a, sum.b * gate.b};
  }
  if constexpr (code == kPlainSilu) return {sum.a / (exp_vector(-sum.a) + 1.f), sum.b / (exp_vector(-sum.b) + 1.f)};
  return sum;
}

template <int type>
inline void store_output(const ShortConvParams& p, const Pair& y, int n, char* to) {
  p.past_caches&& n == kPairLanes ? stream_pair<type>(y, to) : store_pair<type>(y, n, to);
}

// Where h of the tokens in front lies: in rows of floats.
struct InRows {
  const ShortConvRows& rows;
  Pair load(int k, int i, long, int) const { return rows.h(k)[i]; }
  void store(int k, int i, long, int, const Pair& h) const { rows.h(k)[i] = h; }
};
// Or in the state, which is written in the place of what is read. `from` null: there is none. `next`: the state that is read soon.
template <int type>
struct InState {
  const char *from, *next;
  char* to;
  long row_stride;
  Pair load(int k, int, long at, int n) const {
    __builtin_prefetch(next + k * row_stride + at, 0, 2);
    return from == nullptr ? Pair{} : load_pair<type>(from + k * row_stride + at, n);
  }
  void store(int k, int, long at, int n, const Pair& h) const { store_pair<type>(h, n, to + k * row_stride + at); }
};

// The outputs of `count` tokens from `input` on, whose sums are computed side by side: they share weights, and most of their h.
// `next`: the rows that are read soon. Rows at distances of whole memory pages use the same few lines of L1, so they are fetched no further
// than L2. `known_width`: 0 for any.
template <int type, int code, int known_width, int count, class History>
inline __attribute__((always_inline)) void run_tokens(const ShortConvParams& p, const char* input, const char* const (&next)[count],
                                                      char* out, int dims, const ShortConvRows& rows, const History& history) {
  constexpr long size = type == kF32 ? 4 : 2;
  const int width = known_width == 0 ? p.width : known_width, before = width - 1;
  for_pairs<type>(
      dims, [&](int i, long at, int n) __attribute__((always_inline)) {
        Pair h[(known_width == 0 ? kShortConvWidth : known_width) - 1 + count];
        for (int k = 0; k < before; ++k) h[k] = history.load(k, i, at, n);
        for (int t = 0; t < count; ++t) {
          for (int part = 0; part < parts_of(code); ++part) __builtin_prefetch(next[t] + at + long(part) * p.dim * size, 0, 2);
          h[before + t] = load_h<type, code>(p, input + t * p.input_stride + at, n);
        }
        Pair y[count];
        for (int t = 0; t < count; ++t) {
          y[t] = rows.bias()[i];
          for (int tap = 0; tap < width; ++tap) {
            const Pair& w = rows.taps(tap)[i];
            y[t].a += w.a * h[t + tap].a, y[t].b += w.b * h[t + tap].b;
          }
          y[t] = output_of<type, code>(y[t], input + t * p.input_stride + at + p.dim * size, n);
        }
        for (int t = 0; t < count; ++t) store_output<type>(p, y[t], n, out + t * p.out_stride + at);
        for (int k = 0; k < before; ++k) history.store(k, i, at, n, h[count + k]);
      });
}

// Tokens that are computed side by side. In the gated form two bring as many rows from memory as four do in the plain one, which are better
// by a fifth than two there.
constexpr int together_of(int code) { return code == kGated ? 2 : 4; }

// A call's channels of the items' tokens.
template <int type, int code, int known_width>
class ShortConvCall {
 public:
  ShortConvCall(const ShortConvParams& p, int dim_begin, int dim_end, char* scratch)
      : p_(p), dim_(dim_begin), dims_(dim_end - dim_begin), rows_(scratch, dims_, p.width) {
    for (int tap = 0; tap < p.width; ++tap)
      for_pairs<type>(dims_, [&](int i, long, int n) { rows_.taps(tap)[i] = load_weights(dim_ + i * kPairLanes, tap, n); });
    for_pairs<type>(dims_, [&](int i, long at, int n) {
      rows_.bias()[i] = p.bias == nullptr ? Pair{} : load_pair<type>(p.bias + dim_ * kSize + at, n);
    });
  }

  void run(const ShortConvItem* items, int count) const {
    for (int i = 0; i < count; ++i) run_item(items[i], items[i + 1 < count ? i + 1 : i]);
    if (p_.past_caches) end_stream();
  }

 private:
  static constexpr long kSize = type == kF32 ? 4 : 2;
  static constexpr int kTogether = together_of(code);

  Pair load_weights(int dim, int tap, int n) const {
    char run[kPairLanes * kSize];
    const char* from = p_.weight + dim * p_.weight_dim_stride + tap * p_.weight_tap_stride;
    for (int i = 0; i < kPairLanes && i < n; ++i, from += p_.weight_dim_stride) __builtin_memcpy(run + i * kSize, from, kSize);
    return load_pair<type>(run, n);
  }

  const char* row_of(int token) const { return p_.input + token * p_.input_stride + dim_ * kSize; }
  char* out_of(int token) const { return p_.out + token * p_.out_stride + dim_ * kSize; }
  char* state_of(const ShortConvItem& item) const { return p_.state + item.slot * p_.state_slot_stride + dim_ * kSize; }
  const char* source_of(const ShortConvItem& item) const {
    const int row = item.first_row * (p_.tree ? p_.width - 1 : 1);
    return p_.state + item.source * p_.state_slot_stride + row * p_.state_row_stride + dim_ * kSize;
  }

  // The row of h of a token of the step, or of an earlier token.
  void load_row(const ShortConvItem& item, int token, Pair* h) const {
    const char* const b = row_of(token < item.request_begin ? item.request_begin : token);
    const char* const gone = source_of(item) + (p_.width - 1 - (item.request_begin - token)) * p_.state_row_stride;
    for_pairs<type>(dims_, [&](int i, long at, int n) {
      h[i] = token >= item.request_begin ? load_h<type, code>(p_, b + at, n) : item.fresh ? Pair{} : load_pair<type>(gone + at, n);
    });
  }
  void store_row(const Pair* h, char* to) const {
    for_pairs<type>(dims_, [&](int i, long at, int n) { store_pair<type>(h[i], n, to + at); });
  }

  // As many tokens from `token` on as rows are said to be read soon.
  template <int count, class History>
  void run_some(int token, const char* const (&next)[count], const History& history) const {
    run_tokens<type, code, known_width>(p_, row_of(token), next, out_of(token), dims_, rows_, history);
  }

  // A request of one token: what is read of its state and what is written meet in one pass.
  void run_alone(const ShortConvItem& item, const ShortConvItem& after) const {
    const char* const next[] = {row_of(after.begin)};
    run_some(item.begin, next,
             InState<type>{item.fresh ? nullptr : source_of(item), source_of(after), state_of(item), p_.state_row_stride});
  }

  // `after`: the item that comes next.
  void run_item(const ShortConvItem& item, const ShortConvItem& after) const {
    const int before = p_.width - 1;
    if (item.begin == item.request_begin && item.request_end == item.begin + 1 && item.drafts == 0) return run_alone(item, after);
    for (int i = 0; i < before; ++i) load_row(item, item.begin - before + i, rows_.h(i));
    const char* const last = row_of(after.begin);
    const auto next_of = [&](int token) { return token < item.end ? row_of(token) : last; };
    int t = item.begin;
    for (; t + kTogether <= item.end; t += kTogether) {
      const char* next[kTogether];
      for (int i = 0; i < kTogether; ++i) next[i] = next_of(t + kTogether + i);
      run_some(t, next, InRows{rows_});
    }
    for (; t < item.end; ++t) {
      const char* const next[] = {next_of(t + 1)};
      run_some(t, next, InRows{rows_});
    }
    if (item.begin != item.request_begin) return;
    // Row i of the state becomes a later one of the old state, which is not written yet, or h of a token.
    const int drafts = p_.tree ? 0 : item.drafts;
    for (int i = 0; i < before + drafts; ++i) {
      load_row(item, item.request_end - drafts - before + i, rows_.h(before));
      store_row(rows_.h(before), state_of(item) + i * p_.state_row_stride);
    }
    if (p_.tree && item.drafts > 0) run_drafts(item, last);
  }

  // Drafts that may be a tree: each begins from the rows of the token that it follows, and leaves its own.
  __attribute__((noinline)) void run_drafts(const ShortConvItem& item, const char* last) const {
    const long rows_stride = (p_.width - 1) * p_.state_row_stride;
    char* const state = state_of(item);
    for (int number = 1; number <= item.drafts; ++number) {
      const int token = item.request_end + number - 1, from = p_.parent_rows != nullptr ? p_.parent_rows[token] : number - 1;
      const char *const next[] = {last}, *const parent = state + from * rows_stride;
      run_some(token, next, InState<type>{parent, parent, state + number * rows_stride, p_.state_row_stride});
    }
  }

  const ShortConvParams& p_;
  int dim_, dims_;
  ShortConvRows rows_;
};

template <int code, int known_width>
void run_width(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end, char* scratch) {
  switch (p.type) {
    case kF32: return ShortConvCall<kF32, code, known_width>(p, dim_begin, dim_end, scratch).run(items, count);
    case kF16: return ShortConvCall<kF16, code, known_width>(p, dim_begin, dim_end, scratch).run(items, count);
    default: return ShortConvCall<kBf16, code, known_width>(p, dim_begin, dim_end, scratch).run(items, count);
  }
}
template <int code>
void run_code(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end, char* scratch) {
  const auto run = p.width == 3 ? run_width<code, 3> : p.width == 4 ? run_width<code, 4> : run_width<code, 0>;
  run(p, items, count, dim_begin, dim_end, scratch);
}

void run_short_conv(const ShortConvParams& p, const ShortConvItem* items, int count, int dim_begin, int dim_end, char* scratch) {
  const auto run = p.gated ? run_code<kGated> : p.silu ? run_code<kPlainSilu> : run_code<kPlain>;
  run(p, items, count, dim_begin, dim_end, scratch);
}
long short_conv_scratch_bytes(int dims, int width) { return ShortConvRows::bytes(dims, width); }

}  // namespace
}  // namespace imbrex::cpu
