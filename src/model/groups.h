#pragma once
// Cache groups of a model: made after parsing and again after with_kv().
#include <optional>
#include <string>

#include "imbrex/model.h"

namespace imbrex {

// Fills cache_groups and every layer's cache_group. Layers without a cache get -1.
void group_layers(ModelSpec&);

// The attention that a layer's pages are of: its own, or that in latent space. None for a layer with states.
std::optional<AttentionSpec> paged_attention(const LayerSpec&);

// A line for each cache group: layers, and what a token or a request takes; each begins with two spaces and ends with a new line.
std::string group_lines(const ModelSpec&);

void validate(const LayerSpec&);  // Errors of the spec's own validate()

}  // namespace imbrex
