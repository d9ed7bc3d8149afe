#pragma once
// Changes of a case file in memory, for tests of what is refused.
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "conformance/safetensors.h"

namespace imbrex::test {

using CaseFileEdit = std::function<void(Safetensors&)>;

// An edit of a case file's metadata.
inline CaseFileEdit edit(const std::function<void(nlohmann::json&)>& change) {
  return [change](Safetensors& file) {
    nlohmann::json root = nlohmann::json::parse(file.metadata["imbrex"]);
    change(root);
    file.metadata["imbrex"] = root.dump();
  };
}
// An edit of an element of a tensor of int32.
inline CaseFileEdit set_i32(const char* name, int index, int value) {
  return [=](Safetensors& file) { std::memcpy(file.tensors[name].bytes.data() + index * 4, &value, 4); };
}

}  // namespace imbrex::test
