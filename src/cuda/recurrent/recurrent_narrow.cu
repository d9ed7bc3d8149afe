// Recurrent layers whose heads have values of one dimension and no delta rule (Mamba1), token by token: decode, drafts, short queries, and
// prompts that recurrent_narrow_prompts.cu is not for. Launched by cuda/recurrent/recurrent_plan.cpp.
//
// A state is a few numbers for each head, so a thread block has kHeads heads of one request after another: what decays are made of stays
// in registers. Threads do not wait for each other: each has its own numbers of the states of the next kAhead requests copied to shared
// memory, and the numbers that the next token brings are loaded while this one is computed. The grid is a multiple of the blocks that a
// request needs.
#include "recurrent_narrow.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentNarrowThreads, kAhead = kRecurrentNarrowAhead;
constexpr int kHeads = recurrent_narrow_heads(kDimK);
constexpr int kListed = 64;  // requests that a block looks up together
constexpr int kQuadBytes = 4 * kStateSize;

// A request and the heads of the block: where its state is read and where row 0 is written.
struct Item {
  int begin, end, drafts, padding;
  const char* source;  // null: there is none
  char* state;
  DEVICE bool is_there() const { return begin < end; }
};
struct Shared {
  char states[kAhead][kOfLane * kQuads][kThreads][kQuadBytes];
  Item items[kListed];
};
extern "C" __device__ const unsigned smem_bytes = sizeof(Shared);
extern __shared__ __align__(16) char memory[];

// What a token brings, as it lies in memory: of a lane's own head, and of a key head that all heads of the block share.
struct Input {
  u32 value, gate;
  RawKeys q, k;
};

// What a lane has from its block's first request to the last.
struct Narrow {
  NarrowLane lane;
  int first_head, heads;             // of the block
  bool shared;                       // by all of them: a key head
  const char *value, *gate, *q, *k;  // of token 0 and the own head, or the shared key head
  char* out;
  Keys coefficients[kOfLane];
  float bias, skip;  // of the own head

  DEVICE int head(int j) const { return first_head + min(lane.head(j), heads - 1); }
  DEVICE bool is_there(int j) const { return lane.head(j) < heads; }
};

// `simple`: tensors that are aligned as has_aligned_quads() says, of which strides have 31 bits and the heads of a state are neighbours, a
// key head that all heads of a block share, and no gates of sigmoids.

// Bytes from token 0 to another one.
template <bool simple>
DEVICE long token_offset(int token, long stride) {
  return simple ? long(token) * int(stride) : token * stride;
}
// From the block's first head to a lane's head j.
template <bool simple>
DEVICE long state_offset(const RecurrentParams& p, const Narrow& n, int j) {
  if constexpr (simple) return (n.lane.first + j * kGroups) * (kDimK * kStateSize);
  return min(n.lane.head(j), n.heads - 1) * p.state_head_stride;
}

template <bool simple>
DEVICE void load_input(const RecurrentParams& p, const Narrow& n, int token, Input& in) {
  in.value = load_raw(n.value + token_offset<simple>(token, p.v_token_stride), kType == kF32);
  in.gate = 0;
  if (n.gate != nullptr) in.gate = load_raw(n.gate + token_offset<simple>(token, p.gate_token_stride), kType == kF32 || p.gate_is_f32);
  if (!simple && !n.shared) return;
  load_raw<simple>(n.q + token_offset<simple>(token, p.q_token_stride), n.lane, in.q);
  load_raw<simple>(n.k + token_offset<simple>(token, p.k_token_stride), n.lane, in.k);
}
DEVICE void load_head_keys(const RecurrentParams& p, const Narrow& n, int token, int j, Keys& q, Keys& k) {
  const int key_head = n.head(j) / p.group;
  RawKeys of_q, of_k;
  load_raw<false>(p.q + token * p.q_token_stride + key_head * p.q_head_stride, n.lane, of_q);
  load_raw<false>(p.k + token * p.k_token_stride + key_head * p.k_head_stride, n.lane, of_k);
  q = keys_of<false>(p, of_q), k = keys_of<true>(p, of_k);
}

