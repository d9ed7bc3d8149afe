// See cut.h.
#include "gpu/cut.h"

#include <algorithm>
#include <ranges>

namespace imbrex::gpu {
namespace {

// The least size of a piece: so many keys, and so many that the traffic of its partial results is at most so many percent of that of its
// keys and values. The percentage is higher where pieces make runs, because they are items of their own only while the GPU would idle
// otherwise, and with many query tokens, because partial results then mostly stay in L2.
struct LeastPiece {
  int keys, partial_percent;
};
constexpr LeastPiece kLeastOfDecode{576, 5}, kLeastOfMore{576, 10}, kLeastOfRuns{128, 15};
// The least pieces where a launch of its own merges the partial results of runs. Prefill: four tiles of products for each time that sums
// are written and read. Verify: no fewer bytes of keys than of partial results.
constexpr int kLeastOfPrefillRuns = 512;
constexpr LeastPiece kLeastOfMergedRuns{256, 100};
// The most keys of a piece: a longer one would still run when all short ones beside it are done. With many query tokens most of the time is
// spent on products; the partial results of kLongestOfMore keys then take a seventh of it.
constexpr int kLongestPiece = 4096, kLongestOfMore = 2048;
// The most q heads of a group that fit a tile. A larger group counts as several heads, which need fewer pieces to keep the GPU busy.
constexpr int kMostGroup = 64;
constexpr int kTasksEach = 2;     // tasks of a lone request for each multiprocessor, at most: two thread blocks share one
constexpr int kMostPieces = 256;  // what join_pieces() takes: nodes of four levels
// Without runs a lone request has pieces for five eighths of the multiprocessors: see share_splits below.
constexpr int kShareNumerator = 5, kShareDenominator = 8;
// The partial rows of each regime that a plan has room for, in tiles for each worker. The regimes use them one after the other: what one
// does not need is left to the next, and long verify has nothing else.
constexpr int kMostPartialTiles[kNumRegimes] = {4, 3, 0, 1};
constexpr int kL2Percent = 60;  // for keys and values; queries and outputs pass through the rest

int round_up(int64_t n, int unit) { return int((n + unit - 1) / unit * unit); }

// The least keys of a piece for each query token, by the bytes of partial results.
int keys_each(const AttentionSpec& spec, const LeastPiece& least) {
  const int64_t partial_bytes = 2 * int64_t(spec.group_size()) * (spec.head_dim_v + 2) * int64_t(sizeof(float));  // written and read
  const int64_t key_bytes = (spec.head_dim_qk + spec.head_dim_v) * size_of(spec.kv_dtype);
  return int(partial_bytes * 100 / (least.partial_percent * key_bytes));
}

}  // namespace

CutPolicy cut_policy(const AttentionSpec& spec, const DeviceInfo& device, const std::array<Tile, kNumRegimes>& tiles, bool balanced) {
  const int group = spec.group_size();
  const int decode_q = std::max(1, tiles[kDecode].rows / group);  // a token has rows for several tiles when the group is large
  const int workers = std::max(device.num_workers, 1);
  const auto heads_of = [&](Regime regime) { return spec.num_kv_heads * ((group + tiles[regime].rows - 1) / tiles[regime].rows); };
  CutPolicy policies;
  for (const Regime regime : kRegimes) {
    SchedulePolicy& p = policies[regime];
    // The most pieces of a request with which no multiprocessor has two tasks.
    const int most = std::max(workers / std::max(heads_of(kDecode), spec.num_kv_heads * ((group + kMostGroup - 1) / kMostGroup)), 1);
    p.tile_q = std::max(1, tiles[regime].rows / group);
    p.tile_kv = tiles[regime].keys;
    const LeastPiece& least = tiles[regime].runs ? kLeastOfRuns : regime == kDecode ? kLeastOfDecode : kLeastOfMore;
    p.split_kv_each = keys_each(spec, least);
    p.split_kv = round_up(std::max(least.keys, p.split_kv_each), tiles[regime].keys);
    p.runs = tiles[regime].runs;
    p.most_in_run = tiles[regime].most_in_run;
    p.workers_each = tiles[regime].blocks_each;
    p.cost_by_keys = tiles[regime].runs && regime != kPrefill;
    // Without runs each piece costs a partial result, so a request alone has fewer: a multiprocessor alone gets more than its share of the
    // memory's rate, unless it is busy widening fp8.
    p.share_splits = tiles[regime].runs || is_fp8(spec.kv_dtype) ? most : std::max(most * kShareNumerator / kShareDenominator, 1);
    p.max_splits = std::min(kTasksEach * most, kMostPieces);
    p.longest_kv = tiles[regime].runs || regime == kDecode ? kLongestPiece : kLongestOfMore;
    // The rows of all pieces of a request are bounded to a tile for each multiprocessor: a tile of verify where runs bound the memory of
    // partial rows, else one of decode.
    p.max_split_rows = most * (regime == kVerify && tiles[regime].runs ? p.tile_q : decode_q);
    p.split_max_q = std::max(1, p.max_split_rows / 2);
    p.balanced = balanced;
    p.split_cost = tiles[regime].split_cost;
    p.num_workers = std::max(tiles[regime].blocks * workers / tiles[regime].cluster / heads_of(regime), 1);
    if (tiles[regime].runs && tiles[regime].merged) {
      const bool prefill = regime == kPrefill;
      p.split_kv_each = prefill ? 0 : keys_each(spec, kLeastOfMergedRuns);
      const int least_keys = prefill ? kLeastOfPrefillRuns : kLeastOfMergedRuns.keys;
      p.split_kv = round_up(std::max(least_keys, tiles[regime].least_piece), tiles[regime].keys);
      p.longest_kv = INT32_MAX;
      p.few_splits = true;
      p.items_each = !tiles[regime].together && p.tile_q % tiles[regime].cluster == 0 ? tiles[regime].cluster : 1;
      p.max_splits = std::min(p.num_workers * p.items_each, p.most_in_run);
      p.share_splits = p.max_splits;
      p.max_split_rows = p.num_workers * p.tile_q;
      p.split_max_q = std::max(1, p.max_split_rows / 2);
    }
  }
  int64_t most_partial_rows = 0;
  for (const Regime regime : kRegimes) {
    most_partial_rows += int64_t(kMostPartialTiles[regime]) * policies[regime].num_workers * policies[regime].tile_q;
    policies[regime].most_partial_rows = int(std::min<int64_t>(most_partial_rows, INT32_MAX));
  }
  policies[kDecode].max_q = decode_q;
  policies[kVerify].min_q = decode_q + 1;
  policies[kVerify].max_q = std::max(decode_q, policies[kVerify].tile_q * tiles[kVerify].tiles_each);
  policies[kLongVerify].min_q = policies[kVerify].max_q + 1;
  policies[kLongVerify].max_q = std::max(policies[kVerify].max_q, policies[kLongVerify].tile_q * tiles[kLongVerify].tiles_each);
  policies[kPrefill].min_q = policies[kLongVerify].max_q + 1;
  return policies;
}

void bound_partials(CutPolicy& policies, const AttentionSpec& spec, const PlanLimits& limits, int64_t run_sums) {
  constexpr int kMostDimsOfRuns = 256;
  constexpr int64_t kMostBytes = int64_t(255) << 20;
  if (spec.head_dim_v <= kMostDimsOfRuns) return;
  const int64_t row_bytes = int64_t(spec.num_q_heads) * (spec.head_dim_v + 2) * int64_t(sizeof(float));
  while (partial_rows_bound(policies, limits) > (kMostBytes - run_sums) / row_bytes) {
    const auto most =
        std::ranges::max_element(policies, {}, [&](const SchedulePolicy& p) { return schedule_bounds(p, limits).num_partial_rows; });
    if (most->max_splits <= 1) return;
    most->max_splits /= 2, most->share_splits = std::min(most->share_splits, most->max_splits);
    most->max_split_rows /= 2, most->split_max_q = std::max(1, most->max_split_rows / 2);
  }
}

long keys_in_l2(const AttentionSpec& spec, const DeviceInfo& device, Regime regime) {
  if (regime != kPrefill || !spec.mask.causal) return 0;
  return device.l2_bytes * kL2Percent / 100 / ((spec.head_dim_qk + spec.head_dim_v) * size_of(spec.kv_dtype));
}

}  // namespace imbrex::gpu
