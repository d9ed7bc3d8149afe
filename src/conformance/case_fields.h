#pragma once
// Reads the metadata and the tensors of a case file of any family: unknown fields are refused, and types and shapes are checked.
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "conformance/safetensors.h"
#include "family/spec_fields.h"
#include "imbrex/expression.h"

namespace imbrex {

constexpr int kCaseFileVersion = 1;

// The metadata key imbrex. Error case_file.metadata, case_file.json.*
nlohmann::json case_metadata(const Safetensors&);

// Reads the fields of a JSON object, and refuses those that have not been read. The object must outlive it. Error case_file.json.*
class CaseFields {
 public:
  CaseFields(const nlohmann::json& object, std::string path);
  bool has(const char* name) const { return object_.contains(name); }

  // Read an optional field; the value does not change where the field is missing.
  void read(const char* name, int& value);
  void read(const char* name, float& value);
  void read(const char* name, bool& value);
  std::string text(const char* name);  // empty when there is none
  template <class T>
  void require(const char* name, T& value) {
    check_there(name);
    read(name, value);
  }
  const nlohmann::json& object(const char* name);
  void finish() const;

 private:
  const nlohmann::json* take(const char* name);
  const nlohmann::json* take_number(const char* name, bool whole);
  void check_there(const char* name) const;

  const nlohmann::json& object_;
  std::string path_;
  std::vector<std::string> taken_;
};

// The metadata's field `family`, attention where it is missing. Error case_file.json.*
std::string family_of(const nlohmann::json& root);
// The fields of the root, with version and family read: Error case_file.version, case_file.family for another one.
CaseFields top_fields(const nlohmann::json& root, std::string_view family);

// Reads a field of a spec by its key. `needed`: a file without it is refused, as one without a type always is.
template <class Value>
void read_field(CaseFields& from, const SpecField& field, bool needed, Value& value) {
  const char* const key = field.key.data();
  if constexpr (std::is_same_v<Value, DType>) {
    value = parse_dtype(from.text(key));
  } else if constexpr (std::is_same_v<Value, Expression>) {
    if (from.has(key)) value = parse_expression(from.text(key));
  } else if constexpr (std::is_enum_v<Value>) {
    if (from.has(key)) parse_value(from.text(key), value);  // of the family that has it
  } else if (needed) {
    from.require(key, value);
  } else {
    from.read(key, value);
  }
}
// A field of a spec as files have it: enums by their names.
template <class Value>
nlohmann::json json_of(const Value& value) {
  if constexpr (std::is_enum_v<Value>)
    return to_string(value);
  else if constexpr (std::is_same_v<Value, Expression>)
    return value.text();
  else if constexpr (std::is_same_v<Value, float>)
    return double(value);
  else
    return value;
}

// Takes tensors out of a file by name, each with the shape and dtype it must have; -1 stands for any size. Error case_file.tensor.*
class CaseTensors {
 public:
  explicit CaseTensors(const Safetensors& file) : file_(file) {}
  bool has(const char* name) const { return file_.tensors.contains(name); }
  HostTensor take(const char* name, const std::vector<DType>& dtypes, std::initializer_list<int64_t> sizes);
  // There exactly when the spec has it.
  HostTensor take_if(bool wanted, const char* name, DType dtype, std::initializer_list<int64_t> sizes) {
    return wanted ? take(name, {dtype}, sizes) : HostTensor{};
  }
  void finish() const;

 private:
  const Safetensors& file_;
  std::vector<std::string> taken_;
};

// Query tokens of each request of [count + 1] starts. Error case_file.query_start_loc.*
std::vector<int> query_lens(const HostTensor& starts);

std::vector<float> floats_of(const HostTensor&);

}  // namespace imbrex
