// Attention of up to 64 or 128 rows over many keys with wgmma and TMA, for sm_90a: verify, short extends, and decode of large groups. Host
// side: cuda/attention/attention_sm90_verify.cpp.
//
// Memory is the limit, as in attention_sm90_decode.cu, but there are as many rows as the matrix unit takes. A warpgroup has 64 rows and all
// keys of a tile, so warps exchange nothing: scores, weights and outputs stay in registers, and the output of a tile is multiplied at the
// same time as the scores of the next one. fp8 is widened to 16 bits in shared memory. With up to 128 dims a multiprocessor has two crews
// of 64 rows, or one of 128; with more, the two warpgroups compute the same scores, and half of the output's dims each. Sums of four pieces
// are folded in registers, those of more in L2.
#include "attention_sm90_runs.cuh"
#include "attention_sm90_verify_load.cuh"
#include "wgmma.cuh"

namespace imbrex::cuda {

// The number of levels of the tree of pieces whose nodes are in memory, where L2 keeps them. Where ALiBi needs registers, the lowest level
// is in memory too.
constexpr bool kNodeKept = !kAlibi || !kShareDims;
constexpr int kLevels = kVerifyLevels + !kNodeKept;
// Log2 units: a row's maximum weighs 2^kFresh when it becomes the reference, and may outgrow that 2^8 times. Weights that are f16 for the
// values' sake keep their bits down to 2^-21 of the maximum so.
constexpr int kValueType = kWidens ? int(kF16) : kQType;
constexpr float kFresh = kWidens ? 7.f : 0.f, kSlack = kFresh + 8.f;

// Registers of a thread: as many as each warpgroup uses, and together no more than the launch has given to all threads.
constexpr int kConsumerRegisters = kCrews == 1 ? (kWidens && kTeamDims * kTileRows != 128 * 128 ? 224 : 232)
                                   : kWidens   ? 208
                                               : 216,
              kProducerRegisters = (65536 / kThreads / 8 * 8 * (kThreads / 128) - 2 * kConsumerRegisters) / kProducers;

// The low half of the descriptors of tiles in shared memory: the address in units of 16 bytes. The high half is the same in all: groups of
// eight lines of a swizzle's width.
DEVICE u32 tile_at(u32 address, u32 leading) { return u32(wgmma_descriptor(address, leading, 0, 0)); }
DEVICE u64 descriptor(u32 tile, int bytes) { return wgmma_descriptor(0, 0, 1024, 1) | u32(tile + bytes / 16); }

using Sums = FragmentSums<Fragment<kTeamDims>>;

// Whether what a row sees through windows is part of the words below, and is found for each tile: it would be in registers meanwhile.
constexpr bool kShownInWindow = kMaskMod && kWindow;

// Which of a tile's keys the user's mask_mod shows to rows `row` and `row` + 8: found in front of products.
using ShownWords = u32[2];
DEVICE void set_shown(const AttentionParams& p, const Item& item, int row, int begin, ShownWords& shown) {
  const ExpressionInputs in[2] = {expression_inputs(p, item, row, p.mask_tensors), expression_inputs(p, item, row + 8, p.mask_tensors)};
  Rows rows;
  if constexpr (kShownInWindow) set_seen(rows, p, item, row);
  const int first = begin + first_column();
  set_seen_bits<kTileKeys>(shown, [&](int h, int column) {
    const int key = first + column;
    return (!kShownInWindow || (key >= rows.seen[h].lo && key < rows.seen[h].hi)) && mask_mod(of_key(in[h], key));
  });
}

class Consumer {
 public:
  DEVICE Consumer(const AttentionParams& p, SharedStorage& shared) : p_(p), shared_(shared) {
    const int row = first_row(), dim = first_dim();
    q_ = tile_at(shared_address(shared.q) + row * 128, 16);
    k_begin_ = tile_at(shared_address(shared.k), 16);
    v_begin_ = tile_at(shared_address(shared.v) + dim / 64 * kChunkBytes, kChunkBytes);
  }

