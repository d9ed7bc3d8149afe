#pragma once
// The specialisations whose texts run on the host: together every way that elements, rows and warps may take.
#include <vector>

#include "cuda/lanes/latent_variants.h"
#include "cuda/lanes/variant.h"

namespace imbrex::test {

inline std::vector<Variant> variants() {
  const auto spec = [](DType q, DType kv, int dim_qk, int dim_v, int group, int block_size) {
    AttentionSpec s;
    s.num_q_heads = 2 * group, s.num_kv_heads = 2;
    s.head_dim_qk = dim_qk, s.head_dim_v = dim_v;
    s.q_dtype = q, s.kv_dtype = kv;
    s.block_size = block_size;
    return s;
  };
  const std::vector<CaseRequest> decodes{{1, 19, 0}, {1, 300, 1}, {0, 0, 2}, {1, 1, 3}, {4, 140, 4}},
      prefills{{70, 70, 0}, {3, 90, 1}, {33, 150, 2}};
  std::vector<Variant> all;
  const auto add = [&](const char* name, const char* arch, gpu::Regime regime, int rows, AttentionSpec s) -> Case& {
    Case c;
    c.name = name, c.spec = s;
    c.requests = regime == gpu::kDecode ? decodes : prefills;
    c.seed = all.size() + 1;
    c.out_dtype = all.size() % 2 == 0 ? s.out_dtypes().front() : DType::f32;
    all.push_back({name, arch, regime, rows, c});
    return all.back().c;
  };
  add("decode", "sm_90a", gpu::kDecode, 1, spec(DType::bf16, DType::bf16, 128, 128, 4, 16)).spec.score.sinks = true;
  all.back().c.values = ValuePattern::rising;  // sums are rescaled again and again
  // Bytes, an odd number of pieces, pages that divide nothing, a power of two for each row of queries.
  Case& bytes = add("bytes", "sm_80", gpu::kDecode, 1, spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 3));
  bytes.spec.mask.window_left = 100, bytes.scale_per_head = true;
  Case& tree = add("tree", "sm_90a", gpu::kDecode, 32, spec(DType::f16, DType::fp8_e5m2, 64, 64, 8, 64));
  tree.spec.mask.custom = true, tree.custom = CustomPattern::tree;
  add("prefill", "sm_90a", gpu::kPrefill, 1, spec(DType::bf16, DType::bf16, 64, 128, 2, 1)).values = ValuePattern::spike;
  // Converted on the way, rows that cannot be copied 16 bytes at a time.
  Case& strided = add("strided", "sm_120", gpu::kPrefill, 1, spec(DType::f16, DType::bf16, 72, 40, 5, 16));
  strided.spec.score.alibi = strided.spec.score.head_scales = true, strided.spec.mask.chunk = 25, strided.spec.mask.chunk_lookback = 1,
  strided.order = "lbhdt";
  Case& exact = add("exact", "sm_120", gpu::kPrefill, 1, spec(DType::f32, DType::f32, 64, 64, 1, 0));
  exact.spec.mask.causal = false, exact.spec.score.soft_cap = 20.f;
  exact.spec.score.relative_buckets = 32, exact.spec.score.relative_max_distance = 64, exact.spec.score.relative_bidirectional = true;
  // Several teams of several warps.
  add("teams", "sm_90a", gpu::kDecode, 32, spec(DType::bf16, DType::bf16, 256, 136, 4, 32)).values = ValuePattern::rising;
  // More heads than rows, warps that share out the output's dims, keys of another type than the queries.
  add("wide", "sm_90a", gpu::kDecode, 1, spec(DType::bf16, DType::f16, 328, 328, 71, 128)).requests = {{1, 70, 0}, {2, 35, 1}};
  // Queries in bytes, with a scale for each head.
  Case& queries = add("queries", "sm_80", gpu::kPrefill, 1, spec(DType::fp8_e4m3, DType::fp8_e4m3, 72, 128, 3, 16));
  queries.scale_per_head = true, queries.out_dtype = DType::f16;

