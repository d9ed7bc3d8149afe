// See weights.h. Names of tensors are those of Hugging Face's LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM.
#include "weights.h"

#include <string>

#include "check.h"
#include "safetensors.h"

namespace llama {
namespace {

using imbrex::DeviceTensor;
using imbrex::DType;
using imbrex::TensorView;

constexpr const char* kEmbedding = "model.embed_tokens.weight";

class Loader {
 public:
  Loader(const std::filesystem::path& folder, DType dtype, const imbrex::DeviceStream& stream)
      : checkpoint_(folder), dtype_(dtype), stream_(stream) {}

  DeviceTensor vector(const std::string& name, int64_t size) {
    std::vector<char> bytes = checkpoint_.read(name, {size}, dtype_);
    return stream_.copy_of(TensorView::contiguous(bytes.data(), dtype_, {size}));
  }
  DeviceTensor matrix(const std::string& name, int64_t out, int64_t in) {
    std::vector<char> bytes = checkpoint_.read(name, {out, in}, dtype_);
    return stream_.copy_of(TensorView::contiguous(bytes.data(), dtype_, {out, in}));
  }
  Linear linear(const std::string& name, int64_t out, int64_t in, bool bias) {
    return {matrix(name + ".weight", out, in), bias ? vector(name + ".bias", out) : DeviceTensor{}};
  }

  // Old checkpoints store the rotation's frequencies, and some a copy of a tied embedding: both follow from what was read.
  void finish(const Config& config) {
    if (config.tied) checkpoint_.skip("lm_head.weight");
    for (int i = 0; i < config.layers(); ++i) checkpoint_.skip("model.layers." + std::to_string(i) + ".self_attn.rotary_emb.inv_freq");
    check(checkpoint_.left().empty(), "expected no tensor beside those of the model, got ", checkpoint_.left().size(), ", the first is ",
          checkpoint_.left().empty() ? "" : shortened(*checkpoint_.left().begin()));
  }

 private:
  Checkpoint checkpoint_;
  DType dtype_;
  const imbrex::DeviceStream& stream_;
};

}  // namespace

DType natural_dtype(const std::filesystem::path& folder) {
  return Checkpoint(folder).dtype(kEmbedding) == DType::bf16 ? DType::bf16 : DType::f32;
}

Weights load_weights(const std::filesystem::path& folder, const Config& config, DType dtype, const imbrex::DeviceStream& stream) {
  Loader load(folder, dtype, stream);
  Weights weights;
  weights.embedding = load.matrix(kEmbedding, config.vocab, config.hidden);
  weights.norm = load.vector("model.norm.weight", config.hidden);
  weights.output = config.tied ? Linear{weights.embedding, {}} : load.linear("lm_head", config.vocab, config.hidden, false);
  for (int i = 0; i < config.layers(); ++i) {
    const std::string at = "model.layers." + std::to_string(i) + ".", attention = at + "self_attn.", mlp = at + "mlp.";
    const imbrex::AttentionSpec& spec = config.spec(i);
    const int64_t q = int64_t(spec.num_q_heads) * spec.head_dim_qk, kv = int64_t(spec.num_kv_heads) * spec.head_dim_qk;
    LayerWeights& w = weights.layers.emplace_back();
    w.input_norm = load.vector(at + "input_layernorm.weight", config.hidden);
    w.post_attention_norm = load.vector(at + "post_attention_layernorm.weight", config.hidden);
    if (config.qk_norm) w.q_norm = load.vector(attention + "q_norm.weight", spec.head_dim_qk);
    if (config.qk_norm) w.k_norm = load.vector(attention + "k_norm.weight", spec.head_dim_qk);
    w.q = load.linear(attention + "q_proj", q, config.hidden, config.qkv_bias);
    w.k = load.linear(attention + "k_proj", kv, config.hidden, config.qkv_bias);
    w.v = load.linear(attention + "v_proj", kv, config.hidden, config.qkv_bias);
    w.o = load.linear(attention + "o_proj", config.hidden, q, config.o_bias);
    w.gate = load.linear(mlp + "gate_proj", config.intermediate, config.hidden, config.mlp_bias);
    w.up = load.linear(mlp + "up_proj", config.intermediate, config.hidden, config.mlp_bias);
    w.down = load.linear(mlp + "down_proj", config.hidden, config.intermediate, config.mlp_bias);
  }
  load.finish(config);
  return weights;
}

}  // namespace llama
