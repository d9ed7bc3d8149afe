// The order of requests and the counts of phases: cases whose results vLLM's functions have, each rule, and random batches against the
// rules as they are written down.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "imbrex/batch_tools.h"

namespace imbrex {
namespace {

using test::error_code;
using Ints = std::vector<int32_t>;
using Ranges = std::vector<std::pair<int32_t, int32_t>>;

// What swaps make of the requests 0, 1, ...
Ints swapped(const BatchOrder& order) {
  Ints places(order.order.size());
  std::iota(places.begin(), places.end(), 0);
  for (const auto& [a, b] : order.swaps) std::swap(places[size_t(a)], places[size_t(b)]);
  return places;
}

struct OrderCase {
  Ints query_lens, context_lens, prompt_lens, order;
  int decode_threshold = 1;
};

TEST(ReorderBatch, KnownOrders) {
  const std::vector<OrderCase> cases = {
      {{1, 1, 1}, {10, 20, 30}, {}, {0, 1, 2}},
      {{100, 200, 300}, {100, 200, 300}, {}, {0, 1, 2}},
      {{100, 1, 200, 1}, {100, 10, 200, 20}, {}, {3, 1, 2, 0}},
      {{1, 1, 100, 200}, {10, 20, 100, 0}, {}, {0, 1, 2, 3}},
      {{1}, {10}, {}, {0}},
      {{2, 3, 5, 6}, {10, 20, 30, 40}, {}, {0, 1, 2, 3}, 4},
      {{100, 200, 1, 1}, {100, 200, 10, 20}, {}, {2, 3, 0, 1}},
      {{100, 10, 1}, {0, 50, 10}, {}, {2, 1, 0}},
      {{100, 10, 200, 20}, {0, 50, 0, 75}, {}, {3, 1, 2, 0}},
      {{1, 1, 374, 300, 1, 256, 1, 27, 1}, {20, 50, 0, 20, 20, 0, 5, 0, 4}, {}, {0, 1, 6, 8, 4, 3, 2, 7, 5}},
      // With prompts: a token of a prompt is a short extend, behind decodes and in front of long extends.
      {{7, 1, 1}, {5, 9, 9}, {12, 10, 3}, {2, 1, 0}},
      {{}, {}, {}, {}},
  };
  for (const OrderCase& c : cases) {
    const BatchOrder result = reorder_batch(c.query_lens, c.context_lens, c.prompt_lens, c.decode_threshold);
    EXPECT_EQ(result.order, c.order);
    EXPECT_EQ(swapped(result), c.order);
    EXPECT_EQ(result.swaps.empty(), std::is_sorted(c.order.begin(), c.order.end()));
  }
}

TEST(ReorderBatch, RandomBatchesComeToTheirRegions) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 300; ++trial) {
    const size_t count = random() % 12;
    Ints query(count), context(count), prompt(count);
    for (size_t r = 0; r < count; ++r) query[r] = int(random() % 5), context[r] = int(random() % 3) * 4, prompt[r] = int(random() % 3) * 4;
    const auto region = [&](int32_t r) {
      const auto i = size_t(r);
      return context[i] == 0 ? 3 : query[i] > 2 ? 2 : context[i] < prompt[i] ? 1 : 0;
    };
    const BatchOrder result = reorder_batch(query, context, prompt, 2);
    EXPECT_EQ(swapped(result), result.order);
    Ints sorted = result.order, regions;
    std::sort(sorted.begin(), sorted.end());
    int moved = 0;
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(sorted[i], int(i));
      regions.push_back(region(result.order[i]));
      moved += result.order[i] != int(i);
    }
    EXPECT_TRUE(std::is_sorted(regions.begin(), regions.end()));
    for (size_t i = 0; i < count; ++i) EXPECT_TRUE(result.order[i] == int(i) || regions[i] != region(int(i))) << "moved within its region";
    EXPECT_LE(int(result.swaps.size()), std::max(moved - 1, 0));
  }
}

TEST(ReorderBatch, Errors) {
  const Ints two{1, 1}, three{1, 1, 1}, negative{1, -1};
  EXPECT_EQ(error_code([&] { reorder_batch(two, three); }), "batch.order.size");
  EXPECT_EQ(error_code([&] { reorder_batch(two, two, three); }), "batch.order.size");
  EXPECT_EQ(error_code([&] { reorder_batch(two, negative); }), "batch.order.length");
  EXPECT_EQ(error_code([&] { reorder_batch(negative, two); }), "batch.order.length");
  EXPECT_EQ(error_code([&] { reorder_batch(two, two, negative); }), "batch.order.length");
  EXPECT_EQ(error_code([&] { reorder_batch(two, two, {}, -1); }), "batch.phases.threshold");
}

