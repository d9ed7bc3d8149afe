// See plan_checks.h. All but begin_plan() is called once a layer, so no text is formatted unless a check fails.
#include "attention/plan_checks.h"

#include <algorithm>
#include <cmath>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace {

void check_rows(const TensorView& t, const char* name, std::string_view code, DType dtype, int64_t tokens, int64_t heads, int64_t dim,
                Device device) {
  check(t.rank == 3 && t.dtype == dtype && t.device == device && t.size(0) >= tokens && t.size(1) == heads && t.size(2) == dim &&
            (t.data != nullptr || tokens == 0),
        code, "{}: expected {}[>= {}, {}, {}] on {}, got {}", name, to_string(dtype), tokens, heads, dim, device, t);
  check_layout(t, name);
}

void check_heads(bool wanted, const TensorView& t, const char* name, std::string_view code, int num_heads, Device device) {
  check(wanted != t.empty(), code, "{}: {} by the spec, but {}", name, wanted ? "needed" : "not used", t.empty() ? "not given" : "given");
  check(!wanted || (t.rank == 1 && t.dtype == DType::f32 && t.size(0) == num_heads && t.stride(0) == 1 && t.device == device), code,
        "{}: expected contiguous f32[{}] on {}, got {}", name, num_heads, device, t);
  check_layout(t, name);
}

// Checks the strides of scales for each head, before the host reads them. Kernels keep such a stride in an i32.
void check_scales(const TensorView& t, const char* name) {
  check_layout(t, name);
  check(t.empty() || t.rank != 1 || t.size(0) <= 1 || (t.stride(0) >= INT32_MIN && t.stride(0) <= INT32_MAX), "tensor.strides",
        "{}: expected a stride that an i32 can count, got {} in {}", name, t.stride(0), t);
}

// Returns `t` where it is one of `types`, otherwise the usual one, which a message then says was expected.
DType one_of(std::span<const DType> types, DType t) { return std::ranges::find(types, t) != types.end() ? t : types.front(); }

void check_cache(const AttentionSpec& spec, const KvCache& cache, std::string_view code, Device device) {
  check_scales(cache.k_scale, "k_scale");
  check_scales(cache.v_scale, "v_scale");
  check_scales(cache.k_rope_scale, "k_rope_scale");
  cache.validate(spec);
  check_memory(cache.k, "k", code, device);
  check_memory(cache.v, "v", code, device);
  check_memory(cache.k_rope, "k_rope", code, device);
  check_layout(cache.k, "k");
  check_layout(cache.v, "v");
  check_layout(cache.k_rope, "k_rope");
  if (device.type != DeviceType::cpu) return;  // elsewhere a scale may be on the host too, see KvCache
  check_memory(cache.k_scale, "k_scale", code, device);
  check_memory(cache.v_scale, "v_scale", code, device);
  check_memory(cache.k_rope_scale, "k_rope_scale", code, device);
}

}  // namespace

void begin_plan(const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                std::string_view kernels) {
  spec.validate();
  if (options.out_dtype) {
    const auto types = spec.out_dtypes();
    check(std::ranges::find(types, *options.out_dtype) != types.end(), "backend.out_dtype",
          "expected a type of outputs of {}, such as {}, got {}", spec.str(), to_string(types.front()), to_string(*options.out_dtype));
  }
  begin_plan(backend, spec.str(), backend.unsupported(spec, device), device, options, kernels);
}

void check_memory(const TensorView& t, const char* name, std::string_view code, Device device) {
  check(t.empty() || t.device == device, code, "{}: expected memory of {}, got {}", name, device, t);
}

void check_on_host(const Batch& batch) {
  constexpr std::string_view code = "update.device";
  check_memory(batch.block_table, "block_table", code, {});
  check_memory(batch.kv_indptr, "kv_indptr", code, {});
  check_memory(batch.kv_indices, "kv_indices", code, {});
  check_memory(batch.kv_start_loc, "kv_start_loc", code, {});
  check_memory(batch.slot_mapping, "slot_mapping", code, {});
  check_memory(batch.custom_mask, "custom_mask", code, {});
  check_memory(batch.packed_mask, "packed_mask", code, {});
}

