#pragma once
// The steps between the parts of a plan of MLA, on the host: latents out of a cache, rows from one tensor to another, and results of pieces
// to the outputs.
#include "attention/key_source.h"
#include "imbrex/merge.h"
#include "imbrex/mla.h"
#include "mla/rounds.h"

namespace imbrex {

// Reads the latents of a round's keys into `latents`, f32 or bf16 [keys, 1, kv_lora_rank], and their rotated parts into the ends of the
// rows of `k`, [keys, num_heads, qk_dim()], of all heads.
void read_latents(const MlaSpec&, const KvCache&, const KeySource&, const MlaRound&, const TensorView& latents, const TensorView& k,
                  const ParallelFor&);

// Copies elements [tokens, heads, dim] of one type with innermost stride 1.
void copy_rows(const TensorView& from, const TensorView& to, const ParallelFor&);

// Writes results to `out`, of any type, and `lse`, which may be empty. `sinks` f32 [heads] or empty: a logit more in the denominator of
// each row that sees a key.
void finish(const PartialResult&, const TensorView& sinks, const TensorView& out, const TensorView& lse, const ParallelFor&);

}  // namespace imbrex
