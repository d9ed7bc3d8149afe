#pragma once
// A random batch for plan_batch.cu: its memory as one image, and what the host's schedule() makes of the same batch. For the
// kernel's text on the host and for the kernel on a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attention/cut_rules.h"
#include "attention/draft_tree.h"
#include "cuda/params.h"
#include "cuda/plan/plan.h"
#include "cuda/plan/plan_arrays.h"
#include "gpu/cut.h"
#include "imbrex/error.h"

namespace imbrex::cuda::test {

struct PlanBatchProblem {
  PlanLimits limits;
  Mask mask;
  bool queries_are_keys = true;
  CutPolicy policies;
  long l2_keys[kNumRegimes];
  int num_kv_heads;
  std::vector<int> starts{0}, lens, kv_starts, positions;      // positions: as the caller gives them
  std::vector<int> parents, drafts;                            // of trees, likewise; drafts empty: all tokens are
  std::vector<int> broken = std::vector<int>(kNumBatchRules);  // as the kernel reports it
  std::vector<bool> left_out;
  bool packed = false;  // the custom mask has bits
  long mask_size = 0;   // its bytes, or bits
  static constexpr int kBlockSize = 16, kTableColumns = 9000;

  // `spoil`: some requests break rules. Up to so many requests.
  PlanBatchProblem(unsigned seed, int most_reqs, bool spoil) : random_(seed) {
    const std::pair<int, int> heads[] = {{32, 8}, {8, 1}, {71, 1}, {16, 16}, {64, 8}};
    const auto [q_heads, kv_heads] = heads[below(5)];
    const AttentionSpec spec{.num_q_heads = q_heads, .num_kv_heads = kv_heads, .head_dim_qk = 128, .head_dim_v = 128};
    mask.causal = below(4) > 0;
    if (below(3) == 0) mask.window_left = below(5000);
    if (below(6) == 0) mask.window_right = below(100);
    if (below(5) == 0) mask.chunk = 1 + below(9000);
    mask.custom = below(4) == 0;
    packed = mask.custom && seed % 2 == 0;
    if (below(4) == 0) mask.tree = mask.causal = true, mask.custom = false;
    limits = {.max_num_reqs = most_reqs, .max_num_tokens = 1 + below(4000), .max_seq_len = 1 + below(below(2) ? 130000 : 3000)};
    const int kind = below(4);  // decode, verify, mixed twice
    if (kind == 0 && below(2) == 0) limits.max_query_len = 1;
    const DeviceInfo device = describe_device("h200");
    std::array<Tile, kNumRegimes> tiles;
    const AttentionKernels& kernels = limits.max_num_tokens % 2 ? kernels_sm80 : kernels_sm90;  // with runs in prefill
    for (const Regime regime : kRegimes) tiles[regime] = kernels.kernel(arch_of(device), spec, regime).tile;
    policies = gpu::cut_policy(spec, device, tiles, false);
    for (const Regime regime : kRegimes) l2_keys[regime] = below(2) ? below(1 << below(24)) : 0;
    num_kv_heads = kv_heads;

    const int longest = limits.max_query_len > 0 ? limits.max_query_len : limits.max_num_tokens;
    for (int r = below(most_reqs + 1); r > 0; --r) {
      int q_len = kind == 0 ? 1 : kind == 1 ? 1 + below(9) : below(3) == 0 ? below(600) : below(20);
      if (below(8) == 0) q_len = 0;
      q_len = std::min({q_len, longest, limits.max_num_tokens - starts.back(), limits.max_seq_len});
      starts.push_back(starts.back() + q_len);
      lens.push_back(below(10) == 0 ? q_len : q_len + below(limits.max_seq_len - q_len + 1));
    }
    if (below(3) == 0) {
      kv_starts.push_back(below(3));
      for (const int len : lens) kv_starts.push_back(kv_starts.back() + (len + kBlockSize - 1) / kBlockSize + below(2));
    }
    if (mask.tree) give_parents(spoil);
    if (spoil) break_rules();
    for (int r = 0; r < num_reqs(); ++r) mask_size += mask_room(r);
    if (spoil && below(2) == 0) mask_size -= mask_size / 4;
    judge();
    for (const Regime regime : {kDecode, kVerify}) {
      policies[regime].runs = below(4) > 0;
      if (below(3) == 0) policies[regime].most_in_run = kMostInRun / kPiecesTogether;
      policies[regime].most_partial_rows = below(2) == 0 ? 0 : 1 + below(40);
      if (below(3) == 0) policies[regime].tile_q = 1 + below(3);  // several items of a request
    }
    mask.positions = !mask.tree && below(3) == 0;
    if (mask.positions) give_positions();
  }

