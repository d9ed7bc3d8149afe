#pragma once
// Small models and traces made by hand, for the tests of the scheduler and the replay.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "imbrex/model.h"
#include "serve/replay.h"
#include "serve/trace.h"

namespace imbrex::serve {

// One layer per mask and repeat; layers with the same mask share a KV group.
inline ModelSpec tiny_model(const std::vector<Mask>& masks, int block_size, int num_q_heads = 4, int num_kv_heads = 2, int head_dim = 16) {
  ModelSpec model;
  model.name = "tiny";
  model.family = "tiny";
  model.hidden_size = num_q_heads * head_dim;
  for (const Mask& mask : masks) {
    ModelLayer layer;
    layer.attention().num_q_heads = num_q_heads;
    layer.attention().num_kv_heads = num_kv_heads;
    layer.attention().head_dim_qk = layer.attention().head_dim_v = head_dim;
    layer.attention().block_size = block_size;
    layer.attention().mask = mask;
    layer.name = "decoder." + std::to_string(model.layers.size());
    layer.number = model.num_layers++;
    size_t group = 0;
    while (group < model.cache_groups.size() && model.cache_groups[group].name != mask.str()) ++group;
    if (group == model.cache_groups.size()) model.cache_groups.push_back({.name = mask.str(), .layers = {}, .bytes_per_token = 0});
    layer.cache_group = int(group);
    model.cache_groups[group].layers.push_back(int(model.layers.size()));
    model.cache_groups[group].bytes_per_token += layer.attention().kv_bytes_per_token();
    model.layers.push_back(layer);
  }
  return model;
}

// Layers of attention ('a': every key, 'w': a window of 24) and of short convolutions ('c'; 'b': with a bias, which shares their states;
// 'p': of the plain form, with SiLU).
inline ModelSpec tiny_hybrid_model(std::string_view layers, int block_size, int dim = 48, int width = 3) {
  ModelSpec model;
  model.name = model.family = "tiny hybrid";
  model.hidden_size = dim;
  for (const char kind : layers) {
    ModelLayer& layer = model.layers.emplace_back();
    layer.name = "decoder." + std::to_string(model.layers.size() - 1);
    layer.number = model.num_layers++;
    if (kind == 'a' || kind == 'w') {
      AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 16};
      if (kind == 'w') spec.mask = {.causal = true, .window_left = 23};
      layer.spec = spec;
    } else {
      ShortConvSpec spec{.dim = dim, .width = width, .bias = kind == 'b'};
      if (kind == 'p') spec.form = ShortConvForm::plain, spec.activation = ShortConvActivation::silu;
      layer.spec = spec;
    }
  }
  return model.with_kv(DType::bf16, DType::bf16, KvFormat::strided, block_size);
}

inline Mask full_mask() { return {}; }
inline Mask window_mask(int keys) { return {.causal = true, .window_left = keys - 1}; }
inline Mask chunk_mask(int keys) { return {.causal = true, .chunk = keys}; }

// Requests that share prefixes in a random tree, in blocks of `prefix_block` tokens.
inline Trace tree_trace(int num_requests, int prefix_block, int max_input, int max_output, uint64_t seed, double gap_s = 0) {
  std::mt19937_64 rng(seed);
  Trace trace;
  trace.source = "tree";
  trace.format = "mooncake";
  trace.prefix_block = prefix_block;
  uint64_t next_id = 0;
  for (int i = 0; i < num_requests; ++i) {
    TraceRequest r;
    r.arrival_s = gap_s * i;
    r.input_length = 1 + int(rng() % uint64_t(max_input));
    r.output_length = 1 + int(rng() % uint64_t(max_output));
    const size_t blocks = size_t((r.input_length + prefix_block - 1) / prefix_block);
    if (i > 0 && rng() % 4 != 0) {
      const auto& parent = trace.requests[rng() % uint64_t(i)].prefix_ids;
      r.prefix_ids.assign(parent.begin(), parent.begin() + int64_t(std::min<size_t>(rng() % (parent.size() + 1), blocks)));
    }
    while (r.prefix_ids.size() < blocks) r.prefix_ids.push_back(next_id++);
    trace.requests.push_back(r);
  }
  return trace;
}

// Options of a replay of such a model in which every output is checked.
inline ReplayOptions small_options() {
  ReplayOptions o;
  o.max_num_batched_tokens = 64;
  o.max_num_seqs = 8;
  o.block_size = 16;
  o.num_threads = 1;
  o.kv_format = "strided";
  o.pacing = Pacing::saturate;
  o.verify_fraction = 1;
  return o;
}

// The replay with changed options, which must not change a digest.
template <class Change>
ReplayResult expect_same_digests(const ModelSpec& model, const Trace& trace, ReplayOptions options, const ReplayResult& first,
                                 const Change& change) {
  change(options);
  ReplayResult r = replay(model, trace, options);
  EXPECT_TRUE(r.complete);
  EXPECT_EQ(r.digest, first.digest);
  EXPECT_EQ(r.decode_digest, first.decode_digest);
  return r;
}

}  // namespace imbrex::serve