  DEVICE void run() {
    for (;; ++items_) {
      const Ring<SharedStorage::kItemSlots> slot = item_slot();
      mbarrier_wait(shared_address(&shared_.item_full[slot.at]), slot.parity);
      const Item& item = shared_.item[slot.at];
      if (item.num_rows == kNoItem) break;
      mbarrier_wait(shared_address(&shared_.q_full[q_slot().at]), q_slot().parity);
      if constexpr (!kMaps) async_proxy_fence();  // the matrix unit reads what lanes have written
      if (first_row() < item.num_rows) {
        run_item(item);
      } else {
        pass_item(item);
      }
      report(shared_.item_empty[item_slot().at]);
    }
  }

 private:
  // These are computed where they are needed, because registers are few.
  DEVICE static int team() { return computed_here(int(threadIdx.x)) / 128 % kTeams; }
  DEVICE static int first_row() { return kShareDims ? 0 : team() * kTeamRows; }
  DEVICE static int first_dim() { return kShareDims ? team() * kTeamDims : 0; }

  DEVICE static void report(u64& barrier) {
    __syncwarp();
    if (lane_id() == 0) mbarrier_arrive(shared_address(&barrier));
  }
  // Positions in rings, each computed from a count of steps, so that it takes one register.
  DEVICE Ring<SharedStorage::kItemSlots> item_slot() const { return ring_at<SharedStorage::kItemSlots>(items_); }
  DEVICE Ring<SharedStorage::kQSlots> q_slot() const { return ring_at<SharedStorage::kQSlots>(items_); }
  DEVICE Ring<kStages> k_stage() const { return ring_at<kStages>(k_tiles_); }
  DEVICE Ring<kValueStages> v_stage() const { return ring_at<kValueStages>(v_tiles_); }
  DEVICE static void wait_for_tile(u64& full, u32 parity) {
    mbarrier_wait(shared_address(&full), parity);
    if constexpr (kLoaders > 1 && !kWidens) async_proxy_fence();  // the matrix unit reads what lanes have written
  }
  DEVICE void wait_for_keys() const { wait_for_tile(shared_.k_full[k_stage().at], k_stage().parity); }
  DEVICE void wait_for_values() const { wait_for_tile(shared_.v_full[v_stage().at], v_stage().parity); }
  // Of the stage whose keys are there.
  DEVICE const ToldTile& told() const { return shared_.told[k_stage().at]; }
  DEVICE void leave_keys() { report(shared_.k_empty[k_stage().at]), ++k_tiles_; }
  DEVICE void leave_values() { report(shared_.v_empty[v_stage().at]), ++v_tiles_; }

  // Releases an item's queries after its last scores. Where there are as many slots for queries as for items, they are released with the
  // item.
  DEVICE void leave_queries() {
    if (SharedStorage::kQSlots < SharedStorage::kItemSlots) report(shared_.q_empty[q_slot().at]);
  }

  // Passes over an item whose rows are the other warpgroup's.
  DEVICE void pass_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    bool more = true;
#pragma unroll 1
    for (int tile = tiles.first; kMaskMod ? more : tile < tiles.end; ++tile) {
      wait_for_keys();
      if constexpr (kMaskMod) more = !told().last;
      leave_keys();
      wait_for_values();
      leave_values();
    }
    leave_queries();
  }

