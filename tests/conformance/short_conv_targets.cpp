// See short_conv_targets.h.
#include "short_conv_targets.h"

#include "shards.h"

namespace imbrex::test {

const std::vector<ShortConvTarget>& short_conv_targets() {
  static const std::vector<ShortConvTarget> all = [] {
    std::vector<ShortConvTarget> result;
    const auto kernels_of = [](const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device) {
      const ShortConvSpec spec{.dim = 64};
      if (!backend.unsupported(spec, device).empty()) return std::string();
      if (device.device.type == DeviceType::cuda) return target_name(backend, device);  // every GPU has kernels of its own
      const std::string text = backend.plan(spec, device, {.limits = {1, 1, 1}, .threads = {}})->str();
      return text.substr(0, text.find(':'));
    };
    for_each_target<ShortConvFamily>(kernels_of, [&](const BackendOf<ShortConvFamily>* backend, const DeviceInfo& device) {
      result.push_back({backend, device});
    });
    return result;
  }();
  return all;
}

const ShortConvCaseInputs& inputs_of(const ShortConvCase& c) {
  return kept<ShortConvCaseInputs, kMostShards>(c, [](const ShortConvCase& of) { return make_inputs(of); });
}

const ShortConvExpected& expected_of(const ShortConvCase& c) {
  return kept<ShortConvExpected, kMostShards>(c, [](const ShortConvCase& of) { return expect(inputs_of(of)); });
}

ShortConvCase steep_case(const ShortConvSpec& spec, std::vector<ShortConvCaseRequest> requests) {
  ShortConvCase c{.name = "law", .spec = spec, .requests = std::move(requests)};
  for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
  c.values = ShortConvValues::steep;
  c.seed = 77;
  return c;
}

bool same_bits(const ShortConvRunResult& a, const ShortConvRunResult& b) {
  return bit_identical(a.out, b.out) && a.state.bytes == b.state.bytes;
}

}  // namespace imbrex::test
