#pragma once
// What the forward pass needs to know of a model, from its config.json. The attention of each layer is read by imbrex itself.
#include <cstdint>
#include <filesystem>
#include <vector>

#include "imbrex/model.h"

namespace llama {

// Of DeepSeek's mixture of experts: each token goes to the `chosen` ones that its router scores highest, and to shared ones.
struct Experts {
  int count = 0, chosen = 0;  // 0: none
  int first_layer = 0;        // those before it have a plain network
  int64_t intermediate = 0, shared_intermediate = 0;
  float scaling = 1;  // of the routed ones
};

struct Config {
  imbrex::ModelSpec model;  // the attention spec of each layer: heads, head_dim, window; or the dimensions of latent attention
  int64_t hidden = 0, intermediate = 0, vocab = 0;
  int64_t max_positions = 0;  // tokens of a request, prompt and answer
  float rms_norm_eps = 0;
  bool tied = false;  // the embedding is the output projection too
  bool qkv_bias = false, o_bias = false, mlp_bias = false;
  bool qk_norm = false;                // each head of q and k is normalised before the rotation
  std::vector<double> rope_frequency;  // [rotated elements / 2], radians a position
  double rope_scale = 1;               // of cosines and sines
  int64_t q_lora_rank = 0;             // of latent attention; 0: queries are projected at once
  Experts experts;

  int layers() const { return int(model.layers.size()); }
  const imbrex::AttentionSpec& spec(int layer) const { return model.layers[size_t(layer)].attention(); }
  bool latent() const { return std::holds_alternative<imbrex::MlaSpec>(model.layers[0].spec); }
  const imbrex::MlaSpec& mla(int layer) const { return std::get<imbrex::MlaSpec>(model.layers[size_t(layer)].spec); }
  bool has_experts(int layer) const { return experts.count > 0 && layer >= experts.first_layer; }
};

// model_type llama, mistral, qwen2, qwen3 or deepseek_v2. What a config asks for and this example does not do is refused by name.
Config load_config(const std::filesystem::path& folder);

}  // namespace llama
