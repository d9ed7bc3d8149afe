// What masks show of tiles: interval arithmetic is sound for random expressions and exact for the usual masks, and lists of stretches are
// what every element says.
#include <gtest/gtest.h>

#include "expression/problem.h"
#include "expression/tensor_extremes.h"
#include "expression/value_range.h"
#include "imbrex/error.h"

namespace imbrex::test {
namespace {

// By looking at every element.
Visibility brute_force(const BoundExpression& mask, ExpressionVariables at, IntRange q, IntRange kv) {
  bool any = false, all = true;
  for (at.q = q.first; at.q <= q.last; ++at.q) {
    for (at.kv = kv.first; at.kv <= kv.last; ++at.kv) {
      const bool shown = mask.evaluate(at).boolean();
      any = any || shown, all = all && shown;
    }
  }
  return all ? Visibility::always : any ? Visibility::sometimes : Visibility::never;
}

ExpressionRanges ranges_of(const ExpressionVariables& at, IntRange q, IntRange kv) {
  return {{at.batch, at.batch}, {at.head, at.head}, q, kv, {at.q_len, at.q_len}, {at.kv_len, at.kv_len}};
}

TEST(BlockMask, IntervalsOfRandomExpressionsAreSound) {
  ExpressionProblem problem(3);
  RandomExpressions random(5, false);
  int decided = 0, exact = 0, count = 0;
  for (int i = 0; i < 6000; ++i) {
    const BoundExpression mask(problem.expression(random, ExpressionType::boolean, 1 + i % 5), problem.tensors);
    for (int n = 0; n < 4; ++n, ++count) {
      const ExpressionVariables at = problem.variables();
      const IntRange q{problem.below(24) - 2, 0}, kv{problem.below(24) - 2, 0};
      const IntRange qs{q.first, q.first + problem.below(5)}, kvs{kv.first, kv.first + problem.below(7)};
      const Visibility shown = mask.shown(ranges_of(at, qs, kvs)), truth = brute_force(mask, at, qs, kvs);
      ASSERT_TRUE(shown == truth || shown == Visibility::sometimes)
          << mask.expression().str() << " q " << qs.first << " to " << qs.last << ", kv " << kvs.first << " to " << kvs.last << ": "
          << to_string(shown) << ", truly " << to_string(truth);
      decided += shown != Visibility::sometimes, exact += shown == truth;
    }
  }
  EXPECT_GT(exact, count * 9 / 10) << "of " << count << ", decided " << decided;
}

// Every operation alone, on small intervals of all kinds of values, and the values at their ends and between.
TEST(BlockMask, IntervalsOfEachOperationHoldItsValues) {
  std::mt19937 random(9);
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> reals = {-infinity, -3e38f, -1e10f, -100.f, -2.5f, -1.f, -1e-3f, -0.f,     0.f, 1e-40f,
                                    0.3f,      0.55f,  1.f,    2.f,    88.f,  1e9f, 3e38f,  infinity, nan};
  const std::vector<int> ints = {INT_MIN, INT_MIN + 1, -1000, -7, -3, -2, -1, 0, 1, 2, 3, 5, 7, 100, 46341, INT_MAX - 1, INT_MAX};
  const auto some_values = [&](ExpressionType type) {
    std::vector<ExpressionBits> values(1 + random() % 4);
    for (ExpressionBits& v : values) {
      if (type == ExpressionType::boolean) v = ExpressionBits::of(random() % 2 == 0);
      if (type == ExpressionType::integer)
        v = ExpressionBits::of(random() % 2 == 0 ? ints[random() % ints.size()] : int(random() % 20) - 10);
      if (type == ExpressionType::real)
        v = ExpressionBits::of(random() % 2 == 0 ? reals[random() % reals.size()] : float(int(random() % 200) - 100) / 16.f);
    }
    return values;
  };
  using enum ExpressionOp;
  using enum ExpressionType;
  for (int n = int(to_real); n <= int(erf); ++n) {
    const auto op = ExpressionOp(n);
    for (const ExpressionType type : {boolean, integer, real}) {
      const bool logic = op == logical_not || op == logical_and || op == logical_or || op == logical_xor;
      const bool functions = op == floor || op == exp || op == log || op == sqrt || op == tanh || op == sigmoid || op == divide ||
                             op == sin || op == cos || op == erf;
      const bool integers = op == floor_divide || op == modulo || (op >= bit_and && op <= shift_right);
      if (op == to_real ? type == real : op == to_integer ? type == integer : op != where && logic != (type == boolean)) continue;
      if ((functions && type != real) || (integers && type != integer)) continue;
      const bool comparison = op == equal || op == not_equal || op == less || op == less_equal;
      const ExpressionType result = comparison || logic ? boolean : op == to_real ? real : op == to_integer ? integer : type;
      for (int i = 0; i < 4000; ++i) {
        const bool same = random() % 4 == 0 && op >= add && op < sin && op != where;
        std::array<std::vector<ExpressionBits>, 3> values;
        std::array<ValueRange, 3> ranges;
        for (size_t a = 0; a < 3; ++a) {
          const ExpressionType of = op == where && a == 0 ? boolean : type;
          values[a] = a == 1 && same ? values[0] : some_values(of);
          ranges[a] = ValueRange::nothing(of);
          for (const ExpressionBits v : values[a]) ranges[a].join(ValueRange::of_value(of, v));
        }
        const ValueRange range = range_of_operation(op, type == boolean && comparison ? integer : result, ranges, same);
        for (size_t x = 0; x < values[0].size(); ++x) {
          for (size_t y = 0; y < values[1].size(); ++y) {
            if (same && x != y) continue;
            const ExpressionBits value = apply_operation(op, op == where ? boolean : type, {values[0][x], values[1][y], values[2][0]});
            const ValueRange one = ValueRange::of_value(result, value);
            ASSERT_TRUE(one.nan ? range.nan : range.contains(one.low))
                << "operation " << n << " of " << to_string(type) << " gives " << to_string(result) << ": " << one.low << " is not from "
                << range.low << " to " << range.high << ", nan " << range.nan << "; of " << ranges[0].low << " to " << ranges[0].high
                << " and " << ranges[1].low << " to " << ranges[1].high;
          }
        }
      }
    }
  }
}

// Boxes of tensors whose rows have blocks of blocks, against every element.
TEST(BlockMask, ExtremesOfBoxes) {
  std::mt19937 random(13);
  const auto below = [&](int n) { return int(random() % unsigned(n)); };
  for (const auto& sizes : {std::array{1, 1, 9000}, {1, 9000, 1}, {2, 3, 700}, {3, 1, 65}, {2, 64, 1}, {4, 0, 3}, {1, 1, 1}}) {
    const int count = sizes[0] * sizes[1] * sizes[2];
    std::vector<int> data(size_t(count) + 1);
    for (int& x : data) x = below(100000) - 30000;
    const ExpressionTensorData tensor{data.data(), {sizes[0], sizes[1], sizes[2]}, {sizes[1] * sizes[2], sizes[2], 1}};
    for (const bool summarised : {true, false}) {
      const TensorExtremes extremes(tensor, ExpressionType::integer, summarised);
      for (int n = 0; n < 300; ++n) {
        int64_t first[3], last[3];
        for (size_t d = 0; d < 3; ++d) {
          first[d] = below(sizes[d] + 4) - 2;
          last[d] = first[d] + (below(4) == 0 ? below(sizes[d] + 2) : below(3));
          if (n % 3 == 0) first[d] = std::max<int64_t>(first[d], 0), last[d] = std::max(first[d], std::min<int64_t>(last[d], sizes[d] - 1));
        }
        ValueRange truth = ValueRange::nothing(ExpressionType::integer);
        for (int64_t i = first[0]; i <= last[0]; ++i) {
          for (int64_t j = first[1]; j <= last[1]; ++j) {
            for (int64_t k = first[2]; k <= last[2]; ++k) {
              const bool within = i >= 0 && i < sizes[0] && j >= 0 && j < sizes[1] && k >= 0 && k < sizes[2];
              const double value = within ? data[size_t((i * sizes[1] + j) * sizes[2] + k)] : 0;
              truth.join(ValueRange::of(ExpressionType::integer, value, value));
            }
          }
        }
        const ValueRange range = extremes.over(first, last);
        ASSERT_TRUE(range.low == truth.low && range.high == truth.high)
            << sizes[0] << " " << sizes[1] << " " << sizes[2] << ": " << range.low << " to " << range.high << ", truly " << truth.low
            << " to " << truth.high;
      }
    }
  }
}

struct UsualMask {
  const char* text;
  std::vector<int> doc;
};

// Of 48 keys: documents of lengths 5, 11, 1, 20 and 11, whose numbers never fall; prefixes of two requests.
std::vector<UsualMask> usual_masks() {
  std::vector<int> doc;
  for (const auto& [number, length] : {std::pair{0, 5}, {1, 11}, {4, 1}, {5, 20}, {9, 11}}) doc.insert(doc.end(), size_t(length), number);
  return {{"kv <= q", doc},
          {"kv <= q & q - kv < 4", doc},
          {"abs(q - kv) <= 7", doc},
          {"q - kv < 20 & q - kv >= 9", doc},
          {"q // 8 == kv // 8", doc},
          {"q // 8 == kv // 8 & kv <= q", doc},
          {"kv <= q & q // 8 - kv // 8 <= 1", doc},
          {"kv < doc[30] | kv <= q", doc},
          {"doc[q] == doc[kv]", doc},
          {"doc[q] == doc[kv] & kv <= q", doc},
          {"kv < 4 | kv <= q & q - kv < 9", doc},
          {"true", doc},
          {"q < kv & false", doc}};
}

TEST(BlockMask, IntervalsAreExactForUsualMasks) {
  std::vector<UsualMask> masks = usual_masks();
  for (UsualMask& usual : masks) {
    const NamedTensor doc{"doc", TensorView::contiguous(usual.doc.data(), DType::i32, {48})};
    const BoundExpression mask(parse_expression(usual.text, std::vector<ExpressionTensor>{{"doc", ExpressionType::integer, 1}}), {&doc, 1});
    for (int q = 0; q < 48; q += 4) {
      for (int q_last = q; q_last < 48; q_last += 9) {
        for (int kv = 0; kv < 48; kv += 3) {
          for (int kv_last = kv; kv_last < 48; kv_last += 8) {
            const Visibility truth = brute_force(mask, {}, {q, q_last}, {kv, kv_last});
            // Of two masks of which each shows or hides a part, intervals do not know that together they show or hide all.
            if (std::string(usual.text).starts_with("q - kv < 20") && truth == Visibility::never) continue;
            if (std::string(usual.text).starts_with("kv < 4 | ") && truth == Visibility::always) continue;
            ASSERT_EQ(mask.shown(ranges_of({}, {q, q_last}, {kv, kv_last})), truth)
                << usual.text << ", q " << q << " to " << q_last << ", kv " << kv << " to " << kv_last;
          }
        }
      }
    }
  }
}

// Elements of a list of stretches against the mask, and its tiles against what they say.
void check_block_mask(const BoundExpression& mask, const BlockMaskShape& shape) {
  const BlockMask blocks = block_mask(mask, shape);
  const std::string name = mask.expression().str();
  const int tiles = (shape.q_len + shape.tile_q - 1) / shape.tile_q;
  ASSERT_EQ(blocks.first_stretch.size(), size_t(tiles) + 1) << name;
  int64_t empty = 0, full = 0, partial = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    const int first = shape.kv_len - shape.q_len + tile * shape.tile_q, last = std::min(first + shape.tile_q, shape.kv_len) - 1;
    int before = -1, flag = -1;
    for (int s = blocks.first_stretch[size_t(tile)]; s < blocks.first_stretch[size_t(tile) + 1]; ++s) {
      const KeyStretch& stretch = blocks.stretches[size_t(s)];
      ASSERT_TRUE(stretch.begin % shape.tile_kv == 0 && stretch.begin < stretch.end && stretch.end <= shape.kv_len) << name;
      ASSERT_TRUE(stretch.begin > before || (stretch.begin == before && stretch.shown != flag)) << name << ": stretches could be one";
      before = stretch.end, flag = stretch.shown;
    }
    for (int kv = 0; kv < shape.kv_len; kv += shape.tile_kv) {
      const int kv_last = std::min(kv + shape.tile_kv, shape.kv_len) - 1;
      Visibility listed = Visibility::never;
      for (int s = blocks.first_stretch[size_t(tile)]; s < blocks.first_stretch[size_t(tile) + 1]; ++s) {
        const KeyStretch& stretch = blocks.stretches[size_t(s)];
        if (stretch.begin <= kv && kv_last < stretch.end) listed = stretch.shown ? Visibility::always : Visibility::sometimes;
      }
      const Visibility truth = brute_force(mask, {.batch = shape.batch, .head = shape.head, .q_len = shape.q_len, .kv_len = shape.kv_len},
                                           {first, last}, {kv, kv_last});
      ASSERT_EQ(listed, truth) << name << " tile " << tile << " keys from " << kv;
      (truth == Visibility::never ? empty : truth == Visibility::always ? full : partial) += 1;
    }
  }
  ASSERT_EQ(blocks.empty_tiles, empty) << name;
  ASSERT_EQ(blocks.full_tiles, full) << name;
  ASSERT_EQ(blocks.partial_tiles, partial) << name;
}

TEST(BlockMask, ListsAreWhatElementsSay) {
  std::vector<UsualMask> masks = usual_masks();
  for (UsualMask& usual : masks) {
    const NamedTensor doc{"doc", TensorView::contiguous(usual.doc.data(), DType::i32, {48})};
    const BoundExpression mask(parse_expression(usual.text, std::vector<ExpressionTensor>{{"doc", ExpressionType::integer, 1}}), {&doc, 1});
    for (const auto& [q_len, kv_len, tile_q, tile_kv] : {std::array{48, 48, 4, 8},
                                                         {17, 45, 4, 8},
                                                         {1, 48, 16, 16},
                                                         {48, 48, 64, 64},
                                                         {10, 3, 4, 2},
                                                         {0, 9, 4, 4},
                                                         {5, 0, 4, 4},
                                                         {48, 48, 32, 16}})
      check_block_mask(mask, {.q_len = q_len, .kv_len = kv_len, .tile_q = tile_q, .tile_kv = tile_kv});
  }
  ExpressionProblem problem(21);
  RandomExpressions random(23, false);
  for (int i = 0; i < 300; ++i) {
    const BoundExpression mask(problem.expression(random, ExpressionType::boolean, 1 + i % 5), problem.tensors);
    check_block_mask(mask, {.batch = problem.below(4),
                            .head = problem.below(6),
                            .q_len = 1 + problem.below(40),
                            .kv_len = 40,
                            .tile_q = 1 + problem.below(24),
                            .tile_kv = 1 + problem.below(24)});
  }
}

// Halved down to single elements: neither intervals nor rows alone could say that these tiles are empty.
TEST(BlockMask, RefinesWhatIntervalsDoNotDecide) {
  const BoundExpression even(parse_expression("(q + kv) * (q + kv + 1) % 2 == 1"));
  EXPECT_EQ(even.shown(ranges_of({}, {0, 63}, {0, 63})), Visibility::sometimes);
  const BlockMask blocks = block_mask(even, {.q_len = 256, .kv_len = 256, .tile_q = 64, .tile_kv = 64});
  EXPECT_EQ(blocks.empty_tiles, 16);
  EXPECT_TRUE(blocks.stretches.empty());
}

// A million keys: ranges of tiles that intervals decide are not looked at one by one.
TEST(BlockMask, LongRequestsAreQuick) {
  const BoundExpression window(parse_expression("kv <= q & q - kv < 4096"));
  const BlockMask blocks = block_mask(window, {.q_len = 1 << 16, .kv_len = 1 << 20, .tile_q = 128, .tile_kv = 128});
  EXPECT_EQ(blocks.first_stretch.size(), 513u);
  EXPECT_EQ(blocks.full_tiles, 512 * 31);
  EXPECT_EQ(blocks.partial_tiles, 512 * 2);
  EXPECT_EQ(blocks.empty_tiles, int64_t(512) * (8192 - 33));
  EXPECT_EQ(blocks.stretches.size(), 512u * 3);
  std::vector<int> numbers(1 << 18);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = int(i / 1000);
  const NamedTensor doc{"doc", TensorView::contiguous(numbers.data(), DType::i32, {1 << 18})};
  const BoundExpression packed(
      parse_expression("doc[q] == doc[kv] & kv <= q", std::vector<ExpressionTensor>{{"doc", ExpressionType::integer, 1}}), {&doc, 1});
  const BlockMask documents = block_mask(packed, {.q_len = 1 << 18, .kv_len = 1 << 18, .tile_q = 128, .tile_kv = 128});
  EXPECT_LT(documents.full_tiles + documents.partial_tiles, 2048 * 10);
}

TEST(BlockMask, WrongShapesAndMasksAreRefused) {
  const auto code = [](const char* text, BlockMaskShape shape) {
    try {
      block_mask(BoundExpression(parse_expression(text)), shape);
      return std::string("none");
    } catch (const Error& error) {
      return error.code();
    }
  };
  EXPECT_EQ(code("q < kv", {.q_len = 4, .kv_len = 4}), "none");
  EXPECT_EQ(code("q + kv", {.q_len = 4, .kv_len = 4}), "expression.type");
  EXPECT_EQ(code("score < 0", {.q_len = 4, .kv_len = 4}), "expression.score");
  EXPECT_EQ(code("q < kv", {.q_len = -1, .kv_len = 4}), "expression.tiles");
  EXPECT_EQ(code("q < kv", {.q_len = 4, .kv_len = 4, .tile_q = 0}), "expression.tiles");
}

}  // namespace
}  // namespace imbrex::test