  DEVICE void start_scores(Scores& s) {
    const u32 q = q_ + q_slot().at * (kQChunks * kQChunkBytes / 16), k = k_begin_ + k_stage().at * (kKRooms * kChunkBytes / 16);
#pragma unroll
    for (int step = 0; step < kQSteps; ++step) {
      Wgmma<kTileKeys>::shared(s, descriptor(q, step / 4 * kQChunkBytes + step % 4 * 32),
                               descriptor(k, step / 4 * kChunkBytes + step % 4 * 32), step != 0);
    }
    wgmma_commit();
  }
  DEVICE void start_output(Sums& sums) {
    const u32 v = v_begin_ + v_stage().at * (kVRooms * kChunkBytes / 16);
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step)
      Wgmma<kTeamDims, kValueType>::template registers<true>(sums.out, weights_[step], descriptor(v, step * 2048), true);
    wgmma_commit();
  }

  DEVICE void clear_values(int lo, int hi) {
    const u32 v = shared_address(shared_.v[v_stage().at]) + first_dim() / 64 * kChunkBytes;
    cuda::clear_values<kTeamDims <= 64 ? 1 : 2, kChunkBytes>(v, lo, hi);
    named_barrier_sync(1 + warp_id() / 4, 128);
  }

  // Scores of `tile` become weights, which are those of the output's next product when the one under way is over.
  template <bool edge>
  DEVICE bool softmax(const Rows& rows, int tile, const ShownWords& shown, Scores& s, Sums& sums, float (&factor)[2]) const {
    if constexpr (!kPlainLogits) modify(rows, s);
    if constexpr (edge && kTree) {
      hide_in_tree(p_, shared_.item[item_slot().at], first_row() + matrix_row(), tile * kTileKeys, s);
    } else if constexpr (edge) {
      if constexpr (!kShownInWindow) hide(tile * kTileKeys, rows, s);
      if constexpr (kMaskMod) hide_unseen(shown[0], 0, s), hide_unseen(shown[1], 1, s);
    }
    return weigh(p_, tile * kTileKeys, rows, s, sums.reference, sums.sum, factor, kSlack, kFresh);
  }

  // Multiplies the output of the tile before, of which some row sees the keys [lo, hi).
  DEVICE void finish_output(Sums& sums, int lo, int hi) {
    wait_for_values();
    if (lo > 0 || hi < kTileKeys) clear_values(lo, hi);
    wgmma_fence();
    start_output(sums);
    finish<0>(sums.out);
    leave_values();
  }

  DEVICE void run_item(const Item& item) {
    const Tiles tiles = tiles_of(item);
    const int piece_tiles = item.piece > 0 ? item.piece / kTileKeys : kFar;
    Rows rows;
    set_rows(rows, p_, item, first_row() + matrix_row(), p_.scale * kv_scale(p_.k, item.kv_head));
    const int begin = first_row(), last_row = min(begin + kTeamRows, item.num_rows) - 1;
    // Tiles of which every row sees every key.
    const KeyRange all = seen_by_rows(p_, item, begin, last_row).all;
    const int whole_first = (max(item.lo, all.lo) + kTileKeys - 1) / kTileKeys, whole_end = max(0, min(item.hi, all.hi)) / kTileKeys;
    const auto is_whole = [&](int tile, bool shown) {
      if constexpr (kTree) {  // read anew, since registers are short
        const KeyRange now = seen_by_rows(p_, item, computed_here(begin), 0).all;
        return tile * kTileKeys >= max(item.lo, now.lo) && (tile + 1) * kTileKeys <= min(item.hi, now.hi);
      }
      if constexpr (kShownInWindow) {
        const int first = computed_here(begin), most = item.num_rows - 1;
        const KeyRange now = seen_by_rows(p_, item, min(first, most), min(first + kTeamRows - 1, most)).all;
        return shown && tile * kTileKeys >= max(item.lo, now.lo) && (tile + 1) * kTileKeys <= min(item.hi, now.hi);
      }
      return (!kMaskMod || shown) && (!kWindow || tile >= whole_first) && tile < whole_end;
    };

    Sums piece, node;  // of the tree of pieces, one that is not complete
    piece.clear(0.f), node.clear(kNoSum);
    int pieces = 0, left = piece_tiles;  // pieces that are done; tiles of the one at work
    float factor[2];
    ShownWords shown;
    bool more = true;          // beside a mask_mod: tiles follow
    int before = tiles.first;  // the tile that was weighed last
    {
      Scores s;
      wait_for_keys();
      if constexpr (kMaskMod) {
        before = told().number, more = !told().last;
        pass_pieces(told().ended, piece, node, pieces);
        set_shown(p_, item, first_row() + matrix_row(), before * kTileKeys, shown);
      }
      wgmma_fence();
      start_scores(s);
      finish<0>(s);
      leave_keys();
      softmax<true>(rows, before, shown, s, piece, factor);
      pack_weights<kValueType>(s, weights_);
      --left;
    }
    // `ended_pieces`: those that end with the tile before.
    const auto turn = [&]<bool edge>(Edge<edge>, int tile, int ended_pieces) __attribute__((always_inline)) {
      Scores s;
      if constexpr (!kMaskMod) wait_for_keys(), before = tile - 1;
      wait_for_values();
      if constexpr (edge && kMaskMod) set_shown(p_, item, first_row() + matrix_row(), tile * kTileKeys, shown);
      // Only an item's first tile has hidden keys before its visible ones. Only its last tile, whose output comes after all turns, has
      // hidden keys after them.
      if (item.lo > before * kTileKeys) clear_values(item.lo - before * kTileKeys, kTileKeys);
      wgmma_fence();
      start_scores(s);
      start_output(piece);
      finish<1>(s);
      leave_keys();
      const bool begins = kMaskMod ? ended_pieces > 0 : left == 0;
      const float ended[2] = {piece.reference[0], piece.reference[1]}, totals[2] = {piece.sum[0], piece.sum[1]};
      if (begins) {
#pragma unroll
        for (int h = 0; h < 2; ++h) piece.reference[h] = kEmptyReference, piece.sum[h] = 0.f;
        left = piece_tiles;
      }
      --left;
      const bool moved = softmax<edge>(rows, tile, shown, s, piece, factor);
      finish<0>(piece.out);
      leave_values();
      pack_weights<kValueType>(s, weights_);
      if (begins) {
        end_piece(piece, ended, totals, node, pieces, false);
        fill(piece.out, 0.f);
        if constexpr (kMaskMod) pass_pieces(ended_pieces - 1, piece, node, pieces);
      } else if (moved) {
        each(piece.out, [&](float& x, int h, int) { x *= factor[h]; });
      }
    };
    if constexpr (kMaskMod) {
#pragma unroll 1
      while (more) {
        wait_for_keys();
        const int tile = told().number, ended = told().ended;
        more = !told().last;
        if (is_whole(tile, told().shown)) {
          turn(Edge<false>{}, tile, ended);
        } else {
          turn(Edge<true>{}, tile, ended);
        }
        before = tile;
      }
    } else {
#pragma unroll 1
      for (int tile = tiles.first + 1; tile < tiles.end; ++tile) {
        if (is_whole(tile, true)) {
          turn(Edge<false>{}, tile, 0);
        } else {
          turn(Edge<true>{}, tile, 0);
        }
      }
      before = tiles.end - 1;
    }
    leave_queries();
    const int last = before * kTileKeys;
    finish_output(piece, item.lo - last, item.hi - last);
    end_piece(piece, piece.reference, piece.sum, node, pieces, true);
    store_rows<kTeamDims>(p_, item, first_row() + matrix_row(), node.reference, node.sum, node.out, first_dim());
  }

  // Ends pieces none of whose tiles mask_mod shows. The output of `piece` is 0.
  DEVICE void pass_pieces(int count, const Sums& piece, Sums& node, int& pieces) const {
    constexpr float kNoReference[2] = {kEmptyReference, kEmptyReference}, kNoTotal[2] = {0.f, 0.f};
#pragma unroll 1
    for (; count > 0; --count) end_piece(piece, kNoReference, kNoTotal, node, pieces, false);
  }

  // Folds the sums of a finished piece with those of the node, and a complete node with those before it. `last`: the piece is the item's
  // last, and the item's sums are then in `node`.
  DEVICE void end_piece(const Sums& piece, const float (&reference)[2], const float (&total)[2], Sums& node, int& pieces, bool last) const {
    if constexpr (!kNodeKept) node.clear(kNoSum);
    const Fold fold[2] = {{node.reference[0], reference[0]}, {node.reference[1], reference[1]}};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      node.reference[h] = fold[h].reference;
      node.sum[h] = fold[h](node.sum[h], sum_over<4>(total[h]));
    }
