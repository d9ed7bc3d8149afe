// The case files in data/cases, of all families: they are what the generator makes, and every backend passes them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "conformance/case_file.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

Case small(const char* name, DType q, DType kv, int q_heads, int kv_heads, int dim, std::vector<CaseRequest> requests) {
  Case c;
  c.name = name;
  c.spec.num_q_heads = q_heads;
  c.spec.num_kv_heads = kv_heads;
  c.spec.head_dim_qk = c.spec.head_dim_v = dim;
  c.spec.q_dtype = q;
  c.spec.kv_dtype = kv;
  c.requests = std::move(requests);
  for (int r = 0; r < int(c.requests.size()); ++r) c.requests[r].id = r;
  c.seed = 2024;
  return c;
}

std::vector<Case> shipped() {
  std::vector<Case> all;
  all.push_back(small("gqa_mixed_bf16", DType::bf16, DType::bf16, 8, 2, 32, {{1, 33}, {0, 0}, {5, 20}, {7, 7}}));
  all.push_back(small("sinks_window_bf16", DType::bf16, DType::bf16, 6, 1, 32, {{4, 40}, {1, 3}}));
  all.back().spec.score.sinks = true;
  all.back().spec.mask.window_left = 15;
  all.push_back(small("soft_cap_f32", DType::f32, DType::f32, 2, 2, 24, {{6, 18}, {1, 30}}));
  all.back().spec.score.soft_cap = 2.f;
  all.push_back(small("tree_verify_f16", DType::f16, DType::f16, 4, 1, 32, {{7, 31}, {3, 9}}));
  all.back().spec.mask.custom = true;
  all.back().custom = CustomPattern::tree;
  all.push_back(small("fp8_head_scales_bf16", DType::bf16, DType::fp8_e4m3, 6, 3, 32, {{2, 37}, {1, 16}}));
  all.back().scale_per_head = true;
  all.push_back(small("cross_alibi_f32", DType::f32, DType::bf16, 2, 1, 16, {{9, 4}, {1, 25}, {2, 0}}));
  all.back().spec.kind = AttentionKind::encoder_decoder;
  all.back().spec.mask.causal = false;
  all.back().spec.score.alibi = true;
  return all;
}

void expect_near(const std::vector<float>& a, const std::vector<float>& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    if (a[i] != b[i]) {  // a C library's exp may differ in the last bit
      ASSERT_NEAR(a[i], b[i], 2e-6) << what << " " << i;
    }
}

std::vector<ShortConvCase> shipped_short_conv() {
  std::vector<ShortConvCase> all;
  all.push_back({.name = "short_conv_mixed_bf16",
                 .spec = {.dim = 48, .width = 3, .bias = true},
                 .requests = {{1, 20, 0, 0, 0}, {9, 0, 0, 0, 1}, {0, 5, 0, 0, 2}, {4, 1, 0, 0, 3}, {1, 0, 0, 0, 4}},
                 .seed = 2025});
  all.push_back({.name = "short_conv_verify_f32",
                 .spec = {.dim = 33, .width = 4, .dtype = DType::f32, .num_drafts = 4},
                 .requests = {{5, 17, 4, 2, 0}, {3, 9, 1, 4, 1}, {4, 0, 3, 0, 2}, {1, 2, 0, 1, 3}},
                 .seed = 2026});
  all.push_back({.name = "short_conv_silu_bf16",
                 .spec = {.dim = 40, .width = 4, .form = ShortConvForm::plain, .activation = ShortConvActivation::silu},
                 .requests = {{1, 20, 0, 0, 0}, {9, 0, 0, 0, 1}, {0, 5, 0, 0, 2}, {4, 1, 0, 0, 3}, {1, 0, 0, 0, 4}},
                 .seed = 2027});
  return all;
}

// The file of this name has the same metadata and inputs as a fresh one, and the results that are named nearly so.
template <class File>
void expect_shipped(const std::string& case_name, const File& made, const std::set<std::string>& results) {
  const std::string name = case_name + ".safetensors", fresh = testing::TempDir() + name;
  save_safetensors(to_safetensors(made), fresh);
  const std::string path = std::string(IMBREX_DATA) + "/cases/" + name;
  ASSERT_TRUE(std::filesystem::exists(path)) << path << " is missing, a fresh one is " << fresh;
  const Safetensors expected = load_safetensors(fresh), actual = load_safetensors(path);
  EXPECT_EQ(actual.metadata, expected.metadata) << path << ", a fresh one is " << fresh;
  EXPECT_EQ(actual.tensors.size(), expected.tensors.size()) << path;
  for (const auto& [tensor, value] : expected.tensors) {
    ASSERT_TRUE(actual.tensors.contains(tensor)) << path << " " << tensor;
    if (!results.contains(tensor)) {
      EXPECT_EQ(actual.tensors.at(tensor).bytes, value.bytes) << path << " " << tensor;
    }
  }
}

