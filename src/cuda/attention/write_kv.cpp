// Host side of write_kv.cu: checks, parameters, and which of its entry points runs.
#include "cuda/attention/write_kv.h"

#include <algorithm>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "cuda/attention/kv_side.h"

namespace imbrex::cuda {
namespace {

constexpr int kMaxTokenBlocks = 1 << 16;  // thread blocks of a launch; more tokens take turns
// The thread blocks of a launch in a graph, where most batches have few tokens: 16384 blocks for 16 tokens take an H200 20.7 us. Blocks
// take tokens in turn, and 1024 of them are several for each multiprocessor.
constexpr int kMaxCapturedBlocks = 1 << 10;

NewRows new_rows(const TensorView& t) { return {t.as<const char>(), byte_stride(t, 0), byte_stride(t, 1), byte_stride(t, 2)}; }

// Eight elements are read and written at once, 16 bytes at a time where they have as many.
bool has_wide_rows(const TensorView& t) { return is_aligned(t, size_of(t.dtype) == 1 ? 8 : 16); }

// What a launch writes: two places with so many dims of each new row, of which a latent has the second empty.
struct Dims {
  int k, v;
};
Dims dims_of(const AttentionSpec& spec) {
  if (spec.kv_format == KvFormat::latent_rope) return {spec.head_dim_v, spec.head_dim_qk - spec.head_dim_v};
  return {spec.head_dim_qk, codec_of(spec).values_in_keys ? 0 : spec.head_dim_v};
}

}  // namespace

KernelKey write_kv_key(std::string_view arch, const AttentionSpec& spec, DType from) {
  if (spec.kv_format == KvFormat::fp8_ds_mla)
    return {"write_ds_mla.cu", std::string(arch), {{"kFrom", int(from)}, {"kBlockSize", spec.block_size}}};
  const Dims dims = dims_of(spec);
  return {"write_kv.cu",
          std::string(arch),
          {{"kFrom", int(from)}, {"kTo", int(spec.kv_dtype)}, {"kDimK", dims.k}, {"kDimV", dims.v}, {"kBlockSize", spec.block_size}}};
}

KernelKey write_latents_key(std::string_view arch, const AttentionSpec& spec, DType from) {
  AttentionSpec apart = spec;  // written as where they lie apart, too
  if (spec.kv_format == KvFormat::latent) apart.kv_format = KvFormat::latent_rope;
  return write_kv_key(arch, apart, from);
}

WriteKv::WriteKv(const std::shared_ptr<const Context>& context, std::string_view arch, const AttentionSpec& spec, bool in_parts)
    : spec_(spec), device_{DeviceType::cuda, context->device()} {
  check(spec.block_size > 0, "write_kv.ragged", "write_kv needs a paged cache, but block_size is {}", spec.block_size);
  const bool records = spec.kv_format == KvFormat::fp8_ds_mla;
  for (const DType type : spec.new_kv_dtypes()) {
    const auto module = Module::load(context, in_parts ? write_latents_key(arch, spec, type) : write_kv_key(arch, spec, type));
    from_.push_back({type, module, module->kernel(records ? "write_ds_mla" : "write_kv"),
                     module->kernel(records ? "write_ds_mla_strided" : "write_kv_strided")});
  }
  if (records) return;
  copy_ = from_.front().module->kernel("copy_kv");
  copy_strided_ = from_.front().module->kernel("copy_kv_strided");
}

namespace {

// The second place that a latent is written to, and whether 16 bytes at a time may go there.
struct RopePlace {
  KvSide side{};
  bool wide = true;
};

RopePlace rope_place(const AttentionSpec& spec, const KvCache& cache, const KvSide& latents) {
  if (spec.kv_format == KvFormat::latent_rope) return {kv_side(cache.k_rope, cache.k_rope_scale, spec), has_wide_rows(cache.k_rope)};
  RopePlace behind{.side = latents};
  behind.side.data += spec.head_dim_v * latents.dim_stride;
  return behind;
}

NewRows shifted(NewRows rows, int64_t dims) {
  rows.data += dims * rows.dim_stride;
  return rows;
}

}  // namespace

void WriteKv::run(const KvCache& cache, const TensorView& k, const TensorView& v, const NewTokens& tokens, CUstream stream) const {
  check_write(spec_, device_, cache, k, v, tokens.slots, tokens.num_tokens, tokens.reach);
  const bool values = !codec_of(spec_).values_in_keys;
  WriteKvParams params{};
  params.new_k = new_rows(k);
  params.new_v = values ? new_rows(v) : spec_.kv_format == KvFormat::latent ? NewRows{} : shifted(params.new_k, spec_.head_dim_v);
  bool wide = has_wide_rows(k) && (!values || (has_wide_rows(v) && has_wide_rows(cache.v)));
  if (spec_.kv_format == KvFormat::fp8_ds_mla) {
    params.k = record_side(cache.k);
    wide = wide && is_aligned(cache.k, 16);
  } else {
    params.k = kv_side(cache.k, cache.k_scale, spec_);
    wide = wide && has_wide_rows(cache.k);
    if (values) params.v = kv_side(cache.v, cache.v_scale, spec_);
    if (spec_.kv_format == KvFormat::latent_rope) {
      // Rows of the rope part begin within those of k: at a multiple of 16 bytes, or of 8 of fp8, if the dims in front are one of 8.
      const RopePlace rope = rope_place(spec_, cache, params.k);
      params.v = rope.side;
      wide = wide && rope.wide;
    }
  }
  launch(params, wide, k.dtype, values ? std::min(k.size(0), v.size(0)) : k.size(0), tokens, stream);
}

void WriteKv::run_latents(const KvCache& cache, const TensorView& latent, const TensorView& rope, const NewTokens& tokens,
                          CUstream stream) const {
  const auto rows_of = [](const TensorView& t) {
    return t.empty() ? NewRows{} : NewRows{t.as<const char>(), byte_stride(t, 0), 0, size_of(t.dtype)};
  };
  WriteKvParams params{};
  params.new_k = rows_of(latent), params.new_v = rows_of(rope);
  bool wide = has_wide_rows(latent) && (rope.empty() || has_wide_rows(rope));
  if (spec_.kv_format == KvFormat::fp8_ds_mla) {
    params.k = record_side(cache.k);
    wide = wide && is_aligned(cache.k, 16);
  } else {
    params.k = kv_side(cache.k, cache.k_scale, spec_);
    const RopePlace behind = rope_place(spec_, cache, params.k);
    if (!rope.empty()) params.v = behind.side;
    wide = wide && has_wide_rows(cache.k) && behind.wide;
  }
  launch(params, wide, latent.dtype, rope.empty() ? latent.size(0) : std::min(latent.size(0), rope.size(0)), tokens, stream);
}

// `type`, `room`: of the new rows.
void WriteKv::launch(WriteKvParams params, bool wide, DType type, int64_t room, const NewTokens& tokens, CUstream stream) const {
  const TensorView& slots = tokens.slots;
  check(slots.empty() || (slots.rank == 1 && slots.dtype == DType::i64 && slots.device == device_ && slots.size(0) >= tokens.num_tokens),
        "write_kv.slot_mapping", "expected i64[>= {}] on {}, got {}", tokens.num_tokens, device_, slots);
  if (slots.empty()) return;
  // A graph writes no more tokens than these tensors have, whatever later steps bring.
  const bool captured = tokens.captured_tokens > 0;
  const int64_t most = std::min(room, slots.size(0));
  const int num_tokens = captured ? int(std::min<int64_t>(tokens.captured_tokens, most)) : tokens.num_tokens;
  if (num_tokens == 0) return;
  params.slots = slots.as<const long>(), params.slot_stride = slots.stride(0);
  params.num_tokens = num_tokens, params.num_kv_heads = spec_.num_kv_heads;
  params.num_tokens_now = captured ? tokens.now : nullptr;
  const bool copies = type == spec_.kv_dtype;
  const From& from = *std::ranges::find(from_, copies ? from_.front().type : type, &From::type);
  const Kernel& kernel = copies ? (wide ? copy_ : copy_strided_) : wide ? from.convert : from.convert_strided;
  const int blocks = std::min(num_tokens, captured ? kMaxCapturedBlocks : kMaxTokenBlocks);
  kernel.launch({.grid_x = unsigned(blocks), .threads = kWriteKvThreads}, stream, params);
}

}  // namespace imbrex::cuda