  int num_reqs() const { return int(lens.size()); }

  // All arrays one after the other; what the kernel writes is 0xff before.
  struct Layout : ArrayLayout {
    ArrayOf<int> starts_from, lengths_from, kv_starts, query_start, seq_lens, item_start, broken, positions_from, positions, parents_from,
        drafts_from, tree_first;
    ArrayOf<unsigned long> tree_seen;
    ArrayOf<long> block_start, custom_start;
    ArrayOf<CutItem> items;
    ArrayOf<WorkItem> work[kPlanRegimes];
    ArrayOf<MergeItem> merges[kPlanRegimes];
    ArrayOf<PlanCounts> counts[kPlanRegimes];
    ArrayOf<FlatCounts> flat;
  };
  Layout layout() const {
    Layout l;
    const int64_t reqs = num_reqs();
    l.starts_from = l.add<int>(reqs + 1), l.lengths_from = l.add<int>(reqs), l.kv_starts = l.add<int>(int64_t(kv_starts.size()));
    l.query_start = l.add<int>(reqs + 1), l.seq_lens = l.add<int>(reqs), l.item_start = l.add<int>(reqs),
    l.broken = l.add<int>(kNumBatchRules);
    l.block_start = l.add<long>(reqs), l.custom_start = l.add<long>(mask.custom ? reqs : 0);
    for (const Regime regime : kRegimes) {
      const ScheduleBounds bounds = schedule_bounds(policies[regime], limits);
      l.work[regime] = l.add<WorkItem>(bounds.num_work), l.counts[regime] = l.add<PlanCounts>(1);
      l.merges[regime] = l.add<MergeItem>(bounds.num_merges);
    }
    const int64_t tokens = mask.tree ? limits.max_num_tokens : 0;
    l.positions_from = l.add<int>(int64_t(positions.size())), l.positions = l.add<int>(std::max(int64_t(positions.size()), tokens));
    l.parents_from = l.add<int>(int64_t(parents.size())), l.drafts_from = l.add<int>(int64_t(drafts.size()));
    l.tree_seen = l.add<unsigned long>(tokens), l.tree_first = l.add<int>(tokens);
    l.items = l.add<CutItem>(limits.max_num_tokens);
    l.flat = l.add<FlatCounts>(1);
    return l;
  }
  std::vector<char> image() const {
    const Layout l = layout();
    std::vector<char> bytes(l.bytes(), char(0xff));
    const auto put = [&](const ArrayOf<int>& at, const std::vector<int>& values) {
      if (!values.empty()) std::memcpy(bytes.data() + at.offset, values.data(), values.size() * sizeof(int));
    };
    put(l.starts_from, starts), put(l.lengths_from, lens), put(l.kv_starts, kv_starts);
    put(l.positions_from, positions), put(l.parents_from, parents), put(l.drafts_from, drafts);
    put(l.broken, std::vector<int>(kNumBatchRules));
    return bytes;
  }
  PlanBatchParams params(char* base) const {
    const Layout l = layout();
    const auto at = [&]<class T>(const ArrayOf<T>& a) { return reinterpret_cast<T*>(base + a.offset); };
    PlanBatchParams p{};
    p.lengths_from = at(l.lengths_from), p.starts_from = at(l.starts_from);
    p.kv_starts = kv_starts.empty() ? nullptr : at(l.kv_starts);
    p.kv_stride = kv_starts.empty() ? kTableColumns : 0, p.kv_entries = kv_starts.empty() ? kTableColumns : kv_starts.back();
    p.entry_keys = kBlockSize, p.mask_size = mask_size, p.mask_is_packed = packed;
    if (mask.positions) p.positions_from = at(l.positions_from), p.positions = at(l.positions), p.most_position = kMostPosition;
    if (mask.tree) {
      p.parents_from = at(l.parents_from), p.num_drafts_from = drafts.empty() ? nullptr : at(l.drafts_from);
      p.positions = at(l.positions), p.tree_seen = at(l.tree_seen), p.tree_first = at(l.tree_first);
    }
    p.num_reqs = num_reqs(), p.num_kv_heads = num_kv_heads, p.max_tokens = limits.max_num_tokens;
    p.min_query_len = limits.min_query_len, p.max_query_len = limits.max_query_len, p.max_seq_len = limits.max_seq_len,
    p.queries_are_keys = queries_are_keys;
    p.query_start = at(l.query_start), p.seq_lens = at(l.seq_lens);
    p.block_start = at(l.block_start), p.custom_start = mask.custom ? at(l.custom_start) : nullptr;
    p.item_start = at(l.item_start), p.items = at(l.items), p.broken = at(l.broken), p.flat = at(l.flat);
    for (const Regime regime : kRegimes)
      p.regimes[regime] = {cut_rules(mask, policies[regime]), l.work[regime].capacity > 0 ? at(l.work[regime]) : nullptr,
                           at(l.merges[regime]), at(l.counts[regime]), l2_keys[regime]};
    return p;
  }

