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

struct LayerWeights {
  imbrex::DeviceTensor input_norm, post_attention_norm;  // [hidden]
  imbrex::DeviceTensor q_norm, k_norm;                   // [head_dim], or empty
  Linear q, k, v, o, gate, up, down;
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
