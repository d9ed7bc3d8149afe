// Checked access to a config.json that may come from anyone: types, ranges and nesting are checked before use.
#include "model/config_reader.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/json_gate.h"

namespace imbrex {

using nlohmann::json;

namespace {

std::string show(const json& value) {
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  if (value.is_object()) return fmt::format("an object of {}", value.size());
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);  // ASCII, so that cutting is safe
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

// Infinity outside of strings becomes null and spaces, so that bytes keep their places.
std::string without_infinity(std::string_view text) {
  constexpr std::string_view kWords[] = {"-Infinity", "Infinity"};
  std::string plain(text);
  bool in_string = false;
  for (size_t at = 0; at < plain.size(); ++at) {
    if (in_string && plain[at] == '\\') {
      ++at;
    } else if (plain[at] == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      for (const std::string_view word : kWords)
        if (std::string_view(plain).substr(at, word.size()) == word)
          plain.replace(at, word.size(), "null" + std::string(word.size() - 4, ' '));
    }
  }
  return plain;
}

}  // namespace

json parse_config_text(std::string_view text) {
  check(int64_t(text.size()) <= kMaxConfigBytes, "model.json.size", "config.json has {} bytes, at most {} are read", text.size(),
        kMaxConfigBytes);
  check(text.find_first_not_of(" \t\r\n") != std::string_view::npos, "model.json.empty", "config.json is empty ({} bytes)", text.size());
  json root;
  try {
    root = parse_json(without_infinity(text), kMaxConfigDepth);
  } catch (const JsonProblem& p) {
    check(p.kind != JsonProblem::depth, "model.json.depth", "config.json is nested deeper than {} levels", kMaxConfigDepth);
    check(p.kind != JsonProblem::duplicate, "model.json.duplicate", "config.json has the key {} twice in one object", show(p.name));
    check(p.kind != JsonProblem::number, "model.json.number", "config.json has a number that does not fit a double");
    fail("model.json.syntax", "config.json is not JSON: error at byte {} of {}", p.byte, text.size());
  }
  check(root.is_object(), "model.json.root", "config.json must be an object, got {} ({})", root.type_name(), show(root));
  return root;
}

const json* ConfigReader::find(const char* key) const {
  const auto it = object_->find(key);
  return it == object_->end() || it->is_null() ? nullptr : &*it;
}

const json* ConfigReader::find(Keys keys, const char** found) const {
  const json* value = nullptr;
  for (const char* key : keys) {
    const json* other = find(key);
    if (other == nullptr) continue;
    if (value == nullptr) {
      value = other;
      *found = key;
    } else {
      check(*value == *other, "model.field.conflict", "{} is {} but {}, another name of it, is {}", path(*found), show(*value), path(key),
            show(*other));
    }
  }
  return value;
}

bool ConfigReader::has(const char* key) const { return find(key) != nullptr; }

bool ConfigReader::is_null(const char* key) const {
  const auto it = object_->find(key);
  return it != object_->end() && it->is_null();
}

std::string ConfigReader::path(std::string_view key) const { return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key); }

std::string ConfigReader::shown(const char* key) const {
  const json* value = find(key);
  return value == nullptr ? "null" : show(*value);
}

void ConfigReader::wrong_type(const std::string& field, const char* expected, const json& value) const {
  fail("model.field.type", "{} must be {}, got {} ({})", field, expected, value.type_name(), show(value));
}

int64_t ConfigReader::as_integer(const std::string& field, const json& value) const {
  check(!value.is_number_float(), "model.field.integer", "{} must be an integer, got {}", field, show(value));
  if (!value.is_number_integer()) wrong_type(field, "an integer", value);
  check(!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(INT64_MAX), "model.field.large", "{} is {}, at most {} is allowed",
        field, show(value), INT64_MAX);
  return value.get<int64_t>();
}

