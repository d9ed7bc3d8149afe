// The fields of AttentionSpec, each once, in the order in which str() prints them. What they mean is in imbrex/spec.h.
//   FIELD(part, member, name, key, feature, flag, help)
//   part     where it is: spec, mask (AttentionSpec::mask) or score (AttentionSpec::score)
//   member   its name there
//   name     its name in imbrex_spec_fields and in Python
//   key      its name in case files; "" where those do not hold it. Those of a mask are in the object "mask", the others in "spec"
//   feature  what a layer does without when the field has its default; "" for what every layer has. Fields of one feature go together
//   flag     its option on the command line; "" where that says it in another way (src/cli/spec_options.cpp)
//   help     of the option
//   SHAPE(member)  a field that has no default of its own: every layer says it, or it follows from another one. Its name is the same
//   everywhere
// attention/spec_fields.h defines both.
// A row a line.
// clang-format off
SHAPE(num_q_heads)
SHAPE(num_kv_heads)
SHAPE(head_dim_qk)
SHAPE(head_dim_v)
SHAPE(kv_dtype)
FIELD(spec, kind, kind, "kind", "", "--kind", "decoder, encoder, encoder_only, encoder_decoder")
FIELD(spec, q_dtype, q_dtype, "q_dtype", "", "--q-dtype", "f32, bf16, f16; fp8_e4m3 with such keys")
FIELD(spec, kv_format, kv_format, "", "", "--kv-format", "How keys and values lie in memory")
FIELD(spec, block_size, block_size, "", "", "--block-size", "Tokens in a block (page); 0: ragged keys without a cache")
FIELD(mask, causal, causal, "causal", "", "", "")
FIELD(mask, window_left, window_left, "window", "window", "", "")
FIELD(mask, window_right, window_right, "window_right", "window", "--window-right", "Keys after its own that a query sees (-1: no limit)")
FIELD(mask, chunk, chunk, "chunk", "chunked-local mask", "--chunk", "Chunked-local attention (Llama 4): chunk length")
FIELD(mask, chunk_lookback, chunk_lookback, "chunk_lookback", "chunked-local mask", "--chunk-lookback", "With --chunk: chunks before its own that a query sees too")
FIELD(mask, custom, custom_mask, "custom", "custom mask", "--custom-mask", "A mask byte for every query and key")
FIELD(mask, positions, positions, "positions", "given positions", "--positions", "A batch gives the position of every query")
FIELD(mask, tree, tree, "tree", "tree of drafts", "--tree", "The queries of a request are a tree of drafts")
FIELD(score, scale, scale, "scale", "", "--scale", "Scale of the logits (default: 1/sqrt(head_dim))")
FIELD(score, head_scales, head_scales, "head_scales", "head scales", "--head-scales", "A factor of the logits per query head")
FIELD(score, soft_cap, soft_cap, "soft_cap", "soft cap", "--soft-cap", "Soft cap of the logits")
FIELD(score, alibi, alibi, "alibi", "ALiBi", "--alibi", "ALiBi position bias")
FIELD(score, alibi_sqrt, alibi_sqrt, "alibi_sqrt", "ALiBi", "--alibi-sqrt", "With --alibi: by the square root of the distance (Step1)")
FIELD(score, relative_buckets, relative_buckets, "relative_buckets", "relative bias", "--relative-buckets", "T5 position bias: buckets of distances")
FIELD(score, relative_max_distance, relative_max_distance, "relative_max_distance", "relative bias", "--relative-max-distance", "With --relative-buckets: distances from here on share the last one")
FIELD(score, relative_bidirectional, relative_bidirectional, "relative_bidirectional", "relative bias", "--relative-bidirectional", "With --relative-buckets: half of them are for keys after the query")
FIELD(score, sinks, sinks, "has_sinks", "sinks", "--sinks", "A sink logit per query head (gpt-oss)")
FIELD(spec, score_mod, score_mod, "score_mod", "score_mod", "--score-mod", "What a logit becomes: an expression of the score (docs/expressions.md)")
FIELD(spec, mask_mod, mask_mod, "mask_mod", "mask_mod", "--mask-mod", "Which keys a query sees: an expression of q, kv, batch, head")
// clang-format on
#undef SHAPE
#undef FIELD
