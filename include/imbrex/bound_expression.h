#pragma once
// An expression with its tensors: computed for one place or along a row of keys, and asked what a mask shows of a tile without looking at
// every element of it. docs/expressions.md has the definitions.
#include <climits>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "imbrex/expression.h"
#include "imbrex/tensor.h"
#include "imbrex/work.h"

namespace imbrex {

// Where an expression is computed.
struct ExpressionVariables {
  float score = 0;
  int batch = 0, head = 0, q = 0, kv = 0, q_len = 0, kv_len = 0;
};

struct ExpressionValue {
  ExpressionType type;
  int32_t bits;  // of an int or a float; 0 or 1 of a bool
  bool boolean() const { return bits != 0; }
  int integer() const { return bits; }
  float real() const;
};

// Values from `first` to `last`, both included; first <= last.
struct IntRange {
  int first = INT_MIN, last = INT_MAX;
  bool contains(int value) const { return first <= value && value <= last; }
};
struct ExpressionRanges {
  IntRange batch, head, q, kv, q_len, kv_len;  // the score may be anything
};

// What a mask shows of the places in some ranges.
enum class Visibility : uint8_t { never, sometimes, always };
const char* to_string(Visibility);

// Copies share what they are made of, and any number of threads may compute at a time.
class BoundExpression {
 public:
  // By name, in any order; others may be among them. Elements whose index is within the tensor for all variables in `ranges`, as interval
  // arithmetic shows whatever the tensors have in them, are read without a check in rows that lie in `ranges`. An element outside of a
  // tensor is 0 (false), and never read. Errors expression.empty, expression.tensor. Reads bool expressions' tensors once, to know the
  // extremes of their parts: do not change them as long as shown() and block_mask() are asked.
  BoundExpression(Expression, std::span<const NamedTensor> tensors = {}, const ExpressionRanges& ranges = {});

  const Expression& expression() const;
  bool is_checked(int tensor_read) const;  // whether the node of this number, an element of a tensor, is checked in rows within the ranges

  ExpressionValue evaluate(const ExpressionVariables&) const;
  // The keys [kv_begin, kv_end) of one query; at.kv is not looked at. score_row() takes scores and puts the expression's values in their
  // place; Error expression.type where it is not float. mask_row() writes 1 where the key is seen and 0 where not; Error expression.type
  // where the expression is not bool. `scores` null: at.score for every key. Each value has the bits that evaluate() gives it.
  void score_row(const ExpressionVariables& at, int kv_begin, int kv_end, float* scores) const;
  // score_row() for kernels: each 16 keys' scores are neighbours, `pitch` floats behind those of the 16 before, and multiplied by `scale`
  // first. It is quickest for multiples of 64 keys.
  void score_groups(const ExpressionVariables& at, int kv_begin, int kv_end, float* scores, int64_t pitch, float scale) const;
  void mask_row(const ExpressionVariables& at, int kv_begin, int kv_end, uint8_t* shown, const float* scores = nullptr) const;

  // Of a bool expression, by interval arithmetic: `never` and `always` hold for every place in the ranges and every score; `sometimes` may
  // be said of places that all agree. It is exact for causality, windows, chunks, prefixes and documents whose numbers never fall. Error
  // expression.type.
  Visibility shown(const ExpressionRanges&) const;

 private:
  struct Parts;
  std::shared_ptr<const Parts> parts_;
};

// The queries and keys of one request, in tiles.
struct BlockMaskShape {
  int batch = 0, head = 0;
  int q_len = 0, kv_len = 0;  // the query at index i has position kv_len - q_len + i
  int tile_q = 64, tile_kv = 128;
};

// Which keys each tile of queries reads, in the form that items of a work list have: tile t has the stretches
// [first_stretch[t], first_stretch[t + 1]), in rising order. A stretch with `shown` 1 is seen by all queries of its tile.
struct BlockMask {
  std::vector<int> first_stretch;
  std::vector<KeyStretch> stretches;
  int64_t empty_tiles = 0, full_tiles = 0, partial_tiles = 0;
};

// Exact: a tile is `empty` or `full` if all of its elements are. Ranges of keys that interval arithmetic decides cost nothing more; others
// are halved down to a few elements, which are computed, until both a seen and a hidden one are found. Errors expression.type,
// expression.score for a mask that depends on the score, expression.tiles for tiles that are not positive or lengths below 0.
BlockMask block_mask(const BoundExpression& mask, const BlockMaskShape&);

}  // namespace imbrex