std::vector<Reason> refuse_expressions(const AttentionSpec& spec) {
  std::vector<Reason> reasons;
  if (!spec.score_mod.empty()) reasons.push_back({"spec.score_mod", "no expression of the score", spec.score_mod.str()});
  if (!spec.mask_mod.empty()) reasons.push_back({"spec.mask_mod", "no expression as a mask", spec.mask_mod.str()});
  return reasons;
}

BatchReach reach_of(const Batch& batch, const AttentionSpec& spec, bool all) {
  const auto on_host = [](const TensorView& t) { return !t.empty() && t.device.type == DeviceType::cpu; };
  BatchReach reach;
  if (on_host(batch.kv_start_loc))
    for (int r = 0; r < batch.num_reqs(); ++r)
      if (batch.seq_lens[r] > 0)
        reach.rows = std::max(reach.rows, int64_t(uint32_t(batch.kv_start_loc.as<const int>()[r])) + batch.seq_lens[r]);
  if (!all) return reach;
  const bool dense = on_host(batch.block_table), csr = on_host(batch.kv_indptr) && on_host(batch.kv_indices);
  for (int r = 0; (dense || csr) && r < batch.num_reqs(); ++r) {
    const int* ids = dense ? batch.block_table.as<const int>() + r * batch.block_table.stride(0)
                           : batch.kv_indices.as<const int>() + batch.kv_indptr.as<const int>()[r];
    const int count = int((int64_t(batch.seq_lens[r]) + spec.block_size - 1) / spec.block_size);
    for (int b = 0; b < count; ++b) reach.block = std::max(reach.block, int64_t(uint32_t(ids[b])));
  }
  const TensorView& slots = batch.slot_mapping;
  for (int64_t t = 0; on_host(slots) && t < batch.num_tokens(); ++t) {
    const int64_t slot = slots.as<const int64_t>()[t * slots.stride(0)];
    reach.slot = std::max(reach.slot, slot < -1 ? INT64_MAX : slot);
  }
  return reach;
}

void check_q_scale(const AttentionSpec& spec, Device device, const TensorView& scale) {
  constexpr std::string_view code = "run.q_scale";
  if (scale.empty()) return;
  check(spec.q_dtype == DType::fp8_e4m3, code, "q_scale: only fp8_e4m3 queries have one, these are {}", to_string(spec.q_dtype));
  const bool host = scale.device.type == DeviceType::cpu;
  check(scale.rank == 1 && scale.dtype == DType::f32 && (scale.size(0) == 1 || scale.size(0) == spec.num_kv_heads) &&
            (host || scale.device == device),
        code, "q_scale: expected f32[1] or f32[{}] on {} or cpu, got {}", spec.num_kv_heads, device, scale);
  check_scales(scale, "q_scale");
  for (int64_t h = 0; host && h < scale.size(0); ++h) {
    const float value = scale.as<const float>()[h * scale.stride(0)];
    check(std::isfinite(value) && value > 0, code, "q_scale: expected finite positive numbers, got {} at {}", value, h);
  }
}

