// The fields of RecurrentSpec, each once. What they mean is in imbrex/recurrent.h; the columns of a row are those of
// attention/spec_fields.inl.
// A row a line.
// clang-format off
SHAPE(num_k_heads)
SHAPE(num_v_heads)
SHAPE(head_dim_k)
SHAPE(head_dim_v)
FIELD(spec, gate, gate, "gate", "", "--gate", "fixed, log, softplus, sigmoid")
FIELD(spec, channel_gate, channel_gate, "channel_gate", "channel gates", "--channel-gate", "a decay for each key channel")
FIELD(spec, channel_rates, channel_rates, "channel_rates", "channel rates", "--channel-rates", "rates for each key channel")
FIELD(spec, gate_min, gate_min, "gate_min", "", "--gate-min", "least value of the gate")
FIELD(spec, gate_max, gate_max, "gate_max", "", "--gate-max", "greatest value of the gate; 0: no limit")
FIELD(spec, delta, delta, "delta", "delta rule", "--delta", "the delta rule")
FIELD(spec, sigmoid_beta, sigmoid_beta, "sigmoid_beta", "delta rule", "--sigmoid-beta", "beta is the sigmoid of what is given")
FIELD(spec, beta_scale, beta_scale, "beta_scale", "delta rule", "--beta-scale", "factor of beta")
FIELD(spec, scaled_values, scaled_values, "scaled_values", "scaled values", "--scaled-values", "values are multiplied by the step")
FIELD(spec, qk_norm, qk_norm, "qk_norm", "norm of q and k", "--qk-norm", "q and k have length 1")
FIELD(spec, skip, skip, "skip", "skip", "--skip", "outputs have a part of the values added")
FIELD(spec, scale, scale, "scale", "", "--scale", "Scale of queries (default: 1/sqrt(head_dim_k))")
FIELD(spec, dtype, dtype, "dtype", "", "--dtype", "f32, bf16, f16")
FIELD(spec, state_dtype, state_dtype, "state_dtype", "", "--state-dtype", "f32, bf16, f16")
FIELD(spec, layout, layout, "layout", "", "--layout", "k_first, v_first")
FIELD(spec, out_gate, out_gate, "out_gate", "output gate", "--out-gate", "none, silu, sigmoid: outputs are multiplied by that of z")
FIELD(spec, out_norm, out_norm, "out_norm", "output norm", "--out-norm", "none, before_gate, after_gate: outputs are normalised")
FIELD(spec, norm_groups, norm_groups, "norm_groups", "output norm", "--norm-groups", "groups of heads of the norm; 0: each head")
FIELD(spec, norm_eps, norm_eps, "norm_eps", "output norm", "--norm-eps", "epsilon of the norm")
FIELD(spec, conv, conv, "conv", "convolution", "--conv", "none, qkv, vkq: what is convolved in front")
FIELD(spec, conv_width, conv_width, "conv_width", "convolution", "--conv-width", "tokens that the convolution is over")
FIELD(spec, conv_bias, conv_bias, "conv_bias", "convolution", "--conv-bias", "the convolution adds a bias")
FIELD(spec, conv_silu, conv_silu, "conv_silu", "convolution", "--conv-silu", "SiLU follows the convolution")
FIELD(spec, num_drafts, num_drafts, "num_drafts", "drafts", "--drafts", "drafts of a step at most")
FIELD(spec, tree_drafts, tree_drafts, "tree_drafts", "drafts", "--tree-drafts", "drafts of a step may be a tree")
// clang-format on
#undef SHAPE
#undef FIELD
