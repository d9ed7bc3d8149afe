// The short convolution of LFM2, docs/kernels/short_conv.md; launched by cuda/short_conv/short_conv.cpp.
//
// Memory: three rows of a token are read and one is written, 8 bytes a channel in 16 bits, for 2 * kWidth + 2 operations. A warp takes
// some tokens one after the other (a chunk), a lane some neighbouring channels of them: the h that later tokens need stay in registers.
//
// Chunks are cut out of the batch without regard to where requests begin. The chunk that has the first token of a request owns its state:
// it reads it, computes the tokens that depend on it (the first kWidth - 1, even if they are in the next chunk), and writes it. So no other
// chunk touches the slot, and no chunk waits for another.
#include "async.cuh"
#include "convert.cuh"
#include "cuda/short_conv_params.h"

namespace imbrex::cuda {

constexpr int kBefore = kWidth - 1, kSize = element_bytes(kType), kWarps = kShortConvThreads / 32;
constexpr int kWide = kShortConvWideBytes / kSize;                  // channels of a lane
constexpr int kNever = 0x7fffffff;                                  // no token
constexpr int kRowBytes = kShortConvThreads * kShortConvWideBytes;  // of a token and one of B, C and x, in shared memory

extern "C" __device__ const unsigned short_conv_wide_smem_bytes = kStages * 3 * kRowBytes;
extern __shared__ __align__(128) char memory[];

// Elements that lie one after the other, as they are in memory.
template <int count>
struct Elements {
  u32 words[(count * kSize + 3) / 4];
  DEVICE float operator[](int i) const {
    if constexpr (kType == kF32) return float_of(words[i]);
    const float2 pair = kType == kBf16 ? unpack_bf16(words[i / 2]) : unpack_f16(words[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  }
};

DEVICE u32 load_element(const char* p) { return kSize == 4 ? *reinterpret_cast<const u32*>(p) : *reinterpret_cast<const u16*>(p); }

// `once`: the memory is not written while the kernel runs, and hardly read by other threads.
template <int count, bool once>
DEVICE Elements<count> load(const char* p) {
  Elements<count> e;
  if constexpr (count == 1) {
    e.words[0] = load_element(p);
  } else {
#pragma unroll
    for (int i = 0; i < count * kSize / 16; ++i) {
      const uint4 v = once ? load_once_16(p + 16 * i) : *reinterpret_cast<const uint4*>(p + 16 * i);
      e.words[4 * i] = v.x, e.words[4 * i + 1] = v.y, e.words[4 * i + 2] = v.z, e.words[4 * i + 3] = v.w;
    }
  }
  return e;
}

template <int count>
DEVICE void store(char* p, const Elements<count>& e) {
  if constexpr (count > 1) {
    *reinterpret_cast<uint4*>(p) = {e.words[0], e.words[1], e.words[2], e.words[3]};
  } else if constexpr (kSize == 4) {
    *reinterpret_cast<u32*>(p) = e.words[0];
  } else {
    *reinterpret_cast<u16*>(p) = u16(e.words[0]);
  }
}

template <int count>
DEVICE Elements<count> rounded(const float (&x)[count]) {
  Elements<count> e;
  if constexpr (kType == kF32) {
#pragma unroll
    for (int i = 0; i < count; ++i) e.words[i] = bits_of(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
      const float high = i + 1 < count ? x[i + 1 < count ? i + 1 : i] : 0.f;
      e.words[i / 2] = kType == kBf16 ? pack_bf16(x[i], high) : pack_f16(x[i], high);
    }
  }
  return e;
}

// h, as it is kept.
template <int count>
DEVICE Elements<count> product(const Elements<count>& b, const Elements<count>& x) {
  float h[count];
#pragma unroll
  for (int i = 0; i < count; ++i) h[i] = b[i] * x[i];
  return rounded(h);
}

// The weights of a lane's channels.
template <int count>
struct Weights {
  Elements<count * kWidth> taps;  // kWidth of a channel one after the other
  Elements<count> bias;
};

template <int count>
DEVICE Weights<count> load_weights(const ShortConvParams& p, int channel) {
  if constexpr (count > 1) {
    Weights<count> w;
    w.taps = load<count * kWidth, false>(p.weight + long(channel) * kWidth * kSize);
    if constexpr (kHasBias) w.bias = load<count, false>(p.bias + long(channel) * kSize);
    return w;
  } else {
    constexpr int kEach = 4 / kSize;  // elements of a word
    Weights<1> w;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const u32 tap = load_element(p.weight + channel * p.weight_dim_stride + i * p.weight_tap_stride);
      w.taps.words[i / kEach] = i % kEach == 0 ? tap : w.taps.words[i / kEach] | tap << 16;
    }
    if constexpr (kHasBias) w.bias.words[0] = load_element(p.bias + long(channel) * kSize);
    return w;
  }
}

// C * (bias + sum over taps), in the order of the taps whatever path the tokens came by. Between tokens weights stay packed: as floats
// those of 16 bits would take twice the registers.
template <int count>
DEVICE Elements<count> output(Weights<count>& w, const Elements<count> (&h)[kWidth], const Elements<count>& c) {
  if constexpr (kSize < 4) {
#pragma unroll
    for (u32& word : w.taps.words) word = u32(computed_here(int(word)));
  }
  float y[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    y[i] = kHasBias ? w.bias[i] : 0.f;
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap) y[i] = __fmaf_rn(w.taps[i * kWidth + tap], h[tap][i], y[i]);
    y[i] *= c[i];
  }
  return rounded(y);
}

// A lane's part of the row of a token.
template <int count>
struct Token {
  Elements<count> b, c, x;
};

// A lane's channels of the tokens of a chunk. Wide ones are copied to shared memory, kStages tokens ahead; a lane reads only what it has
// copied itself, so that lanes do not wait for each other.
template <int count>
class Rows {
 public:
  DEVICE Rows(const ShortConvParams& p, int begin, int end, int channel)
      : first_(p.bcx + long(channel) * kSize), stride_(p.bcx_stride), part_(long(p.dim) * kSize), end_(end), asked_(begin) {
    if constexpr (count > 1) {
      place_ = shared_address(memory) + u32(threadIdx.x) * kShortConvWideBytes;
#pragma unroll
      for (int i = 0; i < kStages; ++i) ask();
    }
  }
  // Tokens of the chunk have to be taken in order, all of them; others, which lie behind it, may come in between.
  DEVICE Token<count> take(int token) {
    if constexpr (count > 1) {
      if (token < end_) {
        copy_async_wait<kStages - 1>();
        Token<count> t;
        t.b = from_shared(0), t.c = from_shared(1), t.x = from_shared(2);
        ask();
        return t;
      }
    }
    return {read(token, 0), read(token, 1), read(token, 2)};
  }
  DEVICE Elements<count> h(int token) const { return product(read(token, 0), read(token, 2)); }
  DEVICE void prefetch_h(int token) const { prefetch_l2(at(token, 0)), prefetch_l2(at(token, 2)); }

