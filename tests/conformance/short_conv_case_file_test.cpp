// Case files of the short convolution: what is written is read back, a wrong result is found, and everything that does not fit is refused
// with its own code.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "conformance/case_file.h"
#include "conformance/case_file_edits.h"
#include "expect_error.h"
#include "short_conv/reference.h"

namespace imbrex::test {
namespace {

using nlohmann::json;

// Has every tensor that a file can have.
ShortConvCase full_conv_case() {
  ShortConvCase c{.name = "full",
                  .spec = {.dim = 6, .width = 4, .bias = true, .dtype = DType::bf16, .num_drafts = 3},
                  .requests = {{4, 9, 3, 1, 0}, {0, 7, 0, 0, 1}, {5, 0, 2, 0, 2}, {1, 12, 0, 3, 3}}};
  return c;
}

ShortConvCase conv_case_of_trees() {
  ShortConvCase c = full_conv_case();
  c.spec.num_drafts = kTreeDrafts, c.spec.tree_drafts = true, c.requests = tree_requests();
  for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
  return c;
}

ShortConvCaseFile reread(const ShortConvCaseFile& file) {
  return std::get<ShortConvCaseFile>(parse_any_case(parse_safetensors(write_safetensors(to_safetensors(file)))));
}

TEST(ShortConvCaseFile, RoundTrips) {
  ShortConvCase plain{.name = "plain", .spec = {.dim = 9, .width = 2, .dtype = DType::f16}, .requests = {{3, 0}, {2, 5}}};
  ShortConvCase silu{.name = "silu",
                     .spec = {.dim = 5, .width = 4, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu},
                     .requests = {{3, 0}, {2, 5}}};
  for (const ShortConvCase& c : {full_conv_case(), plain, silu, conv_case_of_trees()}) {
    const ShortConvCaseFile file = make_case_file(c), again = reread(file);
    EXPECT_EQ(again.inputs.spec, c.spec) << again.inputs.spec.str();
    EXPECT_EQ(again.inputs.input.bytes, file.inputs.input.bytes);
    EXPECT_EQ(again.inputs.weight.bytes, file.inputs.weight.bytes);
    EXPECT_EQ(again.inputs.bias.bytes, file.inputs.bias.bytes);
    EXPECT_EQ(again.inputs.state.bytes, file.inputs.state.bytes);
    EXPECT_TRUE(bit_identical(again.out, file.out));
    EXPECT_EQ(again.state_out.bytes, file.state_out.bytes);
    ASSERT_EQ(again.inputs.requests.size(), c.requests.size());
    for (size_t r = 0; r < c.requests.size(); ++r) {
      EXPECT_EQ(again.inputs.requests[r].q_len, c.requests[r].q_len);
      EXPECT_EQ(again.inputs.requests[r].context_len, c.requests[r].context_len);
      EXPECT_EQ(again.inputs.requests[r].drafts, c.requests[r].drafts);
      EXPECT_EQ(again.inputs.requests[r].accepted, c.requests[r].accepted);
      for (int t = 0; t < c.requests[r].q_len; ++t) EXPECT_EQ(again.inputs.requests[r].parent_of(t), c.requests[r].parent_of(t));
    }
  }
}

TEST(ShortConvCaseFile, VerifiesAndFindsAWrongResult) {
  const BackendOf<ShortConvFamily>* const reference = &short_conv_reference();
  const ShortConvCaseFile good = make_case_file(full_conv_case());
  const auto rows_of = [&](const ShortConvCaseFile& file) { return verify_case(file, probe_cpu(), {&reference, 1}); };
  EXPECT_EQ(rows_of(good).size(), 3u) << "with drafts there is no other way to cut the step";
  for (const VerifyRow& row : rows_of(good)) {
    EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
    EXPECT_GT(row.bound.max, 0);
    EXPECT_LE(row.error.mean, row.bound.mean);
  }
  ShortConvCase plain = full_conv_case();
  plain.requests = {{4, 9}, {5, 0}};
  EXPECT_EQ(rows_of(make_case_file(plain)).size(), 4u);
  ShortConvCaseFile bad = good;
  bad.out[8] += 0.5f;
  for (const VerifyRow& row : rows_of(bad)) EXPECT_TRUE(row.failure.starts_with("out: channel 2 of token 1 ")) << row.failure;
  bad = good;
  bad.state_out.bytes[5] ^= 1;
  for (const VerifyRow& row : rows_of(bad)) EXPECT_TRUE(row.failure.starts_with("state: channel 2 of row 0 of request 0 ")) << row.failure;
  // Rows that the step does not write are not looked at, whatever a file has there.
  Safetensors file = to_safetensors(good);
  HostTensor& state_out = file.tensors["state_out"];
  const size_t row_bytes = 6 * 2, slot_bytes = 6 * row_bytes;
  std::memset(&state_out.bytes[slot_bytes], 0x55, slot_bytes);                     // of the request without tokens
  std::memset(&state_out.bytes[3 * slot_bytes + 3 * row_bytes], 0x55, row_bytes);  // of the one without drafts
  for (const VerifyRow& row : rows_of(parse_short_conv_case(file))) EXPECT_TRUE(row.pass()) << row.failure;
}

TEST(ShortConvCaseFile, ShowsRefusals) {
  const BackendOf<ShortConvFamily>* const reference = &short_conv_reference();
  const auto rows = verify_case(make_case_file(full_conv_case()), describe_device("h200"), {&reference, 1});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NE(rows[0].refused.find("device.type"), std::string::npos) << rows[0].refused;
  EXPECT_FALSE(rows[0].pass());
}

TEST(ShortConvCaseFile, RefusesWhatDoesNotFit) {
  const auto erase = [](const char* name) { return [=](Safetensors& file) { file.tensors.erase(name); }; };
  const struct {
    const char* code;
    std::function<void(Safetensors&)> change;
  } broken[] = {
      {"case_file.metadata", [](Safetensors& f) { f.metadata.clear(); }},
      {"case_file.family", edit([](json& j) { j["family"] = "long_conv"; })},
      {"case_file.family", edit([](json& j) { j["family"] = std::string(1000, 'x'); })},
      {"case_file.json.type", edit([](json& j) { j["family"] = 3; })},
      {"case_file.json.missing", edit([](json& j) {
         j.erase("family"), j["mask"] = {{"causal", true}};
       })},  // read as attention's
      {"case_file.json.missing", edit([](json& j) { j.erase("version"); })},
      {"case_file.json.missing", edit([](json& j) { j.erase("spec"); })},
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("dim"); })},
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("width"); })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["bias"] = 1; })},
      {"case_file.json.range", edit([](json& j) { j["spec"]["dim"] = int64_t(1) << 40; })},
      {"case_file.json.unknown", edit([](json& j) { j["mask"] = json::object(); })},
      {"case_file.json.unknown", edit([](json& j) { j["spec"]["gate"] = "silu"; })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["form"] = 1; })},
      {"short_conv.form", edit([](json& j) { j["spec"]["form"] = "round"; })},
      {"short_conv.activation", edit([](json& j) { j["spec"]["activation"] = "relu"; })},
      {"short_conv.activation", edit([](json& j) { j["spec"]["activation"] = "silu"; })},  // of the gated form
      {"case_file.tensor.missing", edit([](json& j) { j["spec"]["form"] = "plain"; })},    // whose input is named x
      {"case_file.version", edit([](json& j) { j["version"] = 2; })},
      {"dtype.unknown", edit([](json& j) { j["spec"].erase("dtype"); })},
      {"short_conv.dtype", edit([](json& j) { j["spec"]["dtype"] = "fp8_e4m3"; })},
      {"short_conv.dim", edit([](json& j) { j["spec"]["dim"] = 0; })},
      {"short_conv.width", edit([](json& j) { j["spec"]["width"] = 9; })},
      {"short_conv.num_drafts", edit([](json& j) { j["spec"]["num_drafts"] = -1; })},
      {"case_file.tensor.missing", erase("seq_lens")},
      {"case_file.tensor.missing", erase("bcx")},
      {"case_file.tensor.missing", erase("bias")},
      {"case_file.tensor.missing", erase("state")},
      {"case_file.tensor.missing", erase("state_out")},
      {"case_file.tensor.unknown", [](Safetensors& f) { f.tensors["state_slots"] = HostTensor::make(DType::i32, {4}); }},
      {"case_file.tensor.unknown", edit([](json& j) { j["spec"]["bias"] = false; })},
      {"case_file.tensor.dtype", [](Safetensors& f) { f.tensors["state"].dtype = DType::f16; }},
      {"case_file.tensor.dtype", [](Safetensors& f) { f.tensors["out"].dtype = DType::i32; }},
      {"case_file.tensor.rank", [](Safetensors& f) { f.tensors["weight"].sizes = {24}; }},
      {"case_file.tensor.shape",
       [](Safetensors& f) {
         f.tensors["weight"].sizes = {4, 6};
       }},
      {"case_file.tensor.shape", edit([](json& j) { j["spec"]["num_drafts"] = 4; })},
      {"case_file.query_start_loc.start", set_i32("query_start_loc", 0, 1)},
      {"case_file.query_start_loc.monotone", set_i32("query_start_loc", 2, 3)},
      {"case_file.seq_lens.negative", set_i32("seq_lens", 1, -1)},
      {"case_file.seq_lens.shorter_than_query", set_i32("seq_lens", 0, 3)},
      {"case_file.drafts", set_i32("num_drafts", 0, 4)},
      {"case_file.drafts", set_i32("num_drafts", 3, 2)},
      {"case_file.drafts", set_i32("num_drafts", 0, -1)},
      {"case_file.drafts", set_i32("accepted_drafts", 0, 4)},
      {"case_file.drafts", set_i32("accepted_drafts", 2, 1)},  // nothing has gone by
  };
  Safetensors tree = to_safetensors(make_case_file(conv_case_of_trees()));
  ASSERT_NO_THROW(parse_any_case(tree));
  set_i32("draft_parents", 3, 3)(tree);  // itself
  EXPECT_EQ(error_code([&] { parse_any_case(tree); }), "case_file.draft_parents");
  const Safetensors good = to_safetensors(make_case_file(full_conv_case()));
  ASSERT_NO_THROW(parse_any_case(good));
  for (const auto& [code, change] : broken) {
    Safetensors file = good;
    change(file);
    EXPECT_EQ(error_code([&] { parse_any_case(file); }), code) << file.metadata["imbrex"];
  }
  EXPECT_EQ(error_code([&] { parse_case(good); }), "case_file.family");
  Safetensors attention = good;
  attention.metadata["imbrex"] = R"({"version": 1, "family": "attention"})";
  EXPECT_EQ(error_code([&] { parse_short_conv_case(attention); }), "case_file.family");
  EXPECT_EQ(error_code([&] { parse_any_case(attention); }), "case_file.json.missing");
}

// Lengths of which a file has the wrong number of rows are refused before anything is read at them; what is accepted can be run.
TEST(ShortConvCaseFile, DamagedFilesAreReadOrRefused) {
  const std::string good = write_safetensors(to_safetensors(make_case_file(full_conv_case())));
  const BackendOf<ShortConvFamily>* const reference = &short_conv_reference();
  std::mt19937_64 random(3);
  int refused = 0, run = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string bytes = good;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) bytes[random() % bytes.size()] = char(random());
    const std::string code = error_code([&] {
      const AnyCaseFile file = parse_any_case(parse_safetensors(bytes));
      verify_case(std::get<ShortConvCaseFile>(file), probe_cpu(), {&reference, 1});
      ++run;
    });
    if (code == "nothing thrown") continue;
    EXPECT_TRUE(code.starts_with("safetensors.") || code.starts_with("case_file.") || code.starts_with("short_conv.") ||
                code == "dtype.unknown")
        << code;
    ++refused;
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(run, 500);
}

}  // namespace
}  // namespace imbrex::test