  // attention_sm90_decode.cu.
  const auto add_decode = [&](const char* name, int rows, AttentionSpec s, Text text = Text::decode) -> Case& {
    Case& c = add(name, "sm_90a", gpu::kDecode, rows, s);
    all.back().text = text;
    return c;
  };
  add_decode("tma", 16, spec(DType::bf16, DType::bf16, 128, 128, 4, 16)).values = ValuePattern::rising;
  Case& tma_bytes = add_decode("tma_bytes", 16, spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 64));
  tma_bytes.spec.mask.window_left = 100, tma_bytes.scale_per_head = true;
  Case& tma_tree = add_decode("tma_tree", 32, spec(DType::f16, DType::fp8_e5m2, 64, 64, 8, 24));
  tma_tree.spec.mask.custom = true, tma_tree.custom = CustomPattern::tree;
  add_decode("tma_wide", 32, spec(DType::bf16, DType::bf16, 256, 256, 4, 32)).spec.score.sinks = true;
  all.back().c.values = ValuePattern::rising;
  Case& tma_ragged = add_decode("tma_ragged", 16, spec(DType::bf16, DType::f16, 96, 72, 2, 0));
  tma_ragged.spec.score.soft_cap = 20.f, tma_ragged.spec.mask.chunk = 150;
  // Rows in shared memory that are no lines: of their own width, of half a line in boxes and in small pages.
  add_decode("tma_narrow", 16, spec(DType::bf16, DType::bf16, 80, 224, 4, 16)).spec.mask.window_left = 70;
  add_decode("tma_half", 16, spec(DType::bf16, DType::fp8_e4m3, 64, 96, 3, 16)).values = ValuePattern::rising;
  add_decode("tma_half_rows", 16, spec(DType::bf16, DType::fp8_e4m3, 64, 64, 4, 1)).spec.mask.window_left = 70;
  Case& tma_rows = add_decode("tma_rows", 16, spec(DType::bf16, DType::bf16, 128, 72, 4, 6));
  tma_rows.spec.score.alibi = tma_rows.spec.score.alibi_sqrt = true;
  add_decode("element_rows", 32, spec(DType::bf16, DType::bf16, 96, 80, 4, 16), Text::decode_without_maps).spec.score.sinks = true;
  add_decode("elements", 16, spec(DType::bf16, DType::bf16, 128, 128, 4, 16), Text::decode_without_maps).order = "lbhdt";
  add_decode("element_bytes", 16, spec(DType::fp8_e4m3, DType::fp8_e4m3, 72, 200, 3, 0), Text::decode_without_maps).out_dtype = DType::f16;

  // Tokens of more q heads than half of a usual tile, in the larger one in which requests share items, and in the usual one.
  const auto same_output = [&] { all.back().c.out_dtype = all[all.size() - 2].c.out_dtype; };
  const AttentionSpec many_heads = spec(DType::bf16, DType::bf16, 128, 128, 12, 16);
  add("shared_heads", "sm_90a", gpu::kDecode, kSharingRows, many_heads);
  add("heads", "sm_90a", gpu::kDecode, 1, many_heads), same_output();
  add_decode("tma_shared_heads", 32, spec(DType::bf16, DType::fp8_e4m3, 128, 128, 16, 16)).scale_per_head = true;
  add_decode("tma_heads", 16, all.back().c.spec), same_output();

  // attention_sm90_verify.cu: two crews, one whose warpgroups share rows, or dims; pieces of three levels of their tree.
  const auto add_verify = [&](const char* name, AttentionSpec s, std::vector<CaseRequest> requests, Text text = Text::verify) -> Case& {
    Case& c = add(name, "sm_90a", gpu::kDecode, 1, s);
    c.requests = std::move(requests);
    all.back().text = text;
    return c;
  };
  add_verify("verify", spec(DType::bf16, DType::bf16, 128, 128, 4, 16), {{16, 300, 0}, {3, 1300, 1}, {0, 0, 2}, {40, 700, 3}, {1, 1, 4}})
      .values = ValuePattern::rising;
  Case& verify_rows = add_verify("verify_rows", spec(DType::f16, DType::f16, 64, 64, 12, 1), {{2, 90, 0}, {10, 330, 1}, {23, 400, 2}});
  verify_rows.spec.mask.window_left = 140, verify_rows.spec.score.sinks = verify_rows.spec.score.alibi = true;
  Case& verify_dims = add_verify("verify_dims", spec(DType::bf16, DType::bf16, 256, 200, 2, 64), {{20, 300, 0}, {3, 1100, 1}});
  verify_dims.spec.score.soft_cap = 20.f;
  add_verify("verify_elements", spec(DType::bf16, DType::bf16, 120, 128, 20, 0), {{6, 300, 0}, {3, 200, 1}}, Text::verify_without_maps)
      .order = "lbhdt";
  // Verify over fp8 caches, which warps widen.
  Case& verify_bytes = add_verify("verify_bytes", spec(DType::bf16, DType::fp8_e4m3, 128, 128, 4, 16),
                                  {{16, 300, 0}, {3, 1300, 1}, {0, 0, 2}, {40, 700, 3}, {1, 1, 4}});
  verify_bytes.values = ValuePattern::rising, verify_bytes.scale_per_head = true;
  Case& verify_byte_rows =
      add_verify("verify_byte_rows", spec(DType::f16, DType::fp8_e4m3, 64, 64, 12, 1), {{2, 90, 0}, {10, 330, 1}, {23, 400, 2}});
  verify_byte_rows.spec.mask.window_left = 140, verify_byte_rows.spec.score.sinks = true;
  Case& verify_byte_dims =
      add_verify("verify_byte_dims", spec(DType::bf16, DType::fp8_e4m3, 256, 208, 2, 64), {{20, 300, 0}, {3, 1100, 1}});
  verify_byte_dims.spec.score.soft_cap = 20.f, verify_byte_dims.spec.score.alibi = true;  // a level more in memory
  add_verify("verify_byte_elements", spec(DType::bf16, DType::fp8_e4m3, 120, 128, 20, 0), {{6, 300, 0}, {3, 200, 1}},
             Text::verify_without_maps)
      .order = "lbhdt";

  // attention_sm90.cu and attention_sm90_fp8.cu: rows for a thread block and a few more, items of few rows, more rows than an item has.
  const auto add_wgmma = [&](const char* name, AttentionSpec s, std::vector<CaseRequest> requests, Text text = Text::wgmma) -> Case& {
    Case& c = add(name, "sm_90a", gpu::kPrefill, 1, s);
    c.requests = std::move(requests);
    all.back().text = text;
    return c;
  };
  add_wgmma("turns", spec(DType::bf16, DType::bf16, 128, 128, 1, 0), {{140, 300, 0}, {3, 1300, 1}, {400, 400, 2}, {0, 0, 3}});
  add_wgmma("pages", spec(DType::f16, DType::f16, 128, 128, 4, 16), {{40, 200, 0}, {3, 150, 1}, {70, 70, 2}}).spec.mask.causal = false;
  Case& window = add_wgmma("window", spec(DType::bf16, DType::bf16, 128, 128, 2, 64), {{70, 300, 0}, {3, 40, 1}, {100, 100, 2}});
  window.spec.mask.window_left = 90;
  add_wgmma("dims_256", spec(DType::bf16, DType::bf16, 256, 256, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}});
  Case& dims_64 = add_wgmma("dims_64", spec(DType::bf16, DType::bf16, 64, 64, 1, 64), {{200, 300, 0}, {3, 700, 1}, {390, 390, 2}});
  dims_64.spec.score.sinks = true;
  // Items that one block of a cluster does alone: the other head's tasks are nobody's, more of them in a row than tasks are handed on
  // ahead.
  std::vector<CaseRequest> short_requests;
  for (int i = 0; i < 14; ++i) short_requests.push_back({20 + 3 * i, 20 + 5 * i, i});
  add_wgmma("short_items", spec(DType::bf16, DType::bf16, 64, 64, 2, 16), short_requests);
  add_wgmma("dims_72", spec(DType::bf16, DType::bf16, 72, 72, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}});
  add_wgmma("rows", spec(DType::bf16, DType::bf16, 128, 128, 2, 1), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}});
  Case& widened = add_wgmma("widened", spec(DType::bf16, DType::fp8_e4m3, 128, 128, 2, 16), {{70, 300, 0}, {3, 40, 1}, {200, 200, 2}});
  widened.scale_per_head = true;
  add_wgmma("widened_64", spec(DType::f16, DType::fp8_e4m3, 64, 64, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}}).values =
      ValuePattern::rising;
  Case& widened_256 = add_wgmma("widened_256", spec(DType::bf16, DType::fp8_e4m3, 240, 240, 4, 0), {{40, 170, 0}, {3, 40, 1}});
  widened_256.spec.mask.window_left = 90, widened_256.spec.score.soft_cap = 20.f;
  // Logits that need more than a scale, with the tiles that they have.
  Case& capped_64 = add_wgmma("capped_64", spec(DType::bf16, DType::bf16, 64, 64, 2, 16), {{110, 300, 0}, {3, 700, 1}, {200, 200, 2}});
  capped_64.spec.mask.window_left = 150, capped_64.spec.score.soft_cap = 20.f;
  Case& capped_256 = add_wgmma("capped_256", spec(DType::bf16, DType::bf16, 256, 256, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}});
  capped_256.spec.mask.window_left = 90, capped_256.spec.score.soft_cap = 20.f;
  add_wgmma("alibi_256", spec(DType::f16, DType::f16, 256, 256, 4, 0), {{40, 170, 0}, {3, 40, 1}}).spec.score.alibi = true;
  Case& all_terms = add_wgmma("all_terms", spec(DType::bf16, DType::bf16, 128, 128, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}});
  all_terms.spec.score.alibi = all_terms.spec.score.head_scales = true, all_terms.spec.score.soft_cap = 20.f;
  // Custom masks: tiles that nobody sees, or only a part of the rows; rows without a key; bytes.
  Case& masked = add_wgmma("masked", spec(DType::bf16, DType::bf16, 128, 128, 2, 16), {{700, 700, 0}, {3, 40, 1}, {70, 500, 2}});
  masked.spec.mask.custom = true, masked.custom = CustomPattern::documents;
  Case& masked_256 = add_wgmma("masked_256", spec(DType::f16, DType::f16, 256, 256, 4, 1), {{40, 200, 0}, {90, 500, 1}});
  masked_256.spec.mask = {.causal = false, .custom = true}, masked_256.custom = CustomPattern::blind;
  Case& masked_bytes = add_wgmma("masked_bytes", spec(DType::bf16, DType::fp8_e4m3, 64, 64, 1, 16), {{350, 900, 0}, {3, 40, 1}});
  masked_bytes.spec.mask = {.causal = false, .custom = true}, masked_bytes.custom = CustomPattern::documents;
  add_wgmma("e4m3", spec(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128, 1, 0), {{140, 300, 0}, {3, 40, 1}, {400, 400, 2}}, Text::wgmma_e4m3);
  Case& e4m3_64 =
      add_wgmma("e4m3_64", spec(DType::fp8_e4m3, DType::fp8_e4m3, 64, 64, 4, 16), {{40, 200, 0}, {3, 900, 1}}, Text::wgmma_e4m3);
  e4m3_64.scale_per_head = true, e4m3_64.spec.score.alibi = true;
  add_wgmma("e4m3_256", spec(DType::fp8_e4m3, DType::fp8_e4m3, 256, 256, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}},
            Text::wgmma_e4m3)
      .scale_per_head = true;
  Case& e4m3_96 =
      add_wgmma("e4m3_96", spec(DType::fp8_e4m3, DType::fp8_e4m3, 96, 96, 4, 16), {{40, 200, 0}, {3, 150, 1}}, Text::wgmma_e4m3);
  e4m3_96.spec.mask.window_left = 90, e4m3_96.spec.score.soft_cap = 20.f;
  add_wgmma("e4m3_rows", spec(DType::fp8_e4m3, DType::fp8_e4m3, 128, 128, 2, 1), {{70, 300, 0}, {3, 40, 1}, {200, 200, 2}},
            Text::wgmma_e4m3)
      .scale_per_head = true;
  Case& e4m3_rows_96 =
      add_wgmma("e4m3_rows_96", spec(DType::fp8_e4m3, DType::fp8_e4m3, 96, 96, 4, 3), {{40, 300, 0}, {3, 150, 1}}, Text::wgmma_e4m3);
  e4m3_rows_96.spec.mask.window_left = 90;
  // Products of more dims than rows have.
  Case& e4m3_80 =
      add_wgmma("e4m3_80", spec(DType::fp8_e4m3, DType::fp8_e4m3, 80, 80, 4, 16), {{40, 200, 0}, {3, 150, 1}}, Text::wgmma_e4m3);
  e4m3_80.spec.mask.window_left = 90, e4m3_80.scale_per_head = true;
  add_wgmma("e4m3_rows_112", spec(DType::fp8_e4m3, DType::fp8_e4m3, 112, 112, 2, 3), {{70, 300, 0}, {3, 40, 1}}, Text::wgmma_e4m3);
  add_wgmma("e4m3_224", spec(DType::fp8_e4m3, DType::fp8_e4m3, 224, 224, 2, 16), {{70, 170, 0}, {3, 40, 1}, {200, 200, 2}},
            Text::wgmma_e4m3)
      .spec.score.sinks = true;
  add_wgmma("e4m3_rows_256", spec(DType::fp8_e4m3, DType::fp8_e4m3, 256, 256, 2, 4), {{70, 170, 0}, {3, 40, 1}}, Text::wgmma_e4m3)
      .spec.score.sinks = true;

  // Values that are a part of the keys: read from the tile of keys where attention_sm80.cu has one, of 16 bits, bytes and planes, in teams
  // and of rows that are converted; with rows as long as a value, and shorter than the output's dims; by TMA from the keys' memory.
  const auto latent = [](AttentionSpec s) {
    s.kv_format = KvFormat::latent;
    return s;
  };
  const AttentionSpec shape = spec(DType::bf16, DType::bf16, 320, 256, 5, 16);
  for (const bool stored : {false, true}) {  // the second for the bits of the first
    Case& c = add(stored ? "latent_stored" : "latent", "sm_90a", gpu::kDecode, 1, stored ? shape : latent(shape));
    c.values = ValuePattern::rising, c.out_dtype = DType::f32;
  }
  Case& latent_bytes = add("latent_bytes", "sm_80", gpu::kDecode, 1, latent(spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 3)));
  latent_bytes.spec.mask.window_left = 100, latent_bytes.scale_per_head = true;
  add("latent_exact", "sm_120", gpu::kPrefill, 1, latent(spec(DType::f32, DType::f32, 64, 40, 1, 0))).spec.score.sinks = true;
  add("latent_rows", "sm_90a", gpu::kPrefill, 1, latent(spec(DType::f16, DType::bf16, 72, 72, 5, 16))).order = "lbhdt";
  add("latent_wide", "sm_90a", gpu::kDecode, 1, latent(spec(DType::bf16, DType::bf16, 272, 264, 16, 64))).requests = {{1, 70, 0},
                                                                                                                      {2, 35, 1}};
  add_decode("tma_latent", 16, latent(spec(DType::bf16, DType::bf16, 128, 64, 4, 16))).values = ValuePattern::rising;
  add_verify("verify_latent", latent(spec(DType::bf16, DType::bf16, 128, 64, 4, 16)), {{16, 300, 0}, {3, 1300, 1}, {1, 1, 4}});
  add_wgmma("wgmma_latent", latent(spec(DType::bf16, DType::bf16, 128, 64, 2, 64)), {{70, 300, 0}, {3, 40, 1}, {100, 100, 2}});

  // Positions that fall within a request, that several tokens share, that a tree of tokens has.
  Case& positions = add("positions", "sm_90a", gpu::kDecode, 32, spec(DType::bf16, DType::bf16, 64, 64, 4, 16));
  positions.requests = {{4, 140, 0}, {1, 300, 1}, {7, 90, 2}, {0, 0, 3}, {16, 16, 4}};
  positions.spec.mask.window_left = 60, positions.spec.mask.positions = true, positions.positions = PositionPattern::zigzag;
  positions.spec.score.alibi = true;
  Case& shared = add("shared_positions", "sm_90a", gpu::kDecode, 1, spec(DType::bf16, DType::bf16, 64, 64, 4, 16));
  shared.spec.mask.positions = true, shared.positions = PositionPattern::zigzag;
  // Some requests of a test see key 0 of a prompt in common, for others it is in front of their window or chunk.
  add("shared_window", "sm_90a", gpu::kDecode, 1, spec(DType::bf16, DType::bf16, 64, 64, 4, 16)).spec.mask.window_left = 568;
  Case& tma_chunk = add_decode("tma_shared_chunk", 16, spec(DType::bf16, DType::fp8_e4m3, 64, 64, 4, 16));
  tma_chunk.spec.mask.chunk = 270, tma_chunk.spec.mask.chunk_lookback = 1, tma_chunk.spec.mask.window_right = 3;
  tma_chunk.spec.mask.causal = false;
  Case& tma_scored = add_decode("tma_shared_mod", 16, spec(DType::bf16, DType::bf16, 128, 128, 2, 16));
  tma_scored.spec.mask.window_left = 568;
  tma_scored.spec.score_mod = parse_expression("float slope[]; where(kv == 3, score - 1, 15 * tanh(score / 15) + 0.01 * slope[head] * kv)");
  Case& spans = add("positions_prefill", "sm_90a", gpu::kPrefill, 1, spec(DType::bf16, DType::bf16, 128, 128, 2, 16));
  spans.spec.mask.chunk = 40, spans.spec.mask.positions = true, spans.positions = PositionPattern::spans;
  Case& branches = add("positions_tree", "sm_120", gpu::kPrefill, 1, spec(DType::f32, DType::f32, 64, 64, 1, 0));
  branches.spec.mask = {.causal = false, .window_right = 0, .custom = true, .positions = true};
  branches.positions = PositionPattern::tree, branches.custom = CustomPattern::tree;
  // Trees of drafts: with several and with one tile of rows a request, at borders of tiles, beside chains.
  const std::vector<CaseRequest> drafts{{8, 140, 0}, {1, 300, 1}, {7, 71, 2}, {0, 0, 3}, {16, 16, 4}, {5, 193, 5}};
  const auto as_tree = [&](Case& c, TreePattern pattern) -> Case& {
    c.requests = drafts, c.spec.mask.tree = true, c.tree = pattern;
    return c;
  };
  Case& nodes = as_tree(add("nodes", "sm_90a", gpu::kDecode, 32, spec(DType::bf16, DType::bf16, 64, 64, 4, 16)), TreePattern::random);
  nodes.spec.mask.window_left = 3, nodes.spec.score.alibi = true;
  as_tree(add("nodes_prefill", "sm_80", gpu::kPrefill, 1, spec(DType::bf16, DType::bf16, 128, 128, 2, 1)), TreePattern::binary).requests = {
      {64, 200, 0}, {70, 90, 1}, {33, 40, 2}};
  Case& far_nodes =
      as_tree(add("nodes_exact", "sm_120", gpu::kPrefill, 1, spec(DType::f32, DType::f32, 64, 64, 1, 0)), TreePattern::random);
  far_nodes.spec.mask.chunk = 9, far_nodes.spec.score.relative_buckets = 32, far_nodes.spec.score.relative_max_distance = 64;
  as_tree(add_decode("nodes_tma", 32, spec(DType::bf16, DType::bf16, 128, 128, 4, 16)), TreePattern::forest).spec.score.sinks = true;
  as_tree(add_verify("nodes_verify", spec(DType::bf16, DType::bf16, 128, 128, 4, 16), {}), TreePattern::random).requests = {
      {16, 300, 0}, {3, 1300, 1}, {0, 0, 2}, {64, 700, 3}, {1, 1, 5}, {8, 64, 6}};
  Case& node_rows = as_tree(add_verify("nodes_verify_rows", spec(DType::f16, DType::f16, 64, 64, 12, 1), {}), TreePattern::random);
  node_rows.spec.mask.window_left = 5, node_rows.spec.score.sinks = true;
  as_tree(add_wgmma("nodes_turns", spec(DType::bf16, DType::bf16, 128, 128, 2, 16), {}), TreePattern::binary).requests = {
      {64, 300, 0}, {3, 130, 1}, {140, 400, 2}, {0, 0, 3}, {33, 33, 5}};
  as_tree(add_decode("nodes_tma_bytes", 16, spec(DType::bf16, DType::fp8_e4m3, 64, 64, 2, 64)), TreePattern::random).spec.score.alibi =
      true;
  branches.spec.score.relative_buckets = 32, branches.spec.score.relative_max_distance = 64;
  // Expressions: of both kinds, with tiles that nobody sees and such that all see; beside other terms and masks.
  Case& mod_decode = add("mod_decode", "sm_90a", gpu::kDecode, 1, spec(DType::bf16, DType::bf16, 128, 128, 4, 16));
  mod_decode.spec.score_mod = parse_expression("float slope[]; 15 * tanh(score / 15) + 0.01 * slope[head] * (kv - q)");
  mod_decode.spec.mask_mod = parse_expression("kv < 5 | q - kv < 70");
  Case& mod_bytes = add("mod_bytes", "sm_80", gpu::kDecode, 32, spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 3));
  mod_bytes.spec.score = {.head_scales = true, .soft_cap = 20.f, .alibi = true}, mod_bytes.spec.mask.window_left = 200;
  mod_bytes.spec.score_mod = parse_expression("where(kv == 0, score - 1, score * (1 + 0.125 * head))");
  Case& mod_prefill = add("mod_prefill", "sm_90a", gpu::kPrefill, 1, spec(DType::bf16, DType::bf16, 64, 64, 2, 16));
  mod_prefill.spec.mask.causal = false;  // as bits
  mod_prefill.spec.mask_mod = parse_expression("int doc[,]; doc[batch, q] == doc[batch, kv] | batch == 1 & kv % 3 == head % 2");
  Case& mod_exact = add("mod_exact", "sm_120", gpu::kPrefill, 1, spec(DType::f32, DType::f32, 64, 64, 1, 0));
  mod_exact.spec.mask.causal = false;
  mod_exact.spec.mask_mod = parse_expression("kv < kv_len - q_len + 20 & (kv <= q | kv < 50)");
  mod_exact.spec.score_mod = parse_expression("score - exp(min(2, 0.01 * abs(q - kv)))");
  Case& mod_turns = add_wgmma("mod_turns", spec(DType::bf16, DType::bf16, 128, 128, 2, 16), {{140, 300, 0}, {3, 130, 1}, {70, 400, 2}});
  mod_turns.spec.score_mod = parse_expression("float slope[]; 15 * tanh(score / 15) + slope[head] * (kv - q)");
  Case& mod_masked = add_wgmma("mod_masked", spec(DType::bf16, DType::bf16, 128, 128, 2, 16), {{300, 300, 0}, {3, 40, 1}, {70, 500, 2}});
  mod_masked.spec.mask_mod = parse_expression("int doc[,]; doc[batch, q] == doc[batch, kv]");
  mod_masked.spec.score_mod = parse_expression("int doc[,]; score + 0.1 * doc[batch, kv] - 0.01 * abs(q - kv)");
  Case& mod_masked_bytes = add_wgmma("mod_masked_bytes", spec(DType::bf16, DType::fp8_e4m3, 64, 64, 1, 16), {{350, 900, 0}, {3, 40, 1}});
  mod_masked_bytes.spec.mask.causal = false;
  mod_masked_bytes.spec.mask_mod = parse_expression("kv < 5 | kv <= q + 3 & q - kv < 150 | batch == 1");
  Case& mod_tma = add_decode("mod_tma", 16, spec(DType::bf16, DType::bf16, 128, 128, 4, 16));
  mod_tma.spec.mask_mod = parse_expression("kv < 5 | q - kv < 70 | kv // 64 % 3 == 1 & batch < 2");
  mod_tma.spec.score_mod = parse_expression("float slope[]; score * sigmoid(score) + slope[head] * (kv - q)");
  Case& mod_tma_rows = add_decode("mod_tma_rows", 32, spec(DType::f16, DType::fp8_e4m3, 64, 64, 8, 1));
  mod_tma_rows.spec.mask_mod = parse_expression("kv % 5 != head % 3 & kv > 100 | q == kv");
  Case& mod_tma_gaps = add_decode("mod_tma_gaps", 32, spec(DType::bf16, DType::bf16, 64, 64, 2, 16));  // pieces that have no tile
  mod_tma_gaps.requests = {{1, 1500, 0}, {2, 900, 1}, {3, 40, 2}, {4, 1200, 3}};
  mod_tma_gaps.spec.mask.causal = false;
  mod_tma_gaps.spec.mask_mod = parse_expression("kv // 64 % 3 == 1 & kv < kv_len - 100 | batch == 1 & kv == 0");
  Case& mod_tma_runs = add_decode("mod_tma_runs", 16, spec(DType::bf16, DType::bf16, 64, 64, 2, 16));
  mod_tma_runs.spec.score_mod = parse_expression("where(kv == 0, score - 1, score - 0.01 * (q - kv))");
  // Rows in two places: bytes whose parts have a scale each, with queries of 16 bits and of bytes; converted, at any strides; values that
  // the tile of keys does not have. Records, as 16 bits and in planes.
  const auto apart = [](AttentionSpec s) {
    s.kv_format = KvFormat::latent_rope;
    return s;
  };
  Case& parts_bytes = add("parts_bytes", "sm_80", gpu::kDecode, 1, apart(spec(DType::bf16, DType::fp8_e4m3, 80, 48, 3, 3)));
  parts_bytes.scale_per_head = true, parts_bytes.rope_factor = 3.7f;
  Case& parts_queries = add("parts_queries", "sm_90a", gpu::kPrefill, 1, apart(spec(DType::fp8_e4m3, DType::fp8_e4m3, 72, 56, 2, 0)));
  parts_queries.scale_per_head = true, parts_queries.rope_factor = 0.3f;
  add("parts_rows", "sm_90a", gpu::kPrefill, 1, apart(spec(DType::f16, DType::bf16, 72, 40, 5, 16))).order = "lbhdt";
  add("parts_wide", "sm_90a", gpu::kDecode, 1, apart(spec(DType::bf16, DType::bf16, 272, 264, 16, 64))).requests = {{1, 70, 0}, {2, 35, 1}};
  add_latent_variants(all, spec, add, as_tree);

  // Of score_mod, what keys and rows have in common: of all heads and of each, of every type, in tiles at both edges of a window.
  Case& mod_keys = add_wgmma("mod_keys", spec(DType::bf16, DType::bf16, 128, 128, 4, 16), {{40, 200, 0}, {3, 390, 1}, {70, 70, 2}});
  mod_keys.spec.score_mod = parse_expression("float bias[,]; score + 0.5 * bias[head, kv]");
  Case& mod_columns = add_wgmma("mod_columns", spec(DType::f16, DType::fp8_e4m3, 64, 64, 3, 1), {{50, 170, 0}, {3, 300, 1}, {90, 90, 2}});
  mod_columns.spec.mask.window_left = 90;
  mod_columns.spec.score_mod = parse_expression(
      "int doc[,]; float bias[,]; bool shown[]; float slope[];"
      "where(doc[batch, q] == doc[batch, kv], score + bias[head, kv], score * sigmoid(0.01 * float(kv)) - slope[head])"
      " - where(kv % 7 == 3 | shown[kv % 3], 0.5, 0.0)");
  Case& mod_keys_256 = add_wgmma("mod_keys_256", spec(DType::bf16, DType::bf16, 256, 256, 3, 16), {{50, 300, 0}, {3, 390, 1}, {90, 90, 2}});
  mod_keys_256.spec.mask.window_left = 150;
  mod_keys_256.spec.score_mod = parse_expression("float bias[,]; bool shown[]; where(shown[kv % 3], score, 0.5 * score) + bias[head, kv]");
  // Verify with wgmma: pieces that have no tile, in front of an item's first one too; rows of two warpgroups, of which one has none.
  Case& mod_verify = add_verify("mod_verify", spec(DType::bf16, DType::bf16, 128, 128, 4, 16),
                                {{8, 1500, 0}, {16, 900, 1}, {3, 40, 2}, {5, 1200, 3}, {0, 0, 4}});
  mod_verify.spec.mask.causal = false;
  mod_verify.spec.mask_mod =
      parse_expression("kv // 64 % 3 == 1 & kv < kv_len - 100 | batch == 1 & kv == 0 | batch == 0 & q - kv < 70 & kv <= q");
  Case& mod_verify_rows =
      add_verify("mod_verify_rows", spec(DType::f16, DType::f16, 64, 64, 12, 1), {{2, 90, 0}, {10, 730, 1}, {5, 400, 2}});
  mod_verify_rows.spec.mask.window_left = 340;
  mod_verify_rows.spec.mask_mod = parse_expression("int doc[,]; doc[batch, q] == doc[batch, kv] | kv % 5 == head % 3");
  return all;
}

}  // namespace imbrex::test
