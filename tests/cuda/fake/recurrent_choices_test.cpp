// Which kernels recurrent layers have on which GPUs, and how a step of prompts is shared out to their launches.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <variant>

#include "cuda/recurrent/recurrent.h"
#include "imbrex/backend.h"

namespace imbrex::cuda {
namespace {

// What does not fit in scratch at once is shared out evenly, so that rounds end where requests of one length do.
TEST(ChunkRounds, HaveOneLength) {
  const RecurrentSpec gdn{.num_k_heads = 16, .num_v_heads = 64, .head_dim_k = 128, .head_dim_v = 128, .delta = true, .sigmoid_beta = true};
  DeviceInfo device = describe_device("h200");
  const PlanLimits limits{.max_num_reqs = 8, .max_num_tokens = 65536};
  EXPECT_EQ(ChunkRounds(*chunk_kernels(arch_of(device), gdn, device), limits).each, 819);  // 141 GiB / 256
  device.memory_bytes = int64_t(24) << 30;
  const ChunkRounds rounds(*chunk_kernels(arch_of(device), gdn, device), limits);
  EXPECT_EQ(rounds.each, 278);  // 192 MiB
  const auto numbers = [](int64_t requests, int64_t tokens) { return ChunkRounds::numbers(requests * tokens, requests); };
  EXPECT_EQ(rounds.each_of(numbers(4, 8192)), 2 * 129);
  EXPECT_EQ(rounds.each_of(numbers(8, 8192)), 2 * 129);
  EXPECT_EQ(rounds.each_of(278), 278);
  EXPECT_EQ(rounds.each_of(279), 140);
  EXPECT_EQ(rounds.each_of(1), 1);
}

// Blocks of a cluster have one head's values, or heads of one key head, whatever the number of multiprocessors.
TEST(RecurrentKernelChoices, HaveClustersWhereBlocksReadTheSame) {
  const DeviceInfo h200 = describe_device("h200");
  const auto cluster = [&](int dim_v, int group) {
    const RecurrentSpec spec{
        .num_k_heads = 8, .num_v_heads = 8 * group, .head_dim_k = 128, .head_dim_v = dim_v, .delta = true, .sigmoid_beta = true};
    return chunk_kernels(arch_of(h200), spec, h200)->cluster;
  };
  EXPECT_EQ(cluster(128, 1), 2u);
  EXPECT_EQ(cluster(64, 4), 2u);
  EXPECT_EQ(cluster(64, 3), 1u);
  EXPECT_EQ(cluster(64, 1), 1u);
  EXPECT_EQ(cluster(192, 2), 1u);
  EXPECT_EQ(cluster(256, 3), 2u);
}

// Prompts come in chunks on all GPUs, also where decays are of channels and shared memory is small; with less of it, and where numbers have
// more than 16 bits, token by token.
TEST(RecurrentKernelChoices, HaveChunksOnAllGpus) {
  RecurrentSpec gdn{.num_k_heads = 16, .num_v_heads = 32, .head_dim_k = 128, .head_dim_v = 128, .delta = true, .sigmoid_beta = true};
  RecurrentSpec kda = gdn;
  kda.num_k_heads = 32, kda.channel_gate = true;
  const auto stages = [](const RecurrentSpec& spec, const DeviceInfo& device) {
    const auto chunks = chunk_kernels(arch_of(device), spec, device);
    if (!chunks) return 0;
    const auto& constants = chunks->chunks.config;
    const auto found = std::ranges::find(constants, "kStages", &gpu::Constant::name);
    return found == constants.end() ? kRecurrentChunkStages : std::get<int>(found->value);
  };
  const BackendOf<RecurrentFamily>& backend = *find_backend<RecurrentFamily>("cuda_sm80");
  for (const auto& [name, of_gdn, of_kda] : {std::tuple{"a100", 2, 1}, {"h100", 2, 2}, {"b200", 2, 1}, {"rtx5090", 1, 1}, {"l40s", 1, 1}}) {
    DeviceInfo device = describe_device(name);
    EXPECT_EQ(stages(gdn, device), of_gdn) << name;
    EXPECT_EQ(stages(kda, device), of_kda) << name;
    for (RecurrentSpec spec : {gdn, kda}) {
      EXPECT_EQ(backend.kernel_choices(spec, device).at(0).kernel, "recurrent_chunks") << name;
      EXPECT_GT(backend.workspace_bytes(spec, device, {.limits = {.max_num_reqs = 1, .max_num_tokens = 64}}), 0) << name;
      spec.dtype = DType::f32;
      EXPECT_EQ(backend.kernel_choices(spec, device).at(0).kernel, "recurrent_aligned") << name;
      EXPECT_EQ(backend.workspace_bytes(spec, device, {.limits = {.max_num_reqs = 1, .max_num_tokens = 64}}), 0) << name;
    }
    device.max_smem_bytes = 64 << 10;
    EXPECT_EQ(stages(gdn, device), device.sm == 90 ? 0 : 1) << name;
    EXPECT_EQ(stages(kda, device), 0) << name;
  }
}

}  // namespace
}  // namespace imbrex::cuda
