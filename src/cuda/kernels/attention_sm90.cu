// Attention of many queries with wgmma and TMA, for sm_90a: prefill, chunked prefill and extend; planned by cuda/plan.cpp. Its host
// side, with the limits of what it runs, is cuda/attention_sm90.cpp.
//
// 128 rows x 128 keys x 128 dims are 8.4 M operations: 2048 cycles of the matrix unit, 1024 of the one for exponentials. Two warpgroups
// with 64 rows each take turns: while one multiplies, the other exponentiates. A third loads queries, keys and values, a page a lane, and
// is an item ahead. docs/kernels/cuda_sm90.md has the schedule.
#include "attention_item.cuh"
#include "attention_output.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

constexpr int kConsumers = kTileRows / 64, kThreads = 128 * (kConsumers + 1);
constexpr int kQChunks = kHeadDimQk / 64, kVChunks = kHeadDimV / 64;  // of 64 dims: 128 bytes, the width of the swizzle
constexpr int kQChunkBytes = 64 * 128, kKvChunkBytes = kTileKeys * 128;
constexpr int kPageRows = kBlockSize == 0 || kBlockSize > kTileKeys ? kTileKeys : kBlockSize;  // of a TMA box
constexpr int kPages = kTileKeys / kPageRows;                                                  // boxes of a tile
constexpr int kPageBytes = kPageRows * 128;
constexpr float kSlack = 8.f;  // log2 units by which a maximum may outgrow a row's reference

constexpr int kQBytes = kConsumers * kQChunks * kQChunkBytes, kKvBytes = kStages * (kQChunks + kVChunks) * kKvChunkBytes;
constexpr int kQSlots = 2 * kQBytes + kKvBytes + 1024 <= 227 * 1024 ? 2 : 1;  // with two, the next item's queries load meanwhile

struct SharedStorage {
  alignas(1024) char q[kQSlots][kConsumers][kQChunks][kQChunkBytes];
  alignas(1024) char k[kStages][kQChunks][kKvChunkBytes];
  alignas(1024) char v[kStages][kVChunks][kKvChunkBytes];
  u64 q_full[kQSlots], q_empty[kQSlots], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  Item item[kQSlots];  // whose queries are in q
  bool more[kQSlots];  // false: no item, and none will come
};
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

// A place in a ring of `size` and the parity of its current phase.
template <int size>
struct Ring {
  int at = 0;
  u32 parity = 0;
  DEVICE void next() {
    if (++at == size) at = 0, parity ^= 1;
  }
};

struct Tiles {
  int first, end;  // of kTileKeys keys, that some row of the item sees
};
DEVICE Tiles tiles_of(const Item& item) {
  const int first = item.lo / kTileKeys;
  return {first, item.hi > item.lo ? (item.hi + kTileKeys - 1) / kTileKeys : first};
}

// --- producer: one warp

DEVICE void load_pages(u32 to, const TensorMap& map, u32 barrier, int chunks, int dim_chunk_bytes, int block, int offset, int kv_head) {
#pragma unroll
  for (int c = 0; c < chunks; ++c) tma_load(to + c * dim_chunk_bytes, map, barrier, l2_normal(), c * 64, offset, kv_head, block);
}

