// See plan.h. Everything that depends on the batch happens in prepare(); run() checks shapes, fills one POD and starts the workers.
#include "cpu/plan.h"

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "attention/mask_stretches.h"
#include "attention/packed_mask.h"
#include "attention/position_bias.h"
#include "core/check.h"
#include "core/tensor_layout.h"
#include "cpu/run_list.h"

namespace imbrex::cpu {
namespace {

constexpr long kPage = 4096;
constexpr int kWriteTokens = 32;              // tokens a worker takes at a time in write_kv
constexpr long kTogetherBytes = 1 << 20;      // of keys and values in L2: a block of some heads, and the next one
constexpr int kTasksEach = 4;                 // of a worker, that tasks of several heads leave at least
constexpr long kSerialWriteBytes = 64 << 10;  // below this, waking the pool costs more than the copy

}  // namespace

AttentionParams shape_of(const AttentionSpec& spec, const Kernels& kernels) {
  AttentionParams shape{};
  shape.q_type = int(spec.q_dtype);
  KvSides(spec, kernels.widened).describe(shape);
  shape.group = spec.group_size();
  return shape;
}

Plan::Plan(std::string_view backend, const Kernels& kernels, const AttentionSpec& spec, const PlanOptions& options)
    : backend_(backend), kernels_(kernels), spec_(spec), options_(options), sides_(spec, kernels.widened) {
  const int group = spec.group_size();
  policy_.tile_q = std::max(1, kernels.row_tile / group);
  policy_.tile_kv = kBlockKeys;
  policy_.split_max_q = std::max(1, std::min(16, policy_.tile_q));
  policy_.balanced = options.balanced;
  // Every item is run for all kv heads, so fewer items than threads are enough.
  policy_.num_workers = (options.threads.num_workers + spec.num_kv_heads - 1) / spec.num_kv_heads;

  const AttentionParams shape = shape_of(spec, kernels);
  policy_.split_kv = kernels.split_keys(shape);
  scratch_bytes_ = (kernels.scratch_bytes(shape, policy_.tile_q * group) + kPage - 1) / kPage * kPage;
  const long workers = options.threads.num_workers;
  scratch_ = std::dynamic_pointer_cast<SharedScratch>(options.workspace);
  if (scratch_ == nullptr) scratch_ = std::make_shared<SharedScratch>();
  scratch_->reserve(checked_mul("plan.scratch", scratch_bytes_, workers) + kPage);
  if (spec.score.relative_buckets > 0) bias_by_distance_.resize(size_t(spec.num_q_heads) * relative_bias_width(spec.score));
}

void Plan::prepare(const Batch& given, Stream) {
  if (options_.validate) validate(given, spec_, options_.limits, -1);
  check_on_host(given);
  Step& next = steps_.spare();
  const Batch batch = with_mask_bytes(given, next.mask_bytes);
  next.query_start.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
  next.seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
  next.num_tokens = batch.num_tokens();
  next.slot_mapping = batch.slot_mapping;
  next.custom_mask = batch.custom_mask;
  if (spec_.mask.positions) next.positions.assign(batch.positions.begin(), batch.positions.end());
  find_keys(batch, next.keys);
  if (spec_.mask.custom) find_mask_starts(batch, next.custom_start);
  next.reach = reach_of(batch, spec_, options_.validate);
  schedule(batch, spec_.mask, policy_, next.schedule);
  if (spec_.block_size > 0 && spec_.mask_mod.empty())
    share_keys(batch, next.keys,
               {.block_size = spec_.block_size, .most_tokens = policy_.tile_q, .num_workers = std::max(policy_.num_workers, 1)},
               next.schedule, share_scratch_);
  if (spec_.mask.custom && !batch.custom_mask.empty()) find_stretches(batch, next.custom_start, policy_.tile_kv, next.schedule);
  if (!spec_.mask_mod.empty()) next.mask_tiles.find(batch, spec_, policy_.tile_q, next.schedule);
  if (spec_.mask.tree) {
    next.trees.find(batch, spec_.mask);
    next.trees.add_stretches(next.schedule);
  }
  next.longest_item = 0;
  for (const WorkItem& item : next.schedule.work) next.longest_item = std::max(next.longest_item, item.q_end - item.q_begin);
  // Shared by both steps, and never smaller than one of them needs.
  const size_t rows = size_t(next.schedule.num_partial_rows) * spec_.num_q_heads;
  if (partial_state_.size() < rows * 2) partial_state_.resize(rows * 2);
  if (partial_out_.size() < rows * spec_.head_dim_v) partial_out_.resize(rows * spec_.head_dim_v);
}

// How many kv heads of an item are run together. Where the heads of a token are neighbours in memory, it is read in order only if they are
// run together. No result depends on it.
int Plan::heads_together(const AttentionParams& a) const {
  const auto within_tokens = [&](const KvSide& side) {
    const long token_stride = a.block_size == 1 ? side.block_stride : side.token_stride;
    return side.head_stride > 0 && side.head_stride * a.num_kv_heads <= token_stride;
  };
  const Step& step = steps_.now();
  if (a.packed || a.row_parts.first > 0 || step.longest_item * a.group > kernels_.most_rows_together || !within_tokens(a.k) ||
      !within_tokens(a.v))
    return 1;
  const long bytes = 2L * kBlockKeys * (a.k.dim + a.v.dim) * size_of(spec_.kv_dtype), workers = std::max(options_.threads.num_workers, 1);
  const long items = long(step.schedule.work.size());
  for (int heads = std::min(kernels_.most_heads, a.num_kv_heads); heads > 1; --heads) {
    if (a.num_kv_heads % heads != 0 || heads * bytes > kTogetherBytes) continue;
    const long tasks = items * a.num_kv_heads / heads;
    if (tasks >= kTasksEach * workers || (items == 1 && tasks % workers == 0)) return heads;
  }
  return 1;
}

AttentionParams Plan::params(const AttentionInputs& in, const AttentionOutputs& out) const {
  const int heads = spec_.num_q_heads;
  const Step& step = steps_.now();
  const DType out_dtype = check_run(spec_, {}, in, out, step.num_tokens, step.reach);
  AttentionParams a{};
  a.q = in.q.as<const char>();
  a.q_token_stride = byte_stride(in.q, 0);
  a.q_head_stride = byte_stride(in.q, 1);
  a.q_type = int(in.q.dtype);
  a.out = out.out.as<char>();
  a.out_token_stride = byte_stride(out.out, 0);
  a.out_head_stride = byte_stride(out.out, 1);
  a.out_type = int(out_dtype);
  if (!out.lse.empty()) {
    a.lse = out.lse.as<float>();
    a.lse_token_stride = out.lse.stride(0);
    a.lse_head_stride = out.lse.stride(1);
  }
  sides_.read(in.kv, a);
  a.block_size = spec_.block_size;
  a.split_keys = policy_.split_kv;
  if (spec_.mask.positions) a.positions = step.positions.data();
  if (spec_.mask.tree) step.trees.set(a);
  if (!spec_.mask_mod.empty()) step.mask_tiles.set(a);
  a.query_start = step.query_start.data();
  a.seq_lens = step.seq_lens.data();
  a.block_ids = step.keys.ids.as<const int>();
  a.block_start = step.keys.start.data();
  set_details(step.schedule.details, a);
  if (spec_.mask.custom) {
    a.custom_mask = step.custom_mask.as<const unsigned char>();
    a.custom_start = step.custom_start.data();
  }
  a.num_q_heads = heads;
  a.num_kv_heads = spec_.num_kv_heads;
  a.group = spec_.group_size();
  a.scale = spec_.scale();
  a.soft_cap = spec_.score.soft_cap;
  a.causal = spec_.mask.causal;
  a.window_left = spec_.mask.window_left;
  a.window_right = spec_.mask.window_right;
  a.chunk = spec_.mask.chunk;
  a.chunk_before = lookback_tokens(spec_.mask);
  a.head_scales = in.head_scales.as<const float>();
  a.alibi_slopes = in.alibi_slopes.as<const float>();
  a.alibi_sqrt = spec_.score.alibi_sqrt;
  a.sinks = in.sinks.as<const float>();
  if (spec_.score.relative_buckets > 0) {
    expand_relative_bias(spec_, in.relative_bias, bias_by_distance_);
    a.bias_by_distance = bias_by_distance_.data();
    a.bias_reach = relative_bias_width(spec_.score) / 2;
  }
  if (!spec_.score_mod.empty()) set_score_mod(in.score_tensors, a);
  a.partial_out = partial_out_.data();
  a.partial_state = partial_state_.data();
  a.heads_together = heads_together(a);
  return a;
}

namespace {

void modify_scores(const void* score_mod, const ScorePlace& at, float* scores) {
  static_cast<const BoundExpression*>(score_mod)->score_groups(
      {.batch = at.request, .head = at.head, .q = at.position, .q_len = at.q_len, .kv_len = at.kv_len}, at.begin, at.end, scores, at.pitch,
      at.scale);
}

}  // namespace

void Plan::set_score_mod(std::span<const NamedTensor> tensors, AttentionParams& a) const {
  const std::span<const ExpressionTensor> wanted = spec_.score_mod.tensors();
  score_tensors_.resize(wanted.size());
  bool same = score_mod_.has_value();
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto found = std::ranges::find(tensors, wanted[i].name, &NamedTensor::name);
    const TensorView given = found == tensors.end() ? TensorView() : found->tensor;
    same = same && given == score_tensors_[i];
    score_tensors_[i] = given;
  }
  if (!same) {
    score_mod_.reset();  // binding may fail
    score_mod_.emplace(spec_.score_mod, tensors);
  }
  a.modify_scores = modify_scores, a.score_mod = &*score_mod_;
}

