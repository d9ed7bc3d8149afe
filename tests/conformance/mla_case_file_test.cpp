// Case files of latent attention: what is written is read back, a wrong result is found, and everything that does not fit is refused with
// its own code.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>

#include "conformance/case_file.h"
#include "conformance/case_file_edits.h"
#include "expect_error.h"
#include "mla/reference.h"

namespace imbrex::test {
namespace {

using nlohmann::json;

// Has every tensor that a file can have.
MlaCaseFile full_mla_file() {
  MlaSpec spec{.num_heads = 2, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 24, .kv_dtype = DType::fp8_e4m3};
  spec.mask.custom = spec.mask.positions = true;
  spec.mask.window_left = 20;
  spec.sinks = true;
  spec.scale = 0.25f;
  MlaCase c{.spec = spec, .attention = {}};
  c.attention.spec = spec.latent_spec();
  c.attention.requests = {{3, 12, 0}, {0, 0, 1}, {1, 5, 2}};
  c.attention.custom = CustomPattern::random;
  c.attention.positions = PositionPattern::tree;
  return make_case_file(c);
}

TEST(MlaCaseFile, HasTheParentsOfTrees) {
  MlaSpec spec{.num_heads = 2, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 24};
  spec.mask.tree = true;
  MlaCase c{.spec = spec, .attention = {}};
  c.attention.spec = spec.latent_spec();
  c.attention.requests = {{5, 12, 0}, {0, 0, 1}, {1, 5, 2}, {7, 7, 3}};
  c.attention.tree = TreePattern::binary;
  const MlaCaseFile file = make_case_file(c);
  const BackendOf<MlaFamily>* const reference = &mla_reference();
  const auto again = std::get<MlaCaseFile>(parse_any_case(parse_safetensors(write_safetensors(to_safetensors(file)))));
  EXPECT_EQ(again.inputs.spec, file.inputs.spec) << again.inputs.spec.str();
  EXPECT_EQ(again.inputs.attention.draft_parents.bytes, file.inputs.attention.draft_parents.bytes);
  for (const VerifyRow& row : verify_case(again, probe_cpu(), {&reference, 1}))
    EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
  MlaCaseFile chains = again;
  chains.inputs.attention.draft_parents = {};
  for (const VerifyRow& row : verify_case(chains, probe_cpu(), {&reference, 1})) EXPECT_FALSE(row.pass()) << row.variant;
  MlaCaseFile late = again;
  const int32_t itself = 2;
  std::memcpy(late.inputs.attention.draft_parents.bytes.data() + 2 * sizeof itself, &itself, sizeof itself);
  EXPECT_EQ(test::error_code([&] { parse_any_case(parse_safetensors(write_safetensors(to_safetensors(late)))); }),
            "case_file.draft_parents");
}

TEST(MlaCaseFile, RoundTripsAndFindsAWrongResult) {
  const BackendOf<MlaFamily>* const reference = &mla_reference();
  const MlaCaseFile file = full_mla_file();
  const auto again = std::get<MlaCaseFile>(parse_any_case(parse_safetensors(write_safetensors(to_safetensors(file)))));
  EXPECT_EQ(again.inputs.spec, file.inputs.spec) << again.inputs.spec.str();
  EXPECT_EQ(again.inputs.kv_b.bytes, file.inputs.kv_b.bytes);
  EXPECT_EQ(again.inputs.attention.k.bytes, file.inputs.attention.k.bytes);
  EXPECT_EQ(again.inputs.attention.custom_mask.bytes, file.inputs.attention.custom_mask.bytes);
  EXPECT_EQ(again.inputs.attention.positions.bytes, file.inputs.attention.positions.bytes);
  EXPECT_EQ(again.inputs.attention.requests, file.inputs.attention.requests);
  EXPECT_TRUE(bit_identical(again.out, file.out) && bit_identical(again.lse, file.lse));
  const auto rows = verify_case(again, probe_cpu(), {&reference, 1});
  EXPECT_EQ(rows.size(), 4u);
  for (const VerifyRow& row : rows) EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
  MlaCaseFile bad = again;
  bad.out[5] += 0.5f;
  for (const VerifyRow& row : verify_case(bad, probe_cpu(), {&reference, 1}))
    EXPECT_TRUE(row.failure.starts_with("max error")) << row.failure;
  const auto refused = verify_case(again, describe_device("h200"), {&reference, 1});
  ASSERT_EQ(refused.size(), 1u);
  EXPECT_NE(refused[0].refused.find("device.type"), std::string::npos);
}

TEST(MlaCaseFile, RefusesWhatDoesNotFit) {
  const auto erase = [](const char* name) { return [=](Safetensors& file) { file.tensors.erase(name); }; };
  const struct {
    const char* code;
    CaseFileEdit change;
  } broken[] = {
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("kv_lora_rank"); })},
      {"case_file.json.missing", edit([](json& j) { j.erase("mask"); })},
      {"case_file.json.unknown", edit([](json& j) { j["spec"]["q_lora_rank"] = 8; })},
      {"case_file.window", edit([](json& j) { j["mask"]["window"] = 0; })},
      {"mla.v_dim", edit([](json& j) { j["spec"]["v_dim"] = 12; })},
      {"case_file.mla", edit([](json& j) { j["spec"]["v_dim"] = 40; })},
      {"dtype.unknown", edit([](json& j) { j["spec"].erase("dtype"); })},
      {"case_file.tensor.missing", erase("kv_b")},
      {"case_file.tensor.missing", erase("latents")},
      {"case_file.tensor.unknown", edit([](json& j) { j["spec"].erase("has_sinks"); })},
      {"case_file.seq_lens.shorter_than_query", set_i32("seq_lens", 0, 2)},
      {"case_file.positions", set_i32("positions", 0, -1)},
  };
  const Safetensors good = to_safetensors(full_mla_file());
  for (const auto& [code, change] : broken) {
    Safetensors file = good;
    change(file);
    EXPECT_EQ(error_code([&] { parse_any_case(file); }), code);
  }
}

}  // namespace
}  // namespace imbrex::test
