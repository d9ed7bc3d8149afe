// See kernel_choices.h.
#include "cuda/attention/kernel_choices.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <variant>

namespace imbrex::cuda {
namespace {

struct SizeName {
  std::string_view constant, name;  // of the kernel's text; of the size
};
constexpr SizeName kSizes[] = {{"kTileRows", "tile_rows"}, {"kTileKeys", "tile_keys"},       {"kItemRows", "item_rows"},
                               {"kStages", "stages"},      {"kValueStages", "value_stages"}, {"kRowWarps", "row_warps"},
                               {"kKeyWarps", "key_warps"}, {"kDimWarps", "dim_warps"},       {"kBlocks", "blocks"}};

}  // namespace

std::vector<KernelChoice> kernel_choices(const AttentionKernels& kernels, const AttentionSpec& spec, const DeviceInfo& device) {
  const std::string arch = arch_of(device);
  std::array<RegimeKernel, kNumRegimes> regimes;
  std::array<Tile, kNumRegimes> tiles;
  for (const Regime regime : kRegimes) tiles[regime] = (regimes[regime] = kernels.kernel(arch, spec, regime)).tile;
  const CutPolicy policies = gpu::cut_policy(spec, device, tiles, false);

  std::vector<KernelChoice> choices;
  for (const Regime regime : kRegimes) {
    const RegimeKernel& kernel = regimes[regime];
    const SchedulePolicy& policy = policies[regime];
    if (kernel.tile.rows == 0 || policy.min_q > policy.max_q) continue;
    KernelChoice choice{.requests = gpu::kRegimeNames[regime],
                        .least_queries = std::max(policy.min_q, 1),
                        .most_queries = policy.max_q,
                        .kernel = kernel.entry,
                        .sizes = {}};
    const KernelKey key = kernels.attention(arch, spec, regime, spec.out_dtypes()[0]);
    for (const auto& [constant, name] : kSizes) {
      const auto found = std::ranges::find(key.config, constant, &Constant::name);
      const int* const value = found == key.config.end() ? nullptr : std::get_if<int>(&found->value);
      if (value != nullptr && *value > 0) choice.sizes.push_back({std::string(name), *value});
    }
    choice.sizes.push_back({"threads", kernel.threads});
    choice.sizes.push_back({"cluster", kernel.cluster});
    if (policy.max_splits > 0) {
      choice.sizes.push_back({"piece_keys", policy.split_kv});
      choice.sizes.push_back({"most_pieces", policy.max_splits});
    }
    if (policy.runs) choice.sizes.push_back({"most_in_run", policy.most_in_run});
    choices.push_back(std::move(choice));
  }
  return choices;
}

}  // namespace imbrex::cuda
