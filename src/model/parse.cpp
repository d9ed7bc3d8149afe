// parse_model_config(): from the text of a config.json to a ModelSpec.
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "imbrex/model.h"
#include "model/config_reader.h"
#include "model/families.h"
#include "model/groups.h"

namespace imbrex {

namespace {

// Multimodal models whose language model is read alone, and its model_type where the nested config has none.
struct Wrapper {
  std::string_view model_type, text_type;
  std::string_view note;
};
constexpr std::string_view kVisionLeftOut = "only the language model is read; the layers of the vision encoder are left out";
constexpr Wrapper kWrappers[] = {
    {"gemma3", "gemma3_text", "images attend in both directions: the engine gives such steps a custom mask"},
    {"gemma4", "gemma4_text", kVisionLeftOut},
    {"kimi_k25", "deepseek_v3", kVisionLeftOut},
    {"kimi_k3", "kimi_linear", kVisionLeftOut},
    {"kimi_vl", "deepseek_v3", kVisionLeftOut},
    {"lfm2_vl", "lfm2", kVisionLeftOut},
    {"llama4", "llama4_text", kVisionLeftOut},
    {"mistral3", "mistral", kVisionLeftOut},
    {"qwen3_5", "qwen3_5_text", kVisionLeftOut},
    {"qwen3_5_moe", "qwen3_5_moe_text", kVisionLeftOut},
};

const Wrapper* find_wrapper(std::string_view model_type) {
  for (const Wrapper& wrapper : kWrappers)
    if (wrapper.model_type == model_type) return &wrapper;
  return nullptr;
}

std::optional<std::string> read_dtype_name(const ConfigReader& config) {
  const auto name = config.maybe_string("dtype"), old_name = config.maybe_string("torch_dtype");
  check(!name || !old_name || *name == *old_name, "model.field.conflict", "{} is {} but {}, another name of it, is {}",
        config.path("dtype"), config.shown("dtype"), config.path("torch_dtype"), config.shown("torch_dtype"));
  return name ? name : old_name;
}

DType read_dtype(const ConfigReader& text, const ConfigReader& top) {
  auto given = read_dtype_name(text);
  if (!given) given = read_dtype_name(top);
  if (!given || *given == "auto") {
    top.note("dtype absent: bfloat16");
    return DType::bf16;
  }
  std::string_view name = *given;
  if (name.starts_with("torch.")) name.remove_prefix(6);
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16" || name == "half") return DType::f16;
  if (name == "float32" || name == "float") return DType::f32;
  const bool real = name == "float64" || name == "double" || name.starts_with("float8") || name == "int8" || name == "uint8";
  check(!real, "model.field.dtype.unsupported", "dtype must be float32, float16 or bfloat16 (activations), got \"{:.60}\"", name);
  fail("model.field.dtype.unknown", "dtype must be float32, float16 or bfloat16, got \"{:.60}\"", name);
}

void refuse_later(std::string_view name, std::string_view family) {
  if (const LaterFamily* later = find_later_family(family))
    fail("model.family.later", "{:.100}: imbrex knows the family {} but does not run it yet; it waits for {}", name, family,
         later->waits_for);
}

}  // namespace

ModelSpec parse_model_config(std::string_view json_text, std::string_view name) {
  const nlohmann::json root = parse_config_text(json_text);
  ModelSpec model;
  const ConfigReader top(root, "", model.notes);
  const auto top_type = top.maybe_string("model_type");
  std::optional<ConfigReader> text = top.child("text_config");
  std::string family = top_type.value_or("");
  if (!name.empty()) {
    model.name = name;
  } else {
    model.name = top.maybe_string("_name_or_path").value_or("");
    if (model.name.empty()) model.name = family;
  }
  model.family = family;
  refuse_later(model.name, family);

  const Wrapper* wrapper = find_wrapper(family);
  if (text && find_family(family) == nullptr) {
    const std::string text_type = text->maybe_string("model_type").value_or(wrapper != nullptr ? std::string(wrapper->text_type) : "");
    refuse_later(model.name, text_type);
    if (wrapper != nullptr || !top_type) family = text_type;
    if (wrapper != nullptr) model.notes.emplace_back(wrapper->note);
    if (model.family.empty()) model.family = family;
    if (model.name.empty()) model.name = family;
  } else {
    check(wrapper == nullptr, "model.field.missing", "text_config is missing, expected the object of the {} language model", family);
    text.reset();
  }
  check(!family.empty(), "model.family.missing", "model_type is missing, expected the name of the model's family");
  const ConfigReader& config = text ? *text : top;
  const Family* known = find_family(family);
  check(!config.has("kv_lora_rank") || (known != nullptr && known->latent), "model.family.later",
        "{:.100}: {} is {}; the model waits for {}", model.name, config.path("kv_lora_rank"), config.shown("kv_lora_rank"), kWaitsForMla);
  check(known != nullptr, "model.family.unknown", "{:.100}: the family {} is not known", model.name,
        text && !wrapper ? top.shown("model_type") : config.shown("model_type"));

  read_family(*known, {.config = config, .dtype = read_dtype(config, top), .model = model});
  for (const ModelSpec::Kind& kind : model.kinds()) validate(kind.spec);
  group_layers(model);
  return model;
}

}  // namespace imbrex
