// Specs that together need every kernel, and the tiles that are short of room: the sample of precompile.h.
#include "cuda/attention/attention_sm80.h"
#include "cuda/precompile.h"

namespace imbrex::cuda {
namespace {

AttentionSpec spec_of(DType q, DType kv, int dim_qk, int dim_v, int block_size = 16) {
  return {.num_q_heads = 32,
          .num_kv_heads = 8,
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .q_dtype = q,
          .kv_dtype = kv,
          .block_size = block_size};
}

auto with_tree_drafts(auto spec) { return spec.num_drafts = 4, spec.tree_drafts = true, spec; }

}  // namespace

KernelKey TightTile::key() const { return attention_sm80_key(arch, spec, spec.q_dtype, *attention_sm80_tiles(arch, spec, regime, rows)); }

std::vector<TightTile> tight_tiles() {
  constexpr gpu::Regime kTiled[] = {gpu::kDecode, gpu::kPrefill};
  std::vector<TightTile> tiles;
  const auto add = [&](std::string_view archs, const AttentionSpec& spec, std::span<const gpu::Regime> regimes, int rows = 1) {
    for (const char* arch : {"sm_80", "sm_90a", "sm_100a", "sm_120"})
      if (archs.find(arch) != std::string_view::npos)
        for (const gpu::Regime regime : regimes) tiles.push_back({arch, spec, regime, rows});
  };
  const std::span<const gpu::Regime> both(kTiled), decode(kTiled, 1), prefill(kTiled + 1, 1);
  const AttentionSpec plain = spec_of(DType::bf16, DType::bf16, 128, 128);
  add("sm_80 sm_90a sm_100a sm_120", plain, both);
  add("sm_90a", plain, decode, 32);
  add("sm_80", spec_of(DType::bf16, DType::fp8_e4m3, 128, 128), decode);
  add("sm_90a", spec_of(DType::bf16, DType::fp8_e5m2, 80, 80), prefill);
  add("sm_90a", spec_of(DType::bf16, DType::bf16, 256, 256), prefill);
  add("sm_90a", spec_of(DType::f32, DType::f32, 128, 128), prefill);
  add("sm_90a", spec_of(DType::f32, DType::f32, 576, 512), decode);
  add("sm_100a", spec_of(DType::bf16, DType::f32, 512, 512), prefill);

  const auto latent = [](KvFormat format, DType q, DType kv) {
    AttentionSpec spec = spec_of(q, kv, 576, 512, 64);
    spec.kv_format = format, spec.num_kv_heads = 1;
    return spec;
  };
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
    add("sm_90a", latent(KvFormat::latent, DType::bf16, kv), both);
    add("sm_80", latent(KvFormat::latent, DType::bf16, kv), decode);
    add("sm_90a", latent(KvFormat::latent_rope, DType::bf16, kv), both);
  }
  add("sm_80", latent(KvFormat::latent_rope, DType::f16, DType::fp8_e4m3), decode);
  add("sm_80 sm_90a", latent(KvFormat::fp8_ds_mla, DType::bf16, DType::fp8_e4m3), both);
  add("sm_90a", latent(KvFormat::fp8_ds_mla, DType::f32, DType::fp8_e4m3), decode);

  AttentionSpec all_terms = plain;
  all_terms.mask.window_left = 100, all_terms.mask.custom = true;
  all_terms.score = {
      .head_scales = true, .soft_cap = 30.f, .alibi = true, .relative_buckets = 32, .relative_max_distance = 128, .sinks = true};
  add("sm_80 sm_90a", all_terms, both);

  // Positions take registers: beside scores and outputs of many rows, and beside what else a logit needs.
  const auto add_placed = [&](AttentionSpec spec, std::string_view archs = "sm_90a", bool in_decode = false) {
    spec.mask.positions = true;
    add(archs, spec, prefill);
    if (in_decode) add("sm_90a", spec, decode);
  };
  for (const int dim : {64, 96, 128}) {
    AttentionSpec window = spec_of(DType::bf16, DType::bf16, dim, dim), relative = window;
    window.mask.window_left = dim == 128 ? -1 : 100;
    relative.score = {.relative_buckets = 32, .relative_max_distance = 128};
    add_placed(window, dim == 96 ? "sm_80 sm_90a sm_100a" : "sm_90a", dim == 96);
    add_placed(relative);
  }
  // Words of trees of drafts, beside windows and what else a logit needs.
  for (const int dim : {64, 128, 256}) {
    AttentionSpec tree = spec_of(DType::bf16, DType::bf16, dim, dim), window = tree, capped = tree, alibi = tree;
    tree.mask.tree = window.mask.tree = capped.mask.tree = alibi.mask.tree = true;
    window.mask.window_left = alibi.mask.window_left = 4095, window.score.sinks = true;
    capped.score.soft_cap = 50.f, alibi.score.alibi = true;
    for (const AttentionSpec& spec : {tree, window, capped, alibi}) add("sm_80 sm_90a sm_100a", spec, both);
    tree.kv_dtype = DType::fp8_e4m3;
    add("sm_90a", tree, both);
  }
  add_placed(spec_of(DType::bf16, DType::fp8_e4m3, 128, 128));
  add_placed(spec_of(DType::f32, DType::f32, 128, 128));
  AttentionSpec wide = spec_of(DType::bf16, DType::bf16, 256, 256);
  wide.mask.custom = true, wide.score.alibi = true;
  add_placed(wide);
  return tiles;
}

