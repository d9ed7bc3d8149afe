// Latent attention's plan for GPUs computes a step in slices, and heads a few at a time, so that its scratch is bounded. On the fake
// driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/fake/mla_plans.h"
#include "imbrex/workspace.h"

namespace imbrex::cuda {
namespace {

// Slices that cut no request change no bit, and heads neither; a graph of several slices replays any step.
TEST_F(FakeMlaCalls, SlicesOfWholeRequestsChangeNoBit) {
  const auto stream = open_stream(device);
  for (const bool expand : {false, true}) {
    const auto whole = plan(forced(expand, 32), options), sliced = plan(forced(expand, 32, 20, 3), options);
    DeviceGraph graph;
    for (const Lengths& lengths : {prompts, decode, Lengths{{0, 8, 20, 39}, {8, 12, 64}}}) {
      whole->update(batch_of(lengths), stream->get());
      sliced->update(batch_of(lengths), stream->get());
      const std::string wanted = results(*whole, *stream);
      const std::vector<float> wanted_lse = lse;
      std::fill(lse.begin(), lse.end(), 7.f);
      EXPECT_TRUE(results(*sliced, *stream) == wanted) << expand << lengths.lens[0];
      EXPECT_TRUE(std::equal(lse.begin(), lse.begin() + lengths.starts.back() * 4, wanted_lse.begin())) << expand << lengths.lens[0];
      if (expand) continue;
      if (graph == nullptr) graph = stream->capture([&] { sliced->run(in, to, stream->get()); });
      std::fill(out.begin(), out.end(), uint16_t(0x2222));
      stream->replay(graph);
      stream->synchronize();
      EXPECT_TRUE(std::string(reinterpret_cast<const char*>(out.data()), out.size() * 2) == wanted) << lengths.lens[0];
    }
    whole->update(batch_of(prompts), stream->get());
    sliced->update(batch_of(prompts), stream->get());
    EXPECT_NE(sliced->str().find(expand ? "of 3 heads and 32 keys" : "40 tokens in latent space in 2 slices"), std::string::npos)
        << sliced->str();
    EXPECT_EQ(whole->str().find("slices"), std::string::npos) << whole->str();
  }
}

// Each slice has its own requests' bits of a packed mask, wherever the batch says that these begin.
TEST_F(FakeMlaCalls, SlicesFindTheirBitsOfAPackedMask) {
  const auto stream = open_stream(device);
  spec.mask.custom = true;
  options.limits.max_query_len = 20;  // no request under a custom mask is cut
  const auto whole = plan(forced(false, 32), options), sliced = plan(forced(false, 32, 20), options);
  for (const bool gaps : {false, true}) {
    std::vector<uint8_t> bits;
    std::vector<int32_t> starts;
    for (size_t r = 0; r < prompts.lens.size(); ++r) {
      if (gaps) bits.resize(bits.size() + 3 + r);
      starts.push_back(int32_t(bits.size()));
      const int pairs = (prompts.starts[r + 1] - prompts.starts[r]) * prompts.lens[r];
      for (int i = 0; i < (pairs + 7) / 8; ++i) bits.push_back(uint8_t((i * 73 + int(r) * 31) % 255 | 1));
    }
    starts.push_back(int32_t(bits.size()));
    Batch batch = batch_of(prompts);
    batch.packed_mask = TensorView::contiguous(bits.data(), DType::u8, {int64_t(bits.size())});
    if (gaps) batch.mask_indptr = starts;
    whole->update(batch, stream->get());
    sliced->update(batch, stream->get());
    const std::string wanted = results(*whole, *stream);
    EXPECT_TRUE(results(*sliced, *stream) == wanted) << gaps;
    EXPECT_NE(sliced->str().find("in 2 slices"), std::string::npos) << sliced->str();
  }
}

// All scratch of a plan, that of its plans of attention included, is in one workspace, of a size that is known before: less than 256 MB,
// whatever a step has.
TEST_F(FakeMla, AStepOfAnyLengthComputesInAQuarterOfAGigabyte) {
  const auto stream = open_stream(device);
  std::vector<int32_t> table(2048);
  for (const int heads : {20, 128})
    for (const BackendOf<MlaFamily>* backend : {&sm90, &sm80})
      for (const auto& [tokens, most] : {std::pair(8192, 0), {1024, 1}, {512, 4}}) {
        const MlaSpec large{.num_heads = heads, .block_size = 64};
        fake::use_mla_texts(large);
        const auto workspace = make_workspace(device);
        const PlanOptions chosen{.limits = {.max_num_reqs = 256, .max_num_tokens = tokens, .max_seq_len = 131072, .max_query_len = most},
                                 .load_on_demand = true,  // nothing is launched
                                 .out_dtype = DType::bf16,
                                 .workspace = workspace};
        const auto p = backend->plan(large, device, chosen);
        const int64_t asked = backend->workspace_bytes(large, device, chosen);
        EXPECT_LE(asked, 256'000'000) << heads << " " << tokens;
        // A prompt after a context, beside short ones and decode.
        const int longest = most > 0 ? most : tokens - 1000;
        std::vector<int32_t> starts{0}, lens;
        const auto add = [&](int queries, int keys) { starts.push_back(starts.back() + queries), lens.push_back(keys); };
        add(longest, std::max(longest, 100000));
        for (const int queries : {1, 3, 500}) add(std::min(queries, longest), 700);
        for (int i = 0; i < 100; ++i) add(std::min(2, longest), 5000);
        Batch batch;
        batch.query_start_loc = starts, batch.seq_lens = lens;
        table.resize(lens.size() * 2048, 1);
        batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(lens.size()), 2048});
        p->update(batch, stream->get());
        EXPECT_EQ(workspace->bytes(), asked) << p->str();
      }
}

}  // namespace
}  // namespace imbrex::cuda
