#pragma once
// The weights of a model on its device, read from a checkpoint folder; used by Model.
#include <filesystem>
#include <vector>

#include "config.h"
#include "imbrex/device_stream.h"

namespace llama {

// y = x weight^T + bias
struct Linear {
  imbrex::DeviceTensor weight;  // [out, in]
  imbrex::DeviceTensor bias;    // [out], or empty
};

// down(silu(gate(x)) * up(x))
struct Network {
  Linear gate, up, down;
};

// Of latent attention. Rotated elements are in another order than in the checkpoint: the pairs that DeepSeek turns lie side by side there,
// and half a head apart here, as those of other models do.
struct LatentWeights {
  Linear q_low;                              // with q_lora_rank: what comes before `q`
  imbrex::DeviceTensor q_norm, latent_norm;  // [q_lora_rank] or empty, [kv_lora_rank]
  Linear latent, k_rope;                     // the two parts of kv_a_proj_with_mqa
  imbrex::DeviceTensor kv_b;                 // [heads, nope + v, kv_lora_rank]
};

struct LayerWeights {
  imbrex::DeviceTensor input_norm, post_attention_norm;  // [hidden]
  imbrex::DeviceTensor q_norm, k_norm;                   // [head_dim], or empty
  Linear q, k, v, o;                                     // k and v are empty with latent attention
  LatentWeights latent;
  Network network;               // where there are experts, the shared ones
  Linear router;                 // [experts, hidden], or empty
  std::vector<Network> experts;  // empty: none
};

struct Weights {
  imbrex::DeviceTensor embedding;  // [vocab, hidden]
  std::vector<LayerWeights> layers;
  imbrex::DeviceTensor norm;  // [hidden]
  Linear output;              // [vocab, hidden]: the embedding itself where the two are tied
};

// What a checkpoint runs in without rounding of its weights: bf16 where they are, f32 otherwise.
imbrex::DType natural_dtype(const std::filesystem::path& folder);
// In f32 or bf16, whatever the checkpoint has. A tensor that is missing, left over or of the wrong shape is an error.
Weights load_weights(const std::filesystem::path& folder, const Config&, imbrex::DType, const imbrex::DeviceStream&);

}  // namespace llama