DEVICE void produce(const AttentionParams& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                    SharedStorage& shared) {
  const int lane = lane_id(), tasks = num_tasks(p), blocks = int(gridDim.x), last = max(tasks - blocks, 0) + blocks - 1;
  Ring<kQSlots> q;
  Ring<kStages> kv;
  for (int task = int(blockIdx.x);; q.next()) {
    int fetched = 0;
    if (lane == 0 && (task < tasks || task == int(blockIdx.x))) {  // as often as attention_sm80 does
      fetched = atomicAdd(p.next_task, 1);
      if (fetched == last) *p.next_task = 0;
    }
    const u32 q_full = shared_address(&shared.q_full[q.at]);
    mbarrier_wait(shared_address(&shared.q_empty[q.at]), q.parity ^ 1);
    if (task >= tasks) {
      if (lane == 0) {
        shared.more[q.at] = false;
        mbarrier_arrive(q_full);
      }
      break;
    }
    const Item item = item_of(p, task);
    if (lane == 0) {
      shared.item[q.at] = item;
      shared.more[q.at] = true;
      mbarrier_arrive_expect(q_full, kConsumers * kQChunks * (64 / kGroup * kGroup) * 128);
#pragma unroll
      for (int i = 0; i < kConsumers * kQChunks; ++i) {
        const int wg = i / kQChunks, c = i % kQChunks;
        tma_load(shared_address(shared.q[q.at][wg][c]), q_map, q_full, l2_first_out(), c * 64, item.kv_head * kGroup,
                 item.q_begin + wg * (64 / kGroup));
      }
    }
    const Tiles tiles = tiles_of(item);
    const auto block_of = [&](int tile) {
      if constexpr (kBlockSize == 0) return 0;
      const int key = tile * kTileKeys + lane * kPageRows;
      return lane < kPages && key < item.hi ? p.block_ids[item.first_block + key / max(kBlockSize, 1)] : 0;
    };
    int block = tiles.end > tiles.first ? block_of(tiles.end - 1) : 0;
    for (int tile = tiles.end - 1; tile >= tiles.first; --tile, kv.next()) {
      const int key = tile * kTileKeys + lane * kPageRows;
      const bool loads = lane < kPages && key < item.hi && key + kPageRows > item.lo;
      const int pages = __popc(__ballot_sync(kFullWarp, loads));
      const int offset = kBlockSize == 0 ? int(item.first_block) + key : key % max(kBlockSize, 1);
      const int next_block = tile > tiles.first ? block_of(tile - 1) : 0;
      const u32 k_full = shared_address(&shared.k_full[kv.at]), v_full = shared_address(&shared.v_full[kv.at]);
      mbarrier_wait(shared_address(&shared.k_empty[kv.at]), kv.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(k_full, pages * kPageBytes * kQChunks);
      __syncwarp();
      if (loads)
        load_pages(shared_address(shared.k[kv.at]) + lane * kPageBytes, k_map, k_full, kQChunks, kKvChunkBytes, block, offset,
                   item.kv_head);
      mbarrier_wait(shared_address(&shared.v_empty[kv.at]), kv.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(v_full, pages * kPageBytes * kVChunks);
      __syncwarp();
      if (loads)
        load_pages(shared_address(shared.v[kv.at]) + lane * kPageBytes, v_map, v_full, kVChunks, kKvChunkBytes, block, offset,
                   item.kv_head);
      block = next_block;
    }
    task = blocks + shuffle(fetched, 0);
  }
}

// --- consumers: a warpgroup each

struct Rows {  // what a thread knows of its two rows
  RowTerms terms[2];
  KeyRange seen[2];
  int position[2];
};

template <bool>
struct Edge {};

DEVICE void hide(int begin, const Rows& rows, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int first = begin + 2 * (lane_id() % 4), lo = rows.seen[h].lo - first, hi = rows.seen[h].hi - first;
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int key = 8 * j + c;
        if (key >= hi || key < lo) s[4 * j + 2 * h + c] = -infinity();
      }
    }
  }
}

DEVICE void modify(const AttentionParams& p, int begin, const Rows& rows, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int distance = begin + 2 * (lane_id() % 4) - rows.position[h];
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * h + c];
        x = modified(p, rows.terms[h], x, distance + 8 * j + c);
      }
    }
  }
}

// Scores become weights relative to each row's reference. True where a row's sums must be multiplied by `factor` first.
DEVICE bool weigh(const Rows& rows, float (&s)[kTileKeys / 2], float (&reference)[2], float (&sum)[2], float (&factor)[2]) {
  bool moved = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float top = -infinity();
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
    top = max_over<4>(top);
    if constexpr (kPlainLogits) top *= rows.terms[h].scale;
    const bool moves = top > reference[h] + kSlack;
    factor[h] = moves ? exp2_approx(reference[h] - top) : 1.f;
    if (moves) reference[h] = top;
    moved = moved || moves;
    sum[h] *= factor[h];
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kTileKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[4 * j + 2 * h + c];
        x = exp2_approx(kPlainLogits ? fmaf(x, rows.terms[h].scale, -reference[h]) : x - reference[h]);
        part[c] += x;
      }
    }
    sum[h] += part[0] + part[1];
  }
  return any_lane(moved);
}

DEVICE void pack_weights(const float (&s)[kTileKeys / 2], u32 (&weights)[kTileKeys / 16][4]) {
#pragma unroll
  for (int i = 0; i < kTileKeys / 4; ++i) {
    weights[i / 4][i % 4] = kQType == kBf16 ? pack_bf16(s[2 * i], s[2 * i + 1]) : pack_f16(s[2 * i], s[2 * i + 1]);
  }
}

// `q` and `k`: descriptors of the tiles, whose addresses count in units of 16 bytes.
DEVICE void start_scores(u64 q, u64 k, float (&s)[kTileKeys / 2]) {
#pragma unroll
  for (int step = 0; step < kHeadDimQk / 16; ++step) {
    Wgmma<kTileKeys>::shared(s, q + (step / 4 * kQChunkBytes + step % 4 * 32) / 16, k + (step / 4 * kKvChunkBytes + step % 4 * 32) / 16,
                             step != 0);
  }
  wgmma_commit();
}