std::vector<AttentionSpec> thorough_specs() {
  std::vector<AttentionSpec> specs;
  constexpr DType kQ[] = {DType::bf16, DType::f16, DType::f32},
                  kKv[] = {DType::bf16, DType::f16, DType::f32, DType::fp8_e4m3, DType::fp8_e5m2};
  for (const DType q : kQ)
    for (const DType kv : kKv) specs.push_back(spec_of(q, kv, 128, 128));
  constexpr int kDims[][2] = {{64, 64}, {80, 80}, {96, 96}, {192, 128}, {256, 256}};
  for (const auto& dims : kDims)
    for (const DType kv : {DType::bf16, DType::fp8_e4m3}) specs.push_back(spec_of(DType::bf16, kv, dims[0], dims[1]));
  for (const int dim : {72, 112, 192}) specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim));
  for (const int dim : {64, 256}) specs.push_back(spec_of(DType::fp8_e4m3, DType::fp8_e4m3, dim, dim));
  for (const int dim : {64, 128, 256}) specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim, 1));
  for (const DType q : {DType::bf16, DType::fp8_e4m3}) specs.push_back(spec_of(q, DType::fp8_e4m3, 128, 128, 1));
  // Tiles as large as logits that need registers leave room for.
  for (const int dim : {64, 256}) {
    for (const ScoreMod& score : {ScoreMod{.soft_cap = 50.f}, ScoreMod{.alibi = true}}) {
      specs.push_back(spec_of(DType::bf16, DType::bf16, dim, dim));
      specs.back().score = score;
      if (score.soft_cap > 0) specs.back().mask.window_left = 4095;
    }
  }
  specs.push_back(spec_of(DType::bf16, DType::fp8_e4m3, 64, 64));
  specs.back().score.soft_cap = 50.f;
  specs.push_back(spec_of(DType::bf16, DType::fp8_e4m3, 64, 64, 1));
  specs.back().mask.custom = true;
  specs.push_back(spec_of(DType::bf16, DType::bf16, 256, 256));
  specs.back().mask.custom = true;
  for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
    AttentionSpec& wide = specs.emplace_back(spec_of(DType::bf16, kv, 256, 256));
    wide.mask = {.window_left = 4095, .custom = true}, wide.score = {.head_scales = true, .soft_cap = 50.f, .alibi = true};
  }
  for (const int dim : {64, 128, 256})
    for (const DType kv : {DType::bf16, DType::fp8_e4m3})
      for (const int window : {-1, 4095})
        specs.emplace_back(spec_of(DType::bf16, kv, dim, dim)).mask = {.window_left = window, .tree = true};
  specs.push_back(spec_of(DType::bf16, DType::bf16, 64, 64));
  specs.back().num_q_heads = 66, specs.back().num_kv_heads = 2;  // of each warpgroup's rows, about a half
  // Latents: a half of the values' dims is one product or two, and all that logits and masks can need besides.
  const auto add_latent = [&](DType type, int dim_v, int q_heads, int block_size) -> AttentionSpec& {
    AttentionSpec& spec = specs.emplace_back(spec_of(type, type, dim_v + 64, dim_v, block_size));
    spec.kv_format = KvFormat::latent, spec.num_q_heads = q_heads, spec.num_kv_heads = 1;
    return spec;
  };
  add_latent(DType::bf16, 512, 128, 64);
  add_latent(DType::bf16, 512, 64, 64);
  add_latent(DType::bf16, 512, 128, 1);
  AttentionSpec& handed = add_latent(DType::bf16, 512, 128, 1);
  handed.mask.window_left = 4095, handed.score = {.soft_cap = 50.f, .sinks = true};
  add_latent(DType::f16, 384, 20, 16).score.sinks = true;
  add_latent(DType::f16, 256, 16, 1);
  add_latent(DType::bf16, 384, 20, 16).score = {.soft_cap = 50.f, .sinks = true};
  AttentionSpec& all_terms = add_latent(DType::bf16, 512, 16, 1);
  all_terms.mask.window_left = 4095, all_terms.score = {.head_scales = true, .alibi = true};
  // Of few rows besides: bytes, records, and a mask that needs registers.
  add_latent(DType::bf16, 512, 128, 64).kv_dtype = DType::fp8_e4m3;
  add_latent(DType::f16, 256, 16, 16).kv_dtype = DType::fp8_e4m3;
  AttentionSpec& records = add_latent(DType::bf16, 512, 16, 64);
  records.kv_format = KvFormat::fp8_ds_mla, records.kv_dtype = DType::fp8_e4m3;
  AttentionSpec& masked = add_latent(DType::bf16, 512, 32, 64);
  masked.mask = {.custom = true, .positions = true}, masked.score = {.soft_cap = 50.f, .alibi = true};
  // Trees: the words of drafts beside what each of these kernels has.
  for (const int q_heads : {16, 128})
    for (const int window : {-1, 4095})
      for (const DType kv : {DType::bf16, DType::fp8_e4m3}) {
        AttentionSpec& tree = add_latent(DType::bf16, 512, q_heads, 64);
        tree.mask = {.window_left = window, .tree = true}, tree.kv_dtype = kv;
        if (kv == DType::fp8_e4m3 && q_heads == 16) tree.kv_format = KvFormat::fp8_ds_mla;
        if (window >= 0) tree.score = {.soft_cap = 50.f, .alibi = kv == DType::fp8_e4m3};
      }
  return specs;
}