TEST(CaseFiles, ShippedOnesAreWhatTheGeneratorMakes) {
  for (const Case& c : shipped()) {
    const CaseFile made = make_case_file(c);
    expect_shipped(c.name, made, {"out", "lse"});
    const CaseFile file = load_case(std::string(IMBREX_DATA) + "/cases/" + c.name + ".safetensors");
    expect_near(file.out, made.out, c.name + " out");
    expect_near(file.lse, made.lse, c.name + " lse");
  }
}

TEST(CaseFiles, ShortConvOnesAreWhatTheGeneratorMakes) {
  for (const ShortConvCase& c : shipped_short_conv()) {  // results too where they are nothing but sums
    const bool has_exp = c.spec.activation == ShortConvActivation::silu;
    const ShortConvCaseFile made = make_case_file(c);
    expect_shipped(c.name, made, has_exp ? std::set<std::string>{"out"} : std::set<std::string>{});
    expect_near(parse_short_conv_case(load_safetensors(std::string(IMBREX_DATA) + "/cases/" + c.name + ".safetensors")).out, made.out,
                c.name + " out");
  }
}

// One with requests that go each way, and one of absorbed queries.
std::vector<MlaCase> shipped_mla() {
  const auto make = [](const char* name, const MlaSpec& spec, std::vector<CaseRequest> requests, uint64_t seed) {
    MlaCase c{.spec = spec, .attention = {}};
    c.attention.name = name;
    c.attention.spec = spec.latent_spec();
    c.attention.requests = std::move(requests);
    for (int r = 0; r < int(c.attention.requests.size()); ++r) c.attention.requests[size_t(r)].id = r;
    c.attention.seed = seed;
    return c;
  };
  const MlaSpec spec{.num_heads = 3, .kv_lora_rank = 32, .qk_nope_dim = 16, .qk_rope_dim = 8, .v_dim = 24};
  MlaSpec sinks = spec, absorbed = spec;
  sinks.sinks = true;
  absorbed.absorbed = true;
  absorbed.kv_dtype = DType::fp8_e4m3;
  absorbed.mask.window_left = 15;
  return {make("mla_mixed_bf16", sinks, {{1, 40}, {24, 24}, {0, 0}, {3, 20}}, 2027),
          make("mla_absorbed_fp8", absorbed, {{1, 30}, {4, 19}}, 2028)};
}

TEST(CaseFiles, MlaOnesAreWhatTheGeneratorMakes) {
  for (const MlaCase& c : shipped_mla()) {
    const MlaCaseFile made = make_case_file(c);
    expect_shipped(c.attention.name, made, {"out", "lse"});
    const auto file = std::get<MlaCaseFile>(load_any_case(std::string(IMBREX_DATA) + "/cases/" + c.attention.name + ".safetensors"));
    EXPECT_EQ(file.inputs.spec, made.inputs.spec) << file.inputs.spec.str();
    expect_near(file.out, made.out, c.attention.name + " out");
    expect_near(file.lse, made.lse, c.attention.name + " lse");
  }
}

