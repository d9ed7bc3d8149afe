// Random cases of attention (tests/conformance/random_cases.h) on the whole host side of the CUDA backends, with kernels that are host
// code, on the fake driver: those that a GPU runs in conformance_tests.
#include <gtest/gtest.h>

#include "conformance/random_trials.h"
#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_backend.h"
#include "sanitizers.h"

namespace imbrex::cuda {
namespace {

class RandomCasesOnHost : public testing::TestWithParam<int> {
 protected:
  ~RandomCasesOnHost() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
};

TEST_P(RandomCasesOnHost, AgreeWithTheReferenceAndKeepItsLaws) {
  constexpr int kCount = imbrex::test::kAddressSanitizer ? 16 : 48;
  std::vector<imbrex::test::Target> targets;
  std::vector<std::unique_ptr<Backend>> backends, mirrors;
  for (const char* name : {"cuda_sm80", "cuda_sm90"}) {
    backends.push_back(std::make_unique<HostBackend>(name));
    mirrors.push_back(device_mirror(*backends.back()));
    for (const KvFormat format : {KvFormat::strided, KvFormat::latent, KvFormat::latent_rope, KvFormat::fp8_ds_mla})
      targets.push_back({.backend = mirrors.back().get(), .device = probe_cuda().at(0), .kv_format = format});
  }
  imbrex::test::for_each_seed(GetParam(), kCount, "attention", [&](uint64_t seed) {
    fake::state().launches.clear();
    return imbrex::test::random_attention_failure(seed, targets, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Part, RandomCasesOnHost, testing::Range(0, imbrex::test::kRandomParts), testing::PrintToStringParamName());

}  // namespace
}  // namespace imbrex::cuda
