// Short convolutions, docs/kernels/short_conv.md; launched by cuda/short_conv/short_conv.cpp.
//
// Memory: three rows of a token are read, in the plain form one, and one is written: 8 or 4 bytes a channel in 16 bits, for 2 * kWidth + 2
// operations. A warp takes some tokens one after the other (a chunk), a lane some channels of them: the h that later tokens need stay in
// registers. Rows come to shared memory by copies of 16 bytes, kStages tokens ahead. Where rows are aligned to as many, a lane's channels
// are those that it copies. Where they are not, the copies are of the aligned words that cover the row, and a lane has channels 32 apart,
// so that the accesses of a warp to a channel of each lane are contiguous wherever the row begins.
//
// Chunks are cut out of the batch without regard to where requests begin. The chunk that has the first token of a request owns its state:
// it reads it, computes the tokens that depend on it (the first kWidth - 1, even if they are in the next chunk), and writes it. So no other
// chunk touches the slot, and no chunk waits for another. Where drafts may be a tree, it computes those too.
#include "async.cuh"
#include "convert.cuh"
#include "cuda/short_conv_params.h"
#include "find_request.cuh"

namespace imbrex::cuda {

constexpr int kBefore = kWidth - 1, kSize = element_bytes(kType), kWarps = kShortConvThreads / 32;
constexpr int kChannels = kShortConvLaneBytes / kSize;  // of a lane
constexpr int kTile = 32 * kChannels;                   // channels of a warp
constexpr int kWordElements = 4 / kSize;
constexpr int kParts = kGated ? 3 : 1;             // rows of a token: B, C and x, or x
constexpr int kNever = 0x7fffffff;                 // no token
constexpr int kRowsOfDraft = kTree ? kBefore : 1;  // of the state, from what a draft leaves to what the next one does

// Bytes of shared memory for a tile of one of a token's rows: in aligned words, one more where the first one begins in front of it.
template <bool aligned>
constexpr int kTileBytes = (aligned ? 32 : 33) * kShortConvLaneBytes;
template <bool aligned>
constexpr int kRowBytes = kWarps* kTileBytes<aligned>;

extern "C" __device__ const unsigned short_conv_aligned_smem_bytes = kStages * kParts * kRowBytes<true>;
extern "C" __device__ const unsigned short_conv_unaligned_smem_bytes = kStages * kParts * kRowBytes<false>;
extern __shared__ __align__(128) char memory[];

// Elements of a lane, as they are in memory.
template <int count>
struct Elements {
  u32 words[count / kWordElements];
  DEVICE float operator[](int i) const {
    if constexpr (kType == kF32) return float_of(words[i]);
    const float2 pair = kType == kBf16 ? unpack_bf16(words[i / 2]) : unpack_f16(words[i / 2]);
    return i % 2 == 0 ? pair.x : pair.y;
  }
  // Elements have to be put in order.
  DEVICE void put(int i, u32 element) {
    words[i / kWordElements] = i % kWordElements == 0 ? element : words[i / kWordElements] | element << 16;
  }
};
using Lane = Elements<kChannels>;

// The channels of a lane of which `count` are there; the others are read as 0, and not written. Aligned ones are neighbours, all or none
// of which are there, others 32 apart.
struct Channels {
  int first, count;
};
template <bool aligned>
DEVICE Channels channels_of(int tile, int dim) {
  if constexpr (aligned) return {tile * kTile + lane_id() * kChannels, kChannels};
  const int first = tile * kTile + lane_id();
  return {first, min(max(dim - first + 31, 0) / 32, kChannels)};
}

DEVICE u32 load_element(const char* p) { return kSize == 4 ? *reinterpret_cast<const u32*>(p) : *reinterpret_cast<const u16*>(p); }

// `once`: the memory is not written while the kernel runs, and hardly read by other threads.
template <bool once, int count>
DEVICE void load_neighbours(const char* p, Elements<count>& e) {
#pragma unroll
  for (int i = 0; i < count * kSize / 16; ++i) {
    const uint4 v = once ? load_once_16(p + 16 * i) : *reinterpret_cast<const uint4*>(p + 16 * i);
    e.words[4 * i] = v.x, e.words[4 * i + 1] = v.y, e.words[4 * i + 2] = v.z, e.words[4 * i + 3] = v.w;
  }
}
// `p`: where the lane's first channel is.
template <bool aligned, bool once>
DEVICE Lane load(const char* p, int count) {
  Lane e;
  if constexpr (aligned) {
    load_neighbours<once>(p, e);
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) e.put(i, i < count ? load_element(p + i * 32 * kSize) : 0);
  }
  return e;
}

