// See weights.h. Names of tensors are those of Hugging Face's LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
// and DeepseekV2ForCausalLM.
#include "weights.h"

#include <cstring>
#include <numeric>
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

  // Some rows of a matrix, in their order.
  Linear rows(const std::string& name, int64_t out, int64_t in, const std::vector<int64_t>& chosen) {
    const std::vector<char> all = checkpoint_.read(name + ".weight", {out, in}, dtype_);
    const size_t row = size_t(in * imbrex::size_of(dtype_));
    std::vector<char> bytes(chosen.size() * row);
    for (size_t i = 0; i < chosen.size(); ++i) std::memcpy(&bytes[i * row], &all[size_t(chosen[i]) * row], row);
    return {stream_.copy_of(TensorView::contiguous(bytes.data(), dtype_, {int64_t(chosen.size()), in})), {}};
  }
  Network network(const std::string& at, int64_t intermediate, int64_t hidden, bool bias) {
    return {linear(at + "gate_proj", intermediate, hidden, bias), linear(at + "up_proj", intermediate, hidden, bias),
            linear(at + "down_proj", hidden, intermediate, bias)};
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

// Rows [begin, end), and behind them `rotated` whose pairs lie side by side: first those of even places, then those of odd ones.
void append_rows(int64_t begin, int64_t end, int64_t rotated, std::vector<int64_t>& rows) {
  for (int64_t i = begin; i < end; ++i) rows.push_back(i);
  for (const int64_t odd : {0, 1})
    for (int64_t i = odd; i < rotated; i += 2) rows.push_back(end + i);
}

void load_latent(Loader& load, const std::string& attention, const Config& config, const imbrex::MlaSpec& spec, LayerWeights& w) {
  const int64_t heads = spec.num_heads, dim = spec.qk_dim(), rank = spec.kv_lora_rank, rope = spec.qk_rope_dim, low = config.q_lora_rank;
  LatentWeights& latent = w.latent;
  std::vector<int64_t> of_q, of_latent(static_cast<size_t>(rank)), of_rope;
  for (int64_t h = 0; h < heads; ++h) append_rows(h * dim, h * dim + spec.qk_nope_dim, rope, of_q);
  std::iota(of_latent.begin(), of_latent.end(), 0);
  append_rows(rank, rank, rope, of_rope);
  if (low > 0) {
    latent.q_low = load.linear(attention + "q_a_proj", low, config.hidden, false);
    latent.q_norm = load.vector(attention + "q_a_layernorm.weight", low);
  }
  w.q = load.rows(attention + (low > 0 ? "q_b_proj" : "q_proj"), heads * dim, low > 0 ? low : config.hidden, of_q);
  latent.latent = load.rows(attention + "kv_a_proj_with_mqa", rank + rope, config.hidden, of_latent);
  latent.k_rope = load.rows(attention + "kv_a_proj_with_mqa", rank + rope, config.hidden, of_rope);
  latent.latent_norm = load.vector(attention + "kv_a_layernorm.weight", rank);
  const int64_t rows = int64_t(spec.qk_nope_dim) + spec.v_dim;
  latent.kv_b = load.matrix(attention + "kv_b_proj.weight", heads * rows, rank);
  const TensorView flat = latent.kv_b.view;
  latent.kv_b.view = TensorView::contiguous(flat.data, flat.dtype, {heads, rows, rank}, flat.device);
  w.o = load.linear(attention + "o_proj", config.hidden, heads * spec.v_dim, false);
}

void load_attention(Loader& load, const std::string& attention, const Config& config, const imbrex::AttentionSpec& spec, LayerWeights& w) {
  const int64_t q = int64_t(spec.num_q_heads) * spec.head_dim_qk, kv = int64_t(spec.num_kv_heads) * spec.head_dim_qk;
  if (config.qk_norm) w.q_norm = load.vector(attention + "q_norm.weight", spec.head_dim_qk);
  if (config.qk_norm) w.k_norm = load.vector(attention + "k_norm.weight", spec.head_dim_qk);
  w.q = load.linear(attention + "q_proj", q, config.hidden, config.qkv_bias);
  w.k = load.linear(attention + "k_proj", kv, config.hidden, config.qkv_bias);
  w.v = load.linear(attention + "v_proj", kv, config.hidden, config.qkv_bias);
  w.o = load.linear(attention + "o_proj", config.hidden, q, config.o_bias);
}

void load_network(Loader& load, const std::string& mlp, const Config& config, bool experts, LayerWeights& w) {
  if (!experts) {
    w.network = load.network(mlp, config.intermediate, config.hidden, config.mlp_bias);
    return;
  }
  const Experts& e = config.experts;
  w.network = load.network(mlp + "shared_experts.", e.shared_intermediate, config.hidden, false);
  w.router = load.linear(mlp + "gate", e.count, config.hidden, false);
  for (int i = 0; i < e.count; ++i)
    w.experts.push_back(load.network(mlp + "experts." + std::to_string(i) + ".", e.intermediate, config.hidden, false));
}

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
    LayerWeights& w = weights.layers.emplace_back();
    w.input_norm = load.vector(at + "input_layernorm.weight", config.hidden);
    w.post_attention_norm = load.vector(at + "post_attention_layernorm.weight", config.hidden);
    if (config.latent()) {
      load_latent(load, attention, config, config.mla(i), w);
    } else {
      load_attention(load, attention, config, config.spec(i), w);
    }
    load_network(load, mlp, config, config.has_experts(i), w);
  }
  load.finish(config);
  return weights;
}

}  // namespace llama
