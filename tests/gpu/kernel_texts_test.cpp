// What a record of a compiled kernel holds for: the texts that the compiler reads for it, but not their comments, nor any other text.
#include "gpu/kernel_texts.h"

#include <gtest/gtest.h>

#include "expect_error.h"

namespace imbrex::gpu {
namespace {

using imbrex::test::error_code;

constexpr std::string_view kTextOfA = "// A kernel.\n#include \"rows.cuh\"\n  int a = 1;  // one\n",
                           kTextOfRows = "#include \"config.cuh\"\nint rows;\n", kTextOfOther = "int other;\n";

struct Texts {
  std::string_view kernel = kTextOfA, rows = kTextOfRows, other = kTextOfOther, config = "int k;", compiler = "NVRTC 13.0.88";
  std::vector<std::string> options = {"-std=c++20"};
  std::string hash() const {
    const EmbeddedText texts[] = {{"a.cu", kernel}, {"config.cuh", "of an editor"}, {"rows.cuh", rows}, {"other.cuh", other}};
    return KernelTexts(texts, "config.cuh", ".cu").content_hash({"a.cu", "sm_80", {}}, config, options, compiler);
  }
};

TEST(ContentHash, ChangesWithWhatTheCompilerReads) {
  const std::string before = Texts{}.hash();
  EXPECT_EQ(before.size(), 32u);
  EXPECT_NE((Texts{.kernel = "#include \"rows.cuh\"\nint a = 2;  // one\n"}.hash()), before);
  EXPECT_NE((Texts{.rows = "#include \"config.cuh\"\nint row;\n"}.hash()), before);
  EXPECT_NE((Texts{.config = "int l;"}.hash()), before);
  EXPECT_NE((Texts{.compiler = "NVRTC 13.0.89"}.hash()), before);
  EXPECT_NE((Texts{.options = {"-std=c++20", "-G"}}.hash()), before);
  // The second line is a comment in one of them only.
  EXPECT_NE((Texts{.kernel = "// \\\nint a;\n"}.hash()), (Texts{.kernel = "int a;\n"}.hash()));
}

TEST(ContentHash, StaysWithCommentsAndOtherTexts) {
  const std::string before = Texts{}.hash();
  EXPECT_EQ((Texts{.kernel = "\n#include \"rows.cuh\"\n    // Indented.\n    int a = 1;  // one\n\n"}.hash()), before);
  EXPECT_EQ((Texts{.rows = "// Rows.\n#include \"config.cuh\"\nint rows;"}.hash()), before);
  EXPECT_EQ((Texts{.other = "int another;\n"}.hash()), before);
}

TEST(ContentHash, FollowsIncludesOfIncludesOnce) {
  const std::string_view to_other = "#include \"config.cuh\"\n#  include \"other.cuh\"\nint rows;\n";
  const std::string before = Texts{.rows = to_other, .other = "#include \"rows.cuh\"\n"}.hash();
  EXPECT_NE((Texts{.rows = to_other, .other = "#include \"rows.cuh\"\nint o;\n"}.hash()), before);
  EXPECT_EQ(error_code([] { Texts{.rows = "#include \"nowhere.cuh\"\n"}.hash(); }), "cuda.source");
}

}  // namespace
}  // namespace imbrex::gpu