template <bool aligned>
DEVICE void store(char* p, int count, const Lane& e) {
  if constexpr (aligned) {
    *reinterpret_cast<uint4*>(p) = {e.words[0], e.words[1], e.words[2], e.words[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      char* const to = p + i * 32 * kSize;
      if constexpr (kSize == 4) {
        if (i < count) *reinterpret_cast<u32*>(to) = e.words[i];
      } else {
        if (i < count) *reinterpret_cast<u16*>(to) = u16(e.words[i / 2] >> i % 2 * 16);
      }
    }
  }
}

DEVICE Lane rounded(const float (&x)[kChannels]) {
  Lane e;
  if constexpr (kType == kF32) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) e.words[i] = bits_of(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; i += 2) e.words[i / 2] = kType == kBf16 ? pack_bf16(x[i], x[i + 1]) : pack_f16(x[i], x[i + 1]);
  }
  return e;
}

// h, as it is kept.
DEVICE Lane product(const Lane& b, const Lane& x) {
  float h[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) h[i] = b[i] * x[i];
  return rounded(h);
}

// The weights of a lane's channels.
struct Weights {
  Elements<kChannels * kWidth> taps;  // kWidth of a channel one after the other
  Lane bias;
};

template <bool aligned>
DEVICE Weights load_weights(const ShortConvParams& p, const Channels& channels) {
  Weights w;
  if constexpr (aligned) {
    load_neighbours<false>(p.weight + long(channels.first) * kWidth * kSize, w.taps);
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const char* const taps = p.weight + (channels.first + 32 * i) * p.weight_dim_stride;
#pragma unroll
      for (int tap = 0; tap < kWidth; ++tap)
        w.taps.put(i * kWidth + tap, i < channels.count ? load_element(taps + tap * p.weight_tap_stride) : 0);
    }
  }
  if constexpr (kHasBias) w.bias = load<aligned, false>(p.bias + long(channels.first) * kSize, channels.count);
  return w;
}

// A lane's part of the rows of a token, by the form of the layer.
template <bool gated>
struct TokenOf {
  Lane b, c, x;
  template <class Load>
  DEVICE static TokenOf from(const Load& load) {
    return {load(0), load(1), load(2)};
  }
  DEVICE Lane h() const { return product(b, x); }
  DEVICE float output(int i, float s) const { return s * c[i]; }  // of a channel whose sum is s
};
template <>
struct TokenOf<false> {
  Lane x;
  template <class Load>
  DEVICE static TokenOf from(const Load& load) {
    return {load(0)};
  }
  DEVICE Lane h() const { return x; }
  // SiLU of numbers so small that exp(-s) is no float is -0.
  DEVICE float output(int, float s) const { return kSilu ? s * reciprocal_approx(1.f + exp2_approx(-s * kLog2e)) : s; }
};
using Token = TokenOf<kGated>;

// bias + sum over taps, in the order of the taps whatever path the tokens came by, and what becomes of it. Between tokens weights stay
// packed: as floats those of 16 bits would take twice the registers.
DEVICE Lane output(Weights& w, const Lane (&h)[kWidth], const Token& t) {
  if constexpr (kSize < 4) {
#pragma unroll
    for (u32& word : w.taps.words) word = u32(computed_here(int(word)));
  }
  float y[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) {
    y[i] = kHasBias ? w.bias[i] : 0.f;
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap) y[i] = __fmaf_rn(w.taps[i * kWidth + tap], h[tap][i], y[i]);
    y[i] = t.output(i, y[i]);
  }
  return rounded(y);
}

// A lane's channels of the tokens of a chunk, which are copied to shared memory kStages tokens ahead. A lane reads only what it has copied
// itself, so that lanes do not wait for each other; where rows are not aligned, those of a warp do.
template <bool aligned>
class Rows {
 public:
  DEVICE Rows(const ShortConvParams& p, int begin, int end, const Channels& channels)
      : first_(p.input + long(aligned ? channels.first : channels.first - lane_id()) * kSize),
        stride_(p.input_stride),
        part_(long(p.dim) * kSize),
        count_(channels.count),
        bytes_(min((p.dim - (channels.first - lane_id())) * kSize, 32 * kShortConvLaneBytes)),
        end_(end),
        asked_(begin) {
    place_ = shared_address(memory) + (aligned ? u32(threadIdx.x) * kShortConvLaneBytes : threadIdx.x / 32 * kTileBytes<false>);
#pragma unroll
    for (int i = 0; i < kStages; ++i) ask();
  }
  // Tokens of the chunk have to be taken in order, all of them; others, which lie behind it, may come in between.
  DEVICE Token take(int token) {
    if (token >= end_) return Token::from([&](int part) { return read(token, part); });
    copy_async_wait<kStages - 1>();
    if constexpr (!aligned) __syncwarp();  // what other lanes have copied is there
    const Token t = Token::from([&](int part) { return from_shared(token, part); });
    if constexpr (!aligned) __syncwarp();  // all have read, and the next copies may come
    ask();
    return t;
  }
  DEVICE Lane h(int token) const {
    if constexpr (kGated) return product(read(token, 0), read(token, 2));
    return read(token, 0);
  }
  DEVICE void prefetch_h(int token) const {
    prefetch(token, 0);
    if constexpr (kGated) prefetch(token, 2);
  }

