#pragma once
// Cache groups of a model: made after parsing and again after with_kv().
#include "imbrex/model.h"

namespace imbrex {

// Fills cache_groups and every layer's cache_group. Layers without a cache get -1.
void group_layers(ModelSpec&);

void validate(const LayerSpec&);  // Errors of the spec's own validate()

}  // namespace imbrex
