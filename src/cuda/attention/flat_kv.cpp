// See flat_kv.h; host side of flatten_kv.cu.
#include "cuda/attention/flat_kv.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/driver/tensor_map.h"

namespace imbrex::cuda {
namespace {

// At most; what does not fit for all kv heads is made flat for some of them at a time.
constexpr int64_t kMostBytes = int64_t(64) << 20;
// Query rows of a kv head that have to read a key, on average: for fewer it costs more than it saves. On an H200, four requests of 6000
// keys and 8 heads took as long with flat keys as without at about so many rows: of 16-bit pages of 1, of bytes, of bytes in pages of 1.
constexpr int64_t kLeastRows = 850, kLeastRowsOfBytes = 650, kLeastRowsOfSmallBytes = 250;

int64_t least_rows(const AttentionSpec& spec) {
  if (!widens(spec)) return kLeastRows;
  return has_small_pages(spec) ? kLeastRowsOfSmallBytes : kLeastRowsOfBytes;
}

// Thread blocks of a launch whose work only the device knows: eight for each multiprocessor of the largest GPUs.
constexpr int64_t kMostCapturedBlocks = 1056;

// Keys and values of a head.
int64_t row_bytes(const AttentionSpec& spec) { return (spec.head_dim_qk + spec.head_dim_v) * size_of(spec.q_dtype); }

int64_t blocks_of_rows(int64_t rows) { return (rows + kFlatRows - 1) / kFlatRows; }

struct Keys {
  int begin = 0, end = 0;  // that have rows: from the block on in which the first tile begins
  int first = 0;           // that a query sees
};
Keys keys_of(const CutRules& rules, const Batch& batch, int r) {
  const int q_len = batch.query_len(r), seq_len = batch.seq_lens[r], context = seq_len - q_len;
  if (!is_cut(rules, q_len)) return {};
  const int begin = item_keys(rules, usual_positions(q_len, seq_len, 0, tile_end(rules, q_len, 0)), seq_len).begin;
  return {begin / kFlatRows * kFlatRows, seq_len, visible_keys(rules, context, context, seq_len).begin};
}

}  // namespace

bool flattens(const AttentionSpec& spec) {
  const bool words = spec.q_dtype == DType::bf16 || spec.q_dtype == DType::f16, bytes = spec.q_dtype == DType::fp8_e4m3;
  if (spec.kv_dtype == spec.q_dtype) return (words || bytes) && has_small_pages(spec);
  return words && spec.kv_dtype == DType::fp8_e4m3;
}

AttentionSpec flat_spec(const AttentionSpec& spec) {
  AttentionSpec flat = spec;
  flat.kv_dtype = spec.q_dtype;
  flat.kv_format = KvFormat::strided;  // values lie by themselves, whatever they were a part of
  flat.block_size = 0;
  return flat;
}

KernelKey flatten_kv_key(std::string_view arch, const AttentionSpec& spec) {
  // Bytes that stay bytes are copied as half as many 16-bit numbers: 16 bytes a lane.
  const bool bytes = is_fp8(spec.q_dtype);
  const int size = bytes ? 2 : 1;
  return {"flatten_kv.cu",
          std::string(arch),
          {{"kFrom", int(bytes ? DType::bf16 : spec.kv_dtype)},
           {"kTo", int(bytes ? DType::bf16 : spec.q_dtype)},
           {"kDimK", spec.head_dim_qk / size},
           {"kDimV", spec.head_dim_v / size},
           {"kBlockSize", spec.block_size}}};
}

FlatRoom flat_room(const AttentionSpec& spec, const SchedulePolicy& prefill, const PlanLimits& limits, int heads_together) {
  const int64_t longest = limits.max_query_len > 0 ? limits.max_query_len : limits.max_num_tokens;
  if (longest * spec.group_size() < least_rows(spec)) return {};
  const int64_t reqs = std::min<int64_t>(limits.max_num_reqs, limits.max_num_tokens / std::max(prefill.min_q, 1));
  const int64_t all = checked_mul("plan.scratch", reqs, blocks_of_rows(limits.max_seq_len));  // blocks
  const int64_t block_bytes = checked_mul("plan.scratch", kFlatRows, row_bytes(spec));
  const int64_t bytes = std::min(kMostBytes / (block_bytes * heads_together) * (block_bytes * heads_together),
                                 checked_mul("plan.scratch", all, block_bytes * spec.num_kv_heads));
  const int64_t most = std::min(all, bytes / (block_bytes * heads_together));
  return {.most_blocks = most, .bytes = most > 0 ? bytes : 0};
}

FlatKv::FlatKv(const ContextPtr& context, std::string_view arch, const AttentionSpec& spec, const SchedulePolicy& prefill,
               int heads_together, const FlatRoom& room)
    : spec_(spec),
      rules_(cut_rules(spec.mask, prefill)),
      heads_together_(heads_together),
      room_(room),
      device_{DeviceType::cuda, context->device()},
      module_(Module::load(context, flatten_kv_key(arch, spec))),
      kernel_(module_->kernel("flatten_kv")) {}

FlatStep FlatKv::plan(const Batch& batch) const {
  int64_t blocks = 0, keys = 0, reads = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const Keys k = keys_of(rules_, batch, r);
    blocks += blocks_of_rows(k.end - k.begin);
    keys += k.end - k.begin;
    reads += int64_t(k.end - k.begin) * batch.query_len(r) * spec_.group_size();
  }
  if (blocks == 0 || blocks > room_.most_blocks || reads < least_rows(spec_) * keys) return {};
  const int64_t room = room_.bytes / (blocks * kFlatRows * row_bytes(spec_));
  const int all = spec_.num_kv_heads, at_once = int(std::min<int64_t>(all, room / heads_together_ * heads_together_));
  if (at_once == 0) return {};
  const int rounds = (all + at_once - 1) / at_once, each = (all + rounds - 1) / rounds;
  return {.kv_heads = std::min(at_once, (each + heads_together_ - 1) / heads_together_ * heads_together_), .blocks = int(blocks)};
}

