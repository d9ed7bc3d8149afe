// Masks as prefill with wgmma reads them (attention_sm90_mask.cuh): custom masks, of which the caller has a byte or a bit for each query
// token and key, and a layer's mask_mod, which is computed here. Launched by cuda/plan/plan_run.cpp: of the caller's in front of each run,
// since a caller may change them; of a mask_mod once a step.
//
// Memory: each byte that a query may see is read once, and written as a bit: 4096 x 4096 causal are 8.4 MB, 3 us at 3 TB/s. A warp takes
// 1024 keys of a token at a time, a thread block the tokens of an item and 32 tiles of keys: a word of its flags.
#include "attention_expression.cuh"
#include "attention_sm90_mask.cuh"

namespace imbrex::cuda {

constexpr int kWarps = kPackMaskThreads / 32;
constexpr int kChunkKeys = 32 * 32, kTaskKeys = 32 * kTileKeys, kChunks = kTaskKeys / kChunkKeys;  // of a warp's turn, of a task

struct SharedStorage {            // a bit for each word of the task's keys
  u32 seen[kChunks];              // some token sees a key of it
  u32 part[kConsumers][kChunks];  // of a warpgroup's tokens, one does not see all of it
};
extern __shared__ char memory[];
extern "C" __device__ const unsigned smem_bytes = sizeof(SharedStorage);

DEVICE int tasks_of(const AttentionParams& p, int request) {
  const int q_len = p.query_start[request + 1] - p.query_start[request], seq_len = p.seq_lens[request];
  if (q_len < p.least_masked_q || seq_len <= 0) return 0;
  return (q_len + kItemTokens - 1) / kItemTokens * ((seq_len + kTaskKeys - 1) / kTaskKeys);
}

// A token's 1024 keys from `begin` on: a word a lane. `shows`: the key to the token, of its visible keys.
template <class Shows>
DEVICE u32 packed(int begin, const KeyRange& seen, const Shows& shows) {
  u32 mine = 0;
#pragma unroll
  for (int i = 0; i < 32; i += 8) {  // eight loads under way
    bool sees[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int key = begin + 32 * (i + j) + lane_id();
      sees[j] = key >= seen.lo && key < seen.hi && shows(key);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const u32 word = __ballot_sync(kFullWarp, sees[j]);
      if (lane_id() == i + j) mine = word;
    }
  }
  return mine;
}

// Likewise where the caller's mask has bits: a lane takes 32 of them from the five bytes that they lie in.
DEVICE u32 gathered(const AttentionParams& p, long first_number, int begin, const KeyRange& seen) {
  const int from = max(begin + 32 * lane_id(), seen.lo), to = min(begin + 32 * lane_id() + 32, seen.hi);
  if (from >= to) return 0;
  const long bit = first_number + from, last = first_number + to - 1;
  u64 bits = 0;
  for (long byte = bit >> 3; byte <= last >> 3; ++byte) bits |= u64(p.custom_mask[byte]) << 8 * int(byte - (bit >> 3));
  const u32 word = u32(bits >> int(bit & 7)) & (~0u >> (32 - (to - from)));
  return word << (from - (begin + 32 * lane_id()));
}

DEVICE void pack(const AttentionParams& p, SharedStorage& shared, int request, int task) {
  const int first_token = p.query_start[request], q_len = p.query_start[request + 1] - first_token, seq_len = p.seq_lens[request];
  const int words = (seq_len + kTaskKeys - 1) / kTaskKeys, word = task % words, first_query = task / words * kItemTokens;
  const int num_tokens = min(kItemTokens, q_len - first_query), position = seq_len - q_len + first_query;
  const int lo = visible_keys(p, position).lo, hi = min(visible_keys(p, position + num_tokens - 1).hi, seq_len);
  const int task_begin = word * kTaskKeys;
  if (task_begin >= hi || task_begin + kTaskKeys <= lo) return;  // no tile of it is asked for
  __syncthreads();                                               // what the task before has left there is read
  if (int(threadIdx.x) < int(sizeof shared / sizeof(u32))) reinterpret_cast<u32*>(&shared)[threadIdx.x] = 0;
  __syncthreads();
  for (int token = warp_id(); token < num_tokens; token += kWarps) {
    const long first_number = kMaskMod ? 0 : p.custom_start[request] + long(first_query + token) * seq_len;
    const auto shows = [&] {
      if constexpr (kMaskMod) {
        const ExpressionInputs in{.score = 0.f,
                                  .batch = request,
                                  .head = 0,
                                  .q = position + token,
                                  .kv = 0,
                                  .q_len = q_len,
                                  .kv_len = seq_len,
                                  .tensors = p.mask_tensors};
        return [=](int key) { return mask_mod(of_key(in, key)); };
      } else {
        const unsigned char* const mask = p.custom_mask + first_number;
        return [=](int key) { return mask[key] != 0; };
      }
    }();
    const KeyRange visible = visible_keys(p, position + token), seen{max(visible.lo, 0), min(visible.hi, seq_len)};
    u32* const row = mask_row(p, first_token + first_query + token);
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int begin = task_begin + chunk * kChunkKeys;
      if (begin >= hi || begin + kChunkKeys <= lo) continue;
      const u32 mine = !kMaskMod && p.mask_is_packed ? gathered(p, first_number, begin, seen) : packed(begin, seen, shows);
      const u32 any = __ballot_sync(kFullWarp, mine != 0), part = __ballot_sync(kFullWarp, mine != ~0u);
      if (begin / 32 + lane_id() < p.mask_words) row[begin / 32 + lane_id()] = mine;
      if (lane_id() == 0) {
        atomicOr(&shared.seen[chunk], any);
        atomicOr(&shared.part[token / kTeamTokens][chunk], part);
      }
    }
  }
  __syncthreads();
  if (warp_id() > 0) return;
  const int at = lane_id() * kMaskWords;  // of the lane's tile, its first word
  const auto of_tile = [&](const u32(&bits)[kChunks]) { return bits[at / 32] >> at % 32 & ((1u << kMaskWords) - 1); };
  const bool sees = of_tile(shared.seen) != 0;
  u32* const flags = seen_tiles(p, first_token + first_query) + word;
  const u32 any = __ballot_sync(kFullWarp, sees);
  if (lane_id() == 0) flags[0] = any;
#pragma unroll
  for (int wg = 0; wg < kConsumers; ++wg) {
    const u32 whole = __ballot_sync(kFullWarp, sees && of_tile(shared.part[wg]) == 0);
    if (lane_id() == 0) flags[(1 + wg) * p.seen_tile_words] = whole;
  }
}

// Beside a mask_mod: so many thread blocks at a time, by which ptxas counts registers. Left to itself it takes 32 of them, and spills.
constexpr int kBlocksAtOnce = kMaskMod ? 4 : 0;

// Tasks are those of all requests, one after the other; a thread block takes each gridDim.x-th.
extern "C" __global__ void __launch_bounds__(kPackMaskThreads, kBlocksAtOnce) pack_mask(const __grid_constant__ AttentionParams p) {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  griddep_wait();
  const int num_reqs = p.counts->num_reqs, lane = lane_id();
  int task = int(blockIdx.x), before = 0;  // before: tasks of the requests in front of these 32
  for (int base = 0; base < num_reqs; base += 32) {
    const int mine = base + lane < num_reqs ? tasks_of(p, base + lane) : 0;
    int end = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int others = shuffle(end, max(lane - step, 0));
      if (lane >= step) end += others;
    }
    const int all = shuffle(end, 31);
    for (; task < before + all; task += int(gridDim.x)) {
      const int owner = lowest_bit(__ballot_sync(kFullWarp, before + end > task));
      pack(p, shared, base + owner, task - before - shuffle(end - mine, owner));
    }
    before += all;
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
