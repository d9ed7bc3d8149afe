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
      if (layer.cache_group >= int(model.cache_groups.size()) || imbrex::to_string(layer.spec).empty()) std::abort();
    for (const imbrex::CacheGroup& group : model.cache_groups)
      if ((group.bytes_per_token > 0) == (group.bytes_per_slot > 0)) std::abort();
  } catch (const imbrex::Error&) {
  }
  return 0;
}
