#pragma once
// Latents on their way into a cache and out of it, in every format that has a codec.
#include "attention/key_source.h"
#include "attention/kv_codec.h"
#include "imbrex/parallel.h"

namespace imbrex {

// Where key j of a request lies in a paged cache.
inline KvPlace place_of(const KeySource& keys, const AttentionSpec& spec, int request, int64_t j) {
  return {.block = keys.ids_of(request)[j / spec.block_size], .offset = j % spec.block_size, .head = 0};
}

// Writes the latents and rotated parts of tokens [0, num_tokens) to their slots; `spec` is the layer's attention in latent space. The
// arguments have been checked.
void write_latents(const AttentionSpec& spec, const KvCache&, const TensorView& latent, const TensorView& rope,
                   const TensorView& slot_mapping, int num_tokens, const ParallelFor&);

}  // namespace imbrex