#pragma unroll
    for (int tile = 0; tile < kTeamDims / 8; ++tile) set_four(node.out, tile, folded(fold, four(node.out, tile), four(piece.out, tile)));
    ++pieces;
    if (kNodeKept && !last && pieces % kPiecesTogether != 0) return;
    int each = kNodeKept ? kPiecesTogether : 1;  // pieces of a node below the level
#pragma unroll 1
    for (int level = 0; level < kLevels; ++level, each *= kPiecesTogether) {
      const RunNode<kTeamDims, kTeamDims / 8, kLevels> before(p_, level);
      if ((pieces - 1) / each % kPiecesTogether > 0) before.add_to(node.reference, node.sum, node.out);
      if (last || pieces % (kPiecesTogether * each) == 0) continue;
      before.put(node.reference, node.sum, node.out);
      break;
    }
    if (!last) node.clear(kNoSum);
  }

  const AttentionParams& p_;
  SharedStorage& shared_;
  u32 q_, k_begin_, v_begin_;
  u32 items_ = 0, k_tiles_ = 0, v_tiles_ = 0;
  WeightsOf<kValueType> weights_;
};

DEVICE void begin_barriers(SharedStorage& shared) {
  constexpr int kWarps = 4 * kTeams;
  for (int i = 0; i < kStages; ++i) {
    mbarrier_init(shared_address(&shared.k_full[i]), kKeyReports);
    mbarrier_init(shared_address(&shared.k_empty[i]), kWarps);
  }
  for (int i = 0; i < kValueStages; ++i) {
    mbarrier_init(shared_address(&shared.v_full[i]), kReports);
    mbarrier_init(shared_address(&shared.v_empty[i]), kWarps);
  }
  for (int i = 0; i < SharedStorage::kItemSlots; ++i) {
    mbarrier_init(shared_address(&shared.item_full[i]), 1);
    mbarrier_init(shared_address(&shared.item_empty[i]), kWarps + kLoadingWarps);
  }
  mbarrier_init(shared_address(&shared.item_wanted), 1);
  for (int i = 0; i < SharedStorage::kQSlots; ++i) {
    mbarrier_init(shared_address(&shared.q_full[i]), kMaps ? 1 : 32);
    mbarrier_init(shared_address(&shared.q_empty[i]), kWarps);
  }
  auto& bytes = loaded_barriers(shared);
  for (int i = 0; kWidens && i < kBytesStages; ++i) {
    mbarrier_init(shared_address(&bytes.k_full[i]), kLoaders);
    mbarrier_init(shared_address(&bytes.v_full[i]), kLoaders);
    mbarrier_init(shared_address(&bytes.k_empty[i]), 1);
    mbarrier_init(shared_address(&bytes.v_empty[i]), 1);
  }
  mbarrier_fence_init();
}

