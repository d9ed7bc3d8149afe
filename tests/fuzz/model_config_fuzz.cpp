// Fuzz target: parse_model_config() on any text ends in a sound model or an imbrex::Error, nothing else.
#include <cstdlib>
#include <string_view>

#include "imbrex/error.h"
#include "imbrex/model.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const imbrex::ModelSpec model = imbrex::parse_model_config({reinterpret_cast<const char*>(data), size});
    if (model.layers.empty() || model.str().empty()) std::abort();
    for (const imbrex::ModelLayer& layer : model.layers)
      if (layer.kv_group >= int(model.kv_groups.size()) || layer.spec.kv_bytes_per_token() <= 0) std::abort();
  } catch (const imbrex::Error&) {
  }
  return 0;
}
