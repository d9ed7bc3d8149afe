// Case files: what is written is read back, and everything that does not fit is refused with its own code.
#include "conformance/attention/case_file.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "attention/reference.h"
#include "conformance/case_file_edits.h"
#include "expect_error.h"

namespace imbrex::test {
namespace {

using nlohmann::json;

// Has every tensor that a file can have, as far as they go together.
Case full_case() {
  Case c;
  c.name = "full";
  c.spec.num_q_heads = 4;
  c.spec.num_kv_heads = 2;
  c.spec.head_dim_qk = 16;
  c.spec.head_dim_v = 8;
  c.spec.kv_dtype = DType::fp8_e4m3;
  c.spec.mask = {.causal = true, .window_left = 6, .window_right = -1, .chunk = 16, .custom = true};
  c.spec.score = {.head_scales = true, .soft_cap = 30.f, .alibi = true, .sinks = true};
  c.requests = {{3, 9, 0}, {0, 0, 1}, {1, 12, 2}};
  c.custom = CustomPattern::random;
  c.scale_per_head = true;
  return c;
}

TEST(CaseFile, RoundTrips) {
  Case relative = full_case();
  relative.spec.kind = AttentionKind::encoder_decoder;
  relative.spec.mask = {.causal = false, .window_right = 5};
  relative.spec.score = {.scale = 0.25f, .relative_buckets = 8, .relative_max_distance = 20, .relative_bidirectional = true};
  relative.custom = CustomPattern::none;
  Case bytes = full_case();
  bytes.spec.q_dtype = DType::fp8_e4m3;
  Case variants = full_case();
  variants.spec.score.alibi_sqrt = true;
  variants.spec.mask.chunk_lookback = 2;
  for (const Case& c : {full_case(), relative, bytes, variants}) {
    const CaseFile file = make_case_file(c);
    const CaseFile again = parse_case(parse_safetensors(write_safetensors(to_safetensors(file))));
    AttentionSpec spec = c.spec;
    spec.score.scale = spec.scale();  // written as it is in effect
    EXPECT_EQ(again.inputs.spec, spec) << again.inputs.spec.str();
    EXPECT_EQ(again.inputs.q.bytes, file.inputs.q.bytes);
    EXPECT_EQ(again.inputs.q_scale.bytes, file.inputs.q_scale.bytes);
    EXPECT_EQ(again.inputs.custom_mask.bytes, file.inputs.custom_mask.bytes);
    EXPECT_TRUE(bit_identical(again.out, file.out));
    EXPECT_TRUE(bit_identical(again.lse, file.lse));
  }
}

TEST(CaseFile, VerifiesAndFindsAWrongResult) {
  const BackendOf<AttentionFamily>* const reference = &reference_backend();
  CaseFile file = make_case_file(full_case());
  const auto rows = verify_case(file, probe_cpu(), {&reference, 1});
  EXPECT_GE(rows.size(), 6u);
  for (const VerifyRow& row : rows) EXPECT_TRUE(row.pass()) << row.variant << ": " << row.failure << row.refused;
  file.out[5] += 0.5f;
  for (const VerifyRow& row : verify_case(file, probe_cpu(), {&reference, 1})) EXPECT_FALSE(row.pass()) << row.variant;
}

TEST(CaseFile, ShowsRefusals) {
  const BackendOf<AttentionFamily>* const reference = &reference_backend();
  const auto rows = verify_case(make_case_file(full_case()), describe_device("h200"), {&reference, 1});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_NE(rows[0].refused.find("device.type"), std::string::npos) << rows[0].refused;
  EXPECT_FALSE(rows[0].pass());
}

// A file without v is a latent: its first elements are the values.
TEST(CaseFile, LatentServesAsValues) {
  Safetensors file = to_safetensors(make_case_file(full_case()));
  file.tensors.erase("v"), file.tensors.erase("v_scale");
  const CaseFile c = parse_case(file);
  EXPECT_EQ(c.inputs.spec.kv_format, KvFormat::latent);
  EXPECT_EQ(c.inputs.v_scale.bytes, c.inputs.k_scale.bytes);
  EXPECT_EQ(c.inputs.v.sizes, (std::vector<int64_t>{21, 2, 8}));
  EXPECT_EQ(c.inputs.v.get(8), c.inputs.k.get(16));
  const Safetensors again = to_safetensors(c);
  EXPECT_FALSE(again.tensors.contains("v") || again.tensors.contains("v_scale"));
}

TEST(CaseFile, RefusesWhatDoesNotFit) {
  const struct {
    const char* code;
    std::function<void(Safetensors&)> change;
  } broken[] = {
      {"case_file.metadata", [](Safetensors& f) { f.metadata.clear(); }},
      {"case_file.json.syntax", [](Safetensors& f) { f.metadata["imbrex"] = "{"; }},
      {"case_file.json.depth", [](Safetensors& f) { f.metadata["imbrex"] = "[[[[[[[1]]]]]]]"; }},
      {"case_file.json.duplicate",
       [](Safetensors& f) {
         std::string& text = f.metadata["imbrex"];  // the spec, and then another one
         text.insert(text.rfind('}'), R"(, "spec": {})");
       }},
      {"case_file.json.duplicate",
       [](Safetensors& f) {
         std::string& text = f.metadata["imbrex"];
         text.insert(text.find("\"causal\""), R"("causal": false, )");
       }},
      {"case_file.json.object", [](Safetensors& f) { f.metadata["imbrex"] = "3"; }},
      {"case_file.json.missing", edit([](json& j) { j.erase("version"); })},
      {"case_file.json.missing", edit([](json& j) { j.erase("mask"); })},
      {"case_file.json.missing", edit([](json& j) { j["spec"].erase("num_q_heads"); })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["num_q_heads"] = "4"; })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["num_q_heads"] = 4.5; })},
      {"case_file.json.type", edit([](json& j) { j["mask"]["causal"] = 1; })},
      {"case_file.json.type", edit([](json& j) { j["spec"]["q_dtype"] = 1; })},
      {"case_file.json.range", edit([](json& j) { j["spec"]["num_q_heads"] = int64_t(1) << 40; })},
      {"case_file.json.range", edit([](json& j) { j["spec"]["num_q_heads"] = -(int64_t(1) << 40); })},
      {"case_file.json.unknown", edit([](json& j) { j["spec"]["colour"] = 1; })},
      {"case_file.json.unknown", edit([](json& j) { j["mask"]["prefix"] = 1; })},
      {"case_file.json.unknown", edit([](json& j) { j["more"] = 1; })},
      {"case_file.version", edit([](json& j) { j["version"] = 2; })},
      {"case_file.kind", edit([](json& j) { j["spec"]["kind"] = "sideways"; })},
      {"case_file.window", edit([](json& j) { j["mask"]["window"] = 0; })},
      {"dtype.unknown", edit([](json& j) { j["spec"]["q_dtype"] = "f128"; })},
      {"spec.num_q_heads", edit([](json& j) { j["spec"]["num_q_heads"] = 0; })},
      {"spec.head_dim_qk", edit([](json& j) { j["spec"]["head_dim_qk"] = 17; })},
      {"spec.score.scale", edit([](json& j) { j["spec"]["scale"] = 1e300; })},
      {"case_file.tensor.missing", [](Safetensors& f) { f.tensors.erase("q"); }},
      {"case_file.tensor.missing", [](Safetensors& f) { f.tensors.erase("sinks"); }},
      {"case_file.tensor.missing", [](Safetensors& f) { f.tensors.erase("out"); }},
      {"case_file.tensor.unknown", [](Safetensors& f) { f.tensors["extra"] = HostTensor::make(DType::u8, {1}); }},
      {"case_file.tensor.unknown", edit([](json& j) { j["spec"]["has_sinks"] = false; })},
      {"case_file.tensor.dtype", [](Safetensors& f) { f.tensors["q"].dtype = DType::f16; }},
      {"case_file.tensor.rank",
       [](Safetensors& f) {
         f.tensors["q"].sizes = {16, 16};
       }},
      {"case_file.tensor.shape",
       [](Safetensors& f) {
         f.tensors["q"].sizes = {4, 16, 4};
       }},
      {"case_file.tensor.shape", set_i32("seq_lens", 0, 8)},
      {"case_file.query_start_loc.start", set_i32("query_start_loc", 0, 1)},
      {"case_file.query_start_loc.monotone", set_i32("query_start_loc", 2, 1)},
      {"case_file.seq_lens.negative", set_i32("seq_lens", 1, -1)},
      {"case_file.seq_lens.shorter_than_query", set_i32("seq_lens", 0, 2)},
      {"case_file.scale.size", [](Safetensors& f) { f.tensors["k_scale"] = HostTensor::make(DType::f32, {3}); }},
      {"case_file.scale.value", [](Safetensors& f) { f.tensors["v_scale"].set(1, 0.0); }},
      {"case_file.latent", [](Safetensors& f) { f.tensors.erase("v"); }},  // its scale is left
      {"case_file.latent",
       [&](Safetensors& f) {
         f.tensors.erase("v"), f.tensors.erase("v_scale");
         edit([](json& j) { j["spec"]["head_dim_v"] = 24; })(f);
       }},
  };
  const Safetensors good = to_safetensors(make_case_file(full_case()));
  ASSERT_NO_THROW(parse_case(good));
  for (const auto& [code, change] : broken) {
    Safetensors file = good;
    change(file);
    EXPECT_EQ(error_code([&] { parse_case(file); }), code) << file.metadata["imbrex"];
  }
}

}  // namespace
}  // namespace imbrex::test
