// Kernels and sizes that backends say they would choose, for devices that are absent.
#include <gtest/gtest.h>

#include <algorithm>

#include "expect_error.h"
#include "imbrex/backend.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

TEST(KernelChoices, AsText) {
  const KernelChoice all{.requests = "all", .kernel = "avx2", .sizes = {}};
  EXPECT_EQ(all.str(), "all: avx2");
  KernelChoice some{
      .requests = "decode", .least_queries = 1, .most_queries = 1, .kernel = "k", .sizes = {{"a", 1}, {"b", int64_t(1) << 40}}};
  EXPECT_EQ(some.str(), "decode (1 query): k with a 1, b 1099511627776");
  some.most_queries = 4;
  EXPECT_EQ(some.str(), "decode (1 to 4 queries): k with a 1, b 1099511627776");
  some.least_queries = 5, some.most_queries = INT32_MAX;
  EXPECT_EQ(some.str(), "decode (5 queries or more): k with a 1, b 1099511627776");
}

// Every backend that can run a layer, on devices of every sort: the requests of its kernels are all there can be, each once.
TEST(KernelChoices, EveryRequestHasOneKernel) {
  int checked = 0;
  for (const char* name : {"h200", "a100", "b200", "amx,8 threads", "avx512,8 threads", "avx2,8 threads"}) {
    const DeviceInfo device = describe_device(name);
    for (const int group : {1, 4, 16, 71}) {
      for (const int dim : {64, 128, 256, 512}) {
        const AttentionSpec spec{.num_q_heads = group, .num_kv_heads = 1, .head_dim_qk = dim, .head_dim_v = dim};
        for (const Backend* backend : backends()) {
          if (!backend->unsupported(spec, device).empty()) {
            if (backend->name() != "reference") {
              EXPECT_EQ(test::error_code([&] { backend->kernel_choices(spec, device); }), "backend.unsupported");
            }
            continue;
          }
          const std::vector<KernelChoice> choices = backend->kernel_choices(spec, device);
          if (choices.empty()) {
            EXPECT_EQ(backend->name(), "reference");
            continue;
          }
          int64_t next = 1;
          for (const KernelChoice& choice : choices) {
            EXPECT_EQ(choice.least_queries, next) << spec.str() << " on " << device.str() << ": " << choice.str();
            next = int64_t(choice.most_queries) + 1;
            for (const KernelChoice::Size& size : choice.sizes) EXPECT_GT(size.value, 0) << choice.str();
          }
          EXPECT_EQ(next, int64_t(INT32_MAX) + 1) << spec.str() << " on " << device.str();
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 100);
}

}  // namespace
}  // namespace imbrex
