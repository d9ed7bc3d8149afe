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
  for (const ShortConvCase& c : shipped_short_conv()) expect_shipped(c.name, make_case_file(c), {});  // results too: nothing but sums
}

TEST(CaseFiles, EveryBackendPassesThem) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(IMBREX_DATA) + "/cases")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    const AnyCaseFile file = load_any_case(entry.path().string());
    for (const DeviceInfo& device : test_devices()) {
      const auto* const attention = std::get_if<CaseFile>(&file);
      for (const VerifyRow& row : attention
                                      ? verify_case(*attention, device, test_backends<AttentionFamily>(device))
                                      : verify_case(std::get<ShortConvCaseFile>(file), device, test_backends<ShortConvFamily>(device))) {
        EXPECT_TRUE(row.pass() || !row.refused.empty()) << entry.path().filename() << " " << row.backend << " on " << to_string(device.isa)
                                                        << " " << row.variant << ": " << row.failure;
      }
    }
  }
  EXPECT_GE(files, 8);
}

}  // namespace
}  // namespace imbrex::test
