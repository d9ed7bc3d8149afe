// See plan.h. What a plan is made of: kernels, lists, scratch. plan_update.cpp takes batches, plan_run.cpp launches.
#include "cuda/plan/plan.h"
#include "cuda/driver/open_device.h"

#include <algorithm>
#include <future>

#include "core/check.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/attention/expressions.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kMaxHostMask = int64_t(64) << 20;  // bytes of host custom masks
constexpr int64_t kMaxStretches = int64_t(1) << 19;  // of a regime: items without room for theirs compute all of their keys

bool has_flat(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Regime regime) {
  return table.flat != nullptr && table.flat->kernel(arch, spec, regime).entry != nullptr;
}

bool packs_mask(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec) {
  return table.kernel(arch, spec, kPrefill).mask_teams > 0;
}

// Whether the kernels of a spec, to such an extent, have the variant that shares items. What sharing adds depends on dims, not on types, so
// that a sample has it for one pair of these.
bool ships_sharing(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Regime regime, Extent extent) {
  const bool chosen = spec.q_dtype == DType::bf16 && spec.kv_dtype == DType::bf16;
  return table.sharing != nullptr && table.sharing->kernel(arch, spec, regime).entry != nullptr &&
         (extent == Extent::all || (extent == Extent::sample && chosen));
}

}  // namespace

std::vector<KernelKey> plan_kernels(const AttentionKernels& table, std::string_view arch, const AttentionSpec& spec, Extent extent) {
  std::vector<KernelKey> keys;
  if (!reads(table, spec)) return keys;
  // A kernel may run several regimes, and is one all the same.
  const auto add = [&](KernelKey key) {
    if (std::ranges::find(keys, key) == keys.end()) keys.push_back(std::move(key));
  };
  for (const DType out : spec.out_dtypes().first(extent == Extent::all ? spec.out_dtypes().size() : 1)) {
    for (const Regime regime : kRegimes) {
      const RegimeKernel kernel = table.kernel(arch, spec, regime);
      if (kernel.tile.rows == 0) return {};
      add(table.attention(arch, spec, regime, out));
      if (kernel.maps != nullptr && extent != Extent::usual) add(table.without_maps->attention(arch, spec, regime, out));
      if (ships_sharing(table, arch, spec, regime, extent)) {
        add(table.sharing->attention(arch, spec, regime, out));
        if (kernel.maps != nullptr && extent == Extent::all) add(table.sharing->without_maps->attention(arch, spec, regime, out));
      }
      if (has_flat(table, arch, spec, regime)) add(table.flat->attention(arch, spec, regime, out));
      for (const AttentionKernels* few : table.few_tasks)
        if (few != nullptr && few->kernel(arch, spec, regime).entry != nullptr) add(few->attention(arch, spec, regime, out));
    }
    add(table.merge(arch, spec, out));
    if (extent == Extent::all && may_share_prefixes(table, arch, spec)) add(sharing(table.merge(arch, spec, out)));
  }
  if (packs_mask(table, arch, spec)) keys.push_back(pack_mask_key(arch, spec));
  if (has_flat(table, arch, spec, kPrefill)) keys.push_back(flatten_kv_key(arch, spec));
  keys.push_back(plan_tables_key(arch));
  keys.push_back(plan_batch_key(arch));
  return keys;
}