DEVICE void start_output(const u32 (&weights)[kTileKeys / 16][4], u64 v, float (&out)[kHeadDimV / 2]) {
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) Wgmma<kHeadDimV>::registers(out, weights[step], v + step * 2048 / 16);
  wgmma_commit();
}

template <int n>
DEVICE void pin(float (&x)[n]) {
#pragma unroll
  for (float& element : x) wgmma_pin(element);
}

// Values outside of [lo, hi) may be anything, and zero times NaN is NaN.
DEVICE void clear_values(u32 v, int begin, int lo, int hi) {
  for (int i = int(threadIdx.x); i < kTileKeys * kVChunks * 8; i += 128 * kConsumers) {
    const int row = i / 8 % kTileKeys, chunk = i / 8 / kTileKeys, key = begin + row;
    if (key < lo || key >= hi) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(v + chunk * kKvChunkBytes + row * 128 + i % 8 * 16), "r"(0) : "memory");
    }
  }
  async_proxy_fence();
  named_barrier_sync(1 + kConsumers, 128 * kConsumers);
}

DEVICE void store_rows(const AttentionParams& p, const Item& item, int row, const float (&reference)[2], const float (&total)[2],
                       const float (&out)[kHeadDimV / 2]) {
  const float v_scale = kv_scale(p.v, item.kv_head);
  const bool aligned = out_is_wide(p), first = lane_id() % 4 == 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    if (r >= item.num_rows) continue;
    const int token = item.token_of(r), head = item.head_of(r), dim = 2 * (lane_id() % 4);
    if (item.partial >= 0) {
      const long at = partial_row(p, item, r);
      if (first) reinterpret_cast<float2*>(p.partial_state)[at] = {reference[h], total[h]};
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        *reinterpret_cast<float2*>(p.partial_out + at * kHeadDimV + 8 * j + dim) = {out[4 * j + 2 * h] * v_scale,
                                                                                    out[4 * j + 2 * h + 1] * v_scale};
      }
    } else {
      const RowEnd end = row_end(p, head, reference[h], total[h]);
      if (first) store_lse(p, token, head, end.lse);
      char* const to = out_row(p, token, head) + dim * element_bytes(kOutType);
#pragma unroll
      for (int j = 0; j < kHeadDimV / 8; ++j) {
        store_pair(to + 8 * j * element_bytes(kOutType), aligned, ended(out[4 * j + 2 * h], end.factor * v_scale),
                   ended(out[4 * j + 2 * h + 1], end.factor * v_scale));
      }
    }
  }
}

DEVICE void consume(const AttentionParams& p, SharedStorage& shared, int wg) {
  const int row = wg * 64 + warp_id() % 4 * 16 + lane_id() / 4;  // and row + 8
  const bool leader = threadIdx.x % 128 == 0;
  Ring<kQSlots> slot;
  Ring<kStages> k, v;
  const u64 first_k = wgmma_descriptor(shared_address(shared.k), 16, 1024, 1);
  const u64 first_v = wgmma_descriptor(shared_address(shared.v), kKvChunkBytes, 1024, 1);
  const auto k_tile = [&] { return first_k + k.at * (kQChunks * kKvChunkBytes / 16); };
  const auto v_tile = [&] { return first_v + v.at * (kVChunks * kKvChunkBytes / 16); };
  if (wg == 1) named_barrier_arrive(1, 256);  // warpgroup 0 multiplies first
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&shared.q_full[slot.at]), slot.parity);
    if (!shared.more[slot.at]) break;
    const Item item = shared.item[slot.at];
    const Tiles tiles = tiles_of(item);
    Rows rows;
    const float scale = p.scale * kv_scale(p.k, item.kv_head);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = min(row + 8 * h, item.num_rows - 1);
      rows.terms[h] = row_terms(p, item.head_of(r), scale);
      rows.position[h] = item.position_of(r);
      const KeyRange seen = visible_keys(p, rows.position[h]);
      rows.seen[h] = {max(seen.lo, item.lo), min(seen.hi, item.hi)};
    }
    const int first_row = min(wg * 64, item.num_rows - 1), last_row = min(wg * 64 + 63, item.num_rows - 1);
    const int all_lo = max(item.lo, visible_keys(p, item.position_of(last_row)).lo);
    const int all_hi = min(item.hi, visible_keys(p, item.position_of(first_row)).hi);
    const u64 q =
        wgmma_descriptor(shared_address(shared.q[0][0]), 16, 1024, 1) + (slot.at * kConsumers + wg) * (kQChunks * kQChunkBytes / 16);

    float out[kHeadDimV / 2], reference[2] = {kEmptyReference, kEmptyReference}, sum[2] = {0.f, 0.f}, factor[2];
    u32 weights[kTileKeys / 16][4];
