// The fold of pieces: the same bits whether pieces are joined from memory, as groups that a thread block has folded, or all in one block.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/lanes/library.h"
#include "cuda/lanes/split_sums.h"
#include "cuda/lanes/variants.h"
#include "cuda/params.h"

namespace imbrex::test {
namespace {

using cuda::AttentionParams;

// A list of merges whose splits may be pieces, groups of them, or all.
class JoinPieces : public testing::Test {
 protected:
  JoinPieces() {
    for (const Variant& v : variants())
      if (std::string(v.name) == "bytes") spec = v.c.spec;
    EXPECT_EQ(spec.head_dim_v % 8, 0);
  }
  int heads() const { return spec.num_q_heads; }
  size_t rows_of(const MergeItem& m) const { return size_t((m.q_end - m.q_begin) * heads()); }

  struct Result {
    std::vector<float> out, lse;
    bool operator==(const Result& other) const {
      const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                          [](float x, float y) { return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y); });
      };
      return same(out, other.out) && same(lse, other.lse);
    }
  };
  Result joined(const std::vector<Splits>& items, int tokens_each) const {
    const int dims = spec.head_dim_v, tokens = int(items.size()) * tokens_each;
    std::vector<MergeItem> merges;
    std::vector<float> out, state;
    for (const Splits& splits : items) {
      const int begin = int(merges.size()) * tokens_each, first = int(state.size()) / 2 / heads();
      merges.push_back({begin, begin + tokens_each, first, int(splits.size())});
      for (const std::vector<Sums>& split : splits)
        for (const Sums& row : split) {
          out.insert(out.end(), row.x.begin(), row.x.end());
          state.push_back(row.reference), state.push_back(row.sum);
        }
    }
    std::vector<float> aligned(out.size() + 3);  // float4
    float* const partial_out = aligned.data() + (16 - reinterpret_cast<uintptr_t>(aligned.data()) % 16) % 16 / 4;
    std::copy(out.begin(), out.end(), partial_out);
    Result result{std::vector<float>(size_t(tokens * heads() * dims), NAN), std::vector<float>(size_t(tokens * heads()), NAN)};
    const cuda::PlanCounts counts{0, int(merges.size()), tokens, int(items.size()), 1};
    AttentionParams p{};
    p.out = reinterpret_cast<char*>(result.out.data());
    p.out_head_stride = dims * long(sizeof(float)), p.out_token_stride = heads() * p.out_head_stride;
    p.lse = result.lse.data(), p.lse_head_stride = 1, p.lse_token_stride = heads();
    p.v.scale = kScale;
    p.merges = merges.data(), p.counts = &counts, p.num_kv_heads = p.kv_heads_now = spec.num_kv_heads;
    p.partial_out = partial_out, p.partial_state = state.data();
    open_library("join_pieces_bytes").run(&p, nullptr, {.blocks = 1});
    return result;
  }

  static constexpr float kScale = 0.75f;
  AttentionSpec spec;
};

TEST_F(JoinPieces, GivesTheSameBitsWhoeverFolded) {
  std::mt19937 random(1);
  constexpr int kTokens = 2;
  std::vector<Splits> pieces, runs[kRunLengths];
  for (int item = 0; item < 40; ++item) {
    const int splits = 2 + int(random() % (item % 2 == 0 ? 12 : 250));
    pieces.push_back(random_splits(random, splits, kTokens * heads(), spec.head_dim_v, item == 0));
    const std::array<Splits, kRunLengths> of_item = runs_of(pieces.back());
    for (size_t i = 0; i < kRunLengths; ++i) runs[i].push_back(of_item[i]);
  }
  const Result from_pieces = joined(pieces, kTokens);
  for (const std::vector<Splits>& of_level : runs) EXPECT_EQ(from_pieces, joined(of_level, kTokens));
  Splits& spoiled = pieces.back();
  std::swap(spoiled[0], spoiled[1]);
  EXPECT_FALSE(from_pieces == joined(pieces, kTokens)) << "the order of pieces is seen";
  std::swap(spoiled[0], spoiled[1]);

  size_t rows = 0, seen = 0;
  for (size_t item = 0; item < pieces.size(); ++item)
    for (size_t row = 0; row < size_t(kTokens * heads()); ++row, ++rows) {
      double top = -1e30, sum = 0;
      for (const auto& split : pieces[item]) top = std::max(top, double(split[row].reference));
      std::vector<double> x(size_t(spec.head_dim_v), 0.);
      double largest = 0;
      for (const auto& split : pieces[item]) {
        const double weight = std::exp2(split[row].reference - top);
        sum += split[row].sum * weight;
        for (size_t d = 0; d < x.size(); ++d) x[d] += split[row].x[d] * weight, largest = std::max(largest, std::abs(x[d]));
      }
      seen += sum > 0;
      EXPECT_FLOAT_EQ(from_pieces.lse[rows], sum > 0 ? float((top + std::log2(sum)) * M_LN2) : -INFINITY);
      for (size_t d = 0; d < x.size(); ++d)
        EXPECT_NEAR(from_pieces.out[rows * x.size() + d], sum > 0 ? x[d] / sum * double(kScale) : 0., 1e-6 * (1 + largest / (sum + 1)));
    }
  EXPECT_GT(seen, rows / 2);
  EXPECT_LT(seen, rows);
}

}  // namespace
}  // namespace imbrex::test
