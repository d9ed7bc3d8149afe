#pragma once
// The tree of a run's pieces in attention_sm90_latent_pair.cu.
#include "attention_sm90_latent_pair_load.cuh"
#include "attention_sm90_tree.cuh"

namespace imbrex::cuda {

using Out = Fragment<kTeamDims>;
using Sums = FragmentSums<Out>;

using Tree = StoredTree<Sums, kTeamDims>;

}  // namespace imbrex::cuda
