#pragma once
// The tiles of keys that kernels load and compute of an item: all from the first to the last that a row sees or, beside a mask_mod, those
// that it shows to some query of the item, as the list's stretches say.
#include "attention_item.cuh"

namespace imbrex::cuda {

// A place in an item's stretches.
struct StretchPlace {
  int tile, end;  // of a stretch; at the end of the last one they are equal
  const KeyStretch* stretch = nullptr;
  int left = 0;        // stretches behind it
  bool shown = false;  // mask_mod hides none of its keys from any query of the item

  DEVICE StretchPlace(const AttentionParams& p, const Item& item) : tile(item.lo / kTileKeys), end(tile) {
    if (item.piece < 0) {
      const ItemDetails& details = p.item_details[~item.piece];
      stretch = p.stretches + details.first_stretch, left = details.num_stretches;
      begin_stretch();
    } else if (item.hi > item.lo) {
      end = (item.hi + kTileKeys - 1) / kTileKeys;
    }
  }
  DEVICE void begin_stretch() {
    if (left == 0) return;
    tile = stretch->begin / kTileKeys, end = (stretch->end + kTileKeys - 1) / kTileKeys, shown = stretch->shown != 0;
    ++stretch, --left;
  }
  DEVICE void next() {
    if (++tile >= end) begin_stretch();
  }
  DEVICE bool at_end() const { return tile >= end; }
  DEVICE int tiles_left() const {
    int tiles = end - tile;
    for (int i = 0; i < left; ++i) tiles += (stretch[i].end + kTileKeys - 1) / kTileKeys - stretch[i].begin / kTileKeys;
    return tiles;
  }
};

// The walk of attention_sm80.cu: it has a tile that is computed, and one `ahead` of it that is loaded; next_load() goes on with the latter.
template <bool stretches>
class TileWalk {
 public:
  DEVICE TileWalk(const AttentionParams&, const Item& item)
      : first_(item.lo / kTileKeys), end_(item.hi > item.lo ? (item.hi + kTileKeys - 1) / kTileKeys : first_), tile_(first_) {}
  DEVICE bool at_end() const { return tile_ >= end_; }
  DEVICE int tile() const { return tile_; }
  DEVICE void next() { ++tile_; }
  DEVICE bool is_shown() const { return false; }
  DEVICE bool loads(int ahead) const { return tile_ + ahead < end_; }
  DEVICE int loaded(int ahead) const { return tile_ + ahead; }
  DEVICE void next_load() {}
  // True once: at the first tile that no more than so many follow.
  DEVICE bool comes_to_last(int tiles) { return tile_ == max(first_, end_ - tiles); }

 private:
  const int first_, end_;
  int tile_;
};

template <>
class TileWalk<true> {
 public:
  DEVICE TileWalk(const AttentionParams& p, const Item& item) : computed_(p, item), loaded_(computed_) {}
  DEVICE bool at_end() const { return computed_.at_end(); }
  DEVICE int tile() const { return computed_.tile; }
  DEVICE void next() { computed_.next(); }
  DEVICE bool is_shown() const { return computed_.shown; }
  DEVICE bool loads(int) const { return !loaded_.at_end(); }
  DEVICE int loaded(int) const { return loaded_.tile; }
  DEVICE void next_load() { loaded_.next(); }
  DEVICE bool comes_to_last(int tiles) {
    const bool before = came_;
    came_ = came_ || (computed_.left == 0 && computed_.tile >= computed_.end - tiles);
    return came_ && !before;
  }

 private:
  StretchPlace computed_, loaded_;
  bool came_ = false;
};

// The walk of a warp that does one thing with each tile: at least one tile, since an item without keys has a result too. Its tiles are
// counted from first() to end(). Beside a mask_mod it knows where pieces of a run end, some of which may have no tile.
template <bool stretches>
class TileStream {
 public:
  DEVICE TileStream(const AttentionParams&, const Item& item) : tiles_(tiles_of(item)), tile_(tiles_.first) {}
  DEVICE int first() const { return tiles_.first; }
  DEVICE int end() const { return tiles_.end; }
  DEVICE int count() const { return tile_; }
  DEVICE int tile() const { return tile_; }
  DEVICE int tile_before() const { return tile_ - 1; }
  DEVICE int next_tile() const { return tile_ + 1; }
  DEVICE bool is_shown() const { return false; }
  DEVICE bool next_is_shown() const { return false; }
  DEVICE bool is_run() const { return false; }  // runs are the caller's matter
  DEVICE int ended_pieces() const { return 0; }
  DEVICE bool ends_piece() const { return false; }
  DEVICE void next() { ++tile_; }

 private:
  const Tiles tiles_;
  int tile_;
};

template <>
class TileStream<true> {
 public:
  DEVICE TileStream(const AttentionParams& p, const Item& item) : now_(p, item), next_(now_), end_(max(now_.tiles_left(), 1)) {
    next_.next();
    const int keys = item.piece < 0 ? p.item_details[~item.piece].piece : item.piece;
    piece_tiles_ = keys > 0 ? keys / kTileKeys : kFar, piece_end_ = item.lo / kTileKeys + piece_tiles_;
    pass_pieces();
  }
  DEVICE int first() const { return 0; }
  DEVICE int end() const { return end_; }
  DEVICE int count() const { return count_; }
  DEVICE int tile() const { return now_.tile; }
  DEVICE int tile_before() const { return before_; }
  DEVICE int next_tile() const { return next_.tile; }
  DEVICE bool is_shown() const { return now_.shown; }
  DEVICE bool next_is_shown() const { return next_.shown; }
  DEVICE void next() {
    before_ = now_.tile;
    now_ = next_;
    next_.next();
    ++count_;
    pass_pieces();
  }
  DEVICE bool is_run() const { return piece_tiles_ != kFar; }
  // Pieces that end between the tile before, or the item's beginning, and the tile.
  DEVICE int ended_pieces() const { return ended_; }
  // Whether no other tile of the piece follows.
  DEVICE bool ends_piece() const { return next_.tile >= piece_end_ || count_ + 1 == end_; }

 private:
  DEVICE void pass_pieces() {
    for (ended_ = 0; now_.tile >= piece_end_; ++ended_) piece_end_ += piece_tiles_;
  }

  StretchPlace now_, next_;
  int end_, count_ = 0, before_ = 0;
  int piece_tiles_, piece_end_, ended_;  // piece_end_: the tile that the next piece begins with
};

}  // namespace imbrex::cuda