Plan::Plan(const AttentionKernels& table, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options)
    : table_(table),
      spec_(spec),
      device_(device),
      options_(options),
      arch_(arch_of(device)),
      context_(Context::of_device(device.device.index)),
      workspace_(gpu::workspace_for(std::make_shared<ContextDevice>(context_), context_->id(), options.workspace)),
      programmatic_(device.sm >= 90) {
  check(!options.on_device || !options.balanced, "backend.on_device",
        "expected on_device or balanced, got both: shares of the load are "
        "computed on the host");
  const CurrentContext current(*context_);
  const PlanOutline planned = outline(table, spec, device, options);
  for (const Regime regime : kRegimes) {
    static_cast<PlanOutline::OfRegime&>(regimes_[regime]) = planned.regimes[regime];
    regimes_[regime].l2_keys = gpu::keys_in_l2(spec, device, regime);
  }
  mask_ = planned.mask;
  if (planned.step_mask_bytes > 0) step_mask_ = DeviceBuffer(context_, planned.step_mask_bytes);
  scratch_ = planned.scratch;
  partial_rows_ = planned.partial_rows;
  may_share_ = planned.may_share, shares_prefixes_ = planned.shares_prefixes;
  name_kernels();
  if (const RegimePlan& prefill = regimes_[kPrefill]; planned.flat.most_blocks > 0)
    flat_ = std::make_unique<FlatKv>(context_, arch_, spec, prefill.policy, int(prefill.flat_kernel.cluster), planned.flat);
  for (RegimePlan& s : regimes_) choose_for_graphs(s);
  several_kernels_ = flat_ != nullptr || std::ranges::count_if(regimes_, [](const RegimePlan& s) { return s.bounds.num_work > 0; }) > 1 ||
                     std::ranges::any_of(regimes_, &RegimePlan::chooses_in_graph);
  lay_out(planned.prefix_parts);
  workspace_->reserve(int64_t(planned.scratch_bytes));
  // A step has at most max_num_tokens items, since every item has a query token.
  if (options.on_device) device_plan_ = std::make_unique<DevicePlan>(context_, arch_, spec, options.limits, options.limits.max_num_tokens);
}

// Makes the list of the plan's kernels, and loads them, several at a time, unless PlanOptions::load_on_demand is set.
void Plan::name_kernels() {
  std::vector<Specialised*> now;
  const auto name = [&](ByOutput& kernels, const char* entry, unsigned threads, unsigned cluster, bool on_demand, const auto& key_of) {
    size_t i = 0;
    for (const DType out : spec_.out_dtypes()) {
      Specialised& s = kernels[i++];
      if (out != options_.out_dtype.value_or(out)) continue;
      s = {.key = key_of(out), .entry = entry, .threads = threads, .cluster = cluster, .module = {}, .kernel = {}};
      if (!on_demand) now.push_back(&s);
    }
  };
  const auto name_attention = [&](ByOutput& kernels, const AttentionKernels& table, Regime regime, bool on_demand) {
    const RegimeKernel kernel = table.kernel(arch_, spec_, regime);
    name(kernels, kernel.entry, kernel.threads, kernel.cluster, on_demand,
         [&](DType out) { return table.attention(arch_, spec_, regime, out); });
    for (Specialised& s : kernels) s.one_each = kernel.run_sums > 0;
  };
  for (const Regime regime : kRegimes) {
    RegimePlan& s = regimes_[regime];
    if (s.bounds.num_work == 0) continue;
    const AttentionKernels& table = may_share_ && regime == kDecode ? *table_.sharing : table_;
    name_attention(s.kernels, table, s.kernel_of, options_.load_on_demand);
    if (s.flat_kernel.entry != nullptr) name_attention(s.over_flat, *table_.flat, regime, options_.load_on_demand);
    for (size_t i = 0; i < kFewTasksTables; ++i)
      if (s.few_tasks_kernels[i].entry != nullptr) name_attention(s.few_tasks[i], *table_.few_tasks[i], regime, options_.load_on_demand);
    if (s.kernel.maps == nullptr) continue;
    s.mapless_joins = table.without_maps->kernel(arch_, spec_, s.kernel_of).joins_pieces;
    name_attention(s.without_maps, *table.without_maps, s.kernel_of, true);
  }
  const auto merges = [](const RegimePlan& s) { return !s.kernel.joins_pieces && s.bounds.num_merges > 0; };
  if (std::ranges::any_of(regimes_, merges))
    name(merge_, "merge", kMergeThreads, 1, options_.load_on_demand, [&](DType out) {
      const KernelKey key = table_.merge(arch_, spec_, out);
      return shares_prefixes_ ? sharing(key) : key;
    });
  if (mask_.words > 0) {
    pack_mask_.key = pack_mask_key(arch_, spec_), pack_mask_.entry = "pack_mask", pack_mask_.threads = kPackMaskThreads;
    if (!options_.load_on_demand) now.push_back(&pack_mask_);
  }
  std::vector<std::future<void>> compiled;
  compiled.reserve(now.size());
  for (const Specialised* one : now) compiled.push_back(std::async(std::launch::async, [one] { get_kernel(one->key); }));
  for (std::future<void>& one : compiled) one.get();
  for (Specialised* one : now) load(*one);
  tables_ = std::make_unique<PlanTables>(context_, arch_, spec_);
  if (spec_.block_size > 0) write_kv_ = std::make_unique<WriteKv>(context_, arch_, spec_);
}

