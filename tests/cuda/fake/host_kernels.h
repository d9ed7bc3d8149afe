#pragma once
// The kernels of a plan as plain host code: with them the fake driver computes, and everything a plan hands to a launch is put to use.
#include <span>

#include "cuda/driver/jit.h"
#include "imbrex/spec.h"

namespace imbrex::cuda::fake {

// A cubin that is none, of which the text is the key's, into the cache.
void put_into_cache(const KernelKey&);

// Makes the fake driver run plans of this spec from now on, whose kernels need no compiling: a cubin that is none lies in the cache for
// every key of the CUDA backends on its devices.
void run_on_host(const AttentionSpec&);
// Of plans of several specs, whose kernels are told apart by their keys.
void run_on_host(std::span<const AttentionSpec>);

}  // namespace imbrex::cuda::fake