std::vector<ShortConvSpec> covering_short_conv_specs() {
  constexpr ShortConvForm plain = ShortConvForm::plain;
  constexpr ShortConvActivation silu = ShortConvActivation::silu;
  std::vector<ShortConvSpec> specs{{.width = 3, .dtype = DType::bf16},
                                   {.width = 3, .bias = true, .dtype = DType::bf16},
                                   {.width = 5, .bias = true, .dtype = DType::bf16},
                                   {.width = 8, .bias = true, .dtype = DType::bf16},
                                   {.width = 3, .bias = true, .dtype = DType::f16},
                                   {.width = 4, .bias = true, .dtype = DType::f16},
                                   {.width = 8, .bias = true, .dtype = DType::f16},
                                   {.width = 2, .dtype = DType::f32},
                                   {.width = 5, .bias = true, .dtype = DType::f32},
                                   {.width = 8, .bias = true, .dtype = DType::f32},
                                   {.width = 4, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 4, .bias = true, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 8, .bias = true, .dtype = DType::bf16, .form = plain, .activation = silu},
                                   {.width = 4, .bias = true, .dtype = DType::f16, .form = plain},
                                   {.width = 4, .dtype = DType::f32, .form = plain, .activation = silu},
                                   {.width = 5, .bias = true, .dtype = DType::f32, .form = plain, .activation = silu},
                                   {.width = 8, .bias = true, .dtype = DType::f32, .form = plain, .activation = silu}};
  for (const size_t of : {0, 3, 11, 13, 16}) specs.push_back(with_tree_drafts(specs[of]));
  return specs;
}