  // The lists of the regimes.
  std::vector<Schedule> expected() const {
    std::vector<Schedule> lists(kNumRegimes);
    int rows = 0;
    for (const Regime regime : kRegimes) {
      if (broken[kStartsRise] == 0) lists[regime] = schedule_of(policies[regime], rows);
      rows += lists[regime].num_partial_rows;
    }
    return lists;
  }

  // Checks everything that the kernel has to have written, apart from its own scratch.
  void expect(const std::vector<char>& bytes) const {
    const Layout l = layout();
    const auto values = [&]<class T>(const ArrayOf<T>& a, size_t count) {
      std::vector<T> v(count);
      if (count > 0) std::memcpy(v.data(), bytes.data() + a.offset, count * sizeof(T));
      return v;
    };
    const auto untouched = [&]<class T>(const ArrayOf<T>& a, size_t from) {
      const char *begin = bytes.data() + a.offset + from * sizeof(T), *end = bytes.data() + a.offset + a.capacity * sizeof(T);
      return std::all_of(begin, end, [](char b) { return b == char(0xff); });
    };
    const bool fall = broken[kStartsRise] > 0;
    const size_t reqs = lens.size();
    EXPECT_EQ(values(l.broken, kNumBatchRules), broken);
    if (reqs > 0) {
      EXPECT_EQ(values(l.query_start, reqs + 1), starts);
    }
    long custom = 0;
    for (size_t r = 0; r < reqs; ++r) {
      EXPECT_EQ(values(l.seq_lens, reqs)[r], left_out[r] ? -1 : lens[r]) << r;
      EXPECT_EQ(values(l.block_start, reqs)[r], kv_starts.empty() ? long(r) * kTableColumns : kv_starts[r]) << r;
      if (mask.custom) {
        EXPECT_EQ(values(l.custom_start, reqs)[r], custom) << r;
      }
      custom += mask_room(int(r));
    }
    if (mask.positions) {
      const size_t tokens = fall || reqs == 0 ? 0 : size_t(std::min(starts.back(), limits.max_num_tokens));
      const std::vector<int> all = positions_in_range();
      EXPECT_EQ(values(l.positions, tokens), std::vector<int>(all.begin(), all.begin() + long(tokens)));
      EXPECT_TRUE(untouched(l.positions, tokens));
    }
    for (size_t r = 0; mask.tree && !fall && r < reqs; ++r) {
      if (left_out[r]) continue;
      std::vector<TreeNode> nodes;
      find_nodes(batch_of_all(), mask, int(r), nodes);
      for (size_t t = 0; t < nodes.size(); ++t) {
        const size_t token = size_t(starts[r]) + t;
        EXPECT_EQ(values(l.positions, token + 1)[token], nodes[t].position) << "request " << r << ", token " << t;
        EXPECT_EQ(values(l.tree_seen, token + 1)[token], nodes[t].seen) << "request " << r << ", token " << t;
        EXPECT_EQ(values(l.tree_first, token + 1)[token], nodes[t].first) << "request " << r << ", token " << t;
      }
    }
    const std::vector<Schedule> lists = expected();
    const FlatCounts flat = values(l.flat, 1)[0];
    EXPECT_EQ(std::memcmp(&flat.over_cache, bytes.data() + l.counts[kPrefill].offset, sizeof flat.over_cache), 0);
    EXPECT_EQ(flat.over_flat.num_work, 0);
    EXPECT_EQ(flat.num_blocks, 0);
    for (const Regime regime : kRegimes) {
      const PlanCounts counts = values(l.counts[regime], 1)[0];
      const std::vector<WorkItem>& work = lists[regime].work;
      const std::vector<MergeItem>& merges = lists[regime].merges;
      ASSERT_EQ(counts.num_work, int(work.size())) << "regime " << regime;
      ASSERT_EQ(counts.num_merges, int(merges.size())) << "regime " << regime;
      ASSERT_LE(merges.size(), l.merges[regime].capacity);
      EXPECT_EQ(counts.num_tokens, fall ? 0 : std::min(starts.back(), limits.max_num_tokens));
      EXPECT_EQ(counts.num_reqs, num_reqs());
      long keys = 0;
      for (size_t r = 0; r < reqs; ++r)
        if (!left_out[r] && starts[r + 1] - starts[r] >= policies[regime].min_q && starts[r + 1] - starts[r] <= policies[regime].max_q)
          keys += lens[r];
      if (!work.empty()) {
        const auto fit = uint64_t(std::max(l2_keys[regime] / std::max(keys, 1l), 1l)), heads = uint64_t(num_kv_heads);
        EXPECT_EQ(uint64_t(counts.heads_together), fit < heads ? std::bit_floor(fit) : heads);
      }
      const std::vector<WorkItem> got = values(l.work[regime], work.size());
      for (size_t i = 0; i < got.size(); ++i)
        ASSERT_EQ(std::memcmp(&got[i], &work[i], sizeof got[i]), 0) << "regime " << regime << ", item " << i << " of " << got.size();
      EXPECT_TRUE(untouched(l.work[regime], work.size())) << "regime " << regime;
      const std::vector<MergeItem> joined = values(l.merges[regime], merges.size());
      for (size_t i = 0; i < joined.size(); ++i)
        ASSERT_EQ(std::memcmp(&joined[i], &merges[i], sizeof joined[i]), 0) << "regime " << regime << ", merge " << i;
      if (policies[regime].most_partial_rows == 0) {
        EXPECT_TRUE(untouched(l.merges[regime], merges.size())) << "regime " << regime;
      }
    }
  }

