#pragma once
// What the forward pass needs to know of a model, from its config.json. The attention of each layer is read by imbrex itself.
#include <cstdint>
#include <filesystem>
#include <vector>

#include "imbrex/model.h"

namespace llama {

struct Config {
  imbrex::ModelSpec model;  // the attention spec of each layer: heads, head_dim, window
  int64_t hidden = 0, intermediate = 0, vocab = 0;
  int64_t max_positions = 0;  // tokens of a request, prompt and answer
  float rms_norm_eps = 0;
  bool tied = false;  // the embedding is the output projection too
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;                // each head of q and k is normalised before the rotation
  std::vector<double> rope_frequency;  // [head_dim / 2], radians a position

  int layers() const { return int(model.layers.size()); }
  const imbrex::AttentionSpec& spec(int layer) const { return model.layers[size_t(layer)].attention(); }
};

// model_type llama, mistral, qwen2 or qwen3. What a config asks for and this example does not do is refused by name.
Config load_config(const std::filesystem::path& folder);

}  // namespace llama
