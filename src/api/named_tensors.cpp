// Tensors that expressions read, from the structs of the C API.
#include "api/guard.h"
#include "api/structs.h"
#include "core/check.h"

namespace imbrex::api {

std::vector<NamedTensor> named_tensors_of(const imbrex_named_tensors& given, const char* what) {
  check(given.count >= 0, "api.tensor", "{}: expected 0 tensors or more, got {}", what, given.count);
  check(given.count == 0 || (given.names != nullptr && given.tensors != nullptr), "api.null", "{}: {} tensors need names and tensors", what,
        given.count);
  std::vector<NamedTensor> tensors;
  for (int32_t i = 0; i < given.count; ++i) {
    check(given.names[i] != nullptr, "api.null", "{}: name {} is NULL", what, i);
    tensors.push_back({given.names[i], view_of(&deref(given.tensors[i], what), given.names[i])});
  }
  return tensors;
}

}  // namespace imbrex::api
