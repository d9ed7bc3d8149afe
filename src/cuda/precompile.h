#pragma once
// The table of shipped kernels: which specialisations each family needs for a layer on an architecture. A new backend adds a line.
#include <span>
#include <string_view>
#include <vector>

#include "cuda/driver/jit.h"
#include "cuda/plan/plan.h"
#include "family/precompile.h"
#include "imbrex/layer_spec.h"

namespace imbrex::cuda {

// A group of kernels of attention.
struct KernelFamily {
  const char* name;
  // The kernels of a plan for the spec on the architecture. Empty: this group of kernels does not run it.
  std::vector<KernelKey> (*keys)(std::string_view arch, const AttentionSpec&, Extent);
  std::string_view thorough = "";  // the architecture for which a sample has every pair of types and dimensions
};

struct ShippedKernel {
  const char* family;
  KernelKey key;
};
// The kernels of all groups, each once: those for the specs, or a sample where there are no specs. With the name of a backend, those that
// its plans for the specs usually run.
std::vector<ShippedKernel> shipped_kernels(std::string_view arch, std::span<const LayerSpec> specs, std::string_view backend = {});

// What the entry points of a kernel take.
std::vector<PrecompiledEntry> precompiled_entries(const CompiledKernel&);

// A tile of attention_sm80.cu for which registers or shared memory are short: of wide heads or latents, beside positions, or with every
// term.
struct TightTile {
  const char* arch;
  AttentionSpec spec;
  gpu::Regime regime;
  int rows = 1;
  KernelKey key() const;
};
// They are in the sample, besides what the specs below need.
std::vector<TightTile> tight_tiles();

// Specs that together need every kind of code: copies and conversions of keys, heads of 64 to 512 dims, all masks and scores.
std::vector<AttentionSpec> covering_specs();
std::vector<RecurrentSpec> covering_recurrent_specs();   // chunks and tokens, layouts, dimensions that do not fill lanes
std::vector<ShortConvSpec> covering_short_conv_specs();  // types, sums of few tokens and of many, with a bias and without
// All pairs of types, all usual head dimensions, pages of one token.
std::vector<AttentionSpec> thorough_specs();

}  // namespace imbrex::cuda
