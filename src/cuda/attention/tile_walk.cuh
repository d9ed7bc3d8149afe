#pragma once
// The tiles of keys that attention_sm80.cu loads and then computes of an item: all from the first to the last that a row sees or, beside a
// mask_mod, those that it shows to some query of the item, as the list's stretches say.
#include "attention_item.cuh"

namespace imbrex::cuda {

// Both walks have a tile that is computed, and one `ahead` of it that is loaded; next_load() goes on with the latter.
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
  DEVICE TileWalk(const AttentionParams& p, const Item& item) {
    computed_.tile = item.lo / kTileKeys, computed_.end = computed_.tile;
    if (item.piece < 0) {
      const ItemDetails& details = p.item_details[~item.piece];
      computed_.stretch = p.stretches + details.first_stretch, computed_.left = details.num_stretches;
      computed_.begin_stretch();
    } else if (item.hi > item.lo) {
      computed_.end = (item.hi + kTileKeys - 1) / kTileKeys;
    }
    loaded_ = computed_;
  }
  DEVICE bool at_end() const { return computed_.tile >= computed_.end; }
  DEVICE int tile() const { return computed_.tile; }
  DEVICE void next() { computed_.next(); }
  DEVICE bool is_shown() const { return computed_.shown; }  // mask_mod hides none of its keys from any query of the item
  DEVICE bool loads(int) const { return loaded_.tile < loaded_.end; }
  DEVICE int loaded(int) const { return loaded_.tile; }
  DEVICE void next_load() { loaded_.next(); }
  DEVICE bool comes_to_last(int tiles) {
    const bool before = came_;
    came_ = came_ || (computed_.left == 0 && computed_.tile >= computed_.end - tiles);
    return came_ && !before;
  }

 private:
  struct Place {
    int tile, end;  // of a stretch
    const KeyStretch* stretch = nullptr;
    int left = 0;  // stretches behind it
    bool shown = false;
    DEVICE void begin_stretch() {
      if (left == 0) return;
      tile = stretch->begin / kTileKeys, end = (stretch->end + kTileKeys - 1) / kTileKeys, shown = stretch->shown != 0;
      ++stretch, --left;
    }
    DEVICE void next() {
      if (++tile >= end) begin_stretch();
    }
  };
  Place computed_, loaded_;
  bool came_ = false;
};

}  // namespace imbrex::cuda