Ints starts_of(const Ints& query_lens) {
  Ints starts{0};
  for (const int32_t q : query_lens) starts.push_back(starts.back() + q);
  return starts;
}

PhaseCounts counts(const Ints& query_lens, const PhaseOptions& options) {
  return split_decodes_and_prefills(starts_of(query_lens), options);
}
PhaseCounts two(int decodes, int prefills, int decode_tokens, int prefill_tokens) {
  return {.decodes = decodes, .prefills = prefills, .decode_tokens = decode_tokens, .prefill_tokens = prefill_tokens};
}

TEST(SplitDecodesAndPrefills, KnownSplits) {
  const PhaseOptions at_3{.decode_threshold = 3}, at_4{.decode_threshold = 4};
  EXPECT_EQ(counts({1, 1, 1}, {}), two(3, 0, 3, 0));
  EXPECT_EQ(counts({1, 2, 1, 3, 2, 1, 2}, at_3), two(7, 0, 12, 0));
  EXPECT_EQ(counts({4, 5, 6, 7}, at_3), two(0, 4, 0, 22));
  EXPECT_EQ(counts({2, 1, 3, 4, 5, 6, 7, 8}, at_4), two(4, 4, 10, 26));
  EXPECT_EQ(counts({1, 1, 1}, {.uniform = true}), two(3, 0, 3, 0));
  EXPECT_EQ(counts({2, 2, 1, 3, 2, 1, 2}, {.decode_threshold = 3, .uniform = true}), two(2, 5, 4, 9));
  EXPECT_EQ(counts({4, 5, 6, 7}, {.decode_threshold = 3, .uniform = true}), two(0, 4, 0, 22));
  EXPECT_EQ(counts({2, 2, 2, 4, 5, 6, 7, 8}, {.decode_threshold = 4, .uniform = true}), two(3, 5, 6, 30));
  EXPECT_EQ(counts({2, 1, 2, 4, 5, 6, 7, 8}, {.decode_threshold = 4, .uniform = true}), two(1, 7, 2, 33));
  EXPECT_EQ(counts({2, 2, 2, 0}, {.decode_threshold = 3, .num_tokens = 8, .uniform = true}), two(4, 0, 8, 0));
}

TEST(SplitDecodesAndPrefills, EachRule) {
  EXPECT_EQ(counts({}, {}), PhaseCounts());
  EXPECT_EQ(counts({1, 9, 1}, {}), two(1, 2, 1, 10)) << "all behind the first prefill are prefills";
  EXPECT_EQ(counts({1, 9}, {.num_tokens = 16}), two(1, 1, 1, 15)) << "padding counts for the last phase";
  EXPECT_EQ(counts({1, 0, 1}, {.uniform = true}), two(3, 0, 2, 0)) << "at a threshold of 1 absent requests are no other length";
  EXPECT_EQ(counts({0, 1, 1}, {.uniform = true}), two(3, 0, 2, 0)) << "nor is one token, where the first request is absent";
  EXPECT_EQ(counts({1, 0, 5}, {.uniform = true}), two(1, 2, 1, 5));
  const std::vector<uint8_t> second{0, 1, 0};
  const PhaseOptions strict{.short_extends_are_decodes = false, .is_prefilling = second};
  EXPECT_EQ(counts({1, 1, 1}, strict), two(1, 2, 1, 2));
  EXPECT_EQ(counts({1, 1, 7}, strict), two(1, 2, 1, 8));
  EXPECT_EQ(counts({2, 1, 1}, strict), two(0, 3, 0, 4));
  const std::vector<uint8_t> none{0, 0, 0};
  EXPECT_EQ(counts({1, 1, 1}, {.short_extends_are_decodes = false, .is_prefilling = none}), two(3, 0, 3, 0));
  const PhaseOptions uniform_strict{.decode_threshold = 3, .uniform = true, .short_extends_are_decodes = false, .is_prefilling = none};
  EXPECT_EQ(counts({2, 2, 0}, uniform_strict), two(2, 1, 4, 0)) << "padding is a decode only where short extends are";
}