 private:
  DEVICE const char* at(int token, int part) const { return first_ + token * stride_ + part * part_; }
  DEVICE Elements<count> read(int token, int part) const { return load<count, true>(at(token, part)); }
  DEVICE Elements<count> from_shared(int part) const {
    const uint4 v = load_shared(place_ + u32(stage_ * 3 + part) * kRowBytes);
    return {v.x, v.y, v.z, v.w};
  }
  // For the next token, in the place of the one that was read last.
  DEVICE void ask() {
    if (asked_ < end_) {
#pragma unroll
      for (int part = 0; part < 3; ++part) copy_async<16>(place_ + u32(stage_ * 3 + part) * kRowBytes, at(asked_, part));
    }
    ++asked_;
    copy_async_commit();
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  const char* first_;
  long stride_, part_;
  int end_, asked_, stage_ = 0;
  u32 place_;
};

// Tokens [from, to) of a request that ends in front of `end`. `kept`: the state's rows are h of the tokens from there to the end, of which
// those from `to` on are not this call's; kNever: another chunk owns the state. `state`: row 0 of the request's slot.
template <int count>
DEVICE void run_tokens(const ShortConvParams& p, Weights<count>& w, const StateRequest& request, Rows<count>& rows, char* state, int from,
                       int to, int end, int kept, int channel) {
  for (int token = max(to, kept); token < end; ++token) rows.prefetch_h(token);
  Elements<count> h[kWidth] = {};  // oldest first, and a place for the token's own
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    if (kept == kNever) {
      h[i] = rows.h(from - kBefore + i);
    } else if (request.first_row >= 0) {
      h[i] = load<count, false>(state + (request.first_row + i) * p.state_row_stride);
    }
  }
  const auto keep = [&](int token, const Elements<count>& of_token) {
    if (token >= kept) store(state + (token - kept) * p.state_row_stride, of_token);
  };
#pragma unroll
  for (int i = 0; i < kBefore; ++i) keep(from - kBefore + i, h[i]);
#pragma unroll 1
  for (int token = from; token < to; ++token) {
    const Token<count> t = rows.take(token);
    h[kBefore] = product(t.b, t.x);
    keep(token, h[kBefore]);
    store(p.out + token * p.out_stride + long(channel) * kSize, output(w, h, t.c));
#pragma unroll
    for (int i = 0; i < kBefore; ++i) h[i] = h[i + 1];
  }
#pragma unroll 1
  for (int token = max(to, kept); token < end; ++token) keep(token, rows.h(token));
}

// Tokens [begin, end) of the batch, of which the first is of request `index`.
template <int count>
DEVICE void run_chunk(const ShortConvParams& p, int index, int begin, int end, int channel) {
  Rows<count> rows(p, begin, min(end, p.num_tokens), channel);
  Weights<count> w = load_weights<count>(p, channel);
  int taken = begin;
#pragma unroll 1
  for (int next = begin; next < end; ++index) {
    const StateRequest request = p.requests[index];
    const int request_end = p.requests[index + 1].begin;
    if (request_end <= next) continue;
    next = request_end;
    if (request_end > p.num_tokens) break;
    const bool owns = request.begin >= begin, is_there = request.slot < p.num_slots;
    if (owns && !is_there && p.broken != nullptr && channel == 0) atomicMax(p.broken + kStateSlotIsThere, index + 1);
    if (request.slot < 0 || !is_there) continue;
    const int first = min(request.begin + kBefore, request_end);  // that does not depend on the state
    const int from = owns ? request.begin : max(begin, first), to = owns ? max(min(request_end, end), first) : min(request_end, end);
    if (from >= to) continue;
    for (; taken < from; ++taken) rows.take(taken);
    char* const state = p.state + request.slot * p.state_slot_stride + long(channel) * kSize;
    run_tokens<count>(p, w, request, rows, state, from, to, request_end, owns ? request_end - request.drafts - kBefore : kNever, channel);
    taken = to;
  }
  copy_async_wait<0>();
}

// The last request that begins at the token or in front of it. All lanes of a warp together, each looks at another one.
DEVICE int find_request(const StateRequest* requests, int count, int token) {
  int first = 0;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane_id() * step;
    const u32 begun = __ballot_sync(kFullWarp, at < count && requests[first + min(at, count - 1)].begin <= token);
    const int last = max(__popc(begun) - 1, 0) * step;
    first += last;
    count = min(step, count - last);
  }
  return first;
}

