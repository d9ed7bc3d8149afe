// The fields of MlaSpec, each once. What they mean is in imbrex/mla.h; the columns of a row are those of attention/spec_fields.inl.
// A row a line.
// clang-format off
SHAPE(num_heads)
FIELD(spec, kv_lora_rank, kv_lora_rank, "kv_lora_rank", "", "--kv-lora-rank", "elements of a latent")
FIELD(spec, qk_nope_dim, qk_nope_dim, "qk_nope_dim", "", "--nope-dim", "of queries and keys, without a position")
FIELD(spec, qk_rope_dim, qk_rope_dim, "qk_rope_dim", "", "--rope-dim", "of queries and keys, with a position; 0: none")
FIELD(spec, v_dim, v_dim, "v_dim", "", "--v-dim", "of values")
FIELD(spec, dtype, dtype, "dtype", "", "--dtype", "f32, bf16, f16")
FIELD(spec, kv_dtype, kv_dtype, "kv_dtype", "", "--kv-dtype", "of the cache")
FIELD(spec, kv_format, kv_format, "", "", "--kv-format", "How latents lie in memory")
FIELD(spec, block_size, block_size, "", "", "--block-size", "Tokens in a block (page)")
FIELD(mask, causal, causal, "causal", "", "", "")
FIELD(mask, window_left, window_left, "window", "window", "", "")
FIELD(mask, window_right, window_right, "window_right", "window", "--window-right", "Keys after its own that a query sees (-1: no limit)")
FIELD(mask, chunk, chunk, "chunk", "chunked-local mask", "--chunk", "Chunked-local attention: chunk length")
FIELD(mask, chunk_lookback, chunk_lookback, "chunk_lookback", "chunked-local mask", "--chunk-lookback", "With --chunk: chunks before its own that a query sees too")
FIELD(mask, custom, custom_mask, "custom", "custom mask", "--custom-mask", "A mask byte for every query and key")
FIELD(mask, positions, positions, "positions", "given positions", "--positions", "A batch gives the position of every query")
FIELD(mask, tree, tree, "tree", "tree of drafts", "--tree", "The queries of a request are a tree of drafts")
FIELD(spec, scale, scale, "scale", "", "--scale", "Scale of the logits (default: 1/sqrt(nope + rope))")
FIELD(spec, sinks, sinks, "has_sinks", "sinks", "--sinks", "A sink logit per query head")
FIELD(spec, absorbed, absorbed, "absorbed", "", "--absorbed", "queries and outputs are in latent space")
// clang-format on
#undef SHAPE
#undef FIELD