extern __shared__ __align__(1024) char memory[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attention_sm90_verify(const __grid_constant__ AttentionParams p, const __grid_constant__ TensorMap q_map,
                          const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  if (is_idle(p)) return;
  SharedStorage* const crews = reinterpret_cast<SharedStorage*>(memory);
  if (threadIdx.x == 0) {
    for (int crew = 0; crew < kCrews; ++crew) begin_barriers(crews[crew]);
    if constexpr (kMaps && !kSmallPages) {
      tma_prefetch_map(k_map);
      tma_prefetch_map(v_map);
    }
  }
  __syncthreads();
  if (warp_id() < kCrews) fetch_ahead<kStages, kVChunks>(p, k_map, v_map, first_task(warp_id()));
  if (!begin_launch(p)) return;
  const int wg = shuffle(int(threadIdx.x / 128), 0);
  if (wg >= kConsumers) {
    registers_shrink<kProducerRegisters>();
    const int warp = warp_id() - 4 * kConsumers;
    if constexpr (kWidens) {
      const int crew = warp / 4;
      if (crew >= kCrews) return;
      // A quarter of a multiprocessor, which has every fourth warp, unpacks four bytes a cycle: so the warps that widen are in different
      // quarters.
      const int duty = (warp + 2 * crew) % 4;
      if (duty == 0) {
        produce_items(p, q_map, crew, crews[crew]);
      } else if (duty == 1) {
        produce_tiles<Sides::both>(p, k_map, v_map, crews[crew]);
      } else if (duty == 2) {
        widen_tiles<true>(crews[crew]);
      } else {
        widen_tiles<false>(crews[crew]);
      }
    } else if constexpr (kWarpForEachSide) {
      if (warp == 0) produce_items(p, q_map, 0, crews[0]);
      if (warp == 1) produce_tiles<Sides::keys>(p, k_map, v_map, crews[0]);
      if (warp == 2) produce_tiles<Sides::values>(p, k_map, v_map, crews[0]);
    } else {
      const int crew = warp % kCrews;
      if (warp < kCrews) {
        produce_items(p, q_map, crew, crews[crew]);
      } else {
        produce_tiles<Sides::both>(p, k_map, v_map, crews[crew]);
      }
    }
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer(p, crews[wg / kTeams]).run();
    end_launch(p);
  }
}

}  // namespace imbrex::cuda