template <int count>
DEVICE void short_conv_of(const ShortConvParams& p) {
  constexpr int kTile = 32 * count;  // channels of a warp
  if (!p.lists_are_there) griddep_wait();
  const StateCounts counts = *p.counts;
  const unsigned tiles = unsigned(p.dim + kTile - 1) / kTile;
  const int chunk = short_conv_chunk(counts, p.chunks_at_once, p.most_chunks);
  const unsigned chunks = unsigned(counts.num_tokens + chunk - 1) / unsigned(chunk), units = chunks * tiles;
  for (unsigned unit = blockIdx.x * kWarps + unsigned(warp_id()); unit < units; unit += gridDim.x * kWarps) {
    // With chunks of one token the warps of a block have the same channels, so that they read weights from L1; with longer chunks they have
    // neighbouring parts of rows.
    const unsigned number = chunk == 1 ? unit % chunks : unit / tiles, tile = chunk == 1 ? unit / chunks : unit % tiles;
    const int begin = int(number) * chunk, end = min(begin + chunk, counts.num_tokens), channel = int(tile) * kTile + lane_id() * count;
    const int request = find_request(p.requests, counts.num_reqs, begin);
    griddep_wait();
    if (channel < p.dim) run_chunk<count>(p, request, begin, end, channel);
  }
  griddep_wait();  // also where there is nothing to do: the kernel behind this one may rely on the one in front of it
  griddep_launch();
}

// Rows, weights and bias that are aligned to 16 bytes, weights of a channel one after the other; and others.
extern "C" __global__ void __launch_bounds__(kShortConvThreads, kBlocks) short_conv_wide(const __grid_constant__ ShortConvParams p) {
  short_conv_of<kWide>(p);
}
extern "C" __global__ void __launch_bounds__(kShortConvThreads, kBlocks) short_conv_narrow(const __grid_constant__ ShortConvParams p) {
  short_conv_of<1>(p);
}

}  // namespace imbrex::cuda
