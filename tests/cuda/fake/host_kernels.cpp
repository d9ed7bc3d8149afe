// See host_kernels.h. Double precision and plain loops, over nothing but the launch's parameters and the constants of a spec.
#include "cuda/fake/host_kernels.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "attention/position_bias.h"
#include "core/float_types.h"
#include "cuda/attention/attention_sm90.h"
#include "cuda/attention/flat_kv.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_cache.h"
#include "cuda/fake/host_expressions.h"
#include "cuda/fake/host_plan_batch.h"
#include "cuda/ops/copy_blocks.h"
#include "cuda/ops/gather.h"
#include "cuda/ops/merge_results.h"
#include "cuda/plan/plan.h"
#include "gpu/kernel_cache.h"
#include "imbrex/merge.h"

namespace imbrex::cuda::fake {
namespace {

AttentionSpec spec;                                 // what a kernel is compiled for
std::map<std::string, AttentionSpec> specs_by_key;  // where there are several
HostExpressions expressions;                        // of the launch
bool takes_shared_items = false;                    // likewise

template <class T>
T parameter(const Launch& launch, size_t index) {
  T value;
  std::memcpy(&value, launch.all_params.at(index).data(), sizeof value);
  return value;
}

const char* row_of(const AttentionParams& p, const KvSide& side, int request, int kv_head, int j) {
  const char* base = side.data + (kv_head - p.first_kv_head) * side.head_stride;
  if (p.block_ids == nullptr) return base + (p.block_start[request] + j) * side.token_stride;
  return base + p.block_ids[p.block_start[request] + j / spec.block_size] * side.block_stride + j % spec.block_size * side.token_stride;
}

std::vector<double> load_row(const char* row, DType type, long stride, int dim) {
  std::vector<double> values(static_cast<size_t>(dim));
  for (int d = 0; d < dim; ++d) values[size_t(d)] = load_as_double(row + d * stride, type, 0);
  return values;
}

// Of key j of a request: that of a tree's token is the token's.
int key_position(const AttentionParams& p, int request, int j) {
  const int first = p.query_start[request], context = p.seq_lens[request] - (p.query_start[request + 1] - first);
  return spec.mask.tree && j >= context ? p.positions[first + j - context] : j;
}

bool sees(const AttentionParams& p, int request, int query, int position, int j) {
  const Mask mask{.causal = spec.mask.causal,
                  .window_left = p.window_left,
                  .window_right = p.window_right,
                  .chunk = p.chunk,
                  .chunk_lookback = p.chunk > 0 ? p.chunk_before / p.chunk : 0};
  if (!mask_allows(mask, position, key_position(p, request, j))) return false;
  const int q_len = p.query_start[request + 1] - p.query_start[request], context = p.seq_lens[request] - q_len;
  if (spec.mask.tree && q_len <= kMostTreeTokens && j >= context)
    return (p.tree_seen[p.query_start[request] + query] >> (j - context) & 1) != 0;
  if (!spec.mask.custom) return true;
  const long number = p.custom_start[request] + long(query) * p.seq_lens[request] + j;
  return (p.mask_is_packed ? p.custom_mask[number / 8] >> number % 8 & 1 : p.custom_mask[number]) != 0;
}

double logit(const AttentionParams& p, double dot, int head, int distance) {
  double x = dot * p.scale;
  if (spec.score.head_scales) x *= p.head_scales[head];
  if (spec.score.soft_cap > 0) x = p.soft_cap * std::tanh(x / p.soft_cap);
  if (spec.score.alibi) x += p.alibi_slopes[head] * alibi_distance(spec.score, double(distance));
  if (spec.score.relative_buckets > 0) {
    const int at = std::clamp(distance, -p.bias_reach, p.bias_reach) + p.bias_reach;
    x += p.bias_by_distance[long(head) * (2 * p.bias_reach + 1) + at];
  }
  return x;
}

// A row's sums over the keys of an item: everything is relative to exp(reference).
struct Sums {
  double reference = -1e30, sum = 0;
  std::vector<double> values = std::vector<double>(size_t(spec.head_dim_v), 0.);
  void add(double x, double weight, const double* value) {  // weight of exp(x)
    if (x > reference) {
      const double kept = std::exp(std::exchange(reference, x) - x);
      sum *= kept;
      for (double& sum_of_values : values) sum_of_values *= kept;
    }
    const double now = std::exp(x - reference);
    sum += weight * now;
    for (size_t d = 0; value != nullptr && d < values.size(); ++d) values[d] += value[d] * now;
  }
};

void finish(const AttentionParams& p, DType out_type, int token, int head, Sums& s) {
  const bool empty = s.sum == 0;
  if (!empty && spec.score.sinks) s.add(p.sinks[head], 1, nullptr);
  char* out = p.out + token * p.out_token_stride + head * p.out_head_stride;
  for (int d = 0; d < spec.head_dim_v; ++d) store_from_double(out, out_type, d, empty ? 0. : s.values[size_t(d)] / s.sum);
  if (p.lse)
    p.lse[token * p.lse_token_stride + head * p.lse_head_stride] =
        empty ? -std::numeric_limits<float>::infinity() : float(s.reference + std::log(s.sum));
}

// The keys and values of an item and a kv head; empty before a row sees them.
using Loaded = std::vector<std::pair<std::vector<double>, std::vector<double>>>;

// A plan may be of fewer heads than the spec.
int num_q_heads(const AttentionParams& p) { return p.num_kv_heads * spec.group_size(); }

struct CacheTypes {
  DType k = spec.kv_dtype, v = spec.kv_dtype;
};

void load_key(const AttentionParams& p, const CacheTypes& types, int request, int kv_head, int j, std::vector<double>& key,
              std::vector<double>& value) {
  const char *const k = row_of(p, p.k, request, kv_head, j), *const v = row_of(p, p.v, request, kv_head, j);
  if (spec.kv_format == KvFormat::fp8_ds_mla) {
    key.resize(size_t(spec.head_dim_qk));
    codec_of(spec).decode(spec, {.k = {.data = const_cast<char*>(k)}}, KvPart::k, {}, key.data());
    value.assign(key.begin(), key.begin() + spec.head_dim_v);
  } else if (spec.kv_format == KvFormat::latent_rope) {
    value = load_row(k, types.k, p.k.dim_stride, spec.head_dim_v);
    const std::vector<double> rope = load_row(v, types.k, p.v.dim_stride, spec.head_dim_qk - spec.head_dim_v);
    key = value;
    key.insert(key.end(), rope.begin(), rope.end());
  } else {
    key = load_row(k, types.k, p.k.dim_stride, spec.head_dim_qk);
    value = load_row(v, types.v, p.v.dim_stride, spec.head_dim_v);
  }
}

// Whether an item's query tokens are those of shared_tokens; for kernels without such items they are neighbours in the batch.
bool is_shared(const WorkItem& item) { return takes_shared_items && item.partial >= 0 && item.merge < 0; }

// The query token of number `i` of those that items count in.
int token_of(const AttentionParams& p, const WorkItem& item, int i) { return is_shared(item) ? p.shared_tokens[i].token : i; }

int request_of(const AttentionParams& p, int token) {
  return int(std::upper_bound(p.query_start, p.query_start + p.counts->num_reqs, token) - p.query_start) - 1;
}

void attend_row(const AttentionParams& p, const CacheTypes& types, DType out_type, const WorkItem& item, int i, int kv_head, int head,
                Loaded& loaded) {
  const int token = token_of(p, item, i), r = is_shared(item) ? request_of(p, token) : item.table, query = token - p.query_start[r];
  if ((p.positions != nullptr) != (spec.mask.positions || spec.mask.tree) || (p.tree_seen != nullptr) != spec.mask.tree) std::abort();
  const int position = p.positions ? p.positions[token] : p.seq_lens[r] - (p.query_start[r + 1] - p.query_start[r]) + query;
  const double k_scale = scale_of(p.k, kv_head) * (p.q_scales ? double(p.q_scales[kv_head * p.q_scale_stride]) : 1.);
  const bool apart = spec.kv_format == KvFormat::latent_rope;  // what `v` says is then of k_rope
  const double v_scale = scale_of(apart ? p.k : p.v, kv_head);
  std::vector<double> q =
      load_row(p.q + token * p.q_token_stride + head * p.q_head_stride, spec.q_dtype, size_of(spec.q_dtype), spec.head_dim_qk);
  for (size_t d = size_t(spec.head_dim_v); apart && d < q.size(); ++d) q[d] *= scale_of(p.v, kv_head) / scale_of(p.k, kv_head);
  Sums s;
  for (int j = item.kv_begin; j < item.kv_end; ++j) {
    const bool seen = sees(p, r, query, position, j) && expressions.shows(item, r, head, position, j);
    if (!seen && is_shared(item)) std::abort();
    if (!seen) continue;
    auto& [key, value] = loaded[size_t(j - item.kv_begin)];
    if (key.empty()) {
      load_key(p, types, item.table, kv_head, j, key, value);
    }
    const double dot = std::inner_product(q.begin(), q.end(), key.begin(), 0.);
    const double x = logit(p, dot * k_scale, head, key_position(p, r, j) - position);
    s.add(expressions.score(x, r, head, position, j), 1, value.data());
  }
  for (double& x : s.values) x *= v_scale;
  if (item.partial < 0) return finish(p, out_type, token, head, s);
  const long row = long(item.partial + i - item.q_begin) * num_q_heads(p) + head;
  for (int d = 0; d < spec.head_dim_v; ++d) p.partial_out[row * spec.head_dim_v + d] = float(s.values[size_t(d)]);
  p.partial_state[2 * row] = float(s.reference * M_LOG2E);
  p.partial_state[2 * row + 1] = float(s.sum);
}

void attention(const AttentionParams& p, DType out_type, const CacheTypes& types = {}) {
  if (*p.next_task != 0) std::abort();  // the counter of another list, or of nothing
  expressions = {spec, p};
  if (p.counts->heads_together < 1 || p.counts->heads_together > p.num_kv_heads) std::abort();
  for (int i = 0; i < p.counts->num_work; ++i)
    for (int kv_head = p.first_kv_head; kv_head < p.first_kv_head + p.kv_heads_now; ++kv_head) {
      const WorkItem& item = p.work[i];
      Loaded loaded(size_t(item.kv_end - item.kv_begin));
      for (int token = item.q_begin; token < item.q_end; ++token)  // of the batch, or of shared_tokens
        for (int g = 0; g < spec.group_size(); ++g)
          attend_row(p, types, out_type, item, token, kv_head, kv_head * spec.group_size() + g, loaded);
    }
}

bool is_over_flat_keys(const Launch& launch) {
  return flattens(spec) && launch.module.find(fmt::format("kKvType {},", int(spec.q_dtype))) != std::string::npos &&
         launch.module.find("kBlockSize 0,") != std::string::npos;
}

// Where the maps say that keys and values are; the parameters' own pointers are gone. A variant that needs no maps has nothing to gain
// there.
AttentionParams through_kv_maps(const Launch& launch) {
  AttentionParams p = parameter<AttentionParams>(launch, 0);
  const bool flat = is_over_flat_keys(launch);
  if (launch.module.find("kMaps false") != std::string::npos || (!flat && has_small_pages(spec))) return p;
  for (KvSide* side : {&p.k, &p.v}) {
    const TensorMap map = parameter<TensorMap>(launch, side == &p.k || launch.entry.starts_with("attention_sm90_latent") ? 2 : 3);
    if (!flat && spec.block_size > 0 && (map.sizes[1] != uint64_t(spec.block_size) || spec.block_size % int(map.box[1]) != 0)) std::abort();
    if (map.sizes[2] != uint64_t(p.kv_heads_now)) std::abort();
    side->data = map.data, side->dim_stride = size_of(flat ? spec.q_dtype : spec.kv_dtype);
    side->token_stride = long(map.strides[0]), side->head_stride = long(map.strides[1]), side->block_stride = long(map.strides[2]);
  }
  return p;
}

// Queries too.
AttentionParams through_maps(const Launch& launch) {
  AttentionParams p = through_kv_maps(launch);
  const TensorMap q = parameter<TensorMap>(launch, 1);
  if (q.sizes[1] != uint64_t(p.num_kv_heads * spec.group_size()) || q.sizes[2] < uint64_t(p.counts->num_tokens)) std::abort();
  if (int(q.box[1]) != spec.group_size() || int(q.box[2]) != 64 / spec.group_size()) std::abort();  // whole tokens of 64 rows
  p.q = q.data, p.q_head_stride = long(q.strides[0]), p.q_token_stride = long(q.strides[1]);
  return p;
}

// Keys of bytes become queries' type, values f16 where that has 16 bits.
CacheTypes flat_types() { return {spec.q_dtype, widens(spec) ? DType::f16 : spec.q_dtype}; }

void flatten_kv(const Launch& launch) {
  const FlattenKvParams p = parameter<FlattenKvParams>(launch, 0);
  AttentionParams from{};
  from.block_ids = p.block_ids, from.block_start = p.block_start;
  const int heads = p.num_heads, blocks = p.num_blocks_now != nullptr ? *p.num_blocks_now : p.num_blocks;
  if (blocks > p.num_blocks) std::abort();
  for (int block = 0; block < blocks; ++block)
    for (int row = block * kFlatRows; row < (block + 1) * kFlatRows; ++row) {
      const int r = p.requests[block], j = int(row - p.flat_start[r]);
      if (j < 0) std::abort();
      for (int head = 0; j >= p.first_keys[r] && j < p.seq_lens[r] && head < heads; ++head)
        for (const KvSide* side : {&p.k, &p.v}) {
          const bool keys = side == &p.k;
          const DType type = keys ? flat_types().k : flat_types().v;
          const int dim = keys ? spec.head_dim_qk : spec.head_dim_v;
          char* const to = (keys ? p.to_k : p.to_v) + (long(row) * heads + head) * dim * size_of(type);
          const std::vector<double> values =
              load_row(row_of(from, *side, r, p.first_kv_head + head, j), spec.kv_dtype, side->dim_stride, dim);
          for (int d = 0; d < dim; ++d) store_from_double(to, type, d, values[size_t(d)]);
        }
    }
}

// Host kernels read the caller's bytes; of what is packed only the room is used, all of it.
void fill_packed_mask(const AttentionParams& p) {
  const int words = (1 + attention_sm90_tiles(spec).teams) * p.seen_tile_words;
  for (int token = 0; token < p.counts->num_tokens; ++token) {
    std::fill_n(p.mask_bits + long(token) * p.mask_words, p.mask_words, ~0u);
    std::fill_n(p.seen_tiles + long(token) * words, words, ~0u);
  }
}

void merge(const AttentionParams& p, const MergeList& list, DType out_type) {
  std::vector<double> value(static_cast<size_t>(spec.head_dim_v));
  for (int i = 0; i < list.counts->num_merges; ++i) {
    const MergeItem& m = list.items[i];
    for (int token = m.q_begin; token < m.q_end; ++token)
      for (int head = 0; head < num_q_heads(p); ++head) {
        Sums s;
        for (int split = 0; split < m.num_splits; ++split) {
          if (m.first_partial < 0 && !takes_shared_items) std::abort();
          const int first = m.first_partial < 0 ? p.merge_parts[~m.first_partial + split] : m.first_partial + split * (m.q_end - m.q_begin);
          const long row = long(first + token - m.q_begin) * num_q_heads(p) + head;
          for (int d = 0; d < spec.head_dim_v; ++d) value[size_t(d)] = p.partial_out[row * spec.head_dim_v + d];
          if (p.partial_state[2 * row + 1] > 0) s.add(p.partial_state[2 * row] / M_LOG2E, p.partial_state[2 * row + 1], value.data());
        }
        finish(p, out_type, token, head, s);
      }
  }
}

// A shared item is for kernels that take such, has no more rows than their tile, and tokens of merges that lie beside each other.
void check_shared(const AttentionParams& p, const WorkItem& item) {
  if (!takes_shared_items) std::abort();
  const int most_rows = spec.group_size() <= 8 ? 16 : spec.group_size() <= 16 ? 32 : 64;
  if ((item.q_end - item.q_begin) * spec.group_size() > most_rows || item.q_begin < 0 || item.q_end - item.q_begin < 2) std::abort();
  std::vector<int> merges;
  for (int i = item.q_begin; i < item.q_end; ++i) {
    const auto [token, merge] = p.shared_tokens[i];
    if (merge < 0 || merge >= p.counts->num_merges) std::abort();
    const MergeItem& m = p.merges[merge];
    const bool goes_on = !merges.empty() && merges.back() == merge;
    if (token != (goes_on ? p.shared_tokens[i - 1].token + 1 : m.q_begin)) std::abort();
    if (!goes_on && std::ranges::find(merges, merge) != merges.end()) std::abort();
    merges.push_back(merge);
  }
}

// A kernel whose warps share out keys joins the pieces of its items too, and leaves the counters for that as they were.
void attention_and_merge(const Launch& launch, const AttentionParams& p, DType out_type) {
  attention(p, out_type);
  if (launch.module.find("kWholeItems true") != std::string::npos) return merge(p, {p.merges, p.counts}, out_type);
  if (launch.module.find("kKeyWarps 1") != std::string::npos) return;
  for (int i = 0; i < p.counts->num_merges * p.num_kv_heads; ++i)
    if (p.arrivals[i] != 0) std::abort();
  for (int i = 0; i < p.counts->num_work; ++i) {
    const WorkItem& w = p.work[i];
    if ((w.partial < 0 && w.merge >= 0) || w.merge >= p.counts->num_merges) std::abort();
    if (w.partial >= 0 && w.merge < 0) check_shared(p, w);
    if (w.merge >= 0 && p.merges[w.merge].q_begin != w.q_begin) std::abort();
  }
  merge(p, {p.merges, p.counts}, out_type);
}

void expand_bias(const ExpandBiasParams& p) {
  for (int head = 0; head < spec.num_q_heads; ++head)
    for (int i = 0; i < p.width; ++i)
      p.bias_by_distance[head * p.width + i] = p.bias[p.buckets[i] * p.bucket_stride + head * p.head_stride];
}

void gather(const GatherParams& p, size_t size) {
  for (int row = 0; row < p.num_rows; ++row)
    std::memcpy(p.to + size_t(row) * size_t(p.row_length) * size, p.from + size_t(p.offsets[row]) * size, size_t(p.row_length) * size);
}

void merge_results(const MergeResultsParams& p) {
  const auto view = [&](const MergePart& part) {
    const DType type = DType(part.type);
    const int64_t size = size_of(type);
    PartialResult result{.out = TensorView::contiguous(part.out, type, {p.num_tokens, p.num_heads, p.dim}),
                         .lse = TensorView::contiguous(part.lse, DType::f32, {p.num_tokens, p.num_heads})};
    result.out.strides = {part.token_stride / size, part.head_stride / size, part.dim_stride / size};
    result.lse.strides = {part.lse_token_stride, part.lse_head_stride};
    return result;
  };
  std::vector<PartialResult> parts;
  for (int i = 0; i < p.num_parts; ++i) parts.push_back(view(p.parts[i]));
  const PartialResult result = view(p.result);
  merge_partial_results(parts, result.out, result.lse);
}

// What a constant of the launch's module is; the first where the module has none.
DType type_named(const Launch& launch, const char* constant, std::span<const DType> types) {
  for (const DType type : types)
    if (launch.module.find(fmt::format("{} {}", constant, int(type))) != std::string::npos) return type;
  return types.front();
}

// Entries are told apart by name; types, which are part of a real kernel, by the name of its module.
void run_launch(const Launch& launch) {
  if (const auto of = specs_by_key.find(launch.module); of != specs_by_key.end()) spec = of->second;
  const DType out = type_named(launch, "kOutType", spec.out_dtypes());
  takes_shared_items = launch.module.find("kShares true") != std::string::npos;
  if (launch.entry == "attention_sm80") return attention_and_merge(launch, parameter<AttentionParams>(launch, 0), out);
  if (launch.entry == "attention_sm90_decode") return attention_and_merge(launch, through_kv_maps(launch), out);
  if (launch.entry == "attention_sm90" || launch.entry == "attention_sm90_fp8")
    return attention(through_maps(launch), out, is_over_flat_keys(launch) ? flat_types() : CacheTypes{});
  if (launch.entry == "flatten_kv") return flatten_kv(launch);
  if (launch.entry == "pack_mask") return fill_packed_mask(parameter<AttentionParams>(launch, 0));
  if (launch.entry == "attention_sm90_verify" || launch.entry == "attention_sm90_latent" || launch.entry == "attention_sm90_latent_pair" ||
      launch.entry == "attention_sm90_latent_spread" || launch.entry == "attention_sm90_latent_decode_spread")
    return attention(through_kv_maps(launch), out);
  if (launch.entry == "attention_sm90_latent_decode")  // it reads bytes without a map
    return attention(spec.kv_dtype == spec.q_dtype ? through_kv_maps(launch) : parameter<AttentionParams>(launch, 0), out);
  if (launch.entry == "merge") {
    const auto& p = parameter<AttentionParams>(launch, 0);
    for (const MergeList& list : p.merge_lists)
      if (list.counts != nullptr) merge(p, list, out);
    return;
  }
  if (launch.entry.starts_with("write_ds_mla"))
    return write_ds_mla(spec, parameter<WriteKvParams>(launch, 0), type_named(launch, "kFrom", spec.new_kv_dtypes()));
  if (launch.entry.starts_with("write_kv"))
    return write_kv(spec, parameter<WriteKvParams>(launch, 0), type_named(launch, "kFrom", spec.new_kv_dtypes()));
  if (launch.entry.starts_with("copy_kv")) return write_kv(spec, parameter<WriteKvParams>(launch, 0), spec.kv_dtype);
  if (launch.entry.starts_with("gather_")) return gather(parameter<GatherParams>(launch, 0), size_t(launch.entry.back() - '0'));
  if (launch.entry.starts_with("copy_blocks_")) return copy_blocks(parameter<CopyBlocksParams>(launch, 0), int(launch.grid_x));
  if (launch.entry.starts_with("merge_results_")) return merge_results(parameter<MergeResultsParams>(launch, 0));
  if (launch.entry == "expand_bias") return expand_bias(parameter<ExpandBiasParams>(launch, 0));
  if (launch.entry == "plan_batch") return plan_batch(parameter<PlanBatchParams>(launch, 0), spec.mask);
  if (launch.entry != "widen_starts") std::abort();
  for (int i = 0; i < parameter<int>(launch, 2); ++i) parameter<long*>(launch, 1)[i] = parameter<const int*>(launch, 0)[i];
}

}  // namespace

void put_into_cache(const KernelKey& key) {
  const std::string name = cache_name(key);
  if (!gpu::load_cached(gpu::kernel_cache_folder(), name))
    gpu::store_cached(gpu::kernel_cache_folder(), name, {.binary = key.str(), .log = ""});
}

void run_on_host(const AttentionSpec& of) { run_on_host(std::span(&of, 1)); }

void run_on_host(std::span<const AttentionSpec> all) {
  const std::string arch = "sm_90a";
  specs_by_key.clear();
  for (const AttentionSpec& of : all) {
    spec = of;
    const auto put = [&](const KernelKey& key) {
      put_into_cache(key);
      if (all.size() > 1) specs_by_key[key.str()] = of;
    };
    for (const AttentionKernels* kernels : {&kernels_sm80, &kernels_sm90})
      for (const KernelKey& key : plan_kernels(*kernels, arch, of)) put(key);
    for (const DType from : of.new_kv_dtypes()) {
      if (of.block_size > 0) put(write_kv_key(arch, of, from));
      if (of.block_size > 0 && codec_of(of).values_in_keys) put(write_latents_key(arch, of, from));
    }
  }
  put_into_cache(gather_key(arch));
  put_into_cache(copy_blocks_key(arch));
  put_into_cache(merge_results_key(arch));
  put_into_cache(plan_batch_key(arch));
  const std::vector<size_t> with_maps{sizeof(AttentionParams), sizeof(CUtensorMap), sizeof(CUtensorMap), sizeof(CUtensorMap)};
  state().param_sizes = {{"attention_sm80", {sizeof(AttentionParams)}},
                         {"attention_sm90_decode", with_maps},
                         {"attention_sm90_verify", with_maps},
                         {"attention_sm90_latent", with_maps},
                         {"attention_sm90_latent_spread", with_maps},
                         {"attention_sm90_latent_pair", with_maps},
                         {"attention_sm90_latent_decode", with_maps},
                         {"attention_sm90_latent_decode_spread", with_maps},
                         {"attention_sm90", with_maps},
                         {"attention_sm90_fp8", with_maps},
                         {"merge", {sizeof(AttentionParams)}},
                         {"flatten_kv", {sizeof(FlattenKvParams)}},
                         {"pack_mask", {sizeof(AttentionParams)}},
                         {"write_kv", {sizeof(WriteKvParams)}},
                         {"write_kv_strided", {sizeof(WriteKvParams)}},
                         {"write_ds_mla", {sizeof(WriteKvParams)}},
                         {"write_ds_mla_strided", {sizeof(WriteKvParams)}},
                         {"copy_kv", {sizeof(WriteKvParams)}},
                         {"copy_kv_strided", {sizeof(WriteKvParams)}},
                         {"plan_batch", {sizeof(PlanBatchParams)}},
                         {"merge_results_8", {sizeof(MergeResultsParams)}},
                         {"merge_results_1", {sizeof(MergeResultsParams)}},
                         {"gather_1", {sizeof(GatherParams)}},
                         {"gather_2", {sizeof(GatherParams)}},
                         {"gather_4", {sizeof(GatherParams)}},
                         {"expand_bias", {sizeof(ExpandBiasParams)}},
                         {"widen_starts", {sizeof(void*), sizeof(void*), sizeof(int)}}};
  for (const int bytes : {1, 2, 4, 8, 16}) state().param_sizes[fmt::format("copy_blocks_{}", bytes)] = {sizeof(CopyBlocksParams)};
  state().on_launch = run_launch;
}

}  // namespace imbrex::cuda::fake