// Which kernels a graph has launches of: several only for so few requests that a usual step has few tasks, or a short one, though the
// longest requests within the limits have more. Those for usual steps are the first branch. In graphs of drafts most steps have the same
// number of query tokens, and regimes that do not take so many have one kernel: each launch more costs such a step up to 2 us. Only two
// blocks for a task that take short steps, in front of a kernel for all others, are better off as launches that follow each other
// (docs/kernels/cuda_sm90_latent.md).
void Plan::choose_for_graphs(RegimePlan& s) const {
  const int drafts = options_.limits.max_query_len;
  const int64_t each = int64_t(spec_.num_kv_heads) * s.row_blocks, most = s.bounds.num_work * each;
  const int longest = s.kernels_for(most);
  s.in_graph = {options_.on_device ? longest : RegimePlan::kManyTasks};
  if (options_.on_device) return;  // the counts of several launches are the host's
  if (has_drafts(options_.limits) && (drafts < s.policy.min_q || drafts > s.policy.max_q)) return;
  constexpr int64_t kLeastKeys = 1024, kShortKeys = 1536, kUsualKeys = 4096, kLongPiece = 512;
  SchedulePolicy whole = s.policy;
  whole.split_max_q = 0;  // no request is cut
  const int64_t piece = std::max(s.kernel.tile.least_piece, 256), items = schedule_bounds(whole, options_.limits).num_work;
  const auto kernels_for_keys = [&](int64_t keys) { return s.kernels_for(std::min(items * each * ((keys + piece - 1) / piece), most)); };
  const int usual = kernels_for_keys(kUsualKeys);
  s.in_graph = {usual};
  const auto add = [&](int kernels) {
    if (std::ranges::find(s.in_graph, kernels) == s.in_graph.end()) s.in_graph.push_back(kernels);
  };
  s.in_branches = true;
  if (usual != RegimePlan::kManyTasks) {
    for (int64_t keys = kLeastKeys; keys < options_.limits.max_seq_len; keys *= 2) add(kernels_for_keys(keys));
    add(longest);
  } else if (piece >= kLongPiece && options_.limits.max_seq_len > kUsualKeys) {  // short pieces gain too little
    const int few = kernels_for_keys(kShortKeys);
    add(few);
    s.in_branches = few == int(kFewTasksTables) - 1;
    if (!s.in_branches) std::ranges::reverse(s.in_graph);
  }
}

void Plan::load(Specialised& s) const {
  s.module = Module::load(context_, s.key);
  s.kernel = s.module->kernel(s.entry);
  const int each = s.one_each ? 1 : std::max(s.kernel.blocks_per_multiprocessor(int(s.threads)), 1);
  s.grid = unsigned(std::max(device_.num_workers, 1) * each) / s.cluster * s.cluster;
}

