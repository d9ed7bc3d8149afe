// Tests of the batch notation: what it means, that it survives a round trip, and a code for every way to get it wrong.
#include "serve/batch_grammar.h"

#include <gtest/gtest.h>

#include "imbrex/error.h"

namespace imbrex::serve {
namespace {

TEST(BatchGrammar, Reads) {
  using Items = std::vector<BatchItem>;
  EXPECT_EQ(parse_batch("q2k"), (Items{{1, 2048, 2048}}));
  EXPECT_EQ(parse_batch("2q2k,32q1s1k"), (Items{{2, 2048, 2048}, {32, 1, 1024}}));
  EXPECT_EQ(parse_batch("2q2k_32q1s1k"), parse_batch("2q2k,32q1s1k"));
  EXPECT_EQ(parse_batch("q100s100"), (Items{{1, 100, 100}}));
  EXPECT_EQ(parse_batch("65536q1"), (Items{{65536, 1, 1}}));
}

TEST(BatchGrammar, RoundTrip) {
  for (const char* text : {"q2k", "2q2k,32q1s1k", "q7s1025", "3q1k,q1"}) EXPECT_EQ(to_string(parse_batch(text)), text);
}

TEST(BatchGrammar, RefusesWithACode) {
  const std::pair<const char*, const char*> rows[] = {
      {"", "batch_grammar.syntax"},
      {"2", "batch_grammar.syntax"},
      {"q", "batch_grammar.syntax"},
      {"q1,", "batch_grammar.syntax"},
      {"q1x", "batch_grammar.syntax"},
      {"q1s", "batch_grammar.syntax"},
      {"q1ss2", "batch_grammar.syntax"},
      {" q1", "batch_grammar.syntax"},
      {"q-1", "batch_grammar.syntax"},
      {"q1kk", "batch_grammar.syntax"},
      {"0q1", "batch_grammar.count"},
      {"65537q1", "batch_grammar.count"},
      {"q0", "batch_grammar.length"},
      {"q16385k", "batch_grammar.length"},
      {"q99999999999999999999", "batch_grammar.length"},
      {"q2s1", "batch_grammar.order"},
      {"60000q1,6000q1", "batch_grammar.size"},
      {"60000q1s1024k", "batch_grammar.size"},
  };
  for (const auto& [text, code] : rows) {
    try {
      parse_batch(text);
      ADD_FAILURE() << "\"" << text << "\" was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << text << ": " << e.what();
    }
  }
}

}  // namespace
}  // namespace imbrex::serve
