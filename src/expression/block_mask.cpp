// What a mask shows of the tiles of a request.
#include <algorithm>

#include "core/check.h"
#include "imbrex/bound_expression.h"

namespace imbrex {
namespace {

// Queries [q, q_end) at their positions, and keys [kv, kv_end).
struct Box {
  int64_t q, q_end, kv, kv_end;
};

class MaskedTiles {
 public:
  MaskedTiles(const BoundExpression& mask, const BlockMaskShape& shape, BlockMask& out) : mask_(mask), shape_(shape), out_(out) {}

  // Of tiles [first, end) of keys, for the queries of one tile.
  void add_tiles(Box queries, int64_t first, int64_t end) {
    Box box = queries;
    box.kv = first * shape_.tile_kv;
    box.kv_end = std::min<int64_t>(end * shape_.tile_kv, shape_.kv_len);
    Visibility shown = by_intervals(box);
    if (shown == Visibility::sometimes && end - first > 1) {
      const int64_t middle = first + (end - first) / 2;
      add_tiles(queries, first, middle);
      add_tiles(queries, middle, end);
      return;
    }
    if (shown == Visibility::sometimes && !is_mixed(box)) shown = exact(box);
    (shown == Visibility::never ? out_.empty_tiles : shown == Visibility::always ? out_.full_tiles : out_.partial_tiles) += end - first;
    if (shown == Visibility::never) return;
    const int full = shown == Visibility::always ? 1 : 0;
    if (int(out_.stretches.size()) > out_.first_stretch.back() && out_.stretches.back().end == box.kv &&
        out_.stretches.back().shown == full) {
      out_.stretches.back().end = int(box.kv_end);
    } else {
      out_.stretches.push_back({int(box.kv), int(box.kv_end), full});
    }
  }

 private:
  static constexpr int64_t kFewElements = 256;

  Visibility by_intervals(const Box& box) const {
    const auto one = [](int value) { return IntRange{value, value}; };
    return mask_.shown({.batch = one(shape_.batch),
                        .head = one(shape_.head),
                        .q = {int(box.q), int(box.q_end - 1)},
                        .kv = {int(box.kv), int(box.kv_end - 1)},
                        .q_len = one(shape_.q_len),
                        .kv_len = one(shape_.kv_len)});
  }

  // Whether the first row already has a seen and a hidden element, as in most tiles that are seen in part.
  bool is_mixed(Box box) {
    box.q_end = box.q + 1;
    return by_elements(box) == Visibility::sometimes;
  }

  // Of a box about which interval arithmetic has not said it.
  Visibility exact(const Box& box) {
    const int64_t queries = box.q_end - box.q, keys = box.kv_end - box.kv;
    if (queries * keys <= kFewElements) return by_elements(box);
    Box parts[2] = {box, box};
    if (queries >= keys) {
      parts[0].q_end = parts[1].q = box.q + queries / 2;
    } else {
      parts[0].kv_end = parts[1].kv = box.kv + keys / 2;
    }
    Visibility shown[2];
    for (int i = 0; i < 2; ++i) {
      shown[i] = by_intervals(parts[i]);
      if (shown[i] == Visibility::sometimes) shown[i] = exact(parts[i]);
      if (shown[i] == Visibility::sometimes) return Visibility::sometimes;
    }
    return shown[0] == shown[1] ? shown[0] : Visibility::sometimes;
  }

  Visibility by_elements(const Box& box) {
    bool any = false, all = true;
    row_.resize(size_t(box.kv_end - box.kv));
    for (int64_t q = box.q; q < box.q_end && !(any && !all); ++q) {
      mask_.mask_row({.batch = shape_.batch, .head = shape_.head, .q = int(q), .q_len = shape_.q_len, .kv_len = shape_.kv_len}, int(box.kv),
                     int(box.kv_end), row_.data());
      for (const uint8_t seen : row_) any = any || seen != 0, all = all && seen != 0;
    }
    return all ? Visibility::always : any ? Visibility::sometimes : Visibility::never;
  }

  const BoundExpression& mask_;
  const BlockMaskShape& shape_;
  BlockMask& out_;
  std::vector<uint8_t> row_;
};

}  // namespace

BlockMask block_mask(const BoundExpression& mask, const BlockMaskShape& shape) {
  check(mask.expression().type() == ExpressionType::boolean, "expression.type", "a mask is a bool expression, got {}",
        to_string(mask.expression().type()));
  check(!mask.expression().uses(ExpressionVariable::score), "expression.score",
        "a mask of tiles is expected not to depend on the score, got {}", mask.expression().str());
  check(shape.q_len >= 0 && shape.kv_len >= 0 && shape.tile_q > 0 && shape.tile_kv > 0, "expression.tiles",
        "lengths of at least 0 and tiles of at least 1 are wanted, got {} queries, {} keys, tiles of {} x {}", shape.q_len, shape.kv_len,
        shape.tile_q, shape.tile_kv);
  BlockMask out;
  MaskedTiles tiles(mask, shape, out);
  const int64_t key_tiles = (int64_t(shape.kv_len) + shape.tile_kv - 1) / shape.tile_kv,
                first_position = int64_t(shape.kv_len) - shape.q_len;
  for (int64_t q = 0; q < shape.q_len; q += shape.tile_q) {
    out.first_stretch.push_back(int(out.stretches.size()));
    const int64_t end = std::min<int64_t>(q + shape.tile_q, shape.q_len);
    if (key_tiles > 0) tiles.add_tiles({first_position + q, first_position + end, 0, 0}, 0, key_tiles);
  }
  out.first_stretch.push_back(int(out.stretches.size()));
  return out;
}

}  // namespace imbrex