 private:
  int below(int n) { return int(random_() % unsigned(std::max(n, 1))); }
  long mask_rows(int r) const { return std::max<long>(long(starts[size_t(r) + 1]) - starts[size_t(r)], 0) * std::max(lens[size_t(r)], 0); }
  // What it takes of the mask: bits begin with a byte of their own.
  long mask_room(int r) const { return packed ? (mask_rows(r) + 7) / 8 * 8 : mask_rows(r); }

  // Near those that a batch does not have to give, and a few that are anything at all.
  void give_positions() {
    positions.resize(size_t(std::max(limits.max_num_tokens, *std::max_element(starts.begin(), starts.end()))));
    for (int r = 0; r < num_reqs(); ++r) {
      const int begin = starts[size_t(r)], end = starts[size_t(r) + 1];
      for (int t = begin; t < end; ++t)
        positions[size_t(t)] = below(100) == 0 ? int(random_()) : std::max(0, lens[size_t(r)] - end + t + below(80) - 40);
    }
  }
  std::vector<int> positions_in_range() const {
    std::vector<int> all = positions;
    for (int& position : all) position = std::clamp(position, 0, kMostPosition);
    return all;
  }

  // Any tree of the drafts of each request that is short enough; where they are to be spoiled, a few that are none.
  void give_parents(bool spoil) {
    parents.resize(size_t(std::max(limits.max_num_tokens, starts.back())));
    if (below(2) == 0) drafts.resize(lens.size());
    for (int r = 0; r < num_reqs(); ++r) {
      const int begin = starts[size_t(r)], q_len = starts[size_t(r) + 1] - begin, own = drafts.empty() ? q_len : below(q_len + 1);
      if (!drafts.empty()) drafts[size_t(r)] = own;
      for (int t = 0; t < q_len; ++t)
        parents[size_t(begin + t)] = t < q_len - own ? 77 : q_len > imbrex::kMostTreeTokens ? t - 1 : below(t + 1) - 1;
      if (spoil && own > 0 && below(9) == 0) parents[size_t(begin + q_len - 1 - below(own))] = below(2) == 0 ? q_len : -2;
    }
  }
  Batch batch_of_all() const {
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens, batch.draft_parents = parents, batch.num_drafts = drafts;
    return batch;
  }
  bool is_tree(int r) const {
    Batch batch = batch_of_all();
    const int begin = starts[size_t(r)], query_start[] = {0, starts[size_t(r) + 1] - begin};
    batch.query_start_loc = query_start, batch.seq_lens = batch.seq_lens.subspan(size_t(r), 1);
    batch.draft_parents = batch.draft_parents.subspan(size_t(begin));
    if (!drafts.empty()) batch.num_drafts = batch.num_drafts.subspan(size_t(r), 1);
    try {
      check_draft_parents(batch, true);
    } catch (const Error&) {
      return false;
    }
    return true;
  }

