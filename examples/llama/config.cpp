// See config.h.
#include "config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>

#include "check.h"

namespace llama {
namespace {

using nlohmann::json;

constexpr double kMaxSize = 1 << 24;       // of a dimension, a vocabulary, a context
constexpr uintmax_t kMaxBytes = 16 << 20;  // of the file

std::string shown(const json& value) { return shortened(value.dump(-1, ' ', true, json::error_handler_t::replace)); }

json read_object(const std::filesystem::path& path) {
  check(std::filesystem::is_regular_file(path), path.string(), " is not a file");
  const auto bytes = std::filesystem::file_size(path);
  check(bytes <= kMaxBytes, path.string(), ": expected at most ", kMaxBytes, " bytes, got ", bytes);
  std::ifstream stream(path);
  try {
    json parsed = json::parse(std::string(std::istreambuf_iterator<char>(stream), {}));
    check(parsed.is_object(), "config.json: expected a JSON object, got ", parsed.type_name());
    return parsed;
  } catch (const json::exception& error) {
    fail("config.json: not JSON: ", shortened(error.what()));
  }
}

// A field that is missing and one that is null are the same.
const json* find(const json& object, const char* field) {
  const auto found = object.find(field);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

double number(const json& object, const char* field, double low, double high, std::optional<double> otherwise = {}) {
  const json* value = find(object, field);
  if (value == nullptr && otherwise) return *otherwise;
  check(value != nullptr, "config.json: ", field, ": expected a number, there is none");
  check(value->is_number() && value->get<double>() >= low && value->get<double>() <= high, "config.json: ", field,
        ": expected a number from ", low, " to ", high, ", got ", shown(*value));
  return value->get<double>();
}

int64_t size(const json& object, const char* field) {
  const double value = number(object, field, 1, kMaxSize);
  check(value == std::floor(value), "config.json: ", field, ": expected a whole number, got ", value);
  return int64_t(value);
}

bool flag(const json& object, const char* field) {
  const json* value = find(object, field);
  check(value == nullptr || value->is_boolean(), "config.json: ", field, ": expected true or false, got ", value ? shown(*value) : "");
  return value != nullptr && value->get<bool>();
}

std::string text(const json& object, const char* field, const char* otherwise) {
  const json* value = find(object, field);
  check(value == nullptr || value->is_string(), "config.json: ", field, ": expected a string, got ", value ? shown(*value) : "");
  return value != nullptr ? value->get<std::string>() : otherwise;
}

// Llama 3.1: long waves are stretched by `factor`, short ones are left, and those between get something between.
double llama3_frequency(double frequency, const json& rope, double original_positions) {
  const double factor = number(rope, "factor", 1, 1e6);
  const double low = number(rope, "low_freq_factor", 1e-3, 1e6), high = number(rope, "high_freq_factor", 1e-3, 1e6);
  check(low < high, "config.json: expected low_freq_factor below high_freq_factor, got ", low, " and ", high);
  const double turns = original_positions * frequency / (2 * std::numbers::pi);  // of the wave within the original context
  if (turns <= low) return frequency / factor;
  if (turns >= high) return frequency;
  const double share = (turns - low) / (high - low);
  return (1 - share) * frequency / factor + share * frequency;
}

// YaRN: long waves are stretched by `factor`, short ones are left, and between two dimensions, which follow from how often a wave turns
// within the original context, it is something between.
std::vector<double> yarn_frequencies(const json& rope, double theta, int dim) {
  const double factor = number(rope, "factor", 1, 1e6), positions = number(rope, "original_max_position_embeddings", 1, kMaxSize);
  check(find(rope, "truncate") == nullptr || flag(rope, "truncate"), "config.json: truncate: expected true, got false");
  const auto dimension = [&](double turns) { return dim * std::log(positions / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta)); };
  const double low = std::max(std::floor(dimension(number(rope, "beta_fast", 1e-3, 1e6, 32))), 0.);
  const double high = std::min(std::ceil(dimension(number(rope, "beta_slow", 1e-3, 1e6, 1))), dim - 1.);
  std::vector<double> frequencies;
  for (int i = 0; i < dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / dim);
    const double stretched = std::clamp((i - low) / (high == low ? 0.001 : high - low), 0., 1.);
    frequencies.push_back(frequency * (1 - stretched) + frequency / factor * stretched);
  }
  return frequencies;
}

// What YaRN multiplies cosines and sines by.
double yarn_scale(const json& rope) {
  if (find(rope, "attention_factor") != nullptr) return number(rope, "attention_factor", 1e-3, 1e3);
  const double factor = number(rope, "factor", 1, 1e6), one = number(rope, "mscale", 0, 1e3, 0),
               all = number(rope, "mscale_all_dim", 0, 1e3, 0);
  const auto scale = [&](double m) { return 0.1 * m * std::log(factor) + 1; };
  return one > 0 && all > 0 ? scale(one) / scale(all) : scale(1);
}

// Newer configs have rope_parameters, older ones rope_theta and rope_scaling.
void read_rotation(const json& config, int head_dim, Config& to) {
  const json *parameters = find(config, "rope_parameters"), *scaling = find(config, "rope_scaling");
  check(parameters == nullptr || scaling == nullptr || *parameters == *scaling,
        "config.json: expected rope_parameters or rope_scaling, got both, with different values");
  const json rope = parameters != nullptr ? *parameters : scaling != nullptr ? *scaling : json::object();
  check(rope.is_object(), "config.json: rope_parameters: expected an object, got ", shown(rope));
  for (const json* place : {&config, &rope})
    check(number(*place, "partial_rotary_factor", 0, 1, 1) == 1, "config.json: partial_rotary_factor: expected 1, got ",
          place->value("partial_rotary_factor", 1.0));
  check(find(rope, "mrope_section") == nullptr, "config.json: mrope_section: expected none, got ",
        shown(rope.value("mrope_section", json())));
  const double theta = number(rope, "rope_theta", 1, 1e12, number(config, "rope_theta", 1, 1e12, 10000));
  const std::string type = text(rope, "rope_type", text(rope, "type", "default").c_str());
  std::vector<double>& frequencies = to.rope_frequency;
  if (type == "yarn" && to.latent()) {
    frequencies = yarn_frequencies(rope, theta, head_dim);
    to.rope_scale = yarn_scale(rope);
    return;
  }
  for (int i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * i / head_dim);
    if (type == "default") {
      frequencies.push_back(frequency);
    } else if (type == "linear") {
      frequencies.push_back(frequency / number(rope, "factor", 1, 1e6));
    } else if (type == "llama3") {
      const double positions =
          number(config, "original_max_position_embeddings", 1, kMaxSize, number(config, "max_position_embeddings", 1, kMaxSize));
      frequencies.push_back(llama3_frequency(frequency, rope, number(rope, "original_max_position_embeddings", 1, kMaxSize, positions)));
    } else {
      fail("config.json: rope_type: expected default, linear, llama3 or, with latent attention, yarn, got ", shortened(type));
    }
  }
}

