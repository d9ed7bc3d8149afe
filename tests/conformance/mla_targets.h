#pragma once
// Which backends of MLA run on this machine, and the ways in which their plans can compute a request.
#include <string>
#include <vector>

#include "conformance/mla/cases.h"
#include "targets.h"

namespace imbrex::test {

struct MlaTarget {
  const BackendOf<MlaFamily>* backend = nullptr;
  DeviceInfo device;
  std::string name() const { return target_name(*backend, device); }
};

// Every backend on every instruction set of this CPU that changes the kernels of a part.
const std::vector<MlaTarget>& mla_targets();

// A maker of plans that send all requests one way, with chunks of so many keys.
MlaPlanMaker forced_way(bool expand, int chunk_keys);
// A maker of plans that expand keys, in chunks of so many, of requests with more queries than a tenth of their keys.
MlaPlanMaker both_ways(int chunk_keys);
// A maker of plans of GPUs that compute so many tokens at a time and, of expanded keys, so many heads.
MlaPlanMaker in_slices(bool expand, int tokens, int heads);
bool is_composite(const BackendOf<MlaFamily>&);

const MlaCaseInputs& inputs_of(const MlaCase&);
const Expected& expected_of(const MlaCase&);

}  // namespace imbrex::test
