// See host_cache.h.
#include "cuda/fake/host_cache.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention/kv_codec.h"
#include "core/float_types.h"

namespace imbrex::cuda::fake {

double scale_of(const KvSide& side, int kv_head) { return side.scales ? side.scales[kv_head * side.scale_stride] : side.scale; }

namespace {

void write_rows(const AttentionSpec& spec, const KvSide& side, const NewRows& rows, DType from, int dim, long slot, int token, int head) {
  char* to = side.data + slot / spec.block_size * side.block_stride + slot % spec.block_size * side.token_stride + head * side.head_stride;
  const char* source = rows.data + token * rows.token_stride + head * rows.head_stride;
  const bool fp8 = size_of(spec.kv_dtype) == 1;
  for (int d = 0; d < dim; ++d) {
    const char* x = source + d * rows.dim_stride;
    if (from == spec.kv_dtype) {
      std::memcpy(to + d * side.dim_stride, x, size_t(size_of(from)));
    } else {
      store_from_float(to + d * side.dim_stride, spec.kv_dtype, 0, load_as_float(x, from, 0) / (fp8 ? float(scale_of(side, head)) : 1.f));
    }
  }
}

}  // namespace

void write_kv(const AttentionSpec& spec, const WriteKvParams& p, DType from) {
  const int tokens = p.num_tokens_now ? std::min(*p.num_tokens_now, p.num_tokens) : p.num_tokens;
  for (int token = 0; token < tokens; ++token) {
    const long slot = p.slots[token * p.slot_stride];
    for (int head = 0; slot >= 0 && head < p.num_kv_heads; ++head) {
      // Two places of a latent: where the cache has them apart, and where new rows come so.
      const bool apart = spec.kv_format == KvFormat::latent_rope || (codec_of(spec).values_in_keys && p.new_v.data != nullptr);
      write_rows(spec, p.k, p.new_k, from, apart ? spec.head_dim_v : spec.head_dim_qk, slot, token, head);
      if (apart)
        write_rows(spec, p.v, p.new_v, from, spec.head_dim_qk - spec.head_dim_v, slot, token, head);
      else if (!codec_of(spec).values_in_keys)
        write_rows(spec, p.v, p.new_v, from, spec.head_dim_v, slot, token, head);
      else if (p.v.data != nullptr || p.new_v.data != nullptr)
        std::abort();
    }
  }
}

void write_ds_mla(const AttentionSpec& spec, const WriteKvParams& p, DType from) {
  const int tokens = p.num_tokens_now ? std::min(*p.num_tokens_now, p.num_tokens) : p.num_tokens;
  for (int token = 0; token < tokens; ++token) {
    const long slot = p.slots[token * p.slot_stride];
    if (slot < 0) continue;
    char* const record = p.k.data + slot / spec.block_size * p.k.block_stride + slot % spec.block_size * p.k.token_stride;
    std::vector<float> row;
    for (int d = 0; d < spec.head_dim_qk; ++d) {
      const bool latent = d < spec.head_dim_v;
      const NewRows& rows = latent ? p.new_k : p.new_v;
      row.push_back(load_as_float(rows.data + token * rows.token_stride + (latent ? d : d - spec.head_dim_v) * rows.dim_stride, from, 0));
    }
    codec_of(spec).encode(spec, {.k = {.data = record}}, KvPart::k, {}, {.data = row.data(), .dtype = DType::f32});
  }
}

void copy_blocks(const CopyBlocksParams& p, int num_copies) {
  for (const BlockPieces* side : {&p.k, &p.v})
    for (int i = 0; i < num_copies; ++i)
      for (unsigned piece = 0; piece < side->sizes[0] * side->sizes[1] * side->sizes[2]; ++piece) {
        const long at = long(piece % side->sizes[0]) * side->strides[0] + long(piece / side->sizes[0] % side->sizes[1]) * side->strides[1] +
                        long(piece / side->sizes[0] / side->sizes[1]) * side->strides[2];
        std::memcpy(side->data + p.copies[i].to * side->block_stride + at, side->data + p.copies[i].from * side->block_stride + at,
                    size_t(side->piece_bytes));
      }
}

}  // namespace imbrex::cuda::fake
