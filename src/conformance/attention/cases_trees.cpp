// Queries that are trees of drafts: of every shape, under every kind of mask and position bias, beside prompts and decode, at borders of
// tiles and of splits, and with as many rows as every regime of a GPU has.
#include "conformance/attention/case_table.h"

namespace imbrex {

void add_tree_cases(CaseTable& table) {
  struct Variant {
    const char* name;
    TreePattern tree;
    Mask mask;
    ScoreMod score;
  };
  using enum TreePattern;
  const Variant variants[] = {
      {"binary", binary, {}, {}},
      {"random", random, {}, {.sinks = true}},
      {"wide", wide, {}, {.soft_cap = 20.f}},
      {"forest", forest, {}, {}},
      {"chain", none, {}, {}},
      {"window", random, {.window_left = 40}, {}},
      {"short_window", random, {.window_left = 2}, {.sinks = true}},
      {"own_key", forest, {.window_left = 0}, {}},
      {"chunk", random, {.chunk = 9, .chunk_lookback = 1}, {}},
      {"alibi", random, {}, {.alibi = true}},
      {"alibi_window", random, {.window_left = 3, .window_right = 0}, {.alibi = true}},
      {"alibi_sqrt", binary, {}, {.alibi = true, .alibi_sqrt = true}},
      {"relative", random, {}, {.relative_buckets = 32, .relative_max_distance = 128}},
      {"head_scales", forest, {}, {.head_scales = true, .soft_cap = 30.f}},
  };
  const auto set = [](Case& c, const Variant& v) {
    c.tree = v.tree;
    c.spec.mask = v.mask, c.spec.mask.tree = true;
    c.spec.score = v.score;
  };
  const Requests border{{8, 131}, {13, 13}, {1, 64}, {20, 140}, {7, 129}, {5, 130}},
      nodes{{64, 200}, {33, 33}, {6, 128}, {64, 64}, {16, 75}}, beside_prompts{{90, 150}, {8, 60}, {0, 9}, {1, 140}, {66, 66}, {9, 9}};
  const NamedRequests steps[] = {{"verify", kVerify}, {"border", border}, {"nodes", nodes}, {"mixed", beside_prompts}};
  for (const Variant& v : variants) {
    for (const NamedRequests& step : steps) {
      const size_t i = table.cases.size();
      set(table.add(fmt::format("tree_{}_{}", v.name, step.name), i % 3 == 0 ? 4 : 1, i % 3 == 0 ? 1 : 2, {64, 64}, table.types(),
                    step.requests),
          v);
    }
    for (const DTypes types : {kDTypes[0], kDTypes[1], kDTypes[3]}) {
      const int group = int(table.cases.size() % 4) * 2 + 1;
      set(table.add(fmt::format("tree_{}_g{}_{}_{}", v.name, group, to_string(types.q), to_string(types.kv)), group, 2, {128, 128}, types,
                    Requests{{8, 400}, {4, 256}, {17, 300}, {2, 130}, {1, 77}}),
          v);
    }
  }
  // More keys than a split has, and a tree on both sides of where one ends.
  const Requests long_ones{{8, 9000}, {9, 4100}, {5, 4500}};
  for (const size_t i : {0u, 5u, 9u})
    set(table.add(fmt::format("tree_{}_long", variants[i].name), 4, 1, {64, 64}, kDTypes[i % 2], long_ones), variants[i]);
  // Pages of one token, and keys without pages.
  for (const int block_size : {0, 1, 5}) {
    Case& c = table.add(fmt::format("tree_random_page{}", block_size), 2, 2, {64, 64}, kDTypes[0], border);
    set(c, variants[1]);
    c.spec.block_size = block_size, c.csr = block_size == 1;
  }
  // Latents.
  for (const DTypes types : {kDTypes[0], kDTypes[1]}) {
    Case& c = table.add(fmt::format("tree_latent_{}", to_string(types.q)), 4, 1, {128, 64}, types, border);
    set(c, variants[0]);
    c.spec.kv_format = KvFormat::latent;
  }
}

// Latents of as many dims as models have, of which kernels of GPUs take 16, 32 or 64 rows at a time, in one thread block or in a cluster:
// of every format, with tiles in front of the tree that all rows see, and a chain that is longer than a tree may be.
void add_latent_tree_cases(CaseTable& table) {
  struct Layer {
    const char* name;
    int group;
    Dims dims;
    DTypes types;
    KvFormat format;
    TreePattern tree;
    Mask mask;
    ScoreMod score;
  };
  using enum TreePattern;
  using enum KvFormat;
  constexpr DTypes kBf16{DType::bf16, DType::bf16}, kBytes{DType::bf16, DType::fp8_e4m3}, kF16{DType::f16, DType::f16};
  constexpr Dims kLarge{576, 512};
  const Layer layers[] = {
      {"g16", 16, kLarge, kBf16, latent, random, {}, {}},
      {"g64", 64, kLarge, kBf16, latent, binary, {}, {.sinks = true}},
      {"g128", 128, kLarge, kBf16, latent, random, {}, {}},
      {"g16_bytes", 16, kLarge, kBytes, latent, random, {}, {}},
      {"g16_records", 16, kLarge, kBytes, fp8_ds_mla, forest, {}, {}},
      {"g64_records", 64, kLarge, kBytes, fp8_ds_mla, random, {}, {}},
      {"g16_window", 16, kLarge, kBf16, latent, random, {.window_left = 3}, {}},
      {"g80_chunk", 80, kLarge, kBf16, latent, forest, {.chunk = 9, .chunk_lookback = 1}, {}},
      {"g5_bytes_window", 5, kLarge, kBytes, latent, wide, {.window_left = 65}, {.sinks = true}},
      {"g20_f16_cap", 20, {448, 384}, kF16, latent, random, {.window_left = 65}, {.soft_cap = 20.f}},
      {"g16_alibi", 16, {320, 256}, kF16, latent, random, {}, {.alibi = true}},
      {"g10_bytes_alibi",
       10,
       {272, 256},
       kBytes,
       latent,
       binary,
       {.window_left = 4},
       {.head_scales = true, .soft_cap = 30.f, .alibi = true}},
  };
  for (const Layer& layer : layers) {
    // Windows of 65 keys in front of the own one begin on both sides of where a tile does.
    const Requests many{{8, 200}, {3, 65}, {0, 0}, {66, 70}, {20, 129}, {1, 300}}, some{{8, 200}, {3, 65}, {0, 0}, {20, 64}, {1, 300}},
        few{{8, 70}, {3, 65}, {1, 30}}, fewest{{8, 40}, {1, 30}};
    const Requests& requests = layer.group > 80 ? fewest : layer.group > 20 ? few : layer.group > 10 ? some : many;
    for (const int block_size : {64, 1}) {
      Case& c = table.add(fmt::format("tree_latent_{}_page{}", layer.name, block_size), layer.group, 1, layer.dims, layer.types, requests);
      c.spec.kv_format = layer.format, c.spec.block_size = block_size;
      c.tree = layer.tree, c.spec.mask = layer.mask, c.spec.mask.tree = true, c.spec.score = layer.score;
    }
  }
}

}  // namespace imbrex
