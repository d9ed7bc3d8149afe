#pragma once
// The names that the attention family had before there were others. They stay for one release.
#include "imbrex/attention.h"

namespace imbrex {

using Inputs = AttentionInputs;
using Outputs = AttentionOutputs;
using Plan = AttentionPlan;
using Backend = BackendOf<AttentionFamily>;

}  // namespace imbrex