TEST(SplitDecodesAndPrefills, Errors) {
  const Ints falling{0, 3, 2}, late{1, 2};
  EXPECT_EQ(error_code([&] { split_decodes_and_prefills({}); }), "batch.query_start_loc.size");
  EXPECT_EQ(error_code([&] { split_decodes_and_prefills(late); }), "batch.query_start_loc.start");
  EXPECT_EQ(error_code([&] { split_decodes_and_prefills(falling); }), "batch.query_start_loc.monotone");
  EXPECT_EQ(error_code([&] { counts({1, 1}, {.decode_threshold = -1}); }), "batch.phases.threshold");
  EXPECT_EQ(error_code([&] { counts({1, 1}, {.num_tokens = 1}); }), "batch.phases.tokens");
  EXPECT_EQ(error_code([&] { counts({1, 1}, {.short_extends_are_decodes = false}); }), "batch.phases.prefilling");
}

TEST(SplitDecodesPrefillsAndExtends, KnownSplits) {
  const auto split = [](const Ints& query_lens, const Ints& seq_lens, const PhaseOptions& options) {
    return split_decodes_prefills_and_extends(starts_of(query_lens), seq_lens, options);
  };
  EXPECT_EQ(split({1, 2, 4, 5, 6}, {10, 11, 20, 5, 6}, {.decode_threshold = 3}), (PhaseCounts{2, 1, 2, 3, 4, 11}));
  EXPECT_EQ(split({1, 2}, {10, 11}, {.decode_threshold = 3, .num_tokens = 8}), (PhaseCounts{2, 0, 0, 8, 0, 0}));
  EXPECT_EQ(split({1, 5}, {10, 11}, {.num_tokens = 8}), (PhaseCounts{1, 1, 0, 1, 7, 0}));
  EXPECT_EQ(split({1, 5}, {10, 5}, {.num_tokens = 8}), (PhaseCounts{1, 0, 1, 1, 0, 7}));
  EXPECT_EQ(split({1, 1}, {1, 4}, {}), (PhaseCounts{2, 0, 0, 2, 0, 0})) << "a prompt of one token is a decode";
  EXPECT_EQ(split({5, 1, 6}, {9, 4, 6}, {}), (PhaseCounts{0, 2, 1, 0, 6, 6})) << "what follows the first extend is none of the decodes";
  EXPECT_EQ(split({}, {}, {}), PhaseCounts());
  EXPECT_EQ(error_code([&] { split({1, 1}, {1}, {}); }), "batch.order.size");
  EXPECT_EQ(error_code([&] { split({1}, {1}, {.decode_threshold = -1}); }), "batch.phases.threshold");
  EXPECT_EQ(error_code([&] { split({3}, {3}, {.num_tokens = 2}); }), "batch.phases.tokens");
}

TEST(SplitPrefillChunks, KnownSplits) {
  const auto split = [](const Ints& lens, int64_t workspace, int32_t first = 0) { return split_prefill_chunks(lens, workspace, first); };
  EXPECT_EQ(split({2, 3}, 5), (Ranges{{0, 2}}));
  EXPECT_EQ(split({1, 4, 2}, 5, 1), (Ranges{{1, 3}, {3, 4}}));
  EXPECT_EQ(split({2, 3, 4}, 4, 4), (Ranges{{4, 5}, {5, 6}, {6, 7}}));
  EXPECT_EQ(split({3, 9, 0, 1, 4}, 5), (Ranges{{0, 1}, {1, 2}, {2, 5}})) << "a length above the workspace is alone";
  EXPECT_EQ(split({INT_MAX, INT_MAX, INT_MAX}, 2 * int64_t(INT_MAX)), (Ranges{{0, 2}, {2, 3}})) << "sums have 64 bits";
  EXPECT_EQ(split({0, 0}, 0), (Ranges{{0, 2}}));
  EXPECT_EQ(split({}, 5), Ranges());
  EXPECT_EQ(error_code([&] { split({1}, -1); }), "batch.chunks.workspace");
  EXPECT_EQ(error_code([&] { split({1}, 1, INT_MAX); }), "batch.chunks.request");
  EXPECT_EQ(error_code([&] { split({1}, 1, -1); }), "batch.chunks.request");
  EXPECT_EQ(error_code([&] { split({-1}, 1); }), "batch.seq_len.negative");
}

}  // namespace
}  // namespace imbrex
