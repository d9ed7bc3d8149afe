// Case files of recurrent layers: what is written is read back, a wrong result is found, and everything that does not fit is refused with
// its own code.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "conformance/case_file.h"
#include "conformance/case_file_edits.h"
#include "expect_error.h"
#include "recurrent/reference.h"

namespace imbrex::test {
namespace {

using nlohmann::json;

// Has every tensor that a file can have.
RecurrentCase full_recurrent_case() {
  RecurrentCase c{
      .name = "full", .spec = recurrent_layer("kda"), .requests = {{4, 9, 3, 1, 0}, {0, 7, 0, 0, 1}, {5, 0, 2, 0, 2}, {1, 12, 0, 3, 3}}};
  c.spec.num_k_heads = 1, c.spec.num_v_heads = 2, c.spec.head_dim_k = 6, c.spec.head_dim_v = 4;
  c.spec.skip = true, c.spec.num_drafts = 3, c.spec.beta_scale = 2;
  c.spec.out_gate = OutputGate::sigmoid, c.spec.out_norm = OutputNorm::before_gate, c.spec.norm_groups = 1, c.spec.norm_eps = 1e-5f;
  return c;
}
RecurrentCase small_recurrent_case(const char* layer) {
  RecurrentCase c{.name = layer, .spec = recurrent_layer(layer), .requests = {{3, 0}, {2, 5}}, .float_gates = false};
  c.spec.head_dim_k = 6, c.spec.head_dim_v = c.spec.head_dim_v == 1 ? 1 : 5;
  c.spec.num_v_heads = std::min(c.spec.num_v_heads, 4);
  c.spec.dtype = DType::f16, c.spec.layout = StateLayout::k_first;
  return c;
}

RecurrentCase recurrent_case_of_trees() {
  RecurrentCase c = full_recurrent_case();
  c.name = "trees", c.spec.num_drafts = kTreeDrafts, c.spec.tree_drafts = true, c.requests = tree_requests();
  for (size_t r = 0; r < c.requests.size(); ++r) c.requests[r].id = int(r);
  return c;
}

// The same with a convolution in front.
RecurrentCase convolved(RecurrentCase c, bool bias) {
  c.name = "convolved_" + c.name;
  c.spec.conv = bias ? RecurrentConv::vkq : RecurrentConv::qkv, c.spec.conv_width = 3, c.spec.conv_bias = bias, c.spec.conv_silu = bias;
  return c;
}

RecurrentCaseFile reread_recurrent(const RecurrentCaseFile& file) {
  return std::get<RecurrentCaseFile>(parse_any_case(parse_safetensors(write_safetensors(to_safetensors(file)))));
}
const BackendOf<RecurrentFamily>* the_reference() { return &recurrent_reference(); }
std::vector<VerifyRow> recurrent_rows(const RecurrentCaseFile& file) {
  const BackendOf<RecurrentFamily>* const reference = the_reference();
  return verify_case(file, probe_cpu(), {&reference, 1});
}

TEST(RecurrentCaseFile, RoundTrips) {
  std::vector<RecurrentCase> cases{full_recurrent_case(), recurrent_case_of_trees(), convolved(full_recurrent_case(), true),
                                   convolved(recurrent_case_of_trees(), false)};
  for (const char* layer : {"gdn", "kda", "kda_bounded", "lightning", "mamba2", "mamba1"}) cases.push_back(small_recurrent_case(layer));
  for (const RecurrentCase& c : cases) {
    SCOPED_TRACE(c.name);
    const RecurrentCaseFile file = make_case_file(c), again = reread_recurrent(file);
    EXPECT_EQ(again.inputs.spec, c.spec) << again.inputs.spec.str();
    const auto same = [](const HostTensor& a, const HostTensor& b) {
      return a.dtype == b.dtype && a.sizes == b.sizes && a.bytes == b.bytes;
    };
    for (const auto member :
         {&RecurrentCaseInputs::q, &RecurrentCaseInputs::k, &RecurrentCaseInputs::v, &RecurrentCaseInputs::gate, &RecurrentCaseInputs::beta,
          &RecurrentCaseInputs::rates, &RecurrentCaseInputs::gate_bias, &RecurrentCaseInputs::skip, &RecurrentCaseInputs::state,
          &RecurrentCaseInputs::z, &RecurrentCaseInputs::norm_weight, &RecurrentCaseInputs::input, &RecurrentCaseInputs::conv_weight,
          &RecurrentCaseInputs::conv_bias, &RecurrentCaseInputs::conv_state})
      EXPECT_TRUE(same(again.inputs.*member, file.inputs.*member));
    EXPECT_TRUE(bit_identical(again.out, file.out));
    EXPECT_TRUE(bit_identical(again.state_out, file.state_out));
    EXPECT_TRUE(same(again.conv_state_out, file.conv_state_out));
    EXPECT_EQ(again.conv_state_out.empty(), c.spec.conv == RecurrentConv::none);
    ASSERT_EQ(again.inputs.requests.size(), c.requests.size());
    for (size_t r = 0; r < c.requests.size(); ++r) {
      EXPECT_EQ(again.inputs.requests[r].q_len, c.requests[r].q_len);
      EXPECT_EQ(again.inputs.requests[r].context_len, c.requests[r].context_len);
      EXPECT_EQ(again.inputs.requests[r].drafts, c.requests[r].drafts);
      EXPECT_EQ(again.inputs.requests[r].accepted, c.requests[r].accepted);
      for (int t = 0; t < c.requests[r].q_len; ++t) EXPECT_EQ(again.inputs.requests[r].parent_of(t), c.requests[r].parent_of(t));
    }
    for (const VerifyRow& row : recurrent_rows(again)) EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
  }
}

TEST(RecurrentCaseFile, StatesLieInTheOrderOfTheLayout) {
  RecurrentCase c = full_recurrent_case();
  const Safetensors v_first = to_safetensors(make_case_file(c));
  EXPECT_EQ(v_first.tensors.at("state").sizes, (std::vector<int64_t>{4, 4, 2, 4, 6}));
  c.spec.layout = StateLayout::k_first;
  const Safetensors k_first = to_safetensors(make_case_file(c));
  EXPECT_EQ(k_first.tensors.at("state_out").sizes, (std::vector<int64_t>{4, 4, 2, 6, 4}));
  EXPECT_EQ(k_first.tensors.at("gate").sizes, (std::vector<int64_t>{10, 2, 6}));
  EXPECT_EQ(k_first.tensors.at("beta").sizes, (std::vector<int64_t>{10, 2}));
}

TEST(RecurrentCaseFile, VerifiesAndFindsAWrongResult) {
  const RecurrentCaseFile good = make_case_file(full_recurrent_case());
  EXPECT_EQ(recurrent_rows(good).size(), 3u) << "with drafts there is no other way to cut the step";
  for (const VerifyRow& row : recurrent_rows(good)) {
    EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
    EXPECT_GT(row.bound.max, 0);
    EXPECT_LE(row.error.mean, row.bound.mean);
  }
  EXPECT_EQ(recurrent_rows(make_case_file(small_recurrent_case("gdn"))).size(), 4u);
  RecurrentCase rounded = small_recurrent_case("gdn");
  rounded.spec.state_dtype = DType::bf16;
  for (const VerifyRow& row : recurrent_rows(reread_recurrent(make_case_file(rounded))))
    EXPECT_TRUE(row.pass()) << row.variant << row.failure;
  RecurrentCaseFile bad = good;
  bad.out[9] += 0.5f;
  for (const VerifyRow& row : recurrent_rows(bad))
    EXPECT_TRUE(row.failure.starts_with("out: value 1 of head 0 of token 1 ")) << row.failure;
  bad = good;
  bad.state_out[3] += 0.5f;
  for (const VerifyRow& row : recurrent_rows(bad))
    EXPECT_TRUE(row.failure.starts_with("state: number 3 of head 0 of row 0 ")) << row.failure;
  // What the step does not read or write may be anything in a file.
  Safetensors file = to_safetensors(good);
  const size_t row_bytes = 2 * 6 * 4 * sizeof(float);
  std::fill_n(file.tensors["state"].bytes.begin() + long(row_bytes * 0), row_bytes, char(0x7f));       // row 1 of request 0 is read
  std::fill_n(file.tensors["state_out"].bytes.begin() + long(row_bytes * 11), row_bytes, char(0x7f));  // request 2 has two drafts of three
  for (const VerifyRow& row : recurrent_rows(parse_recurrent_case(file))) EXPECT_TRUE(row.pass()) << row.failure;
}

TEST(RecurrentCaseFile, ShowsRefusals) {
  const BackendOf<RecurrentFamily>* const reference = the_reference();
  const auto rows = verify_case(make_case_file(full_recurrent_case()), describe_device("h200"), {&reference, 1});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NE(rows[0].refused.find("device.type"), std::string::npos) << rows[0].refused;
  EXPECT_FALSE(rows[0].pass());
}

TEST(RecurrentCaseFile, RefusesWhatDoesNotFit) {
  const auto erase = [](const char* name) { return [=](Safetensors& file) { file.tensors.erase(name); }; };
  const struct {
    const char* code;
    std::function<void(Safetensors&)> change;
  } broken[] = {
      {"case_file.family", edit([](json& j) { j["family"] = "recurring"; })},
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("num_k_heads"); })},
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("head_dim_v"); })},
      {"case_file.kind", edit([](json& j) { j["spec"].erase("gate"); })},
      {"case_file.kind", edit([](json& j) { j["spec"]["gate"] = "tanh"; })},
      {"case_file.kind", edit([](json& j) { j["spec"].erase("layout"); })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["layout"] = 1; })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["delta"] = 1; })},
      {"case_file.json.range", edit([](json& j) { j["spec"]["head_dim_k"] = int64_t(1) << 40; })},
      {"case_file.json.unknown", edit([](json& j) { j["spec"]["activation"] = "silu"; })},
      {"case_file.version", edit([](json& j) { j["version"] = 2; })},
      {"dtype.unknown", edit([](json& j) { j["spec"].erase("state_dtype"); })},
      {"recurrent.dtype", edit([](json& j) { j["spec"]["dtype"] = "fp8_e4m3"; })},
      {"recurrent.num_v_heads", edit([](json& j) { j["spec"]["num_k_heads"] = 3; })},
      {"recurrent.head_dim_k", edit([](json& j) { j["spec"]["head_dim_k"] = 257; })},
      {"recurrent.num_drafts", edit([](json& j) { j["spec"]["num_drafts"] = -1; })},
      {"recurrent.beta", edit([](json& j) { j["spec"]["delta"] = false; })},
      {"case_file.tensor.missing", erase("seq_lens")},
      {"case_file.tensor.missing", erase("q")},
      {"case_file.tensor.missing", erase("gate")},
      {"case_file.tensor.missing", erase("beta")},
      {"case_file.tensor.missing", erase("rates")},
      {"case_file.tensor.missing", erase("skip")},
      {"case_file.tensor.missing", erase("state")},
      {"case_file.tensor.missing", erase("state_out")},
      {"case_file.tensor.unknown", [](Safetensors& f) { f.tensors["state_slots"] = HostTensor::make(DType::i32, {4}); }},
      {"case_file.tensor.unknown", edit([](json& j) { j["spec"]["skip"] = false; })},
      {"case_file.tensor.dtype", [](Safetensors& f) { f.tensors["state"].dtype = DType::i32; }},
      {"case_file.tensor.dtype", [](Safetensors& f) { f.tensors["k"].dtype = DType::f16; }},
      {"case_file.tensor.rank",
       [](Safetensors& f) {
         f.tensors["rates"].sizes = {2, 1};
       }},
      {"case_file.tensor.rank", edit([](json& j) { j["spec"]["channel_gate"] = false; })},
      {"case_file.tensor.shape", edit([](json& j) { j["spec"]["layout"] = "k_first"; })},
      {"case_file.tensor.shape", edit([](json& j) { j["spec"]["num_drafts"] = 4; })},
      {"case_file.query_start_loc.monotone", set_i32("query_start_loc", 2, 3)},
      {"case_file.seq_lens.negative", set_i32("seq_lens", 1, -1)},
      {"case_file.seq_lens.shorter_than_query", set_i32("seq_lens", 0, 3)},
      {"case_file.drafts", set_i32("num_drafts", 0, 4)},
      {"case_file.drafts", set_i32("accepted_drafts", 2, 1)},  // nothing has gone by
  };
  const Safetensors front = to_safetensors(make_case_file(convolved(full_recurrent_case(), true)));
  ASSERT_NO_THROW(parse_any_case(front));
  EXPECT_FALSE(front.tensors.contains("q"));
  const std::pair<const char*, std::function<void(Safetensors&)>> broken_fronts[] = {
      {"case_file.kind", edit([](json& j) { j["spec"]["conv"] = "kqv"; })},
      {"case_file.tensor.missing",
       edit([](json& j) { j["spec"].erase("conv"), j["spec"].erase("conv_width"), j["spec"].erase("conv_bias"); })},
      {"recurrent.conv", edit([](json& j) { j["spec"].erase("conv"); })},
      {"recurrent.conv_width", edit([](json& j) { j["spec"]["conv_width"] = 9; })},
      {"case_file.tensor.shape", edit([](json& j) { j["spec"]["conv_width"] = 4; })},
      {"case_file.tensor.unknown", edit([](json& j) { j["spec"]["conv_bias"] = false; })},
      {"case_file.tensor.missing", erase("input")},
      {"case_file.tensor.missing", erase("conv_weight")},
      {"case_file.tensor.missing", erase("conv_bias")},
      {"case_file.tensor.missing", erase("conv_state")},
      {"case_file.tensor.missing", erase("conv_state_out")},
      {"case_file.tensor.unknown",
       [](Safetensors& f) {
         f.tensors["q"] = HostTensor::make(DType::bf16, {10, 1, 6});
       }},
  };
  for (const auto& [code, change] : broken_fronts) {
    Safetensors file = front;
    change(file);
    EXPECT_EQ(error_code([&] { parse_any_case(file); }), code) << file.metadata["imbrex"];
  }
  Safetensors tree = to_safetensors(make_case_file(recurrent_case_of_trees()));
  ASSERT_NO_THROW(parse_any_case(tree));
  set_i32("draft_parents", 3, 3)(tree);  // itself
  EXPECT_EQ(error_code([&] { parse_any_case(tree); }), "case_file.draft_parents");
  const Safetensors good = to_safetensors(make_case_file(full_recurrent_case()));
  ASSERT_NO_THROW(parse_any_case(good));
  for (const auto& [code, change] : broken) {
    Safetensors file = good;
    change(file);
    EXPECT_EQ(error_code([&] { parse_any_case(file); }), code) << file.metadata["imbrex"];
  }
  EXPECT_EQ(error_code([&] { parse_short_conv_case(good); }), "case_file.family");
  Safetensors without_bias = good;
  without_bias.tensors.erase("gate_bias");
  EXPECT_TRUE(std::get<RecurrentCaseFile>(parse_any_case(without_bias)).inputs.gate_bias.empty());
}

TEST(RecurrentCaseFile, DamagedFilesAreReadOrRefused) {
  const std::string good = write_safetensors(to_safetensors(make_case_file(full_recurrent_case())));
  std::mt19937_64 random(3);
  int refused = 0, run = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    std::string bytes = good;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) bytes[random() % bytes.size()] = char(random());
    if (trial % 2 == 0) bytes[random() % 2000] = char(random());  // where names and numbers are
    const std::string code = error_code([&] {
      const AnyCaseFile file = parse_any_case(parse_safetensors(bytes));
      recurrent_rows(std::get<RecurrentCaseFile>(file));
      ++run;
    });
    if (code == "nothing thrown") continue;
    EXPECT_TRUE(code.starts_with("safetensors.") || code.starts_with("case_file.") || code.starts_with("recurrent.") ||
                code == "dtype.unknown")
        << code;
    ++refused;
  }
  EXPECT_GT(refused, 300);
  EXPECT_GT(run, 300);
}

}  // namespace
}  // namespace imbrex::test