int ConfigReader::as_positive(const std::string& field, const json& value, int max) const {
  const int64_t n = as_integer(field, value);
  check(n >= 0, "model.field.negative", "{} is {}, must be at least 1", field, n);
  check(n > 0, "model.field.zero", "{} is 0, must be at least 1", field);
  check(n <= max, "model.field.large", "{} is {}, at most {} is allowed", field, n, max);
  return int(n);
}

std::optional<int> ConfigReader::maybe_integer(Keys keys, int max) const {
  const char* key = nullptr;
  const json* value = find(keys, &key);
  if (value == nullptr) return std::nullopt;
  return as_positive(path(key), *value, max);
}

int ConfigReader::integer(Keys keys, int max) const { return integer_or(keys, max, std::nullopt); }

int ConfigReader::integer_or(Keys keys, int max, std::optional<int> class_default) const {
  if (const auto value = maybe_integer(keys, max)) return *value;
  check(class_default.has_value(), "model.field.missing", "{} is missing, expected an integer from 1 to {}", path(*keys.begin()), max);
  note(fmt::format("{} absent: the class default {}", path(*keys.begin()), *class_default));
  return *class_default;
}

std::optional<int64_t> ConfigReader::any_integer(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  return as_integer(path(key), *value);
}

std::optional<double> ConfigReader::maybe_number(const char* key, double max, bool zero) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong_type(path(key), "a number", *value);
  const double x = value->get<double>();
  check(x >= 0, "model.field.negative", "{} is {}, must be above 0", path(key), x);
  check(x > 0 || zero, "model.field.zero", "{} is 0, must be above 0", path(key));
  check(x <= max, "model.field.large", "{} is {}, at most {} is allowed", path(key), x, max);
  return x;
}

std::optional<double> ConfigReader::maybe_negative(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) wrong_type(path(key), "a number", *value);
  const double x = value->get<double>();
  check(x < 0 && x >= -1e6, "model.field.range", "{} is {}, must be from -1e6 to below 0", path(key), x);
  return x;
}

std::optional<std::pair<double, double>> ConfigReader::maybe_range(const char* key, double max) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array() || value->size() != 2) wrong_type(path(key), "an array of two numbers", *value);
  const json &low = (*value)[0], &high = (*value)[1];
  const auto python = [](const json& x) { return x.is_object() && x.size() == 1 && x.value("__float__", json()) == "Infinity"; };
  if (!low.is_number()) wrong_type(path(key) + "[0]", "a number", low);
  const bool endless = high.is_null() || python(high);
  if (!endless && !high.is_number()) wrong_type(path(key) + "[1]", "a number, or null for no limit", high);
  const double from = low.get<double>(), to = endless ? max : high.get<double>();
  check(from >= 0 && from <= to && to <= max && to > 0, "model.field.range",
        "{} is {} to {}, expected 0 <= low <= high <= {}, and high above 0", path(key), from, to, max);
  return std::pair(from, endless ? 0 : to);
}

std::optional<bool> ConfigReader::maybe_bool(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) wrong_type(path(key), "true or false", *value);
  return value->get<bool>();
}

std::optional<std::string> ConfigReader::maybe_string(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) wrong_type(path(key), "a string", *value);
  return value->get<std::string>();
}

std::optional<std::vector<std::string>> ConfigReader::maybe_strings(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) wrong_type(path(key), "an array of strings", *value);
  std::vector<std::string> items;
  for (const json& item : *value) {
    if (!item.is_string()) wrong_type(fmt::format("{}[{}]", path(key), items.size()), "a string", item);
    items.push_back(item.get<std::string>());
  }
  return items;
}

std::optional<std::vector<int64_t>> ConfigReader::maybe_integers(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_array()) wrong_type(path(key), "an array of integers", *value);
  std::vector<int64_t> items;
  for (const json& item : *value) items.push_back(as_integer(fmt::format("{}[{}]", path(key), items.size()), item));
  return items;
}

std::optional<ConfigReader> ConfigReader::child(const char* key) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_object()) wrong_type(path(key), "an object", *value);
  return ConfigReader(*value, path(key), *notes_);
}

}  // namespace imbrex