// Gated delta nets with grouped heads, drafts of a layer whose gates are of each channel, and Mamba2 with all that is in front and behind;
// trees of drafts, gates with a bound, and Mamba1 and lightning attention with states of 16 bits.
std::vector<RecurrentCase> shipped_recurrent() {
  RecurrentCase gdn{.name = "recurrent_gdn_bf16",
                    .spec = recurrent_layer("gdn"),
                    .requests = {{1, 20, 0, 0, 0}, {9, 0, 0, 0, 1}, {0, 5, 0, 0, 2}, {4, 1, 0, 0, 3}, {1, 0, 0, 0, 4}},
                    .seed = 2029};
  gdn.spec.head_dim_k = 8, gdn.spec.head_dim_v = 12;
  RecurrentCase kda{.name = "recurrent_kda_verify_f32",
                    .spec = recurrent_layer("kda"),
                    .requests = {{5, 17, 4, 2, 0}, {3, 9, 1, 4, 1}, {4, 0, 3, 0, 2}, {1, 2, 0, 1, 3}},
                    .seed = 2031};
  kda.spec.head_dim_k = 6, kda.spec.head_dim_v = 5, kda.spec.num_drafts = 4;
  kda.spec.dtype = DType::f32, kda.spec.layout = StateLayout::k_first;
  RecurrentCase mamba{.name = "recurrent_conv_mamba2_bf16",
                      .spec = recurrent_layer("mamba2"),
                      .requests = {{1, 20, 0, 0, 0}, {7, 0, 0, 0, 1}, {0, 5, 0, 0, 2}, {3, 2, 2, 1, 3}},
                      .seed = 2033};
  mamba.spec.head_dim_k = 8, mamba.spec.head_dim_v = 6, mamba.spec.num_drafts = 2;
  mamba.spec.conv = RecurrentConv::vkq, mamba.spec.conv_bias = true;
  mamba.spec.out_gate = OutputGate::silu, mamba.spec.out_norm = OutputNorm::after_gate, mamba.spec.norm_groups = 1;
  const StateCaseRequests steps = gdn.requests;
  RecurrentCase tree{.name = "recurrent_tree_gdn_f16",
                     .spec = recurrent_layer("gdn"),
                     .requests = {{6, 17, 5, 2, 0, {0, 0, 1, 1, 3}}, {3, 9, 2, 4, 1, {0, 0}}, {4, 0, 3, 0, 2, {0, 1, 0}}, {1, 2, 0, 1, 3}},
                     .seed = 2034};
  tree.spec.head_dim_k = 6, tree.spec.head_dim_v = 8, tree.spec.num_drafts = 5, tree.spec.tree_drafts = true;
  tree.spec.dtype = DType::f16, tree.spec.layout = StateLayout::k_first;
  RecurrentCase bounded{.name = "recurrent_kda_bounded_bf16", .spec = recurrent_layer("kda_bounded"), .requests = steps, .seed = 2035};
  bounded.spec.head_dim_k = 7, bounded.spec.head_dim_v = 5;
  RecurrentCase mamba1{.name = "recurrent_mamba1_f32", .spec = recurrent_layer("mamba1"), .requests = steps, .seed = 2036};
  mamba1.spec.num_v_heads = 19, mamba1.spec.head_dim_k = 16, mamba1.spec.dtype = DType::f32, mamba1.spec.state_dtype = DType::bf16;
  RecurrentCase lightning{.name = "recurrent_lightning_bf16", .spec = recurrent_layer("lightning"), .requests = steps, .seed = 2037};
  lightning.spec.head_dim_k = 8, lightning.spec.head_dim_v = 6, lightning.spec.state_dtype = DType::f16;
  return {gdn, kda, mamba, tree, bounded, mamba1, lightning};
}

TEST(CaseFiles, RecurrentOnesAreWhatTheGeneratorMakes) {
  for (const RecurrentCase& c : shipped_recurrent()) {
    const RecurrentCaseFile made = make_case_file(c);
    expect_shipped(c.name, made, {"out", "state_out"});
    const auto file = std::get<RecurrentCaseFile>(load_any_case(std::string(IMBREX_DATA) + "/cases/" + c.name + ".safetensors"));
    EXPECT_EQ(file.inputs.spec, made.inputs.spec) << file.inputs.spec.str();
    expect_near(file.out, made.out, c.name + " out");
    expect_near(file.state_out, made.state_out, c.name + " state_out");
  }
}

TEST(CaseFiles, EveryBackendPassesThem) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(IMBREX_DATA) + "/cases")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    const AnyCaseFile file = load_any_case(entry.path().string());
    for (const DeviceInfo& device : test_devices()) {
      const auto verify = [&]<class File>(const File& f) {
        if constexpr (std::is_same_v<File, CaseFile>)
          return verify_case(f, device, test_backends<AttentionFamily>(device));
        else if constexpr (std::is_same_v<File, ShortConvCaseFile>)
          return verify_case(f, device, test_backends<ShortConvFamily>(device));
        else if constexpr (std::is_same_v<File, RecurrentCaseFile>)
          return verify_case(f, device, test_backends<RecurrentFamily>(device));
        else
          return verify_case(f, device, backends<MlaFamily>());
      };
      for (const VerifyRow& row : std::visit(verify, file)) {
        EXPECT_TRUE(row.pass() || !row.refused.empty()) << entry.path().filename() << " " << row.backend << " on " << to_string(device.isa)
                                                        << " " << row.variant << ": " << row.failure;
      }
    }
  }
  EXPECT_GE(files, 18);
}

}  // namespace
}  // namespace imbrex::test
