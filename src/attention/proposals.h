#pragma once
// The changes of a spec that select() proposes where nothing runs it: those of dtypes, layouts, sizes of heads and features.
#include <span>
#include <string>
#include <vector>

#include "family/select_of.h"
#include "imbrex/select.h"

namespace imbrex {

template <>
std::vector<std::string> propose<AttentionFamily>(const AttentionSpec&, const DeviceInfo&, std::span<const Candidate>,
                                                  const BackendOf<AttentionFamily>& slow);

}  // namespace imbrex
