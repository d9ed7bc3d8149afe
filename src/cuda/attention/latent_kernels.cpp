// See latent_kernels.h.
#include "cuda/attention/latent_kernels.h"

#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/attention/attention_sm90_latent_decode.h"
#include "cuda/attention/attention_sm90_latent_decode_spread.h"
#include "cuda/attention/attention_sm90_latent_pair.h"
#include "cuda/attention/attention_sm90_latent_spread.h"

namespace imbrex::cuda {
namespace {

// Of a kernel of which so many thread blocks take every item together.
template <class Tiles>
Tile latent_tile(const Tiles& tiles, int cluster = 1) {
  return {.rows = tiles.rows,
          .keys = tiles.keys,
          .runs = true,
          .blocks = 1,
          .cluster = cluster,
          .together = true,
          .merged = true,
          .least_piece = tiles.least_piece,
          .split_cost = tiles.split_cost};
}

}  // namespace

bool runs_sm90_latents(std::string_view arch, const AttentionSpec& spec) {
  return attention_sm90_latent_tiles(arch, spec, kDecode) || attention_sm90_latent_decode_tiles(arch, spec, kPrefill);
}

std::optional<RegimeKernel> sm90_latent_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime) {
  if (const auto tiles = attention_sm90_latent_decode_tiles(arch, spec, regime)) {
    return RegimeKernel{.entry = "attention_sm90_latent_decode",
                        .tile = latent_tile(*tiles),
                        .threads = tiles->threads,
                        .run_sums = attention_sm90_latent_decode_run_sums(spec, *tiles),
                        .maps = attention_sm90_latent_decode_maps(*tiles)};
  }
  if (const auto tiles = attention_sm90_latent_pair_tiles(arch, spec, regime)) {
    return RegimeKernel{.entry = "attention_sm90_latent_pair",
                        .tile = latent_tile(*tiles, kSm90LatentPairCluster),
                        .threads = kSm90LatentThreads,
                        .cluster = kSm90LatentPairCluster,
                        .run_sums = attention_sm90_latent_pair_run_sums(spec),
                        .maps = attention_sm90_latent_pair_maps};
  }
  if (const auto tiles = attention_sm90_latent_tiles(arch, spec, regime)) {
    const int row_blocks = has_wide_latent_items(spec, regime) ? 2 : 1;
    return RegimeKernel{.entry = "attention_sm90_latent",
                        .tile = latent_tile(*tiles, row_blocks),
                        .threads = kSm90LatentThreads,
                        .cluster = attention_sm90_latent_cluster(spec, regime),
                        .row_blocks = row_blocks,
                        .run_sums = attention_sm90_latent_run_sums(spec, regime),
                        .short_sums = true,
                        .maps = attention_sm90_latent_maps};
  }
  return std::nullopt;
}

std::optional<KernelKey> sm90_latent_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out, bool maps) {
  if (const auto tiles = attention_sm90_latent_decode_tiles(arch, spec, regime))
    return attention_sm90_latent_decode_key(arch, spec, out, *tiles, maps);
  if (const auto tiles = attention_sm90_latent_pair_tiles(arch, spec, regime))
    return attention_sm90_latent_pair_key(arch, spec, out, *tiles, maps);
  if (const auto tiles = attention_sm90_latent_tiles(arch, spec, regime)) return attention_sm90_latent_key(arch, spec, out, *tiles, maps);
  return std::nullopt;
}

RegimeKernel sm90_few_tasks_kernel(std::string_view arch, const AttentionSpec& spec, Regime regime, bool fewest) {
  const auto few = attention_sm90_latent_decode_tiles(arch, spec, regime);
  const auto form =
      few ? attention_sm90_latent_decode_spread(arch, spec, regime, fewest) : attention_sm90_latent_spread(arch, spec, regime, fewest);
  if (!form) return {};
  return {.entry = few ? "attention_sm90_latent_decode_spread" : "attention_sm90_latent_spread",
          .threads = kSm90LatentSpreadThreads,
          .cluster = form->cluster,
          .most_tasks = form->most_tasks,
          .maps = few ? attention_sm90_latent_decode_maps(*few) : attention_sm90_latent_maps};
}

KernelKey sm90_few_tasks_attention(std::string_view arch, const AttentionSpec& spec, Regime regime, DType out, bool fewest) {
  if (const auto few = attention_sm90_latent_decode_tiles(arch, spec, regime))
    return attention_sm90_latent_decode_spread_key(arch, spec, out, *few, *attention_sm90_latent_decode_spread(arch, spec, regime, fewest));
  return attention_sm90_latent_spread_key(arch, spec, regime, out, *attention_sm90_latent_spread(arch, spec, regime, fewest));
}

}  // namespace imbrex::cuda