std::vector<RecurrentSpec> covering_recurrent_specs() {
  std::vector<RecurrentSpec> specs;
  const auto add = [&](int dim_k, int dim_v, DType dtype, DType state, StateLayout layout) -> RecurrentSpec& {
    RecurrentSpec& spec = specs.emplace_back();
    spec.num_k_heads = 4, spec.num_v_heads = 16, spec.head_dim_k = dim_k, spec.head_dim_v = dim_v;
    spec.dtype = dtype, spec.state_dtype = state, spec.layout = layout;
    return spec;
  };
  const auto delta = [](RecurrentSpec& spec) -> RecurrentSpec& { return spec.delta = spec.sigmoid_beta = spec.qk_norm = true, spec; };
  // Chunks, with the delta rule and without, of norms and not, and layers that have none.
  delta(add(128, 128, DType::bf16, DType::f32, StateLayout::v_first));
  delta(add(128, 128, DType::f16, DType::bf16, StateLayout::k_first));
  delta(add(64, 64, DType::bf16, DType::f16, StateLayout::v_first));
  add(128, 64, DType::bf16, DType::f32, StateLayout::v_first);
  add(128, 64, DType::bf16, DType::f16, StateLayout::k_first).qk_norm = true;
  add(64, 128, DType::f16, DType::f32, StateLayout::k_first);
  delta(add(128, 128, DType::bf16, DType::f32, StateLayout::v_first)).channel_gate = true;  // KDA
  add(256, 256, DType::f32, DType::f32, StateLayout::k_first).channel_gate = true;
  add(200, 130, DType::bf16, DType::f16, StateLayout::v_first).channel_rates = true;
  add(33, 31, DType::f32, DType::bf16, StateLayout::k_first).channel_rates = true;
  add(7, 5, DType::f16, DType::f32, StateLayout::v_first);
  add(16, 1, DType::bf16, DType::f32, StateLayout::v_first).channel_rates = true;
  add(256, 1, DType::f32, DType::f16, StateLayout::v_first);
  add(100, 1, DType::f16, DType::bf16, StateLayout::v_first);
  for (const size_t of : {0, 4, 6, 7, 8, 9, 11, 12, 13}) specs.push_back(with_tree_drafts(specs[of]));
  // Gates and norms of outputs: of a head, of more and more of them, and gates alone.
  for (const int heads : {1, 128, 1 << 10, 1 << 13, 1 << 14}) {
    RecurrentSpec& spec = add(16, 1, heads == 128 ? DType::f32 : DType::bf16, DType::f32, StateLayout::v_first);
    spec.num_k_heads = 1, spec.num_v_heads = heads, spec.norm_groups = 1;
    spec.out_gate = OutputGate::silu, spec.out_norm = heads == 1 ? OutputNorm::before_gate : OutputNorm::after_gate;
  }
  add(16, 1, DType::f16, DType::f32, StateLayout::v_first).out_gate = OutputGate::sigmoid;
  // Outputs that are finished where they are computed, of kernels with few registers left.
  for (const StateLayout layout : {StateLayout::v_first, StateLayout::k_first})
    for (const bool channels : {false, true}) {
      RecurrentSpec& spec = delta(add(128, 128, DType::bf16, DType::f32, layout));
      spec.channel_gate = channels, spec.out_norm = OutputNorm::before_gate;
      spec.out_gate = channels ? OutputGate::sigmoid : OutputGate::silu;
    }
  add(128, 64, DType::bf16, DType::bf16, StateLayout::v_first).out_gate = OutputGate::silu;
  return specs;
}

std::vector<AttentionSpec> covering_specs() {
  std::vector<AttentionSpec> specs;
  const auto add = [&](DType q, DType kv, int dim_qk, int dim_v) { specs.push_back(spec_of(q, kv, dim_qk, dim_v)); };
  // Copied as it is, converted, widened from bytes, and the planes of f32; narrow, odd, unequal and wide heads.
  add(DType::bf16, DType::bf16, 128, 128);
  add(DType::bf16, DType::f32, 128, 128);
  specs.back().mask = {.custom = true, .positions = true}, specs.back().score = {.alibi = true};
  add(DType::bf16, DType::fp8_e4m3, 128, 128);
  add(DType::f16, DType::f16, 64, 64);
  add(DType::bf16, DType::bf16, 64, 64);
  specs.back().mask = {.window_left = 4095, .tree = true};
  add(DType::f16, DType::fp8_e5m2, 128, 128);
  specs.back().mask = {.chunk = 8192}, specs.back().score = {.head_scales = true};
  add(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128);
  add(DType::f32, DType::f32, 128, 128);
  add(DType::f32, DType::bf16, 64, 64);
  specs.back().mask = {.window_left = 1023, .positions = true};
  add(DType::bf16, DType::fp8_e4m3, 80, 80);
  add(DType::bf16, DType::bf16, 192, 128);
  add(DType::bf16, DType::bf16, 256, 256);
  add(DType::bf16, DType::bf16, 512, 512);
  add(DType::bf16, DType::bf16, 576, 512);
  specs.back().kv_format = KvFormat::latent;
  specs.back().num_kv_heads = 1, specs.back().block_size = 64;
  for (const KvFormat format : {KvFormat::latent_rope, KvFormat::fp8_ds_mla}) {
    add(DType::bf16, DType::fp8_e4m3, 576, 512);
    specs.back().kv_format = format;
    specs.back().num_kv_heads = 1, specs.back().block_size = 64;
  }
  const auto with = [&](const Mask& mask, const ScoreMod& score, int block_size = 16) {
    add(DType::bf16, DType::bf16, 128, 128);
    specs.back().mask = mask;
    specs.back().score = score;
    specs.back().block_size = block_size;
  };
  with({.window_left = 1023}, {.soft_cap = 50.f, .sinks = true});
  with({.custom = true}, {.alibi = true});
  with({.causal = false}, {.relative_buckets = 32, .relative_max_distance = 128, .relative_bidirectional = true}, 0);
  return specs;
}

}  // namespace imbrex::cuda
