// States in front of segments of long requests, docs/kernels/recurrent.md: launched by cuda/recurrent/recurrent_plan.cpp between
// recurrent_chunks with kEnds, which has what each segment makes of no state and of unit vectors, and recurrent_chunks without it.
//
// S_j being the state at the end of segment j, S_0 is there, and S_j = M_j S_(j-1) + B_j. Here all are S^T, whose rows do not depend on
// each other: a thread block has some of a head, and each of its warps some key channels. S_j takes the place of B_j. Factors of products
// are sums of two numbers of bf16, which is all but 2^-17 of a float; all else is f32.
#include "recurrent_chunk_units.cuh"

namespace imbrex::cuda {

constexpr int kThreads = kRecurrentJoinThreads, kWarps = kThreads / 32, kJoined = kRecurrentJoinValues;
constexpr int kEights = kDimK / 8 / kWarps;  // a warp's channels, in eights
static_assert(kEnds && kDimK % (8 * kWarps) == 0 && kJoined == 16 && kDimV % kJoined == 0);
constexpr int kPitch = kDimK + 4, kStatePitch = kDimK + 8;  // so that lanes read different banks

struct SharedStorage {
  float transitions[2][recurrent_transition_rows(kDimK, kDelta)][kPitch];  // of the segment, and of the next one
  u16 state[2][kJoined][kStatePitch];                                      // bf16, and what that leaves of it
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);
static_assert(smem_bytes == recurrent_join_bytes(kDimK, kDelta));

// A head of a request and kJoined of its values.
struct Joint {
  RecurrentItem item;
  int chunks, head, first_value, first_chunk;

  DEVICE bool take(const RecurrentParams& p, u32 index) {
    const int each = p.num_v_heads * (kDimV / kJoined), request = int(index) / each, number = int(index) % each;
    item = chunks_of(p, request);
    const int all = chunks_in(item);
    chunks = segment_chunks(p, all);
    head = number / (kDimV / kJoined), first_value = number % (kDimV / kJoined) * kJoined, first_chunk = first_chunk_of(p, request);
    return chunks < all;
  }
  // Row 0 of the head in a segment's place.
  DEVICE float* place(const RecurrentParams& p, int segment) const { return segment_place(p, first_chunk + segment * chunks, head); }
};

// What a segment does to a state comes to shared memory.
DEVICE void copy_transition(const RecurrentParams& p, const Joint& joint, int segment, int last, SharedStorage& s) {
  if (segment < last) {
    const float* const from = joint.place(p, segment) + kDimV * kDimK;
    float* const to = &s.transitions[segment % 2][0][0];
    constexpr int kFours = kDimK / 4, kAll = recurrent_transition_rows(kDimK, kDelta) * kFours;
#pragma unroll 4
    for (int i = int(threadIdx.x); i < kAll; i += kThreads)
      copy_async<16>(shared_address(to + i / kFours * kPitch + i % kFours * 4), from + 4 * i);
  }
  copy_async_commit();
}

// A lane's part of the state: values lane / 4 and 8 further on, and of each eight of channels two.
struct State {
  float of[kEights][4];
};
// Calls visit(two neighbours, where in a row-major matrix of kDimK columns they lie).
template <class Visit>
DEVICE void each_pair(State& x, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kEights; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      visit(&x.of[i][2 * half], lane_id() / 4 + 8 * half, (warp_id() * kEights + i) * 8 + lane_id() % 4 * 2);
}

// Two numbers as sums of two of bf16.
DEVICE void split(float x, float y, u32& high, u32& low) {
  high = pack_bf16(x, y);
  const float2 known = unpack_bf16(high);
  low = pack_bf16(x - known.x, y - known.y);
}

// y += x M^T, x being in shared memory.
DEVICE void multiply_transition(const SharedStorage& s, int segment, State& y) {
  const auto& m = s.transitions[segment % 2];
#pragma unroll 2
  for (int c = 0; c < kDimK / 16; ++c) {
    u32 high[4], low[4];
    const u32 at = shared_address(&s.state[0][lane_id() % 16][16 * c + lane_id() / 16 * 8]);
    load_matrix(high, at), load_matrix(low, at + u32(sizeof s.state[0]));
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const int column = (warp_id() * kEights + i) * 8 + lane_id() / 4, row = 16 * c + lane_id() % 4 * 2;
      u32 of_high[2], of_low[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) split(m[row + 8 * half][column], m[row + 8 * half + 1][column], of_high[half], of_low[half]);
      mma_bf16(y.of[i], low, of_high[0], of_high[1]);
      mma_bf16(y.of[i], high, of_low[0], of_low[1]);
      mma_bf16(y.of[i], high, of_high[0], of_high[1]);
    }
  }
}

DEVICE void join(const RecurrentParams& p, const Joint& joint, SharedStorage& s) {
  const int last = segments_in(p, joint.item) - 1;
  const auto load = [&](int segment, State& x) {
    if (segment >= last) return;
    const float* const from = joint.place(p, segment) + joint.first_value * kDimK;
    each_pair(x, [&](float* to, int row, int column) {
      const float2 pair = *reinterpret_cast<const float2*>(from + row * kDimK + column);
      to[0] = pair.x, to[1] = pair.y;
    });
  };
  State x, next;
  copy_transition(p, joint, 1, last, s);
  load(0, x), load(1, next);
#pragma unroll 1
  for (int segment = 1; segment < last; ++segment) {
    copy_transition(p, joint, segment + 1, last, s);
    State y = next;
    load(segment + 1, next);
    if constexpr (kDelta)
      each_pair(x, [&](const float* from, int row, int column) {
        u32* const to = reinterpret_cast<u32*>(&s.state[0][row][column]);
        split(from[0], from[1], to[0], to[sizeof s.state[0] / 4]);
      });
    copy_async_wait<1>();
    __syncthreads();
    if constexpr (kDelta) {
      multiply_transition(s, segment, y);
    } else {
      each_pair(x, [&](float* of, int, int column) {
        const float* const factors = &s.transitions[segment % 2][0][column];
        of[0] *= factors[0], of[1] *= factors[1];
      });
#pragma unroll
      for (int i = 0; i < 4 * kEights; ++i) y.of[i / 4][i % 4] += x.of[i / 4][i % 4];
    }
    float* const to = joint.place(p, segment) + joint.first_value * kDimK;
    x = y;
    each_pair(x, [&](const float* from, int row, int column) {
      *reinterpret_cast<float2*>(to + row * kDimK + column) = {from[0], from[1]};
    });
    __syncthreads();  // all have read what the next segment's takes the place of
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) recurrent_segments(const __grid_constant__ RecurrentParams p) {
  griddep_wait();
  if (p.lone_chunks) griddep_launch();  // its blocks set up meanwhile
  SharedStorage& s = *reinterpret_cast<SharedStorage*>(memory);
  const u32 units = u32(num_requests(p)) * u32(p.num_v_heads * (kDimV / kJoined));
  Joint joint;
  for (u32 index = blockIdx.x; find_unit(index, units, [&](u32 i) { return joint.take(p, i); }); index += gridDim.x) join(p, joint, s);
}

}  // namespace imbrex::cuda
