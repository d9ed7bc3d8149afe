// See case_fields.h.
#include "conformance/case_fields.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/json_gate.h"

namespace imbrex {

using nlohmann::json;

json case_metadata(const Safetensors& file) {
  constexpr int kMaxDepth = 4;  // root, spec; two to spare
  const auto text = file.metadata.find("imbrex");
  check(text != file.metadata.end(), "case_file.metadata", "the file has no metadata key imbrex");
  try {
    return parse_json(text->second, kMaxDepth);
  } catch (const JsonProblem& p) {
    check(p.kind != JsonProblem::depth, "case_file.json.depth", "the metadata nests deeper than {} levels", kMaxDepth);
    check(p.kind != JsonProblem::duplicate, "case_file.json.duplicate", "the metadata has the key {} twice in one object",
          p.name.substr(0, 64));
    fail("case_file.json.syntax", "the metadata imbrex is not JSON");
  }
}

CaseFields::CaseFields(const json& object, std::string path) : object_(object), path_(std::move(path)) {
  check(object.is_object(), "case_file.json.object", "{} is no object", path_);
}

void CaseFields::read(const char* name, int& value) {
  if (const json* j = take_number(name, true)) value = int(j->get<int64_t>());
}

void CaseFields::read(const char* name, float& value) {
  if (const json* j = take_number(name, false)) value = float(j->get<double>());
}

void CaseFields::read(const char* name, bool& value) {
  if (const json* j = take(name)) {
    check(j->is_boolean(), "case_file.json.type", "{}.{} is no boolean", path_, name);
    value = j->get<bool>();
  }
}

std::string CaseFields::text(const char* name) {
  const json* j = take(name);
  if (j == nullptr) return {};
  check(j->is_string(), "case_file.json.type", "{}.{} is no string", path_, name);
  return j->get<std::string>();
}

const json& CaseFields::object(const char* name) {
  check_there(name);
  return *take(name);
}

void CaseFields::finish() const {
  for (const auto& [name, value] : object_.items())
    check(std::find(taken_.begin(), taken_.end(), name) != taken_.end(), "case_file.json.unknown", "{}.{} is not known", path_,
          name.substr(0, 64));
}

const json* CaseFields::take(const char* name) {
  taken_.push_back(name);
  const auto it = object_.find(name);
  return it == object_.end() ? nullptr : &*it;
}

const json* CaseFields::take_number(const char* name, bool whole) {
  const json* j = take(name);
  if (j == nullptr) return j;
  check(whole ? j->is_number_integer() : j->is_number(), "case_file.json.type", "{}.{} is no {}number", path_, name, whole ? "whole " : "");
  check(!whole || (j->is_number_unsigned() ? j->get<uint64_t>() <= INT32_MAX : j->get<int64_t>() >= INT32_MIN), "case_file.json.range",
        "{}.{} does not fit 32 bits", path_, name);
  return j;
}

void CaseFields::check_there(const char* name) const { check(has(name), "case_file.json.missing", "{}.{} is missing", path_, name); }

std::string family_of(const json& root) {
  std::string family = CaseFields(root, "imbrex").text("family");
  return family.empty() ? "attention" : family;
}

CaseFields top_fields(const json& root, std::string_view family) {
  CaseFields top(root, "imbrex");
  int version = 0;
  top.require("version", version);
  check(version == kCaseFileVersion, "case_file.version", "expected version {}, got {}", kCaseFileVersion, version);
  top.text("family");
  const std::string given = family_of(root);
  check(given == family, "case_file.family", "expected a case of {}, got {}", family, given.substr(0, 64));
  return top;
}

HostTensor CaseTensors::take(const char* name, const std::vector<DType>& dtypes, std::initializer_list<int64_t> sizes) {
  taken_.push_back(name);
  const auto it = file_.tensors.find(name);
  check(it != file_.tensors.end(), "case_file.tensor.missing", "tensor {} is missing", name);
  const HostTensor& t = it->second;
  check(std::find(dtypes.begin(), dtypes.end(), t.dtype) != dtypes.end(), "case_file.tensor.dtype", "tensor {}: expected {}, got {}", name,
        to_string(dtypes.front()), to_string(t.dtype));
  check(t.sizes.size() == sizes.size(), "case_file.tensor.rank", "tensor {}: expected {} dimensions, got {}", name, sizes.size(),
        t.sizes.size());
  size_t d = 0;
  for (int64_t size : sizes) {
    check(size == -1 || t.sizes[d] == size, "case_file.tensor.shape", "tensor {}: expected {} in dimension {}, got {}", name, size, d,
          t.sizes[d]);
    ++d;
  }
  return t;
}

void CaseTensors::finish() const {
  for (const auto& [name, tensor] : file_.tensors)
    check(std::find(taken_.begin(), taken_.end(), name) != taken_.end(), "case_file.tensor.unknown",
          "tensor {} is not known, or of no use here", name.substr(0, 64));
}

std::vector<int> query_lens(const HostTensor& starts) {
  check(starts.get(0) == 0, "case_file.query_start_loc.start", "expected query_start_loc[0] = 0, got {}", starts.get(0));
  std::vector<int> lens;
  for (int64_t r = 0; r + 1 < starts.sizes[0]; ++r) {
    const double q_len = starts.get(r + 1) - starts.get(r);
    check(q_len >= 0, "case_file.query_start_loc.monotone", "query_start_loc falls at request {}", r);
    lens.push_back(int(q_len));
  }
  return lens;
}

std::vector<float> floats_of(const HostTensor& t) {
  std::vector<float> values(size_t(t.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = float(t.get(int64_t(i)));
  return values;
}

}  // namespace imbrex