void Plan::lay_out(int64_t prefix_parts) {
  const PlanLimits& limits = options_.limits;
  const int64_t reqs = limits.max_num_reqs, tokens = limits.max_num_tokens;
  const int64_t blocks = spec_.block_size > 0 ? checked_mul("plan.scratch", reqs, blocks_of(limits.max_seq_len, spec_.block_size)) : 0;
  const int64_t mask = spec_.mask.custom ? checked_mul("plan.scratch", tokens, limits.max_seq_len) : 0;
  // Arrays that every step sends come first, long ones last.
  ArrayLayout layout;
  for (RegimePlan& s : regimes_) {
    s.counts = layout.add<PlanCounts>(1);
    s.of_launches = layout.add<PlanCounts>(s.chooses_in_graph() ? int64_t(s.in_graph.size()) : 0);
  }
  arrays_.flat_counts = layout.add<FlatCounts>(flat_ ? 1 : 0);
  arrays_.query_start = layout.add<int>(reqs + 1);
  arrays_.seq_lens = layout.add<int>(reqs);
  arrays_.block_start = layout.add<long>(reqs);
  arrays_.custom_start = layout.add<long>(spec_.mask.custom ? reqs : 0);
  arrays_.flat_start = layout.add<long>(flat_ ? reqs : 0);
  arrays_.flat_first_keys = layout.add<int>(flat_ ? reqs : 0);
  arrays_.flat_requests = layout.add<int>(flat_ ? flat_->most_blocks() : 0);
  for (RegimePlan& s : regimes_) s.merges = layout.add<MergeItem>(s.bounds.num_merges);
  for (RegimePlan& s : regimes_) s.work = layout.add<WorkItem>(s.bounds.num_work);
  for (const Regime regime : kRegimes) {
    RegimePlan& s = regimes_[regime];
    const bool shares = may_share_ && regime == kDecode;
    s.shared_tokens = layout.add<SharedToken>(shares ? partial_rows_ : 0);
    s.merge_parts = layout.add<int>(shares ? s.bounds.num_work : regime == kVerify ? prefix_parts : 0);
    const int64_t items = spec_.mask_mod.empty() || s.kernel.mask_teams > 0 ? 0 : s.bounds.num_work;
    s.item_details = layout.add<ItemDetails>(items);
    s.stretches = layout.add<KeyStretch>(
        items == 0 ? 0 : std::min(checked_mul("plan.scratch", items, blocks_of(limits.max_seq_len, s.policy.tile_kv)), kMaxStretches));
  }
  arrays_.positions = layout.add<int>(spec_.mask.positions || spec_.mask.tree ? tokens : 0);
  arrays_.shared_positions = layout.add<int>(may_share_ && spec_.mask.positions ? kMostSharedTokens : 0);
  arrays_.tree_first = layout.add<int>(spec_.mask.tree ? tokens : 0);
  arrays_.tree_seen = layout.add<unsigned long>(spec_.mask.tree ? tokens : 0);
  arrays_.mask_tensors = layout.add<ExpressionTensorData>(spec_.mask_mod.empty() ? 0 : int64_t(spec_.mask_mod.tensors().size()));
  arrays_.slots = layout.add<long>(spec_.block_size > 0 ? tokens : 0);
  arrays_.block_ids = layout.add<int>(std::min(blocks, kMaxHostBlocks));
  arrays_.custom_mask = layout.add<unsigned char>(std::min(mask, kMaxHostMask));
  arrays_.mask_elements = layout.add<char>(mask_tensor_room(spec_, limits));
  memory_ = std::make_unique<PlanArrays>(std::make_shared<ContextDevice>(context_), layout);

  steps_.now().arrays = {
      .block_ids = memory_->device(arrays_.block_ids),
      .custom_mask = memory_->device(arrays_.custom_mask),
      .slots = TensorView::contiguous(memory_->device(arrays_.slots), DType::i64, {int64_t(arrays_.slots.capacity)}, device_.device)};
  size_t counters = kNumRegimes;
  for (RegimePlan& s : regimes_) {
    s.arrivals = counters;
    if (s.kernel.joins_pieces) counters += size_t(s.bounds.num_merges) * size_t(spec_.num_kv_heads) * size_t(s.row_blocks);
  }
  counters_ = zeroed(context_, counters * sizeof(int));
}

std::string Plan::str() const {
  const Step& step = steps_.now();
  if (step.on_device) return fmt::format("{} ({}): planned on the device, for at most {} tokens", table_.backend, arch_, step.num_tokens);
  std::string items, names;
  size_t merges = 0;
  int64_t shared = 0;
  for (const Regime regime : kRegimes) {
    if (regime == kLongVerify && regimes_[regime].bounds.num_work == 0) continue;  // most layers have none
    const Schedule& schedule = step.schedules[regime];
    items += fmt::format("{}{}", items.empty() ? "" : " + ", schedule.num_work);
    names += fmt::format("{}{}", names.empty() ? "" : " + ", gpu::kRegimeNames[regime]);
    merges += schedule.merges.size();
    if (!schedule.details.parts.empty())
      shared += std::ranges::count_if(schedule.work, [](const WorkItem& item) { return item.partial >= 0 && item.merge < 0; });
  }
  const std::string flat = step.flat.kv_heads > 0
                               ? fmt::format(", prefill over {} keys made flat {} kv heads at a time", step.flat.rows(), step.flat.kv_heads)
                               : "";
  const std::string of_several = shared > 0 ? fmt::format(", {} items shared by requests with the same blocks", shared) : "";
  return fmt::format("{} ({}): {} work items ({}) x {} kv heads, {} merges{}{}", table_.backend, arch_, items, names, spec_.num_kv_heads,
                     merges, of_several, flat);
}

}  // namespace imbrex::cuda
