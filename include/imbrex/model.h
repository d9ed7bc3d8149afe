#pragma once
// The layers of a model that keep keys, values or a state of each request, read from its Hugging Face config.json or from a preset:
// per-layer specs and cache groups.
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/layer_spec.h"

namespace imbrex {

struct ModelLayer {
  LayerSpec spec;       // kv_dtype, kv_format and block_size of attention are defaults; with_kv() sets them for a deployment
  std::string name;     // "decoder.3", "decoder.3.cross", "encoder.0"; "decoder.3.conv", the convolution in front of a recurrence
  int number = 0;       // which of the model's layers it is, or is a part of: counted from 0, an encoder's first
  int cache_group = 0;  // index into ModelSpec::cache_groups; -1: no cache

  // The spec of an attention layer, which all layers of most models are; std::bad_variant_access for a layer of another family.
  const AttentionSpec& attention() const { return std::get<AttentionSpec>(spec); }
  AttentionSpec& attention() { return std::get<AttentionSpec>(spec); }
};

// Layers that share one block table or one state slot a request, because their caches are filled and freed together: their specs agree in
// all that concerns the cache, and in the window. The cache consists of pages, of which a request has as many as its tokens fill, or of
// states, of which a request has one: a slot, the same in all layers and all groups of states.
struct CacheGroup {
  std::string name;             // "full", "window 4096", "chunk 8192", "cross"; "short_conv"
  std::vector<int> layers;      // indices into ModelSpec::layers
  int64_t bytes_per_token = 0;  // of pages, all layers of the group; 0: the group is of states
  int64_t bytes_per_slot = 0;   // of states, all layers of the group; 0: the group is of pages

  bool holds_states() const { return bytes_per_slot > 0; }
};
using KvGroup = CacheGroup;  // an older name

struct ModelSpec {
  std::string name;    // "llama-3.1-8b" or the config's own
  std::string family;  // "llama": the config's model_type
  int hidden_size = 0;
  int num_layers = 0;              // as the model counts them: one may be several of `layers`, and one without cache and state is none
  std::vector<ModelLayer> layers;  // of the families that layer_spec.h has, in the order they run
  std::vector<CacheGroup> cache_groups;
  std::vector<std::string> notes;  // what was assumed or left out ("sliding_window 32768 present but use_sliding_window is false")

  // The distinct specs, each with the layers that have it: what `imbrex select` prints a block for.
  struct Kind {
    LayerSpec spec;
    std::vector<int> layers;
  };
  std::vector<Kind> kinds() const;
  std::vector<int> numbers_of(const std::vector<int>& indices) const;  // ModelLayer::number of these layers, each once
  // The model as deployed: activations and KV cache in these formats. States get the activations' type; where queries are fp8 they keep the
  // type that they have.
  ModelSpec with_kv(DType q_dtype, DType kv_dtype, KvFormat, int block_size) const;
  std::string str() const;
};

// Error model.json.* for text that is not JSON or has fields of the wrong type or range (with the field's path),
// model.family.later for a family that imbrex knows and does not run yet (MLA, linear, state-space, sparse; the message says
// which), model.family.unknown for any other.
ModelSpec parse_model_config(std::string_view json, std::string_view name = {});
ModelSpec load_model(std::string_view preset_or_path);  // a preset's name, a config.json, or a folder with one

struct ModelPreset {
  std::string_view name;
  std::string_view hf_id;
  std::string_view config;
};
std::span<const ModelPreset> model_presets();  // sorted by name; `config` is a trimmed config.json

}  // namespace imbrex
