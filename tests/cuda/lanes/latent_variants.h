#pragma once
// The specialisations of kernels for latents of many dims whose texts run on the host: a part of variants.h.
#include <string>
#include <utility>
#include <vector>

#include "cuda/lanes/variant.h"

namespace imbrex::test {

// `spec`, `add` and `as_tree` are those of variants().
inline void add_latent_variants(std::vector<Variant>& all, const auto& spec, const auto& add, const auto& as_tree) {
  // attention_sm90_latent.cu: a token with rows for two tiles, several tokens in one, small pages of keys that are all values, and of
  // blocks that hand each other rows, no maps; pieces of three levels.
  const auto add_tiles = [&](const char* name, AttentionSpec s, std::vector<CaseRequest> requests, Text text = Text::latent) -> Case& {
    s.num_q_heads /= 2, s.num_kv_heads = 1, s.kv_format = KvFormat::latent;
    Case& c = add(name, "sm_90a", gpu::kDecode, 1, s);
    c.requests = std::move(requests);
    all.back().text = text;
    return c;
  };
  add_tiles("latent_tiles", spec(DType::bf16, DType::bf16, 576, 512, 80, 64), {{1, 300, 0}, {0, 0, 2}, {2, 70, 1}}).values =
      ValuePattern::rising;
  const DType out_of_tiles = all.back().c.out_dtype;
  Case& halves = add_tiles("latent_halves", spec(DType::f16, DType::f16, 272, 256, 16, 16), {{4, 300, 0}, {1, 700, 1}, {9, 9, 3}});
  halves.spec.mask.window_left = 140, halves.spec.score.sinks = true;
  add_tiles("latent_pages", spec(DType::bf16, DType::bf16, 384, 384, 20, 1), {{3, 90, 0}, {5, 200, 1}}).spec.score.soft_cap = 20.f;
  add_tiles("latent_handed", spec(DType::bf16, DType::bf16, 576, 512, 80, 1), {{1, 700, 0}, {2, 70, 1}}).values = ValuePattern::rising;
  Case& handed_halves =
      add_tiles("latent_handed_halves", spec(DType::f16, DType::f16, 272, 256, 72, 4), {{4, 300, 0}, {1, 700, 1}, {9, 9, 3}});
  handed_halves.spec.mask.window_left = 140, handed_halves.spec.score.sinks = true;
  add_tiles("latent_elements", spec(DType::bf16, DType::bf16, 320, 256, 8, 0), {{8, 90, 0}, {1, 200, 1}}, Text::latent_without_maps).order =
      "lbhdt";

  // The same with rows of several tokens for two tasks, of which an item's end, its last piece or a window leaves one idle.
  const auto of_prefill = [&](Case& c) -> Case& {
    all.back().regime = gpu::kPrefill;
    return c;
  };
  Case& tokens =
      of_prefill(add_tiles("latent_tokens", spec(DType::bf16, DType::bf16, 576, 512, 64, 64), {{7, 300, 0}, {0, 0, 2}, {3, 67, 1}}));
  tokens.values = ValuePattern::rising;
  const Case same_tokens = tokens;
  Case& token_window = of_prefill(
      add_tiles("latent_token_window", spec(DType::f16, DType::f16, 272, 256, 32, 16), {{9, 300, 0}, {1, 700, 1}, {11, 1100, 3}}));
  token_window.spec.mask.window_left = 33, token_window.spec.score.sinks = true;
  of_prefill(add_tiles("latent_token_pages", spec(DType::bf16, DType::bf16, 320, 256, 32, 1), {{5, 700, 0}, {2, 70, 1}, {1, 33, 1}}));
  // Tokens that leave rows of each task over, and many of them.
  of_prefill(add_tiles("latent_token_rest", spec(DType::bf16, DType::bf16, 576, 512, 20, 64), {{7, 300, 0}, {0, 0, 2}, {4, 67, 1}}))
      .values = ValuePattern::rising;
  Case& token_many =
      of_prefill(add_tiles("latent_token_many", spec(DType::f16, DType::f16, 320, 256, 6, 1), {{23, 300, 0}, {9, 90, 1}, {12, 700, 3}}));
  token_many.spec.mask.window_left = 70, token_many.spec.score.soft_cap = 20.f;

  // attention_sm90_latent_spread.cu: the same items, for more blocks of a cluster; steps with a tile and with all, of one block's keys and
  // of all blocks', in one piece and in many; small pages.
  Case& spread_tiles = add_tiles("spread_tiles", spec(DType::bf16, DType::bf16, 576, 512, 80, 64), {{1, 700, 0}, {0, 0, 2}, {2, 70, 1}},
                                 Text::latent_spread);
  spread_tiles.values = ValuePattern::rising, spread_tiles.out_dtype = out_of_tiles;
  const Case same_tiles = spread_tiles;
  add_tiles("spread_fewest", same_tiles.spec, same_tiles.requests, Text::latent_spread_fewest) = same_tiles;
  Case& spread_pages =
      add_tiles("spread_pages", spec(DType::f16, DType::f16, 272, 256, 72, 8), {{2, 300, 0}, {1, 600, 1}, {3, 3, 3}}, Text::latent_spread);
  spread_pages.spec.score.sinks = true;
  add_tiles("spread_ragged", spec(DType::bf16, DType::bf16, 384, 384, 130, 0), {{1, 90, 0}, {1, 500, 1}}, Text::latent_spread);
  add_tiles("spread_rows", spec(DType::bf16, DType::bf16, 576, 512, 80, 1), {{1, 700, 0}, {2, 70, 1}}, Text::latent_spread).values =
      ValuePattern::rising;
  add_tiles("spread_heads", spec(DType::bf16, DType::bf16, 576, 512, 40, 1), {{1, 700, 0}, {3, 70, 1}}, Text::latent_spread);
  add_tiles("spread_short_rows", spec(DType::f16, DType::f16, 272, 256, 72, 4), {{2, 300, 0}, {1, 600, 1}, {3, 3, 3}}, Text::latent_spread);

  of_prefill(add_tiles("spread_tokens", same_tokens.spec, same_tokens.requests, Text::latent_spread_fewest)) = same_tokens;
  of_prefill(add_tiles("spread_token_rest", spec(DType::f16, DType::f16, 272, 256, 24, 16), {{5, 300, 0}, {1, 600, 1}, {3, 3, 3}},
                       Text::latent_spread))
      .spec.score.sinks = true;

  // attention_sm90_latent_pair.cu: the same with one tile for a token; halves that are not as long, an odd number of chunks, no dims behind
  // the values.
  add_tiles("pair_tiles", spec(DType::bf16, DType::bf16, 576, 512, 64, 64), {{1, 300, 0}, {0, 0, 2}, {2, 70, 1}}, Text::latent_pair)
      .values = ValuePattern::rising;
  const DType out_of_pairs = all.back().c.out_dtype;
  Case& spread_paired = add_tiles("spread_paired", spec(DType::bf16, DType::bf16, 576, 512, 64, 64), {{1, 700, 0}, {0, 0, 2}, {2, 70, 1}},
                                  Text::latent_spread_fewest);
  spread_paired.values = ValuePattern::rising, spread_paired.out_dtype = out_of_pairs;
  Case& pair_halves =
      add_tiles("pair_halves", spec(DType::f16, DType::f16, 304, 256, 16, 16), {{4, 300, 0}, {1, 700, 1}, {9, 9, 3}}, Text::latent_pair);
  pair_halves.spec.score.sinks = true;
  add_tiles("pair_pages", spec(DType::bf16, DType::bf16, 384, 384, 20, 8), {{3, 90, 0}, {5, 200, 1}}, Text::latent_pair);
  add_tiles("pair_elements", spec(DType::bf16, DType::bf16, 320, 256, 8, 0), {{8, 90, 0}, {1, 200, 1}}, Text::latent_pair_without_maps)
      .order = "lbhdt";

  // attention_sm90_latent_decode.cu: rows of one token and of several, a mask of their own; no maps, and dims of which a product is short;
  // bytes, and records, in pages of their own and with maps.
  const auto add_few = [&](const char* name, gpu::Regime regime, AttentionSpec s, std::vector<CaseRequest> requests) -> Case& {
    s.num_q_heads /= s.num_kv_heads, s.num_kv_heads = 1;
    if (s.kv_format == KvFormat::strided) s.kv_format = KvFormat::latent;
    Case& c = add(name, "sm_90a", regime, 1, s);
    c.requests = std::move(requests);
    all.back().text = Text::latent_decode;
    return c;
  };
  add_few("few_latents", gpu::kDecode, spec(DType::bf16, DType::bf16, 576, 512, 16, 64), {{1, 300, 0}, {0, 0, 2}, {1, 70, 1}}).values =
      ValuePattern::rising;
  const DType few_out = all.back().c.out_dtype;
  Case& few_masked =
      add_few("few_masked", gpu::kVerify, spec(DType::f16, DType::f16, 320, 256, 10, 1), {{4, 300, 0}, {1, 90, 1}, {7, 7, 3}});
  few_masked.spec.mask.custom = true, few_masked.custom = CustomPattern::tree, few_masked.spec.score.sinks = true;
  Case& few_elements = add_few("few_elements", gpu::kVerify, spec(DType::bf16, DType::bf16, 272, 256, 5, 0), {{8, 90, 0}, {1, 200, 1}});
  few_elements.order = "lbhdt", few_elements.spec.score = {.soft_cap = 20.f, .alibi = true};
  all.back().text = Text::latent_decode_without_maps;
  Case& few_bytes = add_few("few_bytes", gpu::kVerify, spec(DType::bf16, DType::fp8_e4m3, 448, 384, 40, 16), {{2, 200, 0}, {1, 70, 1}});
  few_bytes.spec.mask.window_left = 100;
  add_few("few_byte_rows", gpu::kDecode, spec(DType::f16, DType::fp8_e4m3, 272, 256, 10, 1), {{1, 200, 0}, {1, 70, 1}}).values =
      ValuePattern::rising;
  Case& few_byte_elements =
      add_few("few_byte_elements", gpu::kVerify, spec(DType::bf16, DType::fp8_e4m3, 304, 256, 5, 0), {{8, 90, 0}, {1, 200, 1}});
  few_byte_elements.order = "lbhdt", few_byte_elements.spec.score = {.soft_cap = 20.f, .alibi = true};
  all.back().text = Text::latent_decode_without_maps;

  // attention_sm90_latent_decode_spread.cu: the same items, for the blocks of a cluster; small pages, tokens in one item, three blocks.
  for (const auto& [name, text] : {std::pair{"few_wide", Text::latent_decode},
                                   {"few_wide_spread", Text::latent_decode_spread},
                                   {"few_wide_fewest", Text::latent_decode_spread_fewest}}) {
    Case& c = add_few(name, gpu::kDecode, spec(DType::bf16, DType::bf16, 576, 512, 32, 64), {{1, 900, 0}, {0, 0, 2}, {1, 70, 1}});
    c.values = ValuePattern::rising, c.out_dtype = few_out;
    all.back().text = text;
  }
  add_few("few_spread", gpu::kDecode, spec(DType::bf16, DType::bf16, 576, 512, 16, 64), {{1, 700, 0}, {0, 0, 2}, {1, 70, 1}}).out_dtype =
      few_out;
  all.back().text = Text::latent_decode_spread_fewest;
  Case& few_spread_rows =
      add_few("few_spread_rows", gpu::kVerify, spec(DType::f16, DType::f16, 320, 256, 10, 1), {{3, 300, 0}, {1, 90, 1}, {3, 3, 3}});
  few_spread_rows.spec.score.sinks = true;
  all.back().text = Text::latent_decode_spread_fewest;
  add_few("few_spread_ragged", gpu::kVerify, spec(DType::bf16, DType::bf16, 384, 384, 5, 0), {{8, 90, 0}, {1, 500, 1}});
  all.back().text = Text::latent_decode_spread_fewest;

  const auto records = [&](DType q, int group, int block_size) {
    AttentionSpec s = spec(q, DType::fp8_e4m3, 576, 512, group, block_size);
    s.kv_format = KvFormat::fp8_ds_mla, s.num_kv_heads = 1, s.num_q_heads = group;
    return s;
  };
  add_few("few_records", gpu::kDecode, records(DType::bf16, 16, 1), {{1, 300, 0}, {1, 70, 1}}).out_dtype = DType::f32;
  add_few("few_record_pages", gpu::kDecode, records(DType::bf16, 32, 16), {{1, 300, 0}, {1, 700, 1}}).values = ValuePattern::rising;
  add("records", "sm_90a", gpu::kDecode, 1, records(DType::bf16, 16, 64)).spec.mask.window_left = 100;
  add("records_exact", "sm_90a", gpu::kPrefill, 1, records(DType::f32, 2, 3)).requests = {{3, 40, 0}, {20, 20, 1}};
  // Trees over latents: few rows and many, in clusters and not, with windows and distances; a chain that is longer than a tree may be.
  const auto as_nodes = [&](Case& c, TreePattern pattern) -> Case& {
    as_tree(c, pattern).requests = {{8, 140, 0}, {3, 66, 1}, {0, 0, 2}, {16, 68, 3}, {68, 75, 4}};
    return c;
  };
  Case& few_nodes = as_nodes(add_few("nodes_few", gpu::kVerify, spec(DType::bf16, DType::bf16, 320, 256, 6, 16), {}), TreePattern::random);
  few_nodes.spec.mask.window_left = 65, few_nodes.spec.score.sinks = true;
  few_nodes.requests.push_back({8, 200, 5});  // whose windows begin on both sides of where a tile does
  as_nodes(add_few("nodes_few_spread", gpu::kVerify, spec(DType::bf16, DType::bf16, 320, 256, 6, 16), {}), TreePattern::random);
  all.back().text = Text::latent_decode_spread_fewest;
  as_nodes(add_few("nodes_few_bytes", gpu::kDecode, spec(DType::f16, DType::fp8_e4m3, 272, 256, 10, 1), {}), TreePattern::binary)
      .spec.score = {.soft_cap = 20.f, .alibi = true};
  as_nodes(add_few("nodes_few_records", gpu::kVerify, records(DType::bf16, 20, 64), {}), TreePattern::random).requests = {{5, 129, 0}};
  Case& tile_nodes = as_nodes(add_tiles("nodes_latent", spec(DType::f16, DType::f16, 272, 256, 10, 16), {}), TreePattern::forest);
  tile_nodes.spec.mask.window_left = 65, tile_nodes.spec.score.soft_cap = 20.f, tile_nodes.requests.push_back({8, 200, 5});
  for (const auto& [name, text] : {std::pair{"nodes_latent_tiles", Text::latent}, {"nodes_spread", Text::latent_spread}}) {
    Case& c = as_nodes(add_tiles(name, spec(DType::bf16, DType::bf16, 320, 256, 72, 16), {}, text), TreePattern::random);
    c.requests = {{4, 140, 0}, {0, 0, 2}, {3, 66, 1}}, c.out_dtype = DType::bf16;
  }
  as_nodes(of_prefill(add_tiles("nodes_latent_tokens", spec(DType::bf16, DType::bf16, 320, 256, 32, 16), {})), TreePattern::random)
      .spec.mask.window_left = 65;
  as_nodes(add_tiles("nodes_spread_paired", spec(DType::f16, DType::f16, 512, 512, 40, 16), {}, Text::latent_spread_fewest),
           TreePattern::random)
      .requests = {{4, 140, 0}, {0, 0, 2}, {3, 66, 1}};
  as_nodes(add_tiles("nodes_pair", spec(DType::bf16, DType::bf16, 320, 256, 16, 16), {}, Text::latent_pair), TreePattern::random);
}

}  // namespace imbrex::test
