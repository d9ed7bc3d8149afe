#pragma once
// The parts of the preset table, joined by model_presets().
#include "imbrex/model.h"

namespace imbrex {

std::span<const ModelPreset> decoder_presets();
std::span<const ModelPreset> other_presets();
std::span<const ModelPreset> recurrent_presets();

}  // namespace imbrex
