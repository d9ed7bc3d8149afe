// The order of launches of a step, and which of them wait.
#include "gpu/launch_order.h"

#include <gtest/gtest.h>

#include <string>

namespace imbrex::gpu {
namespace {

// "prefill 7, decode 3 beside, ...": `waits` where the launch behind waits; "| " in front of what begins a branch of a graph.
std::string text(const std::array<RegimeTasks, kNumRegimes>& work, bool captured = false, bool on_device = false, bool drafts = false) {
  std::string all;
  for (const RegimeLaunch& l : launch_order(work, captured, on_device, drafts))
    all += std::string(all.empty() ? "" : ", ") + (l.branches ? "| " : "") + kRegimeNames[l.regime] + " " + std::to_string(l.tasks) +
           (l.beside ? " beside" : "") + (l.next_waits ? " waits" : "");
  return all;
}

TEST(LaunchOrder, LongItemsBeginFirstAndRunBesideTheOthers) {
  EXPECT_EQ(text({}), "");
  EXPECT_EQ(text({{{3}, {5}, {}, {7}}}), "prefill 7, verify 5 beside, decode 3 beside waits");
  EXPECT_EQ(text({{{3}, {}, {}, {7}}}), "prefill 7, decode 3 beside waits");
  EXPECT_EQ(text({{{3}, {5}, {6}, {7}}}), "prefill 7, long verify 6 beside, verify 5 beside, decode 3 beside waits");
  EXPECT_EQ(text({{{3}, {}, {}, {}}}), "decode 3 waits");
}

TEST(LaunchOrder, ThoseThatFoldInTheSameMemoryWait) {
  EXPECT_EQ(text({{{3, true}, {5, true}, {}, {7, true}}}), "prefill 7, verify 5, decode 3 waits");
  EXPECT_EQ(text({{{3, true}, {5}, {}, {7, true}}}), "prefill 7, verify 5 beside, decode 3 waits");
  EXPECT_EQ(text({{{3, true}, {5}, {}, {7}}}), "prefill 7, verify 5 beside, decode 3 beside waits");
}

TEST(LaunchOrder, WhereNobodyKnowsTheWorkEachWaits) {
  EXPECT_EQ(text({{{3}, {5}, {}, {7, true}}}, true), "| decode 3 waits, | verify 5 waits, | prefill 7 waits");
  EXPECT_EQ(text({{{3}, {5}, {}, {7}}}, false, true), "prefill 7 waits, verify 5 waits, decode 3 waits");
}

TEST(LaunchOrder, InGraphsThoseThatFoldAreOneBranch) {
  EXPECT_EQ(text({{{3}, {5, true}, {}, {7, true}}}, true), "| decode 3 waits, | verify 5 waits, prefill 7 waits");
  EXPECT_EQ(text({{{3, true}, {5}, {}, {7, true}}}, true), "| decode 3 waits, verify 5 waits, prefill 7 waits");
  EXPECT_EQ(text({{{3, true}, {5}, {}, {7}}}, true), "| decode 3 waits, | verify 5 waits, | prefill 7 waits");
  EXPECT_EQ(text({{{3, true}, {5, true}, {}, {7, true}}}, true), "| decode 3 waits, verify 5 waits, prefill 7 waits");
}

TEST(LaunchOrder, InGraphsForDraftsTheseBegin) {
  EXPECT_EQ(text({{{3}, {5, true}, {}, {}}}, true, false, true), "| verify 5 waits, | decode 3 waits");
  EXPECT_EQ(text({{{3, true}, {5}, {}, {}}}, true, false, true), "| verify 5 waits, | decode 3 waits");
  EXPECT_EQ(text({{{3}, {}, {}, {7}}}, true, false, true), "| prefill 7 waits, | decode 3 waits");
  EXPECT_EQ(text({{{3}, {5}, {}, {7}}}, true, false, true), "| prefill 7 waits, | verify 5 waits, | decode 3 waits");
  EXPECT_EQ(text({{{3}, {5}, {6}, {}}}, true, false, true), "| long verify 6 waits, | verify 5 waits, | decode 3 waits");
  EXPECT_EQ(text({{{3, true}, {5, true}, {}, {}}}, true, false, true), "| decode 3 waits, verify 5 waits") << "they are one branch";
  EXPECT_EQ(text({{{3, true}, {0, true}, {}, {7, true}}}, true, false, true), "| decode 3 waits, prefill 7 waits");
}

}  // namespace
}  // namespace imbrex::gpu