DType check_run(const AttentionSpec& spec, Device device, const AttentionInputs& in, const AttentionOutputs& out, int num_tokens,
                const BatchReach& reach) {
  const int heads = spec.num_q_heads;
  check_rows(in.q, "q", "run.q", spec.q_dtype, num_tokens, heads, spec.head_dim_qk, device);
  const DType out_dtype = one_of(spec.out_dtypes(), out.out.dtype);
  check_rows(out.out, "out", "run.out", out_dtype, num_tokens, heads, spec.head_dim_v, device);
  check(num_tokens == 0 || (in.q.stride(2) == 1 && out.out.stride(2) == 1), "run.stride",
        "q and out need innermost stride 1, got {} and {}", in.q.stride(2), out.out.stride(2));
  const TensorView& lse = out.lse;
  check(lse.empty() ||
            (lse.rank == 2 && lse.dtype == DType::f32 && lse.device == device && lse.size(0) >= num_tokens && lse.size(1) == heads),
        "run.lse", "lse: expected f32[>= {}, {}] on {}, got {}", num_tokens, heads, device, lse);
  check_written_layout(out.out, "out");
  check_written_layout(lse, "lse");
  check_q_scale(spec, device, in.q_scale);
  check_cache(spec, in.kv, "run.device", device);
  check(spec.block_size == 0 || reach.block < in.kv.num_blocks(spec), "run.block_id", "block ids must be 0 to {}, the batch has {}",
        in.kv.num_blocks(spec) - 1, reach.block);
  check(spec.block_size > 0 || reach.rows <= in.kv.k.size(0), "run.kv_rows", "k and v need {} rows (kv_start_loc), they have {}",
        reach.rows, in.kv.k.size(0));
  check_heads(spec.score.head_scales, in.head_scales, "head_scales", "run.head_scales", heads, device);
  check_heads(spec.score.alibi, in.alibi_slopes, "alibi_slopes", "run.alibi_slopes", heads, device);
  check_heads(spec.score.sinks, in.sinks, "sinks", "run.sinks", heads, device);
  const TensorView& bias = in.relative_bias;
  const int buckets = spec.score.relative_buckets;
  check(buckets > 0 || bias.empty(), "run.relative_bias", "relative_bias is given, but the spec has no relative_buckets");
  check(buckets == 0 || (!bias.empty() && bias.rank == 2 && bias.dtype == DType::f32 && bias.device == device && bias.size(0) == buckets &&
                         bias.size(1) == heads),
        "run.relative_bias", "relative_bias: expected f32[{}, {}] on {}, got {}", buckets, heads, device, bias);
  check_layout(bias, "relative_bias");
  return out_dtype;
}

DType check_write(const AttentionSpec& spec, Device device, const KvCache& cache, const TensorView& k, const TensorView& v,
                  const TensorView& slot_mapping, int num_tokens, const BatchReach& reach) {
  check_cache(spec, cache, "write_kv.device", device);
  const bool as_it_is = k.dtype == spec.kv_dtype && !codec_of(spec).scales_inside;
  const DType dtype = as_it_is ? spec.kv_dtype : one_of(spec.new_kv_dtypes(), k.dtype);
  check_rows(k, "k", "write_kv.k", dtype, num_tokens, spec.num_kv_heads, spec.head_dim_qk, device);
  if (codec_of(spec).values_in_keys)
    check(v.empty(), "write_kv.v", "v: expected none, since values are the first {} elements of the rows of k, got {}", spec.head_dim_v, v);
  else
    check_rows(v, "v", "write_kv.v", dtype, num_tokens, spec.num_kv_heads, spec.head_dim_v, device);
  check(spec.block_size > 0, "write_kv.ragged", "write_kv needs a paged cache, but block_size is {}", spec.block_size);
  check(num_tokens == 0 || !slot_mapping.empty(), "write_kv.slot_mapping", "write_kv needs Batch::slot_mapping, none was given to update");
  constexpr std::array kNames = {"k of the cache", "v of the cache", "k_scale of the cache", "v_scale of the cache", "k_rope of the cache"};
  for (const KvPart part : kKvParts)
    if (codec_of(spec).layout(spec, part)) check_written_layout(part_of(cache, part), kNames[size_t(part)]);
  const int64_t num_slots = cache.num_blocks(spec) * spec.block_size;
  check(reach.slot < num_slots, "write_kv.slot", "slots must be below {}, the batch has {}", num_slots, reach.slot);
  return dtype;
}

}  // namespace imbrex
