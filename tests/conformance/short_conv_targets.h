#pragma once
// Which backends of the short convolution run on which devices of this machine, and the cases that tests of all of them share.
#include <string>
#include <vector>

#include "conformance/short_conv/judge.h"
#include "targets.h"

namespace imbrex::test {

struct ShortConvTarget {
  const BackendOf<ShortConvFamily>* backend = nullptr;
  DeviceInfo device;
  std::string name() const { return target_name(*backend, device); }
  bool on_gpu() const { return device.device.type == DeviceType::cuda; }
};

const std::vector<ShortConvTarget>& short_conv_targets();

const ShortConvCaseInputs& inputs_of(const ShortConvCase&);
const ShortConvExpected& expected_of(const ShortConvCase&);

// A case of one dtype and the requests, of values that differ strongly from token to token.
ShortConvCase steep_case(const ShortConvSpec&, std::vector<ShortConvCaseRequest>);
bool same_bits(const ShortConvRunResult&, const ShortConvRunResult&);

}  // namespace imbrex::test
