// model_presets(): all models that --model knows by name.
#include "model/presets.h"

#include <algorithm>

namespace imbrex {

std::span<const ModelPreset> model_presets() {
  static const std::vector<ModelPreset> presets = [] {
    std::vector<ModelPreset> all(decoder_presets().begin(), decoder_presets().end());
    for (const auto part : {other_presets(), recurrent_presets()}) all.insert(all.end(), part.begin(), part.end());
    std::sort(all.begin(), all.end(), [](const ModelPreset& a, const ModelPreset& b) { return a.name < b.name; });
    return all;
  }();
  return presets;
}

}  // namespace imbrex
