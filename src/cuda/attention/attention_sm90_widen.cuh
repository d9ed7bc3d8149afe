#pragma once
// Keys and values in e4m3 for queries of 16 bits: TMA brings a tile's bytes, and warps of the producer's warpgroup write them, widened, to
// where TMA would have put 16-bit numbers. Two warps have half of the keys each, and one has all values: keys become what the queries are,
// four instructions a pair if that is bf16; values become f16, as the weights are, one.
//
// A tile is loaded in parts. When a warp has widened a part, it asks for the same part of the next tile, of the next item too if that is
// there already; so bytes are under way while it widens the others and waits for a stage.
#include "attention_sm90_cluster.cuh"
#include "attention_sm90_mask.cuh"
#include "tile_rows.cuh"
#include "widen.cuh"

namespace imbrex::cuda {

constexpr bool kWidens = kWidenedParts > 1;
static_assert(kWidens == (kKvType != kQType) && (!kWidens || (kKvType == kE4m3 && kCluster == 1 && kFromBytes)));
constexpr int kKeyWideners = kWidens ? 2 : 1;  // warps
constexpr int kPartRows = kTileKeys / kWidenedParts, kPartPages = kPartRows >= kPageRows ? kPartRows / kPageRows : 1;
static_assert(!kWidens || (kPartRows % 8 == 0 && kPartRows <= 32 && kPartRows % kPageRows == 0));

template <int dim>
struct StagedPart {                                    // bytes, swizzled as TMA does it
  static constexpr int kWidth = dim <= 64 ? 64 : 128;  // of a row in a chunk
  static constexpr int kChunks = (dim + kWidth - 1) / kWidth, kChunkBytes = kPartRows * kWidth, kBytes = kChunks * kChunkBytes;
};

template <bool widens>
struct Staging {  // in shared memory
  alignas(1024) char staged_k[kWidenedParts][StagedPart<kHeadDimQk>::kBytes];
  alignas(1024) char staged_v[kWidenedParts][StagedPart<kHeadDimV>::kBytes];
  u64 staged_k_full[kWidenedParts], staged_v_full[kWidenedParts];
};
template <>
struct Staging<false> {};
constexpr int kStagedBytes =
    kWidens ? kWidenedParts * (StagedPart<kHeadDimQk>::kBytes + StagedPart<kHeadDimV>::kBytes) + 1024 : 0;  // and what aligns the rest

template <class Shared>
DEVICE void init_staging(Shared& shared) {
  if constexpr (kWidens) {
    constexpr u32 kLoaders = kSmallPages ? 32 : 1;  // lanes
    for (u64& full : shared.staged_k_full) mbarrier_init(shared_address(&full), kLoaders);
    for (u64& full : shared.staged_v_full) mbarrier_init(shared_address(&full), kLoaders);
  }
}

// A part row by row, where pages are too small for boxes. The lane has the block of row lane_id() of the part, or a negative number.
template <int dim>
DEVICE void copy_part(const KvSide& side, int kv_head, int block, int first_key, u32 to, u32 full) {
  using Part = StagedPart<dim>;
  constexpr int kRowLanes = Part::kWidth / 16, kRowsAtOnce = 32 / kRowLanes;
  const int lane = lane_id(), piece = lane % kRowLanes;
  const i64 at = block < 0 ? -1 : offset_in_block(side, block, first_key + lane);
  const char* const head = side.data + kv_head * side.head_stride + piece * 16;
#pragma unroll 1
  for (int i = 0; i < kPartRows; i += kRowsAtOnce) {
    const int row = i + lane / kRowLanes;
    const u32 low = shuffle(u32(at), row), high = shuffle(u32(u64(at) >> 32), row);
    const i64 from = i64(u64(high) << 32 | low);
    const u32 place = to + row * Part::kWidth + (piece ^ (Part::kWidth == 128 ? row % 8 : row / 2 % 4)) * 16;
#pragma unroll
    for (int c = 0; c < Part::kChunks; ++c)
      if (from >= 0) copy_async<16>(place + c * Part::kChunkBytes, head + from + c * Part::kWidth, c * Part::kWidth + piece * 16 < dim);
  }
  mbarrier_arrive_after_copies(full);
}

// A warp's share of keys or of values: `parts` of each tile, from the first_part-th on. One of the warps also says when an item ends.
template <bool keys, int chunk_bytes, class Shared>
class Widener {
 public:
  DEVICE Widener(const AttentionParams& p, const TensorMap& map, Shared& shared, int first_part)
      : p_(p), map_(map), shared_(shared), first_part_(first_part) {}

