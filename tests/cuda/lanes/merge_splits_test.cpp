// The text of merge.cu, run lane by lane on the host: a row has the same bits however many blocks share out its dims, and lanes its splits,
// and whichever of these thread blocks have folded before.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cuda/lanes/library.h"
#include "cuda/lanes/split_sums.h"
#include "cuda/lanes/variants.h"
#include "cuda/params.h"

namespace imbrex::test {
namespace {

// A row of 512 dims has one, two or four blocks, one of 256 or 128 dims one or two, or one. nodes_prefill is for sm_80, without mbarriers.
class MergeSplits : public testing::TestWithParam<const char*> {
 protected:
  MergeSplits() {
    for (const Variant& v : variants())
      if (std::string(v.name) == GetParam()) spec_ = v.c.spec, out_bytes_ = size_of(v.c.out_dtype);
    EXPECT_GT(out_bytes_, 0);
    EXPECT_FALSE(spec_.score.sinks);
  }
  int tokens() const { return std::max(1, 16 / spec_.num_q_heads); }  // of an item
  int rows_each() const { return tokens() * spec_.num_q_heads; }

  struct Result {
    std::vector<char> out;
    std::vector<float> lse;
    bool operator==(const Result&) const = default;
  };
  Result merged(const std::vector<Splits>& items, int blocks, bool are_short) const {
    const int dims = spec_.head_dim_v, heads = spec_.num_q_heads, num_tokens = int(items.size()) * tokens();
    std::vector<MergeItem> merges;
    std::vector<float> out, state;
    for (const Splits& splits : items) {
      const int begin = int(merges.size()) * tokens();
      merges.push_back({begin, begin + tokens(), int(state.size()) / 2 / heads, int(splits.size())});
      for (const std::vector<Sums>& split : splits)
        for (const Sums& row : split) {
          out.insert(out.end(), row.x.begin(), row.x.end());
          state.push_back(row.reference), state.push_back(row.sum);
        }
    }
    struct alignas(16) Four {
      float x[4];
    };
    std::vector<Four> aligned(out.size() / 4);
    std::memcpy(aligned.data(), out.data(), out.size() * sizeof(float));
    Result result{std::vector<char>(size_t(num_tokens * heads * dims) * size_t(out_bytes_), 1),
                  std::vector<float>(size_t(num_tokens * heads), 0.f)};
    const cuda::PlanCounts counts{0, int(merges.size()), num_tokens, int(items.size()), 1};
    AttentionParams p{};
    p.out = result.out.data();
    p.out_head_stride = long(dims) * out_bytes_, p.out_token_stride = heads * p.out_head_stride;
    p.lse = result.lse.data(), p.lse_head_stride = 1, p.lse_token_stride = heads;
    p.v.scale = 0.75f;
    p.num_kv_heads = p.kv_heads_now = spec_.num_kv_heads;
    p.partial_out = reinterpret_cast<float*>(aligned.data()), p.partial_state = state.data();
    p.merge_lists[2] = {merges.data(), &counts, rows_each(), are_short};
    open_library(std::string("merge_splits_") + GetParam()).run(&p, nullptr, {.blocks = blocks});
    return result;
  }

  AttentionSpec spec_;
  int out_bytes_ = 0;
};

TEST_P(MergeSplits, HaveTheSameBitsWhoeverJoinsThem) {
  std::mt19937 random(3);
  for (const std::vector<int>& lengths : {std::vector{3, 16, 8, 1}, {17, 5}, {66, 250, 2}, {33, 63, 64, 12}}) {
    std::vector<Splits> pieces, runs[kRunLengths];
    for (const int length : lengths) {
      pieces.push_back(random_splits(random, length, rows_each(), spec_.head_dim_v, false));
      const std::array<Splits, kRunLengths> of_item = runs_of(pieces.back());
      for (size_t i = 0; i < kRunLengths; ++i) runs[i].push_back(of_item[i]);
    }
    const int rows = rows_each() * int(lengths.size());
    const Result wanted = merged(runs[kRunLengths - 1], 7, false), shortened = merged(pieces, 1, true);
    for (const int blocks : {rows / 3, 2 * rows, 4 * rows}) {
      SCOPED_TRACE(testing::Message() << lengths[0] << " splits and others, " << blocks << " blocks");
      EXPECT_TRUE(merged(pieces, blocks, false) == wanted);
      for (const std::vector<Splits>& of_length : runs) EXPECT_TRUE(merged(of_length, blocks, false) == wanted);
      EXPECT_TRUE(merged(pieces, blocks, true) == shortened);
    }
    if (lengths[0] < 17 || out_bytes_ < 4) continue;  // 16 bits hide it
    std::swap(pieces[0][1], pieces[0][14]);
    EXPECT_FALSE(merged(pieces, 4 * rows, false) == wanted) << "the order of pieces is seen";
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, MergeSplits, testing::Values("few_latents", "latent_elements", "nodes_prefill", "verify"),
                         [](const auto& named) { return named.param; });

}  // namespace
}  // namespace imbrex::test