  void break_rules() {
    for (int r = 0; r < num_reqs(); ++r) {
      int& len = lens[size_t(r)];
      const int q_len = starts[size_t(r) + 1] - starts[size_t(r)], kind = below(20);
      if (kind == 0) len = -1 - below(10);
      if (kind == 1) len = limits.max_seq_len + 1 + below(1000);
      if (kind == 2) len = q_len / 2;
      if (kind == 3 && !kv_starts.empty()) kv_starts[size_t(r)] += 1 + below(3);
    }
    const int kind = below(8);
    if (kind == 0) limits.max_num_tokens = std::max(1, starts.back() - below(50));
    if (kind == 1) limits.max_query_len = 1 + below(8);
    if (kind == 3) limits.min_query_len = 1 + below(4);
    if (kind == 2 && num_reqs() > 0) starts[size_t(below(num_reqs()))] += 1 + below(3);
  }
  bool starts_fall() const { return !std::is_sorted(starts.begin(), starts.end()); }
  // The first rule that a request breaks, as params.h defines them.
  BatchRule first_broken(int r, long mask_begin) const {
    const int begin = starts[size_t(r)], end = starts[size_t(r) + 1], len = lens[size_t(r)];
    const int blocks = kv_starts.empty() ? kTableColumns : kv_starts[size_t(r) + 1] - kv_starts[size_t(r)];
    if (end < begin || (r == 0 && begin != 0)) return kStartsRise;
    if (end > limits.max_num_tokens) return kTokensFit;
    if (limits.max_query_len > 0 && end - begin > limits.max_query_len) return kQueryFits;
    if (end > begin && end - begin < limits.min_query_len) return kQueryFits;
    if (len < 0 || len > limits.max_seq_len) return kKeysFit;
    if (len < end - begin) return kQueriesAreKeys;
    if (len > blocks * kBlockSize) return kBlocksSuffice;
    if (mask.custom && mask_begin + mask_rows(r) > mask_size) return kMaskSuffices;
    if (mask.tree && !starts_fall() && !is_tree(r)) return kParentsFit;
    return kNumBatchRules;
  }
  void judge() {
    long mask_begin = 0;
    for (int r = 0; r < num_reqs(); ++r) {
      const BatchRule rule = first_broken(r, mask_begin);
      mask_begin += mask_room(r);
      left_out.push_back(rule < kNumBatchRules);
      if (rule < kNumBatchRules) broken[rule] = r + 1;
    }
  }

