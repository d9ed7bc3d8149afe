// The fold of pieces: the same bits whether pieces are joined from memory, as groups that a thread block has folded, or all in one block.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "cuda/lanes/library.h"
#include "cuda/lanes/variants.h"
#include "cuda/params.h"

namespace imbrex::test {
namespace {

using cuda::AttentionParams;

// The sums of one row, as kernels keep them in registers and leave them in memory.
struct Sums {
  float reference = -1e30f, sum = -0.f;
  std::vector<float> x;
  explicit Sums(int dims) : x(size_t(dims), -0.f) {}
  void fold(const Sums& others) {
    const float top = std::max(reference, others.reference), kept = std::exp2(reference - top), added = std::exp2(others.reference - top);
    const auto joined = [&](float a, float b) { return std::fma(b, added, a * kept); };
    reference = top, sum = joined(sum, others.sum);
    for (size_t d = 0; d < x.size(); ++d) x[d] = joined(x[d], others.x[d]);
  }
};

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

  // For each merge its splits, each with a Sums for each (token, head).
  using Splits = std::vector<std::vector<Sums>>;
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
  const auto below = [&](int n) { return int(random() % unsigned(n)); };
  constexpr int kTokens = 2;
  std::vector<Splits> pieces;
  for (int item = 0; item < 40; ++item) {
    Splits& splits = pieces.emplace_back();
    for (int split = 2 + below(item % 2 == 0 ? 12 : 250); split > 0; --split) {
      std::vector<Sums>& rows = splits.emplace_back();
      for (int row = 0; row < kTokens * heads(); ++row) {
        Sums& sums = rows.emplace_back(spec.head_dim_v);
        if (item == 0 || below(4) == 0) {  // no key was seen
          sums.sum = 0.f, sums.x.assign(sums.x.size(), 0.f);
          continue;
        }
        sums.reference = float(below(below(3) == 0 ? 4000 : 40)) / 4.f - 500.f;
        sums.sum = 1.f + float(below(1 << 20)) / 1024.f;
        for (float& x : sums.x) x = below(10) == 0 ? -0.f : float(below(1 << 20) - (1 << 19)) / 4096.f;
      }
    }
  }
  // Folded on the host, as a thread block folds the pieces of its run.
  constexpr size_t kLevels = 3;
  std::vector<Splits> runs[kLevels + 1];  // of 4, 16, 64 pieces, and of all
  for (const Splits& splits : pieces) {
    const std::vector<Sums> empty(size_t(kTokens * heads()), Sums(spec.head_dim_v));
    const auto fold = [&](std::vector<Sums>& to, const std::vector<Sums>& from) {
      for (size_t row = 0; row < to.size(); ++row) to[row].fold(from[row]);
    };
    const auto folded = [&](const Splits& from) {
      Splits to;
      for (size_t i = 0; i < from.size(); ++i) {
        if (i % kPiecesTogether == 0) to.push_back(empty);
        fold(to.back(), from[i]);
      }
      return to;
    };
    const Splits* nodes = &splits;
    for (size_t level = 0; level < kLevels; ++level) nodes = &runs[level].emplace_back(folded(*nodes));
    std::vector<Sums>& all = runs[kLevels].emplace_back(1, empty)[0];
    for (const std::vector<Sums>& sums : *nodes) fold(all, sums);
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
