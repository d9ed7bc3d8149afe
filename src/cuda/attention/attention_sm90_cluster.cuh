#pragma once
// How thread blocks of the wgmma kernels come by their work: each alone, or those of a cluster together. These read the same tiles of keys
// and values, a part of each from L2 and the rest from each other, and have a part of the item's rows each.
#include "attention_sm90_parts.cuh"
#include "attention_sm90_runs.cuh"

namespace imbrex::cuda {

// The most tiles that a block skips: of a causal item, the block with the first rows does not see the last tiles. It may not be further
// ahead of the others than the stages that wait for it and the tile it begins with.
constexpr int kSkipped = kCausal ? (kTileRows * (kCluster - 1) + kTileKeys - 1) / kTileKeys : 0;
static_assert(kCluster == 1 || (!kWindow && kSkipped < kStages + 2));

DEVICE int rank_in_cluster() { return kCluster == 1 ? 0 : int(cluster_rank()); }

// The tile behind the last one that rows of this block see; its first one, if nothing else, all blocks compute.
DEVICE int seen_end(const AttentionParams& p, const Item& item) {
  const Tiles tiles = tiles_of(item);
  if constexpr (kSkipped == 0) return tiles.end;
  const int hi = seen_by(p, item, item.num_rows - 1).hi;
  return max(tiles.first + 1, min(tiles.end, (hi + kTileKeys - 1) / kTileKeys));
}

// Reports that this block is done with a stage, to all that load it; what wgmma has read, or what threads have. `thread`: of those that are
// done, 0 and up.
template <bool read_by_threads = false>
DEVICE void leave_stage(u64& barrier, int thread) {
  if constexpr (kCluster == 1) {
    if (thread == 0) mbarrier_arrive(shared_address(&barrier));
  } else if (thread < kCluster) {
    mbarrier_arrive_at<read_by_threads>(shared_address(&barrier), thread);
  }
}

// Releases a tile that this block does not see, without reading it. `meet` is a barrier of all warps that wait for the tile: a late warp
// could otherwise find the stage filled once more, with the same phase as before.
template <class Meet>
DEVICE void skip_stage(u64& full, u32 parity, u64& empty, int thread, const Meet& meet) {
  mbarrier_wait(shared_address(&full), parity);
  meet();
  leave_stage(empty, thread);
}

// Whether this block loads the page of a tile for all.
DEVICE bool loads_page(int page) { return page * kPageRows / kBlockKeys == rank_in_cluster(); }
DEVICE void load_box(u32 to, const TensorMap& map, u32 full, bool together, int x, int y, int z, int w) {
  if (kCluster > 1 && together) {
    tma_load_to_all(to, map, full, l2_normal(), kCluster, x, y, z, w);
  } else {
    tma_load(to, map, full, l2_normal(), x, y, z, w);
  }
}

// A queue of tasks that the first block has taken from the counter and the others have not yet read. The first block is not many items
// ahead of the others, since its tiles wait for their loads; but there may be any number of tasks without work in a row.
constexpr int kHandedTasks = 8;
struct HandedTasks {  // in shared memory
  u64 full[kHandedTasks], empty[kHandedTasks];
  int task[kHandedTasks];
  struct {
    int piece;   // the one that find() gives
    bool more;   // whether there are more behind the one that was found last
    u32 before;  // items that were found before the run
  } run;         // state of the warp that finds tasks, which has few registers
};

DEVICE void init_handed(HandedTasks& handed) {
  for (u64& full : handed.full) mbarrier_init(shared_address(&full), 1);
  for (u64& empty : handed.empty) mbarrier_init(shared_address(&empty), kCluster > 1 ? kCluster - 1 : 1);
}

// The task that one warp finds for the others: an item, or a piece of a run, which is computed like an item of its own.
struct Found {
  Item item;
  RunPiece piece;
  bool together;  // the item's rows are those of all blocks of the cluster
};

// The tasks that a warp takes: first the one with the number of its block or cluster, then those that the counter gives. A task that is a
// run of pieces is found piece by piece.
class Tasks {
 public:
  DEVICE Tasks(const AttentionParams& p, HandedTasks& handed) : p_(p), handed_(handed) {
    if (lane_id() == 0) handed_.run = {0, false, 0};
    __syncwarp();
  }

  DEVICE bool exists() const { return task_ < num_tasks(p_); }

  // Finds the item of this block; false: another cluster has it, or the item has no rows for this task. Where one block has room for an
  // item's rows, the blocks of a cluster take a kv head each instead, and the tasks of the other heads are done with that of the first.
  // `items`: how many were found before.
  DEVICE bool find(u32 items, Found& found) {
    Item& item = found.item;
    item = item_of(p_, task_);
    const int piece = handed_.run.piece;
    found.piece = {piece, true};
    if (item.piece > 0) {
      const int begin = tiles_of(item).first * kTileKeys + piece * item.piece, end = begin + item.piece;
      found.piece.last = end >= item.hi;
      item.lo = max(item.lo, begin), item.hi = min(item.hi, end);
    }
    item.query_index = item.merge = item.piece = 0;  // not read: registers are few
    if constexpr (!kScoreMod) item.request = item.seq_len = 0;
    found.together = kCluster > 1 && item.num_rows > kTileRows;
    const bool has_rows = kRowBlocks == 1 || item.num_rows > 0;
    const bool mine = has_rows && (found.together || item.kv_head % kCluster == 0);
    if (lane_id() == 0) {
      if (piece == 0) handed_.run.before = items;
      handed_.run.more = mine && !found.piece.last;
    }
    __syncwarp();
    if (!found.together) {
      item.kv_head += rank_in_cluster();
      return mine;
    }
    // The blocks take turns at the first rows: with a causal mask these have less to do.
    const int before = (rank_in_cluster() + int(handed_.run.before)) % kCluster * kTileRows;
    item.row_begin += before;
    item.num_rows = max(0, min(kTileRows, item.num_rows - before));  // a block without rows still takes part
    return true;
  }