  // The schedule of the requests that are not left out, with each cut into pieces alone: if pieces depended on another request, this would
  // show it. Only runs of pieces depend on the load.
  Schedule schedule_of(const SchedulePolicy& policy, int first_partial) const {
    SchedulePolicy pieces = policy;
    pieces.runs = false;
    Schedule all;
    all.cost_by_keys = policy.cost_by_keys;
    Load load;
    const std::vector<int> in_range = positions_in_range();
    for (int r = 0; r < num_reqs(); ++r) {
      if (left_out[size_t(r)]) continue;
      const int begin = starts[size_t(r)], query_start[] = {0, starts[size_t(r) + 1] - begin};
      Batch batch;
      batch.query_start_loc = query_start;
      batch.seq_lens = std::span(lens).subspan(size_t(r), 1);
      if (mask.positions) batch.positions = std::span(in_range).subspan(size_t(begin));
      if (mask.tree) batch.draft_parents = std::span(parents).subspan(size_t(begin));
      if (!drafts.empty()) batch.num_drafts = std::span(drafts).subspan(size_t(r), 1);
      Schedule one;
      cut(batch, mask, pieces, one);
      for (CutItem item : one.items) {
        item.whole.table = r, item.whole.q_begin += begin, item.whole.q_end += begin;
        item.whole.partial = item.whole.merge = -1;
        all.items.push_back(item);
        add_item(load, item, starts[size_t(r) + 1] - starts[size_t(r)]);
      }
    }
    const CutRules rules = cut_rules(mask, policy);
    RunLengths lengths = run_lengths(rules, load);
    const auto end_row = [&] {
      long rows = first_partial;
      for (size_t i = 0; i < all.items.size(); ++i) {
        CutItem item = all.items[i];
        make_runs(rules, item, longest_run(lengths, int(i)));
        rows += partial_rows(item);
      }
      return rows;
    };
    while (lengthen(rules, load, end_row(), lengths)) {
    }
    int rows = first_partial, number = 0;
    for (CutItem& item : all.items) {
      make_runs(rules, item, longest_run(lengths, number++));
      all.num_work += item.num_splits;
      if (item.num_splits == 1) continue;
      item.whole.partial = rows, item.whole.merge = int(all.merges.size());
      all.merges.push_back(merge_of(item));
      rows += int(partial_rows(item));
    }
    all.num_partial_rows = rows - first_partial;
    all.work.resize(size_t(all.num_work));
    write_work(all, all.work.data());
    if (std::find(left_out.begin(), left_out.end(), true) == left_out.end()) {
      Batch batch;
      batch.query_start_loc = starts;
      batch.seq_lens = lens;
      batch.positions = in_range;
      batch.draft_parents = parents, batch.num_drafts = drafts;
      SchedulePolicy with_rows = policy;
      with_rows.first_partial = first_partial;
      Schedule together;
      schedule(batch, mask, with_rows, together);
      EXPECT_EQ(together.work.size(), all.work.size());
      return together;
    }
    return all;
  }

  std::mt19937 random_;
};

}  // namespace imbrex::cuda::test
