#pragma once
// What configs say of recurrent layers: their specs, and which layers of a model they are; used by the readers of families that have them.
#include <functional>
#include <vector>

#include "model/families.h"

namespace imbrex {

// A recurrent layer of a model: the recurrence with what is in front of it and behind it. The causal convolution is a part of it, but for
// Mamba1: there B, C and steps are projections of what is convolved, so that the engine has work between the two, and each is a layer.
struct RecurrentLayer {
  RecurrentSpec recurrence;
  std::optional<ShortConvSpec> conv;  // of Mamba1
};

// Gated delta nets, by the names of Qwen3-Next. All fields may be absent: the class's defaults are those of published models.
RecurrentLayer read_gdn(const FamilyInput&);

// Kimi delta attention, by the names in linear_attn_config and those of transformers. With a lower bound of the decay (Kimi K3, Ling) the
// gate is a sigmoid.
RecurrentLayer read_kda(const FamilyInput&);
// `width_key`: the field with the width of its convolution, in `place`. `eps`: of the class.
RecurrentLayer kda_layer(const FamilyInput&, int heads, int head_dim, std::optional<double> lower_bound, const ConfigReader& place,
                         const char* width_key, float eps);

// Lightning attention: as many key heads as value heads. scale 0: the usual one. The norm of outputs is over so many groups of heads.
RecurrentLayer lightning_layer(const ConfigReader&, int heads, int head_dim, float scale, int norm_groups, float eps, DType);
// The same with the groups and the epsilon of Ring and Ling.
RecurrentLayer read_bailing_lightning(const FamilyInput&, int heads, int head_dim);

// The epsilon of a norm: a field, or the class's default.
float read_norm_eps(const ConfigReader&, const char* key, float class_default);

// The names of the fields of a convolution in front of a recurrence.
struct ConvFields {
  const char* width;
  const char* bias = nullptr;        // true where it is absent; null: `biased` says
  const char* activation = nullptr;  // silu where it is absent; null: silu, whatever the config says
  bool biased = false;
};

// The names of Mamba2's fields in a family, and the class's defaults, for configs that are nested.
struct Mamba2Fields {
  const char *heads, *head_dim, *state, *groups;  // head_dim: null where it follows from the width
  ConvFields conv;
  int heads_default, state_default, groups_default;
  const char* expand = nullptr;  // of the hidden size: the width of all heads; null: it follows from heads and head_dim
  const char* width = nullptr;   // the width itself, where it is not null
  bool least_step = false;       // the step is at least time_step_min, else within time_step_limit
  // The norm of outputs, over each of the groups.
  const char* eps = "rms_norm_eps";  // null: eps_default, whatever the config says
  float eps_default = 1e-5f;
  bool optional_norm = false;  // there where mamba_rms_norm says so, in front of the gate or behind it; else always, and behind it
};
RecurrentLayer read_mamba2(const FamilyInput&, const Mamba2Fields&, int hidden);

struct Mamba1Fields {
  const char *state, *expand;
  ConvFields conv;
  const char* width = nullptr;  // the width itself, which stands for `expand` where it is there
};
RecurrentLayer read_mamba1(const FamilyInput&, const Mamba1Fields&, int hidden);

// What a layer of a hybrid model has.
enum class Mixer : uint8_t {
  attention,
  recurrent,
  both,  // attention and a recurrence, side by side or one after the other, each with a cache of its own
  none   // neither a cache nor a state
};
// layer_types, or layers_block_type, which is another name of it; nullopt when the config has neither.
std::optional<std::vector<Mixer>> read_mixers(const ConfigReader&, int layers);
// Layers that attend, by their index; the others are recurrent.
std::vector<Mixer> mixers_where(int layers, const std::function<bool(int)>& attends);
std::vector<Mixer> interval_mixers(int layers, int interval);  // every interval-th attends
// Layers whose indices are in the list attend, the others are recurrent. Error model.field.attn_layers for one that is no layer, or twice.
std::vector<Mixer> listed_mixers(const ConfigReader&, const char* key, const std::vector<int64_t>& list, int layers);
// A convolution that is a layer of its own is in front of the recurrence, with the same number.
void add_recurrent(ModelSpec&, int number, const RecurrentLayer&, std::string_view part = {});
void add_mixers(const FamilyInput&, const std::vector<Mixer>&, const LayerSpec& attention, const RecurrentLayer&);

}  // namespace imbrex
