// recurrent_chunks.cu for sm_90a: the same formulas, with products by wgmma, and for layers whose channels have decays of their own too:
// there keys and queries come with their decays from recurrent_channel_weights.cu. Launched by cuda/recurrent/recurrent_plan.cpp.
//
// Four warps compute 64 values together. First factors are in their registers, second ones in shared memory as they are; while products are
// made, the warps do other things. A fifth warp has chunks loaded by TMA and bulk copies, a sixth has outputs stored, and where a block has
// the multiprocessor to itself, a seventh finds what is next. Thread blocks of a cluster have values of one head, or heads of one key head,
// and take the same chunks at a time.
#include "recurrent_chunk_values.cuh"

namespace imbrex::cuda {
constexpr int kQType = kType;  // that wgmma.cuh asks for
}
#include "wgmma.cuh"

namespace imbrex::cuda {

constexpr int kComputing = 128, kThreads = kRecurrentChunkSm90Threads;
// Of a thread. Where a block has the multiprocessor to itself, all have enough.
constexpr int kOwnRegisters = 65536 / (kThreads * kBlocksTogether), kComputeRegisters = 232, kLoadRegisters = 24;
constexpr bool kMoved = kOwnRegisters < kComputeRegisters;
// Where a block has the multiprocessor to itself; RecurrentParams::chunk_stages says how many chunks there are.
extern "C" __device__ const unsigned smem_bytes = recurrent_chunk_sm90_stages(Stage::bytes, 1) * Stage::bytes;

// A place in shared memory, and the parity of the phases of its mbarriers.
struct Place {
  int at = 0;
  u32 parity = 0;
  DEVICE void next(const RecurrentParams& p) {
    if (++at == p.chunk_stages) at = 0, parity ^= 1;
  }
};

DEVICE float (&all_of(Sums& s))[kDimK / 2] { return *reinterpret_cast<float(*)[kDimK / 2]>(s.of); }
template <int blocks>
DEVICE float (&all_of(Columns<blocks>& x))[8 * blocks] {
  return *reinterpret_cast<float(*)[8 * blocks]>(x.of);
}
template <int blocks>
DEVICE float (&half_of(Columns<blocks>& x, int half))[kHalf / 2] {
  return *reinterpret_cast<float(*)[kHalf / 2]>(x.of[4 * half]);
}

// A matrix so many bytes behind another one: one addition, where the other's descriptor is there.
DEVICE u64 behind(u64 descriptor, int bytes) { return (descriptor & ~u64(0xffffffff)) | u64(u32(descriptor) + u32(bytes) / 16); }
// Part of a triangle's column, from a block on.
DEVICE u64 column_at(u32 triangle, int block) { return behind(wgmma_descriptor(triangle, 16, 256, 3), block * kBlockBytes); }
template <int blocks>
DEVICE void multiply_rows(const u32 (&a)[kDimK / 16][4], u32 rows, Columns<blocks>& x) {
#pragma unroll
  for (int c = 0; c < kDimK / 16; ++c)
    Wgmma<16 * blocks, kType>::template registers<false>(
        all_of(x), a[c], behind(wgmma_descriptor(rows, 16, 1024, 1), c / 4 * kColumnBytes + c % 4 * 32), c != 0);
  wgmma_commit();
}

// The state decays meanwhile.
template <int blocks>
DEVICE void begin_with_state(Sums& s, int place, const Stage& stage, Columns<blocks>& of_k, Columns<blocks>& of_q) {
  u32 a[kDimK / 16][4];
#pragma unroll
  for (int c = 0; c < kDimK / 16; ++c) pack_factor(s.of[2 * c], s.of[2 * c + 1], a[c]);
  decay_sums(s, place);
  wgmma_fence();
  if constexpr (kDelta) multiply_rows(a, stage.k(), of_k);
  if constexpr (!kEnds) multiply_rows(a, stage.q(), of_q);
}
template <int blocks>
DEVICE void begin_t(const Factor<blocks>& y, const Stage& stage, Columns<blocks>& x) {
  wgmma_fence();
#pragma unroll
  for (int half = 0; half < blocks / 2; ++half)
#pragma unroll
    for (int from = 0; from < 2 + 2 * half; ++from)
      Wgmma<kHalf, kType>::template registers<false>(half_of(x, half), y.of[from], column_at(stage.t(), 4 * half + 2 * from), from != 0);
  wgmma_commit();
}
template <int blocks>
DEVICE void begin_p(const Factor<blocks>& y, const Stage& stage, Columns<blocks>& x) {
  wgmma_fence();
#pragma unroll
  for (int from = 0; from < blocks; ++from)
    Wgmma<16 * blocks, kType>::template registers<false>(all_of(x), y.of[from], column_at(stage.p(), 4 * from), true);
  wgmma_commit();
}
template <int blocks>
DEVICE void begin_written(const Factor<blocks>& u, const Stage& stage, Sums& s) {
  wgmma_fence();
#pragma unroll
  for (int block = 0; block < blocks; ++block)
    Wgmma<kDimK, kType>::template registers<true>(all_of(s), u.of[block],
                                                  behind(wgmma_descriptor(stage.written(), kColumnBytes, 1024, 1), block * 2048), true);
  wgmma_commit();
}
template <int pending, class Result>
DEVICE void wait_for(Result& x) {
  wgmma_wait<pending>();
#pragma unroll
  for (float(&tile)[4] : x.of)
#pragma unroll
    for (float& number : tile) wgmma_pin(number);
}

// The tensors of a step, [tokens][heads][channels], whose boxes are a chunk's tokens and 64 channels of a head.
struct Maps {
  const TensorMap &q, &k, &v;
};

// What more than one block of a cluster reads is loaded once, to all of them: keys and queries for all, and what else a chunk has of a head
// for the neighbours that have this head.
constexpr int kHeadBlocks = kCluster < kUnits ? kCluster : kUnits;
static_assert(kUnits % kHeadBlocks == 0 && kCluster % kHeadBlocks == 0 && (!kEnds || kMoreTiles % kHeadBlocks == 0));

struct Share {
  int rank = kCluster == 1 ? 0 : shuffle(int(cluster_rank()), 0);
  int turn = 0;