// A field that has one value here, or is absent.
void check_is(const json& object, const char* field, const json& expected) {
  const json* value = find(object, field);
  check(value == nullptr || *value == expected, "config.json: ", field, ": expected ", shown(expected), ", got ",
        value ? shown(*value) : "");
}

void read_deepseek(const json& file, Config& config) {
  check_is(file, "attention_bias", false);
  check_is(file, "mlp_bias", false);
  check_is(file, "scoring_func", "softmax");
  check_is(file, "topk_method", "greedy");
  check_is(file, "norm_topk_prob", false);
  check_is(file, "moe_layer_freq", 1);
  if (find(file, "q_lora_rank") != nullptr) config.q_lora_rank = size(file, "q_lora_rank");
  if (find(file, "n_routed_experts") == nullptr) return;
  Experts& e = config.experts;
  e.count = int(size(file, "n_routed_experts"));
  e.chosen = int(size(file, "num_experts_per_tok"));
  check(e.chosen <= e.count, "config.json: num_experts_per_tok: expected at most n_routed_experts = ", e.count, ", got ", e.chosen);
  e.first_layer = int(number(file, "first_k_dense_replace", 0, kMaxSize, 0));
  e.intermediate = size(file, "moe_intermediate_size");
  e.shared_intermediate = e.intermediate * size(file, "n_shared_experts");
  e.scaling = float(number(file, "routed_scaling_factor", 0, 1e6, 1));
}

}  // namespace

Config load_config(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "config.json";
  const json file = read_object(path);
  const std::string family = text(file, "model_type", "none");
  check(family == "llama" || family == "mistral" || family == "qwen2" || family == "qwen3" || family == "deepseek_v2",
        "config.json: model_type: expected llama, mistral, qwen2, qwen3 or deepseek_v2, got ", shortened(family));
  Config config{.model = imbrex::load_model(path.string()), .rope_frequency = {}};

  const std::string activation = text(file, "hidden_act", "silu");
  check(activation == "silu", "config.json: hidden_act: expected silu, got ", shortened(activation));
  const json* quantized = find(file, "quantization_config");
  check(quantized == nullptr, "config.json: quantization_config: expected none, got ", quantized ? shown(*quantized) : "");

  config.hidden = size(file, "hidden_size");
  config.intermediate = size(file, "intermediate_size");
  config.vocab = size(file, "vocab_size");
  config.max_positions = size(file, "max_position_embeddings");
  config.rms_norm_eps = float(number(file, "rms_norm_eps", 0, 1));
  config.tied = flag(file, "tie_word_embeddings");
  const bool bias = (family == "llama" || family == "qwen3") && flag(file, "attention_bias");
  config.qkv_bias = bias || family == "qwen2";
  config.o_bias = bias;
  config.mlp_bias = family == "llama" && flag(file, "mlp_bias");
  config.qk_norm = family == "qwen3";
  if (config.latent()) read_deepseek(file, config);
  read_rotation(file, config.latent() ? config.mla(0).qk_rope_dim : config.spec(0).head_dim_qk, config);
  return config;
}

}  // namespace llama