// Has a request's state copied, where there is one.
DEVICE void begin_state(const RecurrentParams& p, const Narrow& n, const char* source, u32 to) {
  if (source == nullptr) return;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    const char* const from = source + state_offset<true>(p, n, j) + n.lane.part * kQuadBytes;
#pragma unroll
    for (int i = 0; i < kQuads; ++i)
      if (n.is_there(j) && (i * kKeyLanes + n.lane.part) * 4 < kDimK)
        copy_async<kQuadBytes>(to + u32((j * kQuads + i) * kThreads * kQuadBytes), from + i * kKeyLanes * kQuadBytes);
  }
}
template <bool simple>
DEVICE void take_state(const RecurrentParams& p, const Narrow& n, const Item& item, const char* copied, Keys (&states)[kOfLane]) {
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    states[j] = {};
    if (item.source == nullptr) continue;
    if constexpr (simple) {
#pragma unroll
      for (int i = 0; i < kQuads; ++i)
        if ((i * kKeyLanes + n.lane.part) * 4 < kDimK)
          load_run<kStateType, true>(copied + (j * kQuads + i) * kThreads * kQuadBytes, 4, states[j].of[i]);
    } else {
      load_state<simple>(item.source + state_offset<simple>(p, n, j), n.lane, states[j]);
    }
  }
}

// A token's step and its outputs.
template <bool simple>
DEVICE void run_token(const RecurrentParams& p, const Narrow& n, int token, const HeadStep& own, float value, const Keys& shared_q,
                      const Keys& shared_k, Keys (&states)[kOfLane]) {
  float y[kOfLane];
  const auto run = [&]<bool sigmoid>() {
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      Keys q = shared_q, k = shared_k;
      if (!simple && !n.shared) load_head_keys(p, n, token, j, q, k);
      step_head<sigmoid>(p, k, q, n.coefficients[j], {of_head(own.decay, j), of_head(own.written, j)}, states[j], y[j]);
    }
  };
  if (!simple && p.gate_kind == kSigmoidGate) {
    run.template operator()<true>();
  } else {
    run.template operator()<false>();
  }
  float out = sum_over<kOwners>(part_of_own<kKeyLanes>(y));
  out = __fmaf_rn(n.skip, skipped_value(p, value), out);
  if (n.lane.part % kOwners == 0 && n.lane.own < n.heads) store_number<kType>(n.out + token_offset<simple>(token, p.out_token_stride), out);
}

template <bool simple>
DEVICE void store_row(const RecurrentParams& p, const Narrow& n, const Item& item, int row, Keys (&states)[kOfLane]) {
  char* const to = item.state + row * p.state_row_stride;
#pragma unroll
  for (int j = 0; j < kOfLane; ++j) {
    if (n.is_there(j)) store_state<simple>(to + state_offset<simple>(p, n, j), n.lane, states[j]);
    if constexpr (kTree && kStateType != kF32) {  // drafts begin from what the rows keep
#pragma unroll
      for (auto& quad : states[j].of)
#pragma unroll
        for (float& x : quad) x = rounded_number<kStateType>(x);
    }
  }
}
template <bool simple>
DEVICE void take_parent(const RecurrentParams& p, const Narrow& n, const Item& item, int parent, Keys (&states)[kOfLane]) {
#pragma unroll
  for (int j = 0; j < kOfLane; ++j)
    if (parent >= 0 && n.is_there(j))
      load_state<simple>(item.state + parent * p.state_row_stride + state_offset<simple>(p, n, j), n.lane, states[j]);
}

