#pragma once
// Checked access to one object of a config.json, with the field's path in every message; used by the family readers.
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace imbrex {

constexpr int64_t kMaxConfigBytes = int64_t{4} << 20;  // the largest published ones (lists of quantised modules) have 1 MiB
constexpr int kMaxConfigDepth = 64;

// Infinity, which Python writes and JSON does not have, is read as null. Error model.json.* unless `text` is one JSON object
// without duplicate keys, within the limits above.
nlohmann::json parse_config_text(std::string_view text);

class ConfigReader {
 public:
  // Several names of one field, in order of preference; if two are present, their values must agree.
  using Keys = std::initializer_list<const char*>;

  // `object` and `notes` must outlive the reader. `path` is "" for the root.
  ConfigReader(const nlohmann::json& object, std::string path, std::vector<std::string>& notes)
      : object_(&object), path_(std::move(path)), notes_(&notes) {}

  bool nested() const { return !path_.empty(); }  // Hugging Face drops fields with the class's default value from nested configs
  bool has(const char* key) const;                // present and not null
  bool is_null(const char* key) const;            // present and null
  std::string path(std::string_view key) const;   // "text_config.head_dim"
  void note(std::string text) const { notes_->push_back(std::move(text)); }

  // The readers of values: each reads null like an absent field, and fails with model.field.* for another type or a value out of range.
  int integer(Keys, int max) const;  // 1..max; model.field.missing when absent
  std::optional<int> maybe_integer(Keys, int max) const;
  int integer_or(Keys, int max, std::optional<int> class_default) const;  // notes the default; model.field.missing without one
  std::optional<int64_t> any_integer(const char* key) const;              // of either sign
  std::optional<double> maybe_number(const char* key, double max, bool zero = false) const;  // above 0, or 0 where that is allowed
  std::optional<double> maybe_negative(const char* key) const;                               // below 0 and finite
  // [low, high] of numbers from 0 to `max`; a high of 0 stands for one without a limit: null, or what Python writes for infinity.
  std::optional<std::pair<double, double>> maybe_range(const char* key, double max) const;
  std::optional<bool> maybe_bool(const char* key) const;
  bool flag(const char* key, bool absent) const { return maybe_bool(key).value_or(absent); }
  std::optional<std::string> maybe_string(const char* key) const;
  std::optional<std::vector<std::string>> maybe_strings(const char* key) const;
  std::optional<std::vector<int64_t>> maybe_integers(const char* key) const;
  std::optional<ConfigReader> child(const char* key) const;
  std::string shown(const char* key) const;  // the value for a message: ASCII, at most 60 characters

 private:
  const nlohmann::json* find(const char* key) const;  // nullptr when absent or null
  const nlohmann::json* find(Keys, const char** found) const;
  [[noreturn]] void wrong_type(const std::string& field, const char* expected, const nlohmann::json&) const;
  int64_t as_integer(const std::string& field, const nlohmann::json&) const;
  int as_positive(const std::string& field, const nlohmann::json&, int max) const;

  const nlohmann::json* object_;
  std::string path_;
  std::vector<std::string>* notes_;
};

}  // namespace imbrex