 private:
  // Where the lane's channels begin, or those of the warp.
  DEVICE const char* at(int token, int part) const { return first_ + token * stride_ + part * part_; }
  DEVICE Lane read(int token, int part) const { return load<aligned, true>(at(token, part) + (aligned ? 0 : lane_id() * kSize), count_); }
  DEVICE void prefetch(int token, int part) const {
    prefetch_l2(at(token, part) + (aligned ? 0 : min(lane_id() * kShortConvLaneBytes, bytes_ - 1)));
  }
  // How far behind an aligned word the tile begins.
  DEVICE u32 offset(int token, int part) const { return u32(reinterpret_cast<u64>(at(token, part))) % kShortConvLaneBytes; }
  DEVICE Lane from_shared(int token, int part) const {
    const u32 tile = place_ + u32(stage_ * kParts + part) * kRowBytes<aligned>;
    if constexpr (aligned) {
      const uint4 v = load_shared(tile);
      return {v.x, v.y, v.z, v.w};
    } else {
      const u32 first = tile + offset(token, part) + lane_id() * kSize;
      Lane e;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) e.put(i, load_shared_element<kSize>(first + i * 32 * kSize));
      return e;
    }
  }
  // Copies the aligned words that cover the tile, without what lies behind it.
  DEVICE void copy_covering_words(u32 tile, int token, int part) const {
    const int before = int(offset(token, part)), end = before + bytes_;
    const char* const words = at(token, part) - before;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int byte = (32 * i + lane_id()) * kShortConvLaneBytes;
      if (byte < end) copy_async_first(tile + byte, words + byte, min(end - byte, kShortConvLaneBytes));
    }
  }
  // For the next token, in the place of the one that was read last.
  DEVICE void ask() {
    if (asked_ < end_) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const u32 tile = place_ + u32(stage_ * kParts + part) * kRowBytes<aligned>;
        if constexpr (aligned) {
          copy_async<kShortConvLaneBytes>(tile, at(asked_, part));
        } else {
          copy_covering_words(tile, asked_, part);
        }
      }
    }
    ++asked_;
    copy_async_commit();
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  const char* first_;
  long stride_, part_;
  int count_, bytes_, end_, asked_, stage_ = 0;
  u32 place_;
};

// Tokens [from, to) of a request that ends in front of `end`. `kept`: the state's rows are h of the tokens from there to the end, of which
// those from `to` on are not this call's; kNever: another chunk owns the state. `state`: row 0 of the request's slot.
template <bool aligned>
DEVICE void run_tokens(const ShortConvParams& p, Weights& w, const StateRequest& request, Rows<aligned>& rows, char* state, int from,
                       int to, int end, int kept, const Channels& channels) {
  for (int token = max(to, kept); token < end; ++token) rows.prefetch_h(token);
  Lane h[kWidth] = {};  // oldest first, and a place for the token's own
#pragma unroll
  for (int i = 0; i < kBefore; ++i) {
    if (kept == kNever) {
      h[i] = rows.h(from - kBefore + i);
    } else if (request.first_row >= 0) {
      const char* const source = p.state + request.source * p.state_slot_stride + long(channels.first) * kSize;
      h[i] = load<aligned, false>(source + (request.first_row * kRowsOfDraft + i) * p.state_row_stride, channels.count);
    }
  }
  const auto keep = [&](int token, const Lane& of_token) {
    if (token >= kept) store<aligned>(state + (token - kept) * p.state_row_stride, channels.count, of_token);
  };
#pragma unroll
  for (int i = 0; i < kBefore; ++i) keep(from - kBefore + i, h[i]);
#pragma unroll 1
  for (int token = from; token < to; ++token) {
    const Token t = rows.take(token);
    h[kBefore] = t.h();
    keep(token, h[kBefore]);
    store<aligned>(p.out + token * p.out_stride + long(channels.first) * kSize, channels.count, output(w, h, t));
#pragma unroll
    for (int i = 0; i < kBefore; ++i) h[i] = h[i + 1];
  }
#pragma unroll 1
  for (int token = max(to, kept); token < end; ++token) keep(token, rows.h(token));
}

