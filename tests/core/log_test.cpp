// IMBREX_LOG: which lines reach stderr.
#include "core/log.h"

#include <gtest/gtest.h>

#include <string>

#include "expect_error.h"
#include "scoped.h"

namespace imbrex {
namespace {

std::string said(const char* level) {
  const test::ScopedEnv env("IMBREX_LOG", level);
  testing::internal::CaptureStderr();
  log_warning("cache {}", 1);
  log_info("plan {}", 2);
  return testing::internal::GetCapturedStderr();
}

TEST(Log, SaysAsMuchAsIsAskedFor) {
  EXPECT_EQ(said(nullptr), "imbrex: cache 1\n");
  EXPECT_EQ(said("warning"), "imbrex: cache 1\n");
  EXPECT_EQ(said("info"), "imbrex: cache 1\nimbrex: plan 2\n");
  EXPECT_EQ(said("off"), "");
}

TEST(Log, AnUnknownLevelIsAnError) {
  EXPECT_EQ(test::error_code([] { said("debug"); }), "env.log");
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(test::error_code([] {
              const test::ScopedEnv env("IMBREX_LOG", "2");
              log_info("nothing");
            }),
            "env.log");
}

}  // namespace
}  // namespace imbrex