FlatStep FlatKv::in_graph(const FlatStep& now) const {
  const int heads = now.kv_heads > 0 ? now.kv_heads : spec_.num_kv_heads;
  const int64_t blocks = room_.bytes / (kFlatRows * row_bytes(spec_) * heads);
  return {.kv_heads = heads, .blocks = int(std::min(blocks, room_.most_blocks))};
}

FlatCounts FlatKv::counts_in_graph(const PlanCounts& prefill, const FlatStep& step, int room) const {
  const bool fits = step.kv_heads > 0 && step.blocks <= room;
  FlatCounts counts{.over_cache = prefill, .over_flat = prefill, .num_blocks = fits ? step.blocks : 0};
  (fits ? counts.over_cache : counts.over_flat).num_work = 0;
  return counts;
}

void FlatKv::put_starts(const Batch& batch, long* flat_start) const {
  int64_t block = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const Keys k = keys_of(rules_, batch, r);
    flat_start[r] = block * kFlatRows - k.begin;
    block += blocks_of_rows(k.end - k.begin);
  }
}

void FlatKv::put_first_keys(const Batch& batch, int* first_keys) const {
  for (int r = 0; r < batch.num_reqs(); ++r) first_keys[r] = keys_of(rules_, batch, r).first;
}

void FlatKv::put_requests(const Batch& batch, int* requests) const {
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const Keys k = keys_of(rules_, batch, r);
    requests = std::fill_n(requests, blocks_of_rows(k.end - k.begin), r);
  }
}

bool FlatKv::takes(const KvCache& cache) { return has_aligned_rows(cache.k) && has_aligned_rows(cache.v); }

KvCache FlatKv::cache(char* memory, const FlatStep& step, int kv_heads) const {
  const int64_t rows = step.rows();
  const auto view = [&](char* data, int dim) { return TensorView::contiguous(data, spec_.q_dtype, {rows, kv_heads, dim}, device_); };
  return {.k = view(memory, spec_.head_dim_qk),
          .v = view(memory + rows * kv_heads * spec_.head_dim_qk * size_of(spec_.q_dtype), spec_.head_dim_v)};
}

void FlatKv::run(const FlattenKvParams& params, bool programmatic, CUstream stream) const {
  const int64_t tasks = int64_t(2) * params.num_blocks * params.num_heads;
  const int64_t blocks = params.num_blocks_now != nullptr ? std::min(tasks, kMostCapturedBlocks) : tasks;
  kernel_.launch({.grid_x = unsigned(blocks), .threads = kFlattenThreads, .programmatic = programmatic}, stream, params);
}

}  // namespace imbrex::cuda