  DEVICE void next() {
    const bool more = handed_.run.more;
    __syncwarp();
    if (lane_id() == 0) handed_.run.piece = more ? handed_.run.piece + 1 : 0;
    __syncwarp();
    if (more) return;
    const auto at = ring_at<kHandedTasks>(num_handed_++);
    if (rank_in_cluster() == 0) {
      if (lane_id() == 0) task_ = fetch();
      task_ = shuffle(task_, 0);
      if constexpr (kCluster > 1) mbarrier_wait(shared_address(&handed_.empty[at.at]), at.parity ^ 1);
      if (lane_id() == 0) hand_over(at);
    } else {
      const u32 full = shared_address(&handed_.full[at.at]);
      if (lane_id() == 0) mbarrier_arrive_expect(full, sizeof handed_.task[0]);
      __syncwarp();
      mbarrier_wait(full, at.parity);
      task_ = *static_cast<volatile int*>(&handed_.task[at.at]);
      __syncwarp();
      if (lane_id() == 0) mbarrier_arrive_at<true>(shared_address(&handed_.empty[at.at]), 0);
    }
  }

  // Called when there are no more tasks: a cluster that has had none has not counted itself yet.
  DEVICE void end() const {
    if (lane_id() == 0 && rank_in_cluster() == 0 && task_ == first()) fetch();
  }

 private:
  DEVICE static int first() { return int(blockIdx.x) / kCluster; }
  DEVICE static int clusters() { return int(gridDim.x) / kCluster; }

  DEVICE int fetch() const { return take_number(p_, clusters(), num_tasks(p_)); }

  DEVICE void hand_over(const Ring<kHandedTasks>& at) const {
#pragma unroll
    for (int block = 1; block < kCluster; ++block)
      imbrex::cuda::hand_over(shared_address(&handed_.task[at.at]), task_, shared_address(&handed_.full[at.at]), u32(block));
  }

  const AttentionParams& p_;
  HandedTasks& handed_;
  int task_ = first();
  u32 num_handed_ = 0;
};

// The n-th last tile of an item, or its first. The next task is taken and found at a tile near the end: a task that is taken when an item
// begins waits for the whole of it, which costs 9 % of 1 x 16384 causal with head_dim 256, whose longest item is a quarter of a block's
// work.
DEVICE int tile_from_end(const Tiles& tiles, int n) { return min(tiles.end, tiles.first + n) - 1; }

// Prefetches the first tiles that the block will load into L2, with one warp and in front of griddep_wait(), as attention_sm90_stream.cuh
// does: chunks of 64 dims of keys and of values. With no chunks only the lists are read.
template <int k_chunks, int v_chunks>
DEVICE void fetch_ahead(const AttentionParams& p, const TensorMap& k_map, const TensorMap& v_map) {
  constexpr int kAhead = 2;
  const int task = int(blockIdx.x) / kCluster;
  if (kCustomMask || !p.keys_are_there || task >= num_tasks(p)) return;  // which tiles a mask hides is not known yet
  Item item = item_of(p, task);
  if (item.piece > 0) item.hi = min(item.hi, tiles_of(item).first * kTileKeys + item.piece);
  const Tiles tiles = tiles_of(item);
  const bool together = item.num_rows > kTileRows;
  const int head = item.kv_head + (together ? 0 : rank_in_cluster());
  if (k_chunks == 0 && kBlockSize > 0) prefetch_l2(block_id_of(p, item.first_block, tiles.first * kTileKeys));
#pragma unroll 1
  for (int tile = tiles.end - 1; k_chunks > 0 && tile >= max(tiles.first, tiles.end - kAhead); --tile) {
    const int lane = lane_id(), key = tile * kTileKeys + lane * kPageRows;
    if (lane >= kPages || key >= item.hi || key + kPageRows <= item.lo || (together && !loads_page(lane))) continue;
    const int block = kBlockSize == 0 ? 0 : load_l2(block_id_of(p, item.first_block, key));
    const int row = row_of_key(item.first_block, key);
#pragma unroll 1
    for (int c = 0; c < k_chunks; ++c) tma_prefetch(k_map, l2_normal(), c * 64, row, head, block);
#pragma unroll 1
    for (int c = 0; c < v_chunks; ++c) tma_prefetch(v_map, l2_normal(), c * 64, row, head, block);
  }
}

// Called before the first use of barriers that other blocks use too: waits until these have been set up.
DEVICE void begin_cluster() {
  if constexpr (kCluster == 1) {
    __syncthreads();
  } else {
    cluster_sync();
  }
}
// Called after the last use of barriers: waits until other blocks no longer arrive at those of this block.
DEVICE void end_cluster() {
  if constexpr (kCluster > 1) {
    __syncwarp();
    cluster_sync();
  }
}

}  // namespace imbrex::cuda
