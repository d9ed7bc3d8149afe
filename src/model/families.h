#pragma once
// What the family readers share: the geometry that nearly all configs spell alike, and the list of families.
#include <optional>
#include <string_view>
#include <vector>

#include "imbrex/model.h"
#include "model/config_reader.h"

namespace imbrex {

// Bounds of a config's numbers: above anything published, and small enough that no product of them overflows.
constexpr int kMaxLayers = 1024, kMaxHeads = 1024, kMaxHidden = 1 << 20, kMaxHeadDim = AttentionSpec::kMaxHeadDim, kMaxTokens = 1 << 30;

struct GeometryDefaults {
  int layers = 0, hidden = 0, q_heads = 0, kv_heads = 0;  // defaults of the transformers class, for nested configs that drop these fields
  int head_dim = 0;                                       // also for top-level configs; 0: hidden / q_heads
};

struct Geometry {
  int layers = 0, hidden = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
};

// Reads the usual fields under any of their names. `mha`: an absent num_key_value_heads means one for every query head (null always does).
// `layers`: their number, where another field says it; else 0.
Geometry read_geometry(const ConfigReader&, const GeometryDefaults&, bool mha, int layers = 0);
int even_head_dim(const ConfigReader&, int hidden, int heads);     // hidden / heads; Error model.field.head_dim.indivisible
void check_heads(const ConfigReader&, int q_heads, int kv_heads);  // Error model.field.heads.indivisible
void check_head_dim(const ConfigReader&, int head_dim);            // Error model.field.head_dim.multiple

AttentionSpec decoder_spec(const Geometry&, DType);  // causal, scale 1 / sqrt(head_dim)
void add_layer(ModelSpec&, int number, const LayerSpec&, std::string name);
// A layer of a stack of decoders alone, or the part of it that has this name: "decoder.3", "decoder.3.conv".
void add_decoder_layer(ModelSpec&, int number, const LayerSpec&, std::string_view part = {});
// The tokens that a causal convolution is over. Error model.field.conv_width for others than ShortConvSpec has.
int read_conv_width(const ConfigReader&, const char* key, int class_default);

struct FamilyInput {
  const ConfigReader& config;  // of the language model: text_config where there is one
  DType dtype;                 // of the activations
  ModelSpec& model;            // gets hidden_size, layers and notes; groups are made afterwards
};

// Which layers have a window, for configs without `layer_types`.
enum class WindowRule : uint8_t {
  ignored,        // the model's code never looks at sliding_window
  every_layer,    // all, when sliding_window is set (Mistral)
  tail_if_used,   // layers from max_window_layers on, if use_sliding_window (Qwen2, Qwen3)
  even_if_used,   // even layers below max_window_layers, if use_sliding_window (Qwen2-MoE)
  every_if_used,  // all, if use_sliding_window (Qwen3-MoE)
  even_layers,    // 0, 2, 4, ... (Gemma 2, gpt-oss)
  pattern         // all but every sliding_window_pattern-th (Gemma 3 and 4)
};

// Rules in which the families of ordinary decoders differ.
struct DecoderRules {
  GeometryDefaults defaults{};
  bool mha = false;  // see read_geometry()
  WindowRule window = WindowRule::ignored;
  int window_default = 0;      // the class default of sliding_window; 0: absent means off
  int pre_attn_scalar = 0;     // Gemma: the class default of query_pre_attn_scalar, scale is scalar^-0.5; 0: the usual scale
  float soft_cap_default = 0;  // Gemma 2: the class default of attn_logit_softcapping
  bool sinks = false;
};

// A family of models that imbrex reads. `model_type` is that of the (text) config. Families without `read` are fully described by `rules`.
struct Family {
  std::string_view model_type;
  DecoderRules rules{};
  void (*read)(const FamilyInput&) = nullptr;
  bool latent = false;  // its reader reads kv_lora_rank, which says in every config that attention is latent
};
const Family* find_family(std::string_view model_type);  // nullptr when unknown
void read_family(const Family&, const FamilyInput&);

// Decoders with their own field names or rules, and models with an encoder.
void read_llama4(const FamilyInput&);
void read_gemma4(const FamilyInput&);
void read_falcon(const FamilyInput&);
void read_bloom(const FamilyInput&);
void read_mpt(const FamilyInput&);
void read_t5(const FamilyInput&);
void read_bart(const FamilyInput&);
void read_whisper(const FamilyInput&);
void read_bert(const FamilyInput&);
void read_lfm2(const FamilyInput&);  // layers of several families
void read_lfm2_moe(const FamilyInput&);
void read_qwen3_next(const FamilyInput&);  // recurrent layers, here and below
void read_qwen3_5(const FamilyInput&);
void read_qwen3_5_moe(const FamilyInput&);
void read_nemotron_h(const FamilyInput&);
void read_granite_hybrid(const FamilyInput&);
void read_falcon_h1(const FamilyInput&);
void read_bamba(const FamilyInput&);
void read_zamba2(const FamilyInput&);
void read_jamba(const FamilyInput&);
void read_mamba(const FamilyInput&);
void read_falcon_mamba(const FamilyInput&);
void read_mamba2_model(const FamilyInput&);
void read_minimax(const FamilyInput&);     // as transformers saves it
void read_minimax_01(const FamilyInput&);  // Text-01 and M1
void read_bailing_linear(const FamilyInput&);
void read_deepseek_v2(const FamilyInput&);  // latent attention, here and below
void read_deepseek_v3(const FamilyInput&);  // and Kimi K2
void read_deepseek_v32(const FamilyInput&);
void read_kimi_linear(const FamilyInput&);     // with recurrent layers
void read_bailing_hybrid(const FamilyInput&);  // too
void read_glm_moe_dsa(const FamilyInput&);
void read_glm4_moe_lite(const FamilyInput&);
void read_longcat_flash(const FamilyInput&);
void read_minicpm3(const FamilyInput&);

// Families that are known by name only, and what imbrex lacks to read them.
struct LaterFamily {
  std::string_view model_type;
  std::string_view waits_for;
};
const LaterFamily* find_later_family(std::string_view model_type);
inline constexpr std::string_view kWaitsForMla = "a reader of its MLA layers (multi-head latent attention)";
inline constexpr std::string_view kWaitsForLinear =
    "a reader of its linear or state-space layers (a recurrent state instead of a KV cache)";

// The kind of mask that a layer has, before the window or chunk is known.
enum class Span : uint8_t { full, sliding, chunked };
// `layer_types`, checked for length and names; nullopt when the config has none.
std::optional<std::vector<Span>> read_layer_types(const ConfigReader&, int layers);
// `sliding_window` as keys a query sees, itself included; nullopt when it is off: null, not positive, or never less than the
// context (the last two with a note). `class_default` stands for an absent field; 0: off.
std::optional<int> read_window(const ConfigReader&, int class_default);
// The spans of a model under a rule; takes `layer_types` first. Error model.field.window.conflict.
std::vector<Span> read_spans(const ConfigReader&, WindowRule, int layers, std::optional<int> window);
// The spec of a layer with that span. Error model.field.window.missing, model.field.chunk.missing.
AttentionSpec with_span(const ConfigReader&, AttentionSpec, Span, std::optional<int> window, std::optional<int> chunk);

}  // namespace imbrex
