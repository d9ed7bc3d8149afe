#pragma once
// KV groups of a model: made after parsing and again after with_kv().
#include "imbrex/model.h"

namespace imbrex {

// Fills kv_groups and every layer's kv_group. Layers without a cache get -1.
void group_layers(ModelSpec&);

}  // namespace imbrex
