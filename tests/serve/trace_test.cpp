// The four trace formats, and what is said of rows that are wrong.
#include "serve/trace.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "expect_error.h"
#include "imbrex/error.h"
#include "sanitizers.h"

namespace imbrex::serve {
namespace {

const std::string kMooncake = R"({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]})"
                              "\n"
                              R"({"timestamp": 3001, "input_length": 512, "output_length": 9, "hash_ids": [0]})"
                              "\n";
const std::string kAzure =
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8";

TEST(Trace, ReadsMooncake) {
  const Trace t = parse_trace(kMooncake, "m.jsonl");
  EXPECT_EQ(t.format, "mooncake");
  EXPECT_EQ(t.source, "m.jsonl");
  EXPECT_EQ(t.prefix_block, 512);
  ASSERT_EQ(t.requests.size(), 2u);
  EXPECT_EQ(t.requests[0].prefix_ids, (std::vector<uint64_t>{0, 1}));
  EXPECT_DOUBLE_EQ(t.requests[1].arrival_s, 3.001);
  EXPECT_EQ(t.requests[1].input_length, 512);
  EXPECT_EQ(t.requests[1].output_length, 9);
}

TEST(Trace, ReadsAzureWithWindowsLineEndsAndNoLastNewline) {
  const Trace t = parse_trace(kAzure, "a.csv");
  EXPECT_EQ(t.format, "azure");
  EXPECT_EQ(t.prefix_block, 0);
  ASSERT_EQ(t.requests.size(), 2u);
  EXPECT_EQ(t.requests[0].arrival_s, 0.0);
  EXPECT_NEAR(t.requests[1].arrival_s, 0.052, 1e-12);
  EXPECT_EQ(t.requests[1].input_length, 3180);
  EXPECT_EQ(t.requests[1].output_length, 8);
}

TEST(Trace, AzureTimesCrossDaysMonthsAndLeapYears) {
  const auto gap = [](std::string_view a, std::string_view b) {
    const std::string text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + std::string(a) + ",1,1\n" + std::string(b) + ",1,1\n";
    return parse_trace(text, "t").requests[1].arrival_s;
  };
  EXPECT_DOUBLE_EQ(gap("2023-11-16 23:59:59.5", "2023-11-17 00:00:00.5"), 1.0);
  EXPECT_DOUBLE_EQ(gap("2023-12-31 23:59:59", "2024-01-01 00:00:00"), 1.0);
  EXPECT_DOUBLE_EQ(gap("2024-02-28 00:00:00", "2024-03-01 00:00:00"), 2 * 86400.0);
  EXPECT_DOUBLE_EQ(gap("2023-02-28 00:00:00", "2023-03-01 00:00:00"), 86400.0);
  EXPECT_DOUBLE_EQ(gap("2100-02-28 00:00:00", "2100-03-01 00:00:00"), 86400.0);
  EXPECT_DOUBLE_EQ(gap("2024-05-10 00:00:00.009930+00:00", "2024-05-10T00:00:01.009930Z"), 1.0);
  EXPECT_DOUBLE_EQ(gap("1999-01-01 00:00:00", "2000-01-01 00:00:00"), 365 * 86400.0);
}

TEST(Trace, ReadsPlainFormats) {
  const Trace csv = parse_trace(
      "\xef\xbb\xbf"
      "arrival,input,output\n0.5,10,2\n\n1.5e0,7,1\n",
      "p.csv");
  EXPECT_EQ(csv.format, "csv");
  ASSERT_EQ(csv.requests.size(), 2u);
  EXPECT_EQ(csv.requests[1].arrival_s, 1.5);
  const Trace jsonl = parse_trace("{\"arrival\": 0.25, \"input\": 3, \"output\": 4, \"user\": \"x\"}\r\n", "p.jsonl");
  EXPECT_EQ(jsonl.format, "jsonl");
  EXPECT_EQ(jsonl.requests[0].arrival_s, 0.25);
  EXPECT_EQ(jsonl.requests[0].output_length, 4);
  EXPECT_TRUE(jsonl.requests[0].prefix_ids.empty());
}

struct BadRow {
  const char* code;
  const char* place;  // what the message begins with
  std::string text;
};
void PrintTo(const BadRow& row, std::ostream* os) { *os << row.code << " " << row.text; }

class BadTrace : public testing::TestWithParam<BadRow> {};

TEST_P(BadTrace, IsRefusedWithItsPlace) {
  try {
    parse_trace(GetParam().text, "f");
    FAIL() << "was accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), GetParam().code) << e.what();
    EXPECT_TRUE(std::string(e.what()).starts_with(GetParam().place)) << e.what();
  }
}

std::string mooncake(std::string_view row) { return kMooncake + std::string(row) + "\n"; }
std::string azure(std::string_view row) { return kAzure + "\r\n" + std::string(row); }
std::string plain(std::string_view row) { return "arrival,input,output\n" + std::string(row); }

INSTANTIATE_TEST_SUITE_P(
    Rows, BadTrace,
    testing::Values(
        BadRow{"trace.empty", "f: ", ""}, BadRow{"trace.empty", "f: ", "\n \n"}, BadRow{"trace.empty", "f: ", "arrival,input,output\n"},
        BadRow{"trace.format.unknown", "f:1:1: ", "time,in,out\n"}, BadRow{"trace.format.unknown", "f:2:1: ", "\n[1]\n"},
        BadRow{"trace.format.json", "f:1:1: ", "{\"a\": 1}\n"}, BadRow{"trace.json.syntax", "f:1:8: ", "{\"a\": 1\n"},
        BadRow{"trace.json.syntax", "f:3:15: ", mooncake("{\"timestamp\": x}")},
        BadRow{"trace.json.syntax", "f:3:", mooncake("{\"timestamp\": 1} 2")}, BadRow{"trace.json.object", "f:3:1: ", mooncake("[1, 2]")},
        BadRow{"trace.json.missing", "f:3:1: ", mooncake(R"({"timestamp": 4000, "input_length": 1, "output_length": 1})")},
        BadRow{"trace.json.duplicate",
               "f:3:15: ", mooncake(R"({"timestamp": 4000, "timestamp": 4001, "input_length": 1, "output_length": 1})")},
        BadRow{"trace.json.missing", "f:3:1: ", mooncake(R"({"timestamp": 4000, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.json.type", "f:3:15: ", mooncake(R"({"timestamp": "4", "input_length": 1, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.json.type", "f:3:37: ", mooncake(R"({"timestamp": 4000, "input_length": 1.5, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.json.type",
               "f:3:37: ", mooncake(R"({"timestamp": 4000, "input_length": 18446744073709551615, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.json.type", "f:3:73: ", mooncake(R"({"timestamp": 4000, "input_length": 1, "output_length": 1, "hash_ids":  7})")},
        BadRow{"trace.length.range", "f:3:37: ", mooncake(R"({"timestamp": 4000, "input_length": 0, "output_length": 1, "hash_ids": []})")},
        BadRow{"trace.length.range",
               "f:3:37: ", mooncake(R"({"timestamp": 4000, "input_length": 9223372036854775807, "output_length": 1, "hash_ids": []})")},
        BadRow{"trace.length.range",
               "f:3:57: ", mooncake(R"({"timestamp": 4000, "input_length": 1, "output_length": -3, "hash_ids": []})")},
        BadRow{"trace.hash_ids.count",
               "f:3:", mooncake(R"({"timestamp": 4000, "input_length": 513, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.hash_ids.type", "f:3:", mooncake(R"({"timestamp": 4000, "input_length": 3, "output_length": 1, "hash_ids": [-1]})")},
        BadRow{"trace.hash_ids.type",
               "f:3:", mooncake(R"({"timestamp": 4000, "input_length": 3, "output_length": 1, "hash_ids": [[[]]]})")},
        BadRow{"trace.arrival.order",
               "f:3:15: ", mooncake(R"({"timestamp": 3000, "input_length": 1, "output_length": 1, "hash_ids": [1]})")},
        BadRow{"trace.arrival.range", "f:1:15: ", R"({"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [1]})"},
        BadRow{"trace.csv.columns", "f:4:6: ", azure("1,2,3,4")}, BadRow{"trace.csv.columns", "f:2:4: ", plain("1,2")},
        BadRow{"trace.csv.columns", "f:2:6: ", plain("1,2,3,4")}, BadRow{"trace.csv.number", "f:2:1: ", plain("x,2,3")},
        BadRow{"trace.csv.number", "f:2:3: ", plain("1,,3")}, BadRow{"trace.csv.number", "f:2:5: ", plain("1,2,3.5")},
        BadRow{"trace.csv.number", "f:2:3: ", plain("1, 2,3")}, BadRow{"trace.csv.number", "f:2:3: ", plain("1,99999999999999999999,3")},
        BadRow{"trace.length.range", "f:2:3: ", plain("1,0,3")}, BadRow{"trace.length.range", "f:2:5: ", plain("1,2,16777217")},
        BadRow{"trace.arrival.range", "f:2:1: ", plain("nan,2,3")}, BadRow{"trace.arrival.range", "f:2:1: ", plain("inf,2,3")},
        BadRow{"trace.arrival.range", "f:2:1: ", plain("-0.5,2,3")}, BadRow{"trace.arrival.order", "f:3:1: ", plain("2,2,3\n1,2,3")},
        BadRow{"trace.azure.timestamp", "f:4:1: ", azure("yesterday,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:6: ", azure("2023-13-16 18:17:05.0,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:9: ", azure("2023-02-29 18:17:05.0,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:12: ", azure("2023-11-16 24:17:05.0,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:19: ", azure("2023-11-16 18:17:6,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:21: ", azure("2023-11-16 18:17:05.,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:28: ", azure("2023-11-16 18:17:05.12345678,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:21: ", azure("2023-11-16 18:17:05.+02:00,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:20: ", azure("2023-11-16 18:17:05+02:00,1,1")},
        BadRow{"trace.azure.timestamp", "f:4:20: ", azure("2023-11-16 18:17:05 ,1,1")},
        BadRow{"trace.arrival.order", "f:4:1: ", azure("2023-11-16 18:17:04.0,1,1")},
        BadRow{"trace.arrival.order", "f:4:1: ", azure("2022-11-16 18:17:04.0,1,1")}));

std::string code_of(std::string_view text, const TraceLimits& limits) {
  return test::error_code([&] { parse_trace(text, "f", limits); });
}

TEST(Trace, KeepsItsLimits) {
  EXPECT_EQ(code_of(kMooncake, {.max_bytes = 10}), "trace.limit.bytes");
  EXPECT_EQ(code_of(kMooncake, {.max_line_bytes = 10}), "trace.limit.line");
  EXPECT_EQ(code_of(kMooncake, {.max_requests = 1}), "trace.limit.requests");
  EXPECT_EQ(code_of(kMooncake, {.max_tokens = 599}), "trace.length.range");
  EXPECT_EQ(code_of(kMooncake, {.max_tokens = 600}), "nothing thrown");
}

TEST(Trace, DeepJsonIsAnErrorNotACrash) {
  const std::string deep = "{\"timestamp\": " + std::string(200'000, '[') + std::string(200'000, ']') + "}";
  EXPECT_EQ(code_of(deep, {}), "trace.json.depth");
}

TEST(Trace, FilesThatCannotBeRead) {
  const auto code = [](const std::string& path) { return test::error_code([&] { read_trace(path); }); };
  EXPECT_EQ(code("/no/such/file.jsonl"), "trace.file.open");
  EXPECT_EQ(code(std::filesystem::temp_directory_path().string()), "trace.file.directory");
  const auto path = std::filesystem::temp_directory_path() / "imbrex_trace_test.csv";
  std::ofstream(path, std::ios::binary) << kAzure;
  EXPECT_EQ(read_trace(path.string()).requests.size(), 2u);
  std::filesystem::remove(path);
}

// Requests share what they shared, and have what is left of their tokens.
TEST(Trace, LengthsCanBeDivided) {
  Trace trace;
  trace.source = "t", trace.prefix_block = 512;
  trace.requests = {{.input_length = 1025, .output_length = 1, .prefix_ids = {1, 2, 3}},
                    {.input_length = 512, .output_length = 33, .prefix_ids = {1}}};
  shrink(trace, 1);
  EXPECT_EQ(trace.source, "t");
  EXPECT_EQ(trace.requests[0].input_length, 1025);
  EXPECT_EQ(test::error_code([&] { shrink(trace, 3); }), "trace.shrink");
  EXPECT_EQ(test::error_code([&] { shrink(trace, 0); }), "trace.shrink");
  shrink(trace, 16);
  EXPECT_EQ(trace.source, "t with lengths divided by 16");
  EXPECT_EQ(trace.prefix_block, 32);
  EXPECT_EQ(trace.requests[0].input_length, 65) << "a token of the third block is left";
  EXPECT_EQ(trace.requests[0].output_length, 1);
  EXPECT_EQ(trace.requests[1].input_length, 32);
  EXPECT_EQ(trace.requests[1].output_length, 3);
  trace.prefix_block = 0;
  shrink(trace, 7);
  EXPECT_EQ(trace.requests[0].input_length, 10);
}

// A cheap stand-in for the fuzz target, so that every test run has some of it.
TEST(Trace, DamagedFilesGiveErrorsOnly) {
  std::mt19937_64 rng(7);
  constexpr int kFiles = test::kAddressSanitizer ? 5'000 : 20'000;
  int accepted = 0;
  for (int i = 0; i < kFiles; ++i) {
    std::string text = i % 2 ? kAzure : kMooncake;
    for (int edits = 1 + int(rng() % 3); edits > 0; --edits) {
      const size_t at = rng() % text.size();
      switch (rng() % 3) {
        case 0: text[at] = char(rng()); break;
        case 1: text.erase(at, 1 + rng() % 5); break;
        default: text.insert(at, 1, "0123456789,:-\"{}[]\r\n"[rng() % 20]);
      }
    }
    accepted += code_of(text, {}) == "nothing thrown";
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, kFiles);
}

}  // namespace
}  // namespace imbrex::serve