// The requests that are listed. `prepare` is called behind the first loads.
template <bool simple>
DEVICE void run_items(const RecurrentParams& p, const Narrow& n, int count, Shared& s, const auto& prepare) {
  constexpr u32 kPlaceBytes = sizeof s.states[0];
  const auto begin = [&](int number, u32 place) {
    if (simple && number < count) begin_state(p, n, s.items[number].source, shared_address(s.states[0][0][threadIdx.x]) + place);
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) begin(i, u32(i) * kPlaceBytes);
  Input in{};
  const auto load = [&](int number) {
    if (number < count && s.items[number].is_there()) load_input<simple>(p, n, s.items[number].begin, in);
  };
  load(0);
  prepare();
  u32 place = 0;
#pragma unroll 1
  for (int number = 0; number < count; ++number) {
    const Item item = s.items[number];
    Keys states[kOfLane];
    copy_async_wait<kAhead - 1>();
    take_state<simple>(p, n, item, s.states[0][0][threadIdx.x] + place, states);
    begin(number + kAhead, place);
    place = place + kPlaceBytes == sizeof s.states ? 0 : place + kPlaceBytes;
    if (!item.is_there()) {
      load(number + 1);
      continue;
    }
    int row = item.begin + 1 - (item.end - item.drafts);
    if (row == 1) store_row<simple>(p, n, item, 0, states);  // what is read of the slot has been read
#pragma unroll 1
    for (int token = item.begin; token < item.end; ++token, ++row) {
      const float value = number_of(in.value, kType == kF32), gate = number_of(in.gate, kType == kF32 || p.gate_is_f32);
      const Keys q = keys_of<false>(p, in.q), k = keys_of<true>(p, in.k);
      const bool is_last = token + 1 == item.end;
      const int next = is_last ? number + 1 < count && s.items[number + 1].is_there() ? s.items[number + 1].begin : -1 : token + 1;
      if (next >= 0) load_input<simple>(p, n, next, in);
      if constexpr (kTree) take_parent<simple>(p, n, item, parent_row(p, token, row), states);
      const HeadStep step =
          p.gate_kind == kSoftplusGate ? head_step<true>(p, value, gate, n.bias) : head_step<false>(p, value, gate, n.bias);
      run_token<simple>(p, n, token, step, value, q, k, states);
      if (row >= 0) store_row<simple>(p, n, item, row, states);
    }
  }
  copy_async_wait<0>();
}

DEVICE Item item_of_block(const RecurrentParams& p, const Narrow& n, int index) {
  const RecurrentItem item = item_of(p, index, n.first_head == 0);
  if (item.begin >= item.end || is_narrow_prompt(p, item.end - item.begin, item.drafts)) return {};
  const long first = n.first_head * p.state_head_stride;
  return {
      item.begin,        item.end, item.drafts, 0, item.first_row < 0 ? nullptr : item.source + item.first_row * p.state_row_stride + first,
      item.state + first};
}

template <bool simple>
DEVICE void recurrent_narrow(const RecurrentParams& p) {
  if (!p.lists_are_there) griddep_wait();
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int parts = (p.num_v_heads + kHeads - 1) / kHeads, part = int(blockIdx.x) % parts;
  const int each = int(gridDim.x) / parts, all = num_requests(p);
  Narrow n;
  n.lane = narrow_lane(int(threadIdx.x) / 32), n.first_head = part * kHeads, n.heads = min(kHeads, p.num_v_heads - n.first_head);
  const int key_head = n.first_head / p.group, own = n.first_head + min(n.lane.own, n.heads - 1);
  n.shared = key_head == (n.first_head + n.heads - 1) / p.group;
  n.value = p.v + own * p.v_head_stride, n.gate = p.gate != nullptr ? p.gate + own * p.gate_head_stride : nullptr;
  n.q = p.q + key_head * p.q_head_stride, n.k = p.k + key_head * p.k_head_stride, n.out = p.out + own * p.out_head_stride;
  bool is_first = true;
#pragma unroll 1
  for (int first = int(blockIdx.x) / parts; first < all; first += each * kListed) {
    const int count = min((all - first + each - 1) / each, kListed);
    if (int(threadIdx.x) < count) s.items[threadIdx.x] = item_of_block(p, n, first + int(threadIdx.x) * each);
    if (is_first) {
      griddep_wait();
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) load_rates(p, n.lane, n.head(j), n.coefficients[j]);
      n.bias = p.gate_bias != nullptr ? p.gate_bias[own * p.bias_stride] : 0.f;
      n.skip = p.skip != nullptr ? p.skip[own] : 0.f;
    }
    __syncthreads();
    run_items<simple>(p, n, count, s, [&] {
      if (!is_first) return;
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) make_coefficients(p, n.coefficients[j]);
    });
    is_first = false;
    __syncthreads();  // what is listed has been read
  }
  griddep_wait();  // also where there is nothing to do: the kernel behind this one may rely on the one in front of it
  griddep_launch();
}

extern "C" __global__ void __launch_bounds__(kThreads, kTree || !kWholeQuads ? 4 : recurrent_narrow_blocks(kDimK))
    recurrent_narrow_aligned(const __grid_constant__ RecurrentParams p) {
  recurrent_narrow<kWholeQuads>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads, 4) recurrent_narrow_unaligned(const __grid_constant__ RecurrentParams p) {
  recurrent_narrow<false>(p);
}

}  // namespace imbrex::cuda
