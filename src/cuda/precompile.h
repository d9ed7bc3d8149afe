#pragma once
// The table of shipped kernels: which specialisations each family needs for a layer on an architecture. A new backend adds a line.
#include <span>
#include <string_view>
#include <vector>

#include "cuda/jit.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

struct KernelFamily {
  const char* name;
  // Every kernel that a plan for the spec may load on the architecture; with `sample` those of them that differ in more than the
  // type they store. Empty: the family does not run it.
  std::vector<KernelKey> (*keys)(std::string_view arch, const AttentionSpec&, bool sample);
};
std::span<const KernelFamily> kernel_families();

struct ShippedKernel {
  const char* family;
  KernelKey key;
};
// Of all families, for all specs, each kernel once.
std::vector<ShippedKernel> shipped_kernels(std::string_view arch, std::span<const AttentionSpec> specs, bool sample = false);

// Specs that together need every kind of code: copies and conversions of keys, heads of 64 to 512 dims, all masks and scores; with
// `every_pair` also all pairs of types, and all usual head dimensions with a cache of 16 bits and of 8.
std::vector<AttentionSpec> covering_specs(bool every_pair);

}  // namespace imbrex::cuda
