#pragma once
// What some value heads of a recurrent layer have behind a request's token, from the synthetic definition of its tokens.
#include <span>

#include "conformance/recurrent/judge.h"
#include "serve/verify.h"

namespace imbrex::serve {

RecurrentSpec spec_of_target(const RecurrentSpec&);  // the target's heads as a layer of their own

// Of the tokens with these keys, the request's from its first on: the last one's outputs [heads, head_dim_v], the state behind it, and the
// rows that a convolution in front keeps.
// States of floats, of heads with a multiple of 8 values, are scanned (state_scan.h). Where a head has one decay, tokens that weigh less
// than 2^-72 in its state are left out: with keys of length 1 and beta in [0, 1], or without the delta rule, nothing that S has can grow.
// All others are the judge's, which takes some hundred times as long.
RecurrentExpected expected_of_target(const RecurrentTarget&, const Synthetic&, int layer, std::span<const uint64_t> keys);

// The same by the judge alone, whatever the layer.
RecurrentExpected judged_target(const RecurrentTarget&, const Synthetic&, int layer, std::span<const uint64_t> keys);

}  // namespace imbrex::serve