#pragma unroll
    for (float& x : out) x = 0.f;
    // Whether rows hide keys of a tile is known to the code: a branch while products are under way would have to wait for them.
    const auto softmax = [&]<bool edge>(int tile, float(&s)[kTileKeys / 2], Edge<edge>) __attribute__((always_inline)) {
      const int begin = tile * kTileKeys;
      if constexpr (!kPlainLogits) modify(p, begin, rows, s);
      if constexpr (edge) hide(begin, rows, s);
      return weigh(rows, s, reference, sum, factor);
    };
    const auto ready_values = [&](int tile) __attribute__((always_inline)) {
      mbarrier_wait(shared_address(&shared.v_full[v.at]), v.parity);
      const int begin = tile * kTileKeys;
      if (begin < item.lo || begin + kTileKeys > item.hi) clear_values(shared_address(shared.v[v.at]), begin, item.lo, item.hi);
    };
    if (tiles.end > tiles.first) {
      float s[kTileKeys / 2];
      mbarrier_wait(shared_address(&shared.k_full[k.at]), k.parity);
      named_barrier_sync(1 + wg, 256);
      wgmma_fence();
      start_scores(q, k_tile(), s);
      named_barrier_arrive(1 + (wg ^ 1), 256);
      wgmma_wait<0>();
      pin(s);
      if (leader) mbarrier_arrive(shared_address(&shared.k_empty[k.at]));
      k.next();
      softmax(tiles.end - 1, s, Edge<true>{});
      pack_weights(s, weights);
      int tile = tiles.end - 2;
      const auto turn = [&](auto edge) __attribute__((always_inline)) {
        float s[kTileKeys / 2];
        mbarrier_wait(shared_address(&shared.k_full[k.at]), k.parity);
        ready_values(tile + 1);
        named_barrier_sync(1 + wg, 256);
        wgmma_fence();
        start_scores(q, k_tile(), s);
        start_output(weights, v_tile(), out);
        named_barrier_arrive(1 + (wg ^ 1), 256);
        wgmma_wait<1>();
        pin(s);
        if (leader) mbarrier_arrive(shared_address(&shared.k_empty[k.at]));
        k.next();
        const bool moved = softmax(tile, s, edge);
        // Never taken. Without a branch that needs the sums, ptxas moves the wait up, in front of the exponentials that shall hide it.
        if (sum[0] < 0.f || sum[1] < 0.f) asm volatile("trap;");
        wgmma_wait<0>();
        pin(out);
        if (leader) mbarrier_arrive(shared_address(&shared.v_empty[v.at]));
        v.next();
        if (moved) {
#pragma unroll
          for (int i = 0; i < kHeadDimV / 2; ++i) out[i] *= factor[i / 2 % 2];
        }
        pack_weights(s, weights);
        --tile;
      };
      while (tile >= tiles.first && (tile + 1) * kTileKeys > all_hi) turn(Edge<true>{});
      while (tile >= tiles.first && tile * kTileKeys >= all_lo) turn(Edge<false>{});
      while (tile >= tiles.first) turn(Edge<true>{});
      ready_values(tiles.first);
      wgmma_fence();
      start_output(weights, v_tile(), out);
      wgmma_wait<0>();
      pin(out);
      if (leader) mbarrier_arrive(shared_address(&shared.v_empty[v.at]));
      v.next();
    }
    if (leader) mbarrier_arrive(shared_address(&shared.q_empty[slot.at]));
    const float total[2] = {sum_over<4>(sum[0]), sum_over<4>(sum[1])};
    store_rows(p, item, row, reference, total, out);
  }
  if (wg == 0) named_barrier_sync(1, 256);  // what warpgroup 1 reported last
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                   const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) char memory[];
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const int wg = warp_id() / 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQSlots; ++i) {
      mbarrier_init(shared_address(&shared.q_full[i]), 1);
      mbarrier_init(shared_address(&shared.q_empty[i]), kConsumers);
    }
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&shared.k_full[i]), 1);
      mbarrier_init(shared_address(&shared.v_full[i]), 1);
      mbarrier_init(shared_address(&shared.k_empty[i]), kConsumers);
      mbarrier_init(shared_address(&shared.v_empty[i]), kConsumers);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  griddep_wait();
  if (wg == kConsumers) {
    registers_shrink<24>();
    if (warp_id() == 4 * kConsumers) produce(p, q_map, k_map, v_map, shared);
  } else {
    registers_grow<240>();
    consume(p, shared, wg);
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