namespace {

struct Write {
  const WriteKvParams& params;
  const Kernels& kernels;
  int num_tokens;
  std::atomic<int> next{0};

  void work() {
    for (int t; (t = next.fetch_add(kWriteTokens, std::memory_order_relaxed)) < num_tokens;) {
      kernels.write_kv(params, t, std::min(t + kWriteTokens, num_tokens));
    }
  }
};

}  // namespace

void Plan::run(const AttentionInputs& in, const AttentionOutputs& out, Stream) const {
  char* const memory = scratch_->data();
  char* const page = memory + (kPage - long(reinterpret_cast<uintptr_t>(memory) % kPage)) % kPage;
  run_list(params(in, out), kernels_, steps_.now().schedule, {page, scratch_bytes_}, options_.threads);
}

void Plan::write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream) const {
  const Step& step = steps_.now();
  const DType dtype = check_write(spec_, {}, cache, k, v, step.slot_mapping, step.num_tokens, step.reach);
  const int heads = spec_.num_kv_heads;
  WriteKvParams w{};
  w.src_k = k.as<const char>();
  w.src_v = v.as<const char>();
  w.k_token_stride = byte_stride(k, 0);
  w.k_head_stride = byte_stride(k, 1);
  w.k_dim_stride = byte_stride(k, 2);
  w.v_token_stride = byte_stride(v, 0);
  w.v_head_stride = byte_stride(v, 1);
  w.v_dim_stride = byte_stride(v, 2);
  sides_.write(cache, w);
  w.src_type = int(dtype);
  w.slots = step.slot_mapping.as<const long long>();
  w.slot_stride = step.slot_mapping.stride(0);
  w.block_size = spec_.block_size;
  w.num_kv_heads = heads;
  Write write{.params = w, .kernels = kernels_, .num_tokens = step.num_tokens};
  const long bytes = long(step.num_tokens) * heads * (w.k.dim + w.v.dim) * size_of(dtype);
  const ParallelFor threads = bytes < kSerialWriteBytes ? ParallelFor{} : options_.threads;
  invoke(
      threads, [](void* x, int) { static_cast<Write*>(x)->work(); }, &write);
}

std::string Plan::str() const {
  const Schedule& schedule = steps_.now().schedule;
  std::string text = fmt::format("{} ({}): {} work items x {} kv heads, {} merges", backend_, kernels_.isa, schedule.work.size(),
                                 spec_.num_kv_heads, schedule.merges.size());
  const auto are_of_several = [&](const WorkItem& item) { return item.q_begin >= steps_.now().num_tokens; };
  if (const auto shared = std::ranges::count_if(schedule.work, are_of_several); shared > 0)
    text += fmt::format(", {} items shared by requests with the same blocks", shared);
  if (const size_t items = schedule.details.items.size(); items > 0)
    text += fmt::format(", {} {}", items, spec_.mask.tree ? "of trees of drafts" : "without hidden tiles");
  return text;
}

}  // namespace imbrex::cpu
