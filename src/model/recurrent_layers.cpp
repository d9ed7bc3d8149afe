// See recurrent_layers.h. Class defaults and rules: transformers 5.24, configuration and modelling files of each model_type.
#include "model/recurrent_layers.h"

#include <algorithm>

#include "core/check.h"

namespace imbrex {

namespace {

// The type of states is that of sums, whatever that of activations, where the config does not say otherwise.
DType read_state_dtype(const ConfigReader& config) {
  for (const char* key : {"mamba_ssm_cache_dtype", "mamba_ssm_dtype"}) {
    const auto name = config.maybe_string(key);
    if (!name || *name == "auto") continue;
    if (*name == "float32") return DType::f32;
    if (*name == "bfloat16") return DType::bf16;
    if (*name == "float16") return DType::f16;
    fail("model.field.dtype.unknown", "{} must be float32, float16 or bfloat16, got \"{:.60}\"", config.path(key), *name);
  }
  return DType::f32;
}

int read_size(const ConfigReader& config, const char* key, int max, int class_default) {
  return config.integer_or({key}, max, config.nested() ? std::optional(class_default) : std::nullopt);
}

// The width of a Mamba layer: expand times the hidden size.
int expanded(const ConfigReader& config, const char* key, int hidden) {
  constexpr int kMostExpansion = 64;
  const int64_t width = int64_t(read_size(config, key, kMostExpansion, 2)) * hidden;
  check(width <= kMaxHidden, "model.field.large", "{} times the hidden size {} is {}, at most {} is allowed", config.path(key), hidden,
        width, kMaxHidden);
  return int(width);
}

int even_share(const ConfigReader& config, const char* key, int width, int heads) {
  check(width % heads == 0, "model.field.heads.indivisible", "{}: a width of {} is not a multiple of {} heads", config.path(key), width,
        heads);
  return width / heads;
}

int read_mamba2_head_dim(const ConfigReader& config, const Mamba2Fields& fields, int heads, int hidden) {
  std::optional<int> width;
  if (fields.width != nullptr) width = config.maybe_integer({fields.width}, kMaxHidden);
  if (!width && fields.expand != nullptr) width = expanded(config, fields.expand, hidden);
  const bool follows = fields.head_dim == nullptr || config.shown(fields.head_dim) == "\"auto\"" || (width && !config.has(fields.head_dim));
  if (follows) return even_share(config, fields.heads, *width, heads);
  const int head_dim = read_size(config, fields.head_dim, kMaxHeadDim, 64);
  check(!width || int64_t(head_dim) * heads == *width, "model.field.conflict", "{} {} times {} {} is not the width of the layer, {}",
        config.path(fields.heads), heads, config.path(fields.head_dim), head_dim, width.value_or(0));
  return head_dim;
}

// softplus of the step: at least `low`, and at most `high` where that is not 0.
void read_step_limits(const ConfigReader& config, const Mamba2Fields& fields, RecurrentSpec& spec) {
  constexpr double kMostStep = 1e6;
  if (fields.least_step) {
    spec.gate_min = float(config.maybe_number("time_step_min", kMostStep, true).value_or(0.001));
    config.note(fmt::format("{} {:g}: steps are at least as large, as in transformers; vLLM has no such limit",
                            config.path("time_step_min"), spec.gate_min));
  } else if (const auto range = config.maybe_range("time_step_limit", kMostStep)) {
    spec.gate_min = float(range->first), spec.gate_max = float(range->second);
  }
}

RecurrentSpec delta_spec(const ConfigReader& config, int k_heads, int v_heads, int dim_k, int dim_v, DType dtype) {
  RecurrentSpec spec{.num_k_heads = k_heads, .num_v_heads = v_heads, .head_dim_k = dim_k, .head_dim_v = dim_v};
  spec.delta = spec.sigmoid_beta = spec.qk_norm = true;
  spec.dtype = dtype, spec.state_dtype = read_state_dtype(config);
  return spec;
}

struct ConvSettings {
  int width;
  bool bias;
};
// SiLU follows in all of them.
ConvSettings read_conv(const ConfigReader& config, const ConvFields& fields) {
  const ConvSettings settings{.width = read_conv_width(config, fields.width, 4),  // 4: every class's default
                              .bias = fields.bias != nullptr ? config.flag(fields.bias, true) : fields.biased};
  if (fields.activation == nullptr) return settings;
  const std::string name = config.maybe_string(fields.activation).value_or("silu");
  check(name == "silu" || name == "swish", "model.field.activation",
        "{} must be silu, which convolutions in front of a recurrence have here, got \"{:.60}\"", config.path(fields.activation), name);
  return settings;
}

// Channels are after one another in the rows of the fused projection, in this order.
void add_conv(RecurrentSpec& spec, RecurrentConv order, const ConvSettings& settings) {
  spec.conv = order, spec.conv_width = settings.width, spec.conv_bias = settings.bias;
}

void add_outputs(RecurrentSpec& spec, OutputGate gate, OutputNorm norm, int groups, float eps) {
  spec.out_gate = gate, spec.out_norm = norm;
  if (norm != OutputNorm::none) spec.norm_groups = groups, spec.norm_eps = eps;
}

}  // namespace

float read_norm_eps(const ConfigReader& config, const char* key, float class_default) {
  return float(config.maybe_number(key, 1).value_or(double(class_default)));
}

RecurrentLayer read_gdn(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const int k_heads = config.integer_or({"linear_num_key_heads"}, kMaxHeads, 16),
            v_heads = config.integer_or({"linear_num_value_heads"}, kMaxHeads, 32);
  check(v_heads % k_heads == 0, "model.field.heads.indivisible", "{}: {} value heads are not a multiple of {} key heads",
        config.path("linear_num_value_heads"), v_heads, k_heads);
  const int dim_k = config.integer_or({"linear_key_head_dim"}, kMaxHeadDim, 128),
            dim_v = config.integer_or({"linear_value_head_dim"}, kMaxHeadDim, 128);
  RecurrentSpec spec = delta_spec(config, k_heads, v_heads, dim_k, dim_v, in.dtype);
  add_conv(spec, RecurrentConv::qkv, read_conv(config, {.width = "linear_conv_kernel_dim", .activation = "hidden_act"}));
  add_outputs(spec, OutputGate::silu, OutputNorm::before_gate, 0, read_norm_eps(config, "rms_norm_eps", 1e-6f));
  return {.recurrence = spec, .conv = std::nullopt};
}

// Its q, k and v have weights of their own in checkpoints; as one convolution over all their channels they are the same.
RecurrentLayer kda_layer(const FamilyInput& in, int heads, int head_dim, std::optional<double> lower_bound, const ConfigReader& place,
                         const char* width_key, float eps) {
  RecurrentSpec spec = delta_spec(in.config, heads, heads, head_dim, head_dim, in.dtype);
  spec.channel_gate = true;
  if (lower_bound) spec.gate = RecurrentGate::sigmoid, spec.gate_min = float(*lower_bound);
  add_conv(spec, RecurrentConv::qkv, read_conv(place, {.width = width_key}));
  add_outputs(spec, OutputGate::sigmoid, OutputNorm::before_gate, 0, read_norm_eps(in.config, "rms_norm_eps", eps));
  return {.recurrence = spec, .conv = std::nullopt};
}

RecurrentLayer read_kda(const FamilyInput& in) {
  const ConfigReader& config = in.config;
  const auto lists = config.child("linear_attn_config");
  const bool listed = lists && (lists->has("head_dim") || lists->has("num_heads"));
  const ConfigReader& place = listed ? *lists : config;
  const int heads = place.integer_or({listed ? "num_heads" : "linear_num_heads"}, kMaxHeads, 32),
            head_dim = place.integer_or({listed ? "head_dim" : "linear_head_dim"}, kMaxHeadDim, 128);
  auto bound = config.maybe_negative("linear_lower_bound");
  if (!bound && lists) bound = lists->maybe_negative("gate_lower_bound");
  const bool width_listed = lists && lists->has("short_conv_kernel_size");
  return kda_layer(in, heads, head_dim, bound, width_listed ? *lists : config,
                   width_listed ? "short_conv_kernel_size" : "linear_conv_kernel_dim", 1e-5f);
}

RecurrentLayer lightning_layer(const ConfigReader& config, int heads, int head_dim, float scale, int norm_groups, float eps, DType dtype) {
  RecurrentSpec spec{.num_k_heads = heads, .num_v_heads = heads, .head_dim_k = head_dim, .head_dim_v = head_dim};
  spec.gate = RecurrentGate::fixed;
  spec.scale = scale;
  spec.dtype = dtype, spec.state_dtype = read_state_dtype(config);
  add_outputs(spec, OutputGate::sigmoid, OutputNorm::before_gate, norm_groups, eps);
  config.note("lightning attention: the slopes depend on the head and on the layer's index among all; the engine gives them as rates");
  return {.recurrence = spec, .conv = std::nullopt};
}

RecurrentLayer read_bailing_lightning(const FamilyInput& in, int heads, int head_dim) {
  const int groups = in.config.maybe_integer({"group_norm_size"}, kMaxHeads).value_or(1);
  check(heads % groups == 0, "model.field.heads.indivisible", "{}: {} heads are not a multiple of {} groups",
        in.config.path("group_norm_size"), heads, groups);
  return lightning_layer(in.config, heads, head_dim, 0, groups, read_norm_eps(in.config, "rms_norm_eps", 1e-6f), in.dtype);
}

RecurrentLayer read_mamba2(const FamilyInput& in, const Mamba2Fields& fields, int hidden) {
  const ConfigReader& config = in.config;
  RecurrentSpec spec;
  spec.num_v_heads = read_size(config, fields.heads, kMaxHeads, fields.heads_default);
  spec.num_k_heads = read_size(config, fields.groups, kMaxHeads, fields.groups_default);
  check(spec.num_v_heads % spec.num_k_heads == 0, "model.field.heads.indivisible", "{}: {} heads are not a multiple of {} groups",
        config.path(fields.groups), spec.num_v_heads, spec.num_k_heads);
  spec.head_dim_k = read_size(config, fields.state, kMaxHeadDim, fields.state_default);
  spec.head_dim_v = read_mamba2_head_dim(config, fields, spec.num_v_heads, hidden);
  spec.scaled_values = spec.skip = true;
  spec.scale = 1;
  read_step_limits(config, fields, spec);
  spec.dtype = in.dtype, spec.state_dtype = read_state_dtype(config);
  add_conv(spec, RecurrentConv::vkq, read_conv(config, fields.conv));
  OutputNorm norm = OutputNorm::after_gate;
  if (fields.optional_norm)
    norm = !config.flag("mamba_rms_norm", false)         ? OutputNorm::none
           : config.flag("mamba_norm_before_gate", true) ? OutputNorm::before_gate
                                                         : OutputNorm::after_gate;
  add_outputs(spec, OutputGate::silu, norm, spec.num_k_heads,
              fields.eps == nullptr ? fields.eps_default : read_norm_eps(config, fields.eps, fields.eps_default));
  return {.recurrence = spec, .conv = std::nullopt};
}

RecurrentLayer read_mamba1(const FamilyInput& in, const Mamba1Fields& fields, int hidden) {
  const ConfigReader& config = in.config;
  std::optional<int> width;
  if (fields.width != nullptr) width = config.maybe_integer({fields.width}, kMaxHidden);
  const auto expand = config.maybe_integer({fields.expand}, kMaxHidden);
  if (width && expand && int64_t(*expand) * hidden != *width)
    config.note(fmt::format("{} {}: {} {} is the width, as in the checkpoints", config.path(fields.expand), *expand,
                            config.path(fields.width), *width));
  RecurrentSpec spec;
  spec.num_k_heads = 1;
  spec.num_v_heads = width ? *width : expanded(config, fields.expand, hidden);
  spec.head_dim_k = read_size(config, fields.state, kMaxHeadDim, 16);
  spec.head_dim_v = 1;
  spec.channel_rates = spec.scaled_values = spec.skip = true;
  spec.scale = 1;
  spec.dtype = in.dtype, spec.state_dtype = read_state_dtype(config);
  add_outputs(spec, OutputGate::silu, OutputNorm::none, 0, 0);
  const ConvSettings conv = read_conv(config, fields.conv);
  return {.recurrence = spec,
          .conv = ShortConvSpec{.dim = spec.num_v_heads,
                                .width = conv.width,
                                .bias = conv.bias,
                                .dtype = in.dtype,
                                .form = ShortConvForm::plain,
                                .activation = ShortConvActivation::silu}};
}

std::optional<std::vector<Mixer>> read_mixers(const ConfigReader& config, int layers) {
  const char* const key = config.has("layer_types") ? "layer_types" : "layers_block_type";
  const auto names = config.maybe_strings(key);
  if (!names) return std::nullopt;
  check(int64_t(names->size()) == layers, "model.field.layer_types.length", "{} has {} entries, the model has {} layers", config.path(key),
        names->size(), layers);
  std::vector<Mixer> mixers;
  for (const std::string& name : *names) {
    const bool attends = name == "full_attention" || name == "attention", is_recurrent = name == "linear_attention" || name == "mamba";
    const bool is_none = name == "mlp" || name == "moe";
    check(attends || is_recurrent || is_none || name == "hybrid", "model.field.layer_types.unknown",
          "{}[{}] must be full_attention, attention, linear_attention, mamba, hybrid, mlp or moe, got \"{:.60}\"", config.path(key),
          mixers.size(), name);
    mixers.push_back(attends ? Mixer::attention : is_recurrent ? Mixer::recurrent : is_none ? Mixer::none : Mixer::both);
  }
  return mixers;
}

std::vector<Mixer> mixers_where(int layers, const std::function<bool(int)>& attends) {
  std::vector<Mixer> mixers(size_t(layers), Mixer::recurrent);
  for (int i = 0; i < layers; ++i)
    if (attends(i)) mixers[size_t(i)] = Mixer::attention;
  return mixers;
}

std::vector<Mixer> interval_mixers(int layers, int interval) {
  return mixers_where(layers, [&](int i) { return (i + 1) % interval == 0; });
}

std::vector<Mixer> listed_mixers(const ConfigReader& config, const char* key, const std::vector<int64_t>& list, int layers) {
  std::vector<Mixer> mixers(size_t(layers), Mixer::recurrent);
  for (size_t i = 0; i < list.size(); ++i) {
    check(list[i] >= 0 && list[i] < layers && mixers[size_t(list[i])] == Mixer::recurrent, "model.field.attn_layers",
          "{}[{}] must be one of the layers 0 to {} that the list has not named yet, got {}", config.path(key), i, layers - 1, list[i]);
    mixers[size_t(list[i])] = Mixer::attention;
  }
  return mixers;
}

void add_recurrent(ModelSpec& model, int number, const RecurrentLayer& layer, std::string_view part) {
  if (layer.conv) add_decoder_layer(model, number, *layer.conv, "conv");
  add_decoder_layer(model, number, layer.recurrence, part);
}

void add_mixers(const FamilyInput& in, const std::vector<Mixer>& mixers, const LayerSpec& attention, const RecurrentLayer& recurrent) {
  for (size_t i = 0; i < mixers.size(); ++i) {
    switch (mixers[i]) {
      case Mixer::attention: add_decoder_layer(in.model, int(i), attention); break;
      case Mixer::recurrent: add_recurrent(in.model, int(i), recurrent); break;
      case Mixer::both:
        add_decoder_layer(in.model, int(i), attention, "attention");
        add_recurrent(in.model, int(i), recurrent, "recurrent");
        break;
      case Mixer::none: break;
    }
  }
  in.model.num_layers = int(mixers.size());
  check(!in.model.layers.empty(), "model.field.attn_layers", "none of the {} layers attends or is recurrent", mixers.size());
  if (const auto none = std::count(mixers.begin(), mixers.end(), Mixer::none); none > 0)
    in.config.note(fmt::format("{} of {} layers have neither a cache nor a state: they are left out", none, mixers.size()));
  if (const auto both = std::count(mixers.begin(), mixers.end(), Mixer::both); both > 0)
    in.config.note(fmt::format("{} of {} layers have attention and a recurrence, each with a cache of its own", both, mixers.size()));
}

}  // namespace imbrex
