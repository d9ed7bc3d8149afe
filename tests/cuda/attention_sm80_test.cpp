// Shapes of tiles of attention_sm80.cu: they fit where they must, depend on what they may, and compile without a spill everywhere.
#include "cuda/attention/attention_sm80.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "cuda/compiled.h"
#include "cuda/needs.h"
#include "cuda/params.h"
#include "cuda/precompile.h"

namespace imbrex::cuda {
namespace {

constexpr const char* kArchs[] = {"sm_80", "sm_90a", "sm_100a", "sm_120"};
constexpr gpu::Regime kTiled[] = {gpu::kDecode, gpu::kPrefill};

AttentionSpec spec_of(DType q, DType kv, int dim_qk, int dim_v, int group = 4) {
  return {.num_q_heads = 2 * group, .num_kv_heads = 2, .head_dim_qk = dim_qk, .head_dim_v = dim_v, .q_dtype = q, .kv_dtype = kv};
}

int shared_memory_of(std::string_view arch) { return arch == "sm_80" ? 163 << 10 : arch == "sm_120" ? 99 << 10 : 227 << 10; }

TEST(AttentionSm80, TilesFitEverywhere) {
  int count = 0;
  for (const char* arch : kArchs)
    for (const gpu::Regime regime : kTiled)
      for (const DType q : {DType::bf16, DType::f32})
        for (const DType kv : {DType::bf16, DType::f32, DType::fp8_e4m3})
          for (int dim = 8; dim <= 512; dim += 8)
            for (int rows : {1, 17, 64}) {
              const AttentionSpec spec = spec_of(q, kv, dim, dim);
              const auto tiles = attention_sm80_tiles(arch, spec, regime, rows);
              const std::string what = spec.str() + " " + arch;
              // f32 beyond 256 takes three planes of everything: too much for 99 KiB.
              if (!tiles) {
                EXPECT_TRUE(q == DType::f32 && kv == DType::f32 && dim > 256 && std::string_view(arch) == "sm_120") << what;
                continue;
              }
              ++count;
              const int bytes = attention_sm80_smem_bytes(spec, *tiles);
              EXPECT_LE(bytes, shared_memory_of(arch)) << what;
              EXPECT_LE(tiles->blocks * (bytes + 1024), shared_memory_of(arch) + 1024) << what;
              EXPECT_EQ(tiles->rows % (16 * tiles->row_warps), 0) << what;
              EXPECT_EQ(tiles->keys % (16 * tiles->key_warps), 0) << what;
              EXPECT_EQ(128 % tiles->keys, 0) << what << ": schedules begin at multiples of 128";
              EXPECT_TRUE(regime == gpu::kPrefill || tiles->rows >= rows || q == DType::f32 || dim > 480) << what << " " << rows;
            }
  EXPECT_GT(count, 4000);
}

// On an H200 the memory wants 40 KB under way on each multiprocessor.
TEST(AttentionSm80, DecodeKeepsTheMemoryBusy) {
  for (const DType kv : {DType::bf16, DType::fp8_e4m3})
    for (int dim : {64, 128, 256}) {
      const AttentionSpec spec = spec_of(DType::bf16, kv, dim, dim);
      const AttentionTiles t = *attention_sm80_tiles("sm_90a", spec, gpu::kDecode);
      const int64_t tile = int64_t(t.keys) * 2 * dim * size_of(kv);
      EXPECT_GE(t.blocks * (t.stages - 1) * tile, 40 << 10) << spec.str();
    }
}

// The tiles of a cache that stores both, and more of them at a time: bits do not depend on how many.
TEST(AttentionSm80, LatentTilesAreThoseOfStoredValues) {
  int deeper = 0;
  for (const char* arch : kArchs)
    for (const gpu::Regime regime : kTiled)
      for (const DType kv : {DType::bf16, DType::fp8_e4m3, DType::f32})
        for (const auto& [qk, v] : {std::pair(576, 512), {320, 256}, {128, 64}, {96, 96}, {72, 40}, {272, 264}}) {
          AttentionSpec spec = spec_of(kv == DType::f32 ? DType::f32 : DType::bf16, kv, qk, v);
          const auto stored = attention_sm80_tiles(arch, spec, regime);
          const int stored_bytes = stored ? attention_sm80_smem_bytes(spec, *stored) : 0;
          spec.kv_format = KvFormat::latent;
          auto tiles = attention_sm80_tiles(arch, spec, regime);
          ASSERT_EQ(stored.has_value(), tiles.has_value()) << spec.str() << " " << arch;
          if (!tiles) continue;
          const int bytes = attention_sm80_smem_bytes(spec, *tiles);
          EXPECT_LE(bytes, shared_memory_of(arch)) << spec.str();
          EXPECT_LE(tiles->blocks * (bytes + 1024), shared_memory_of(arch) + 1024) << spec.str();
          deeper += tiles->stages > stored->stages;
          EXPECT_TRUE(tiles->stages > stored->stages || bytes <= stored_bytes) << spec.str();
          tiles->stages = stored->stages;
          EXPECT_EQ(*tiles, *stored) << spec.str() << " " << arch;
        }
  EXPECT_GE(deeper, 20);
}

TEST(AttentionSm80, OneSpecOneShape) {
  const AttentionSpec spec = spec_of(DType::bf16, DType::bf16, 128, 128);
  AttentionSpec other = spec;
  other.num_q_heads = 64, other.num_kv_heads = 16;
  EXPECT_EQ(attention_sm80_key("sm_90a", spec, DType::bf16, *attention_sm80_tiles("sm_90a", spec, gpu::kDecode)).str(),
            attention_sm80_key("sm_90a", other, DType::bf16, *attention_sm80_tiles("sm_90a", other, gpu::kDecode)).str());
  EXPECT_EQ(attention_sm80_tiles("sm_90a", spec, gpu::kDecode)->rows, 16);
  EXPECT_EQ(attention_sm80_tiles("sm_90a", spec_of(DType::bf16, DType::bf16, 128, 128, 32), gpu::kDecode)->rows, 32);
  EXPECT_EQ(attention_sm80_tiles("sm_90a", spec_of(DType::bf16, DType::bf16, 128, 128, 71), gpu::kDecode)->rows, 64);
}

// No spill, no local memory, no warning, and as much shared memory as the host reckons with.
void expect_clean(const TightTile& tile) {
  const AttentionTiles tiles = *attention_sm80_tiles(tile.arch, tile.spec, tile.regime, tile.rows);
  const KernelKey key = tile.key();
  const auto [entries, problems] = test::judged(key);
  EXPECT_EQ(problems, std::vector<std::string>{}) << key.str();
  ASSERT_EQ(entries.size(), 1u) << key.str();
  const PrecompiledEntry& entry = entries[0];
  EXPECT_EQ(entry.name, "attention_sm80");
  EXPECT_EQ(entry.smem_bytes, attention_sm80_smem_bytes(tile.spec, tiles)) << key.str();
  EXPECT_LE(entry.registers * tiles.threads() * tiles.blocks, 65536) << key.str();
}

// What `imbrex compile` makes for a model with such layers: write_kv, copy_blocks, gather, merge_results and the two of tables; for each of
// two types of output the shapes of three regimes, decode's once more with shared items, and the merge.
TEST(AttentionSm80, AModelsFolderHasWhatItsPlansLoad) {
  const LayerSpec layer = spec_of(DType::bf16, DType::fp8_e4m3, 128, 128);
  std::map<std::string, int> files;
  for (const ShippedKernel& kernel : shipped_kernels("sm_80", {&layer, 1})) ++files[kernel.key.path];
  const std::map<std::string, int> expected = {{"write_kv.cu", 1},       {"copy_blocks.cu", 1}, {"gather.cu", 1},
                                               {"merge_results.cu", 1},  {"plan_tables.cu", 1}, {"plan_batch.cu", 1},
                                               {"attention_sm80.cu", 8}, {"merge.cu", 2}};
  EXPECT_EQ(files, expected);
}

// What a plan for many requests loads is in a folder too, for GPUs that have such a kernel.
TEST(AttentionSm80, AFolderOfRecurrencesHasTheKernelOfManyStates) {
  const LayerSpec layer = RecurrentSpec{.num_k_heads = 16, .num_v_heads = 32, .head_dim_k = 128, .head_dim_v = 128};
  for (const auto& [arch, count] : {std::pair{"sm_80", 0}, {"sm_90a", 1}, {"sm_100a", 1}, {"sm_120", 0}}) {
    const std::vector<ShippedKernel> kernels = shipped_kernels(arch, {&layer, 1});
    const auto streams = [](const ShippedKernel& kernel) { return kernel.key.path == "recurrent_stream.cu"; };
    EXPECT_EQ(std::ranges::count_if(kernels, streams), count) << arch;
  }
}

// And for one of recurrences with convolutions in front, which are kernels of another family.
TEST(AttentionSm80, AFolderOfRecurrencesHasTheirConvolutionsToo) {
  RecurrentSpec spec{.num_k_heads = 2, .num_v_heads = 4, .head_dim_k = 64, .head_dim_v = 64};
  const auto files = [&] {
    const LayerSpec layer = spec;
    std::map<std::string, int> all;
    for (const ShippedKernel& kernel : shipped_kernels("sm_80", {&layer, 1})) ++all[kernel.key.path];
    return all;
  };
  std::map<std::string, int> expected = files();
  EXPECT_FALSE(expected.contains("short_conv.cu"));
  spec.conv = RecurrentConv::vkq;
  expected["short_conv.cu"] = 1;
  EXPECT_EQ(files(), expected);
}

TEST(AttentionSm80, EveryTightTileCompilesCleanly) {
  NEEDS_NVRTC();
  for (const TightTile& tile : tight_tiles()) expect_clean(tile);
}

TEST(AttentionSm80, MergeCompilesCleanly) {
  NEEDS_NVRTC();
  for (const char* arch : kArchs)
    for (int dim : {8, 128, 512}) {
      const auto [entries, problems] = test::judged(merge_key(arch, spec_of(DType::bf16, DType::bf16, dim, dim), DType::bf16));
      EXPECT_EQ(problems, std::vector<std::string>{}) << arch << " " << dim;
      ASSERT_EQ(entries.size(), 1u);
      EXPECT_EQ(entries[0].name, "merge");
      EXPECT_LE(entries[0].smem_bytes, 99 << 10);  // what every GPU since sm_80 has for a thread block
    }
}

}  // namespace
}  // namespace imbrex::cuda