  // Loads take turns: whether the next one is this block's, of those that all have and of those of a head.
  DEVICE bool takes() { return turn++ % kCluster == rank; }
  DEVICE bool takes_of_head() { return turn++ % kHeadBlocks == rank % kHeadBlocks; }
  DEVICE void load(u32 to, const TensorMap& map, u32 barrier, u64 l2, int x, int y, int z) {
    if (!takes()) return;
    if constexpr (kCluster > 1) {
      tma_load_to_all(to, map, barrier, l2, kCluster, x, y, z);
    } else {
      tma_load(to, map, barrier, l2, x, y, z);
    }
  }
  DEVICE void load(u32 to, const char* from, u32 bytes, u32 barrier) {
    if constexpr (kHeadBlocks > 1) {
      bulk_load_to(((1u << kHeadBlocks) - 1) << (rank / kHeadBlocks * kHeadBlocks), to, from, bytes, barrier);
    } else {
      bulk_load(to, from, bytes, barrier);
    }
  }
  // Blocks of a triangle from `first` on, in the order without zeros.
  template <class Order, int first, int count>
  DEVICE void load_blocks(u32 to, const char* from, u32 barrier) {
    static_assert(Order::pad(first + count - 1) == Order::pad(first) + count - 1);
    load(to + u32(Order::pad(first) * kBlockBytes), from + first * kBlockBytes, count * kBlockBytes, barrier);
  }
};

template <int blocks>
DEVICE void load_t(const Stage& stage, const char* weights, Share& share) {
  constexpr bool kWhole = blocks == kBlocks;
  share.load_blocks<TOrder, 0, 2>(stage.t(), weights, stage.full());
  share.load_blocks<TOrder, 2, kWhole ? 7 : 1>(stage.t(), weights, stage.full());
  if constexpr (kWhole) share.load_blocks<TOrder, 9, 1>(stage.t(), weights, stage.full());
}
template <int blocks>
DEVICE void load_p(const Stage& stage, const char* weights, Share& share) {
  share.load_blocks<POrder, 0, blocks>(stage.p(), weights, stage.full());
  share.load_blocks<POrder, 4, blocks - 1>(stage.p(), weights, stage.full());
  if constexpr (blocks == kBlocks) {
    share.load_blocks<POrder, 7, 2>(stage.p(), weights, stage.full());
    share.load_blocks<POrder, 9, 1>(stage.p(), weights, stage.full());
  }
}

// A chunk is loaded in two parts. Its front is what nobody reads any more once T X is there: queries, T and, where channels have decays of
// their own, the keys that the state multiplies. So the front of the chunk after the next one is on its way while the rest of this one is
// read. With kEnds there is no front.
constexpr bool kHasFront = !kEnds;
constexpr int kFirstTurnOfRest = 1;  // so that blocks of a cluster load as much as each other

template <int blocks>
DEVICE void load_front(const Stage& stage, const Maps& maps, const char* weights, int key_head, int begin, u64 l2, Share& share) {
  constexpr int kRowBytes = blocks * 16 * 128;  // of 64 channels
#pragma unroll
  for (int part = 0; part < kDimK / 64; ++part) {
    const int at = part * kColumnBytes;
    if constexpr (!kChannelGate) {
      share.load(stage.q() + u32(at), maps.q, stage.full(), l2, 64 * part, key_head, begin);
    } else {
      if (kDelta && share.takes_of_head()) share.load(stage.k() + u32(at), weights + WeightsLayout::known + at, kRowBytes, stage.full());
      if (share.takes_of_head()) share.load(stage.q() + u32(at), weights + WeightsLayout::asked + at, kRowBytes, stage.full());
    }
  }
  if (kDelta && share.takes_of_head()) load_t<blocks>(stage, weights, share);
}
template <int blocks>
DEVICE void load_rest(const Stage& stage, const Maps& maps, const char* weights, int key_head, int begin, u64 l2, Share& share) {
  constexpr int kRowBytes = blocks * 16 * 128;
#pragma unroll
  for (int part = 0; part < kDimK / 64; ++part) {
    const int at = part * kColumnBytes;
    if constexpr (!kChannelGate) {
      share.load(stage.k() + u32(at), maps.k, stage.full(), l2, 64 * part, key_head, begin);
    } else {
      if (kDelta && !kHasFront && share.takes_of_head())
        share.load(stage.k() + u32(at), weights + WeightsLayout::known + at, kRowBytes, stage.full());
      if (share.takes_of_head()) share.load(stage.written() + u32(at), weights + WeightsLayout::written + at, kRowBytes, stage.full());
    }
  }
  if (kDelta && !kHasFront && share.takes_of_head()) load_t<blocks>(stage, weights, share);
  if (!kEnds && share.takes_of_head()) load_p<blocks>(stage, weights + WeightsLayout::p, share);
  if (share.takes_of_head()) share.load(stage.at + Stage::numbers_at, weights + WeightsLayout::numbers, sizeof(ChunkNumbers), stage.full());
  if (kChannelGate && share.takes_of_head())
    share.load(stage.at + Stage::decays_at, weights + WeightsLayout::decays, kDimK * 4, stage.full());
}

// Bytes of both parts without values, of a chunk's blocks of weights; of keys and queries as they are all rows come.
template <int blocks>
struct LoadedBytes {
  static constexpr int triangle = blocks * (blocks + 1) / 2 * kBlockBytes, rows = blocks * 16 * kDimK * kSize,
                       known = (kDelta ? triangle : 0) + (kChannelGate && kDelta ? rows : 0), asked = kChannelGate ? rows : Stage::keys,
                       front = kHasFront ? known + asked : 0,
                       rest = (kHasFront ? 0 : known) + (kEnds ? 0 : triangle) + (kChannelGate ? rows + kDimK * 4 : Stage::keys) +
                              int(sizeof(ChunkNumbers));
};

// Segments whose ends are asked for have whole chunks.
DEVICE bool has_half(const Unit& unit, int begin) { return !kEnds && is_half(unit.end - begin); }
// By a warp.
DEVICE void load_chunks(const RecurrentParams& p, const Maps& maps) {
  const u64 l2 = l2_normal();
  const Share of_block;
  Place place;
  for (ChunkCursor ahead(p); ahead.is_there(); ahead.next(p), place.next(p)) {
    const Stage stage = stage_at(place.at);
    const int key_head = ahead.key_head(p), begin = ahead.begin;
    const char* const weights = ahead.weights(p);
    const bool half = has_half(ahead.unit, begin);
    if constexpr (kHasFront) {
      mbarrier_wait(stage.front_empty(), place.parity ^ 1);
      if (elect_one()) {
        Share share = of_block;
        mbarrier_arrive_expect(stage.full(), half ? LoadedBytes<kBlocks / 2>::front : LoadedBytes<kBlocks>::front);
        half ? load_front<kBlocks / 2>(stage, maps, weights, key_head, begin, l2, share)
             : load_front<kBlocks>(stage, maps, weights, key_head, begin, l2, share);
      }
      __syncwarp();
    }
    mbarrier_wait(stage.rest_empty(), place.parity ^ 1);
    if (elect_one()) {
      Share share = of_block;
      share.turn = kFirstTurnOfRest;
      const int bytes = half ? LoadedBytes<kBlocks / 2>::rest : LoadedBytes<kBlocks>::rest;
      mbarrier_arrive_expect(stage.full(), bytes + (ahead.unit.is_transition() ? 0 : Stage::values));
      half ? load_rest<kBlocks / 2>(stage, maps, weights, key_head, begin, l2, share)
           : load_rest<kBlocks>(stage, maps, weights, key_head, begin, l2, share);
      if (!ahead.unit.is_transition()) tma_load(stage.v(), maps.v, stage.full(), l2, ahead.unit.first_value, ahead.unit.head, begin);
    }
    __syncwarp();
  }
}

// What is behind a request's tokens is another one's, and could be anything: keys and values of a chunk's blocks from `count` on become 0.
template <int blocks>
DEVICE void clear_others(const Stage& stage, int count) {
  if (count >= 16 * blocks) return;
#pragma unroll 1
  for (int i = int(threadIdx.x); i < (16 * blocks - count) * 8; i += kComputing) {
    const int row = count + i / 8;
    store_shared(place_in(stage.v(), row, i % 8), uint4{0, 0, 0, 0});
#pragma unroll
    for (int column = 0; !kChannelGate && column < kDimK / 64; ++column)
      store_shared(place_in(stage.k(), row, 8 * column + i % 8), uint4{0, 0, 0, 0});
  }
  async_proxy_fence();
  named_barrier_sync(1, kComputing);
}

// In all blocks that load to this one's stage.
DEVICE void release(u32 empty) {
  __syncwarp();
  if constexpr (kCluster > 1) {
    if (lane_id() < kCluster) mbarrier_arrive_at<false>(empty, u32(lane_id()));
  } else {
    if (lane_id() == 0) mbarrier_arrive(empty);
  }
}

// Outputs of whole chunks leave by TMA, by a warp of their own, so that nobody else waits until they have been read.
DEVICE void store_chunks(const RecurrentParams& p, const TensorMap& out) {
  Place place;
  for (ChunkCursor chunk(p); chunk.is_there(); chunk.next(p), place.next(p)) {
    const Stage stage = stage_at(place.at);
    mbarrier_wait(stage.placed(), place.parity);
    if (elect_one() && chunk.unit.end - chunk.begin >= kChunk) {
      tma_store(out, stage.v(), chunk.unit.first_value, chunk.unit.head, chunk.begin);
      tma_wait_for_stores();
    }
    release(stage.rest_empty());
  }
}

// The block's units behind its first one, which a warp of its own finds while others are computed: that takes as long as half a chunk, or
// more. Meanwhile the states that they begin with come to L2. Where two blocks share a multiprocessor, one computes while the other finds.
constexpr bool kFindsAhead = kBlocksTogether == 1;
static_assert(sizeof(Unit) == 64);
DEVICE Unit& found_unit() { return *reinterpret_cast<Unit*>(block_memory() + Stage::unit_at); }
// Behind the last one comes one that is not there.
DEVICE void find_units(const RecurrentParams& p) {
  const Stage first = stage_at(0);
  u32 parity = 1;
#pragma unroll 1
  for (Unit unit(p); unit.is_there(); parity ^= 1) {
    unit.next(p);
    prefetch_state(p, unit);
    mbarrier_wait(first.taken(), parity);
    if (lane_id() == 0) {
      found_unit() = unit;
      mbarrier_arrive(first.found());
    }
    __syncwarp();
  }
}
// Goes on to the block's next unit: the one that find_units() has found, or one that is found here. `parity`: of the wait for it.
DEVICE void take_next(const RecurrentParams& p, Unit& unit, u32& parity) {
  if constexpr (!kFindsAhead) return unit.next(p);
  const Stage first = stage_at(0);
  mbarrier_wait(first.found(), parity);
  unit = found_unit();
  __syncwarp();
  if (lane_id() == 0) mbarrier_arrive(first.taken());
  parity ^= 1;
}

// A chunk of a unit, or its first half, which is at a place of shared memory.
template <int blocks>
DEVICE void compute_chunk(const RecurrentParams& p, const Unit& unit, int begin, int at, int value, float skip, Sums& s) {
  const Stage stage = stage_at(at);
  const ChunkNumbers& n = numbers_at(at);
  clear_others<blocks>(stage, unit.end - begin);
  Columns<blocks> u, y;  // u: what the state gives for k, then X, then U
  begin_with_state(s, at, stage, u, y);
  const Factor<blocks> v = unit.is_transition() ? Factor<blocks>{} : load_values<blocks>(stage, value);
  const auto of_values = load_numbers<blocks>(n.values), of_known = load_numbers<blocks>(n.known);
  if constexpr (kEnds) {
    if constexpr (kDelta) wait_for<0>(u);
    take_values(v, of_values, of_known, u);
    if constexpr (kDelta) {
      const Factor<blocks> x = factor_of(u);
      begin_t(x, stage, u);
    }
  } else if constexpr (kDelta) {
    wait_for<1>(u);
    take_values(v, of_values, of_known, u);
    const Factor<blocks> x = factor_of(u);
    begin_t(x, stage, u);
    const auto of_outputs = load_numbers<blocks>(n.outputs);
    wait_for<1>(y);
    begin_outputs(stage, value, of_outputs, skip, y);
  } else {
    take_values(v, of_values, of_known, u);
    const auto of_outputs = load_numbers<blocks>(n.outputs);
    wait_for<0>(y);
    begin_outputs(stage, value, of_outputs, skip, y);
  }
  const auto of_written = load_numbers<blocks>(n.written);
  if constexpr (kDelta) wait_for<0>(u);
  if constexpr (kHasFront) release(stage.front_empty());
  const Factor<blocks> written = factor_of(u);
  if constexpr (!kEnds) begin_p(written, stage, y);
  scale_columns(u, of_written);
  begin_written(factor_of(u), stage, s);
  if constexpr (!kEnds) {
    wait_for<1>(y);
    place_outputs(stage, value, y);
    if (blocks < kBlocks || unit.end - begin < kChunk) store_outputs<blocks>(p, unit, begin, stage, value);
    async_proxy_fence();  // TMA reads outputs, and writes where they were
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(stage.placed());
  }
  wait_for<0>(s);
}

DEVICE void compute_chunks(const RecurrentParams& p) {
  const int value = warp_id() * kWarpValues;
  Place place;
  u32 found = 0;
  for (Unit unit(p); unit.is_there(); take_next(p, unit, found)) {
    Sums s;
    begin_sums(p, unit, value, s);
    const float skip = kSkip ? p.skip[unit.head] : 0.f;
#pragma unroll 1
    for (int begin = unit.begin; begin < unit.end; begin += kChunk, place.next(p)) {
      const Stage stage = stage_at(place.at);
      mbarrier_wait(stage.full(), place.parity);
      if (any_lane(has_half(unit, begin))) {  // the compiler sees that all lanes agree
        compute_chunk<kBlocks / 2>(p, unit, begin, place.at, value, skip, s);
      } else {
        compute_chunk<kBlocks>(p, unit, begin, place.at, value, skip, s);
      }
      release(stage.rest_empty());
    }
    end_sums(p, unit, value, s);
  }
}

// Blocks of zeros of all stages, once, by all threads of a block.
template <class Order>
DEVICE void clear_zeros(int stages, int triangle) {
  constexpr int kWords = kBlockBytes / 16;
#pragma unroll
  for (int block = 0; block < Order::num_zeros; ++block)
    for (int i = int(threadIdx.x); i < stages * kWords; i += kThreads)
      *reinterpret_cast<uint4*>(block_memory() + i / kWords * Stage::bytes + triangle + Order::zeros[block] * kBlockBytes +
                                i % kWords * 16) = {};
}
DEVICE void clear_zeros(int stages) {
  if constexpr (kDelta) clear_zeros<TOrder>(stages, Stage::t_at);
  if constexpr (kHasQueries) clear_zeros<POrder>(stages, Stage::p_at);
}

DEVICE void sync_together() {
  if constexpr (kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksTogether)
    recurrent_chunks(const __grid_constant__ RecurrentParams p, const __grid_constant__ TensorMap q_map,
                     const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
                     const __grid_constant__ TensorMap out_map) {
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int place = 0; place < p.chunk_stages; ++place) {
      const Stage stage = stage_at(place);
      mbarrier_init(stage.full(), kHasFront ? 2 : 1);
      mbarrier_init(stage.front_empty(), kComputing / 32 * kCluster);
      mbarrier_init(stage.rest_empty(), (kComputing / 32 + (kEnds ? 0 : 1)) * kCluster);
      mbarrier_init(stage.placed(), kComputing / 32);
    }
    if constexpr (kFindsAhead) mbarrier_init(stage_at(0).found(), 1), mbarrier_init(stage_at(0).taken(), kComputing / 32);
    mbarrier_fence_init();
  }
  clear_zeros(p.chunk_stages);
  async_proxy_fence();
  sync_together();
  griddep_wait();
  if constexpr (kEnds) griddep_launch();                    // blocks of the next launch set up meanwhile
  if constexpr (kMoved) registers_shrink<kOwnRegisters>();  // what each has beside the other blocks
  if (threadIdx.x < kComputing) {
    if constexpr (kMoved) registers_grow<kComputeRegisters>();
    compute_chunks(p);
  } else {
    if constexpr (kMoved) registers_shrink<kLoadRegisters>();
    if (warp_id() == kComputing / 32) load_chunks(p, {q_map, k_map, v_map});
    if (!kEnds && warp_id() == kComputing / 32 + 1) store_chunks(p, out_map);
    if (kFindsAhead && warp_id() == kComputing / 32 + 2) find_units(p);
  }
  if constexpr (!kEnds) griddep_launch();
  if constexpr (kCluster > 1) cluster_sync();  // what others load comes to a block that is there
}

}  // namespace imbrex::cuda