  // `stages`, `full` and `empty` are those of the first stage.
  DEVICE void run(u32 stages, u32 full, u32 empty) {
    constexpr int kStageBytes = (kDim + 63) / 64 * chunk_bytes;
    constexpr int kType = keys ? kQType : int(kF16);
    Ring<kStages> stage;
    u32 parity = 0;
    while (begin_item()) {
      for (int part = 0; part < kShare; ++part) ask(part);
      for (bool ahead = true; ahead; stage.next(), parity ^= 1) {
        mbarrier_wait(empty + stage.at * 8, stage.parity ^ 1);
        if (kCustomMask && tells() && lane_id() == 0) shared_.told[stage.at] = told_tile(p_, item(), tile_);
        ahead = advance();
        const WidenedPlace place = widened_place<Part::kWidth>();
        const u32 to = stages + stage.at * kStageBytes + first_part_ * (kPartRows * 128) + place.to, from = staged() + place.from;
#pragma unroll 1
        for (int part = 0; part < kShare; ++part) {
          mbarrier_wait(staged_full() + part * 8, parity);
          widen_rows<kType, kDim, kPartRows, Part::kWidth, Part::kChunkBytes, chunk_bytes, kStages == 3 ? 1 : 2>(
              from + part * Part::kBytes, to + part * (kPartRows * 128));
          __syncwarp();
          if (ahead) ask(part);
        }
        async_proxy_fence();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(full + stage.at * 8);
      }
    }
  }

 private:
  static constexpr int kDim = keys ? kHeadDimQk : kHeadDimV, kShare = keys ? kWidenedParts / kKeyWideners : kWidenedParts;
  using Part = StagedPart<kDim>;

  DEVICE bool tells() const { return keys && first_part_ == 0; }
  DEVICE const Item& item() const { return shared_.item[entry_.at]; }
  DEVICE u32 item_full() const { return shared_address(&shared_.item_full[entry_.at]); }
  DEVICE u32 staged() const {
    return (keys ? shared_address(shared_.staged_k) : shared_address(shared_.staged_v)) + first_part_ * Part::kBytes;
  }
  DEVICE u32 staged_full() const { return shared_address(keys ? shared_.staged_k_full : shared_.staged_v_full) + first_part_ * 8; }

  // False: none will come.
  DEVICE bool begin_item() {
    mbarrier_wait(item_full(), entry_.parity);
    if (item().num_rows == kNoItem) return false;
    tile_ = tiles_of(item()).end - 1;
    begin_tile(tile_ + 1);
    return true;
  }

  // Goes to the tile that is loaded next; false if that is not known yet.
  DEVICE bool advance() {
    if (tile_ > tiles_of(item()).first) {
      const int before = tile_;
      tile_ = tile_below(p_, item(), tile_);
      begin_tile(before);
      return true;
    }
    entry_.next();
    return any_lane(mbarrier_is_over(item_full(), entry_.parity)) && begin_item();
  }

  DEVICE void begin_tile(int before) {
    const Item& item = this->item();
    if (tells() && lane_id() == 0 && comes_to(tile_from_end(tiles_of(item), 3), before, tile_))
      mbarrier_arrive(shared_address(&shared_.item_ends));
    if constexpr (kBlockSize > 0 && !kSmallPages) {
      block_ = wanted(item) ? __ldg(block_id_of(p_, item.first_block, page_key())) : 0;
    }
  }

  DEVICE int first_key() const { return tile_ * kTileKeys + first_part_ * kPartRows; }
  DEVICE int page_key() const { return first_key() + lane_id() * kPageRows; }  // a page a lane
  DEVICE bool wanted(const Item& item) const {
    const int key = page_key();
    return lane_id() < kShare * kPartPages && key < item.hi && key + kPageRows > item.lo && item.hi > item.lo;
  }

  DEVICE void ask(int part) {
    const Item& item = this->item();
    const int lane = lane_id();
    const u32 full = staged_full() + part * 8;
    if constexpr (kSmallPages) {
      const int begin = first_key() + part * kPartRows, row = begin + lane;
      const bool is_read = lane < kPartRows && row >= item.lo && row < item.hi;
      const int block = is_read ? __ldg(block_id_of(p_, item.first_block, row)) : -1;
      copy_part<kDim>(keys ? p_.k : p_.v, item.kv_head, block, begin, staged() + part * Part::kBytes, full);
      return;
    }
    const bool loads = lane / kPartPages == part && wanted(item);
    const int boxes = __popc(__ballot_sync(kFullWarp, loads));
    if (lane == 0) mbarrier_arrive_expect(full, boxes * kPageRows * Part::kWidth * Part::kChunks);
    __syncwarp();
    const int offset = row_of_key(item.first_block, page_key());
    const u32 at = staged() + part * Part::kBytes + lane % kPartPages * (kPageRows * Part::kWidth);
#pragma unroll
    for (int c = 0; loads && c < Part::kChunks; ++c)
      tma_load(at + c * Part::kChunkBytes, map_, full, l2_normal(), c * Part::kWidth, offset, item.kv_head, block_);
  }

  const AttentionParams& p_;
  const TensorMap& map_;
  Shared& shared_;
  const int first_part_;
  Ring<int(sizeof(Shared::item) / sizeof(Item))> entry_;
  int tile_ = 0;
  int block_ = 0;  // of `tile_`, that the lane asks for
};

}  // namespace imbrex::cuda