// Drafts [from, end) of a request, which may be a tree: each begins from the rows of the token that it follows, and leaves its own. What
// the lane reads of them it has written itself.
template <bool aligned>
DEVICE void run_drafts(const ShortConvParams& p, Weights& w, Rows<aligned>& rows, char* state, int from, int end,
                       const Channels& channels) {
  Lane h[kWidth];
#pragma unroll 1
  for (int token = from; token < end; ++token) {
    const int number = token - from + 1, parent = p.parent_rows[token];
#pragma unroll
    for (int i = 0; i < kBefore; ++i)
      if (number == 1 || parent != number - 1)
        h[i] = load<aligned, false>(state + (parent * kBefore + i) * p.state_row_stride, channels.count);
    const Token t = rows.take(token);
    h[kBefore] = t.h();
    store<aligned>(p.out + token * p.out_stride + long(channels.first) * kSize, channels.count, output(w, h, t));
#pragma unroll
    for (int i = 0; i < kBefore; ++i) {
      h[i] = h[i + 1];
      store<aligned>(state + (number * kBefore + i) * p.state_row_stride, channels.count, h[i]);
    }
  }
}

// Tokens [begin, end) of the batch, of which the first is of request `index`.
template <bool aligned>
DEVICE void run_chunk(const ShortConvParams& p, int index, int begin, int end, const Channels& channels) {
  Rows<aligned> rows(p, begin, min(end, p.num_tokens), channels);
  Weights w = load_weights<aligned>(p, channels);
  int taken = begin;
#pragma unroll 1
  for (int next = begin; next < end; ++index) {
    const StateRequest request = p.requests[index];
    const int request_end = p.requests[index + 1].begin;
    if (request_end <= next) continue;
    next = request_end;
    if (request_end > p.num_tokens) break;
    const bool owns = request.begin >= begin, is_there = max(request.slot, request.source) < p.num_slots;
    const int tokens_end = kTree ? request_end - request.drafts : request_end;
    if (owns && !is_there && p.broken != nullptr && channels.first == 0) atomicMax(p.broken + kStateSlotIsThere, index + 1);
    if (request.slot < 0 || !is_there) continue;
    const int first = min(request.begin + kBefore, tokens_end);  // that does not depend on the state
    const int from = owns ? request.begin : max(begin, first), to = owns ? max(min(tokens_end, end), first) : min(tokens_end, end);
    if (from >= to && !(kTree && owns)) continue;
    for (; taken < from; ++taken) rows.take(taken);
    char* const state = p.state + request.slot * p.state_slot_stride + long(channels.first) * kSize;
    run_tokens<aligned>(p, w, request, rows, state, from, to, tokens_end, owns ? request_end - request.drafts - kBefore : kNever, channels);
    taken = to;
    if constexpr (kTree) {
      if (owns && tokens_end < request_end) {
        run_drafts<aligned>(p, w, rows, state, tokens_end, request_end, channels);
        taken = request_end;
      }
    }
  }
  copy_async_wait<0>();
  if constexpr (!aligned) __syncwarp();  // before a lane that is ahead writes to the places of the next chunk
}

template <bool aligned>
DEVICE void short_conv(const ShortConvParams& p) {
  if (!p.lists_are_there) griddep_wait();
  const StateCounts counts = *p.counts;
  const unsigned tiles = unsigned(p.dim + kTile - 1) / kTile;
  const int chunk = short_conv_chunk(counts, p.chunks_at_once, p.most_chunks);
  const unsigned chunks = unsigned(counts.num_tokens + chunk - 1) / unsigned(chunk), units = chunks * tiles;
  for (unsigned unit = blockIdx.x * kWarps + unsigned(warp_id()); unit < units; unit += gridDim.x * kWarps) {
    // With chunks of one token the warps of a block have the same channels, so that they read weights from L1; with longer chunks they have
    // neighbouring parts of rows.
    const unsigned number = chunk == 1 ? unit % chunks : unit / tiles, tile = chunk == 1 ? unit / chunks : unit % tiles;
    const int begin = int(number) * chunk, end = min(begin + chunk, counts.num_tokens);
    const Channels channels = channels_of<aligned>(int(tile), p.dim);
    const int request = find_request(counts.num_reqs, begin, [&](int r) { return p.requests[r].begin; });
    griddep_wait();
    if (!aligned || channels.first < p.dim) run_chunk<aligned>(p, request, begin, end, channels);
  }
  griddep_wait();  // also where there is nothing to do: the kernel behind this one may rely on the one in front of it
  griddep_launch();
}

// Rows, weights and bias that are aligned to 16 bytes, weights of a channel one after the other; and others.
extern "C" __global__ void __launch_bounds__(kShortConvThreads, kBlocks) short_conv_aligned(const __grid_constant__ ShortConvParams p) {
  short_conv<true>(p);
}
extern "C" __global__ void __launch_bounds__(kShortConvThreads, kBlocks) short_conv_unaligned(const __grid_constant__ ShortConvParams p) {
  short_conv<false>(p);
}

}  // namespace imbrex::cuda
