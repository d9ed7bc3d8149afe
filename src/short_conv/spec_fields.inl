// The fields of ShortConvSpec, each once. What they mean is in imbrex/short_conv.h; the columns of a row are those of
// attention/spec_fields.inl.
// A row a line.
// clang-format off
SHAPE(dim)
FIELD(spec, width, width, "width", "", "--width", "tokens that a sum is over")
FIELD(spec, dtype, dtype, "dtype", "", "--dtype", "f32, bf16, f16")
FIELD(spec, bias, bias, "bias", "bias", "--bias", "with a bias")
FIELD(spec, num_drafts, num_drafts, "num_drafts", "drafts", "--drafts", "drafts of a step at most")
FIELD(spec, tree_drafts, tree_drafts, "tree_drafts", "drafts", "--tree-drafts", "drafts of a step may be a tree")
FIELD(spec, form, form, "form", "plain form", "--form", "gated (LFM2) or plain (Mamba, GDN, KDA)")
FIELD(spec, activation, activation, "activation", "activation", "--activation", "of the plain form: none or silu")
// clang-format on
#undef SHAPE
#undef FIELD
