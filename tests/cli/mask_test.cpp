// `imbrex mask`: its pictures, its counts, tensors on the command line, and what it refuses.
#include <nlohmann/json.hpp>

#include "cli/program.h"

namespace imbrex::test {
namespace {

TEST_F(Cli, MaskDrawsEveryElement) {
  const Ran ran = run("mask 'kv <= q & q - kv < 4' --queries 8 --keys 12 --tile-queries 4 --tile-keys 4");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, R"(kv <= q & q - kv < 4
8 queries, 12 keys, tiles of 4 x 4

q   kv   0    4    8
        +----+----+----+
      4 |.ooo|o...|    |
      5 |..oo|oo..|    |
      6 |...o|ooo.|    |
      7 |....|oooo|    |
        +----+----+----+
      8 |    |.ooo|o...|
      9 |    |..oo|oo..|
     10 |    |...o|ooo.|
     11 |    |....|oooo|
        +----+----+----+
# shown, in a full tile    o shown, . hidden, in a partial tile    blank: hidden, in an empty tile
6 tiles: 2 (33.3 %) empty, 0 (0.0 %) full, 4 (66.7 %) partial
)");
}

TEST_F(Cli, MaskReadsTensors) {
  const Ran documents = run("mask 'doc[q] == doc[kv]' --queries 7 --tile-queries 2 --tile-keys 3 --tensor 'doc=0*3,1*4'");
  EXPECT_EQ(documents.code, 0) << documents.err;
  EXPECT_TRUE(contains(documents.out, "      1 |###|   | |")) << documents.out;
  EXPECT_TRUE(contains(documents.out, "      2 |ooo|...|.|")) << documents.out;
  EXPECT_TRUE(contains(documents.out, "      6 |   |###|#|")) << documents.out;
  const Ran kinds = run("mask 'seen[kv] & bias[batch, head] < 1' --batch 1 --head 2 -q 2 -t seen=true,false -t bias=2x3:1,2,3,4,5,0.5");
  EXPECT_TRUE(contains(kinds.out, "      0 |o.|")) << kinds.out << kinds.err;
}

TEST_F(Cli, MaskOfLongRequestsIsDrawnByTiles) {
  const Ran ran = run("mask 'q // 8192 == kv // 8192 & kv <= q' --queries 65536 --tile-queries 4096 --tile-keys 4096");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, "   4096 |#o              |\n   8192 |  o             |\n  12288 |  #o            |\n")) << ran.out;
  EXPECT_TRUE(contains(ran.out, "256 tiles: 232 (90.6 %) empty, 8 (3.1 %) full, 16 (6.2 %) partial")) << ran.out;
  EXPECT_TRUE(contains(run("mask 'kv <= q' --queries 65536").out, "too many tiles for a picture"));
}

TEST_F(Cli, MaskPrintsStretchesAsJson) {
  const Ran ran = run("mask 'kv <= q' --queries 8 --json");
  const auto json = nlohmann::json::parse(ran.out);
  EXPECT_EQ(json["expression"], "kv <= q");
  EXPECT_EQ(json["empty_tiles"], 1);
  EXPECT_EQ(json["stretches"].dump(),
            R"([[{"begin":0,"end":4,"full":false}],[{"begin":0,"end":4,"full":true},{"begin":4,"end":8,"full":false}]])");
}

TEST_F(Cli, MaskRefusesWhatIsNoMask) {
  const std::pair<const char*, const char*> rows[] = {
      {"mask 'q <'", "at character 4: expected a value, got the end of the text [expression.syntax]"},
      {"mask 'q + kv'", "[expression.type]"},
      {"mask 'score < 1'", "[expression.score]"},
      {"mask 'doc[q] < 1'", "[expression.name]"},
      {"mask 'doc[q] < 1' -t doc=1,x", "[cli.tensor]"},
      {"mask 'doc[q] < 1' -t doc", "[cli.tensor]"},
      {"mask 'doc[q] < 1' -t doc=1.5,x", "[cli.tensor]"},
      {"mask 'doc[q] < 1' -t doc=true,1", "[cli.tensor]"},
      {"mask 'doc[q, kv] < 1' -t doc=2x2:1,2,3", "[cli.tensor]"},
      {"mask 'doc[q, kv] < 1' -t doc=99999999999x2:1,2,3", "[cli.tensor]"},
      {"mask 'doc[q] < 1' -t 'doc=0*99999999'", "[cli.tensor]"},
      {"mask 'doc[q] < 1' -t 'q=1'", "[expression.name]"},
      {"mask 'q < kv' --queries 0", "[usage]"},
  };
  for (const auto& [arguments, error] : rows) {
    const Ran ran = run(arguments);
    EXPECT_EQ(ran.code, 2) << arguments << "\n" << ran.err;
    EXPECT_TRUE(ran.out.empty() && contains(ran.err, error)) << arguments << "\n" << ran.err;
  }
}

}  // namespace
}  // namespace imbrex::test
