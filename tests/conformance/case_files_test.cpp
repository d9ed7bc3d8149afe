// The case files in data/cases: they are what the generator makes, and every backend passes them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

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

TEST(CaseFiles, ShippedOnesAreWhatTheGeneratorMakes) {
  for (const Case& c : shipped()) {
    const CaseFile made = make_case_file(c);
    const std::string name = c.name + ".safetensors", fresh = testing::TempDir() + name;
    save_safetensors(to_safetensors(made), fresh);
    const std::string path = std::string(IMBREX_DATA) + "/cases/" + name;
    ASSERT_TRUE(std::filesystem::exists(path)) << path << " is missing, a fresh one is " << fresh;
    const Safetensors expected = load_safetensors(fresh), actual = load_safetensors(path);
    EXPECT_EQ(actual.metadata, expected.metadata) << path << ", a fresh one is " << fresh;
    for (const auto& [tensor, value] : expected.tensors) {
      ASSERT_TRUE(actual.tensors.contains(tensor)) << path << " " << tensor;
      if (tensor != "out" && tensor != "lse") {
        EXPECT_EQ(actual.tensors.at(tensor).bytes, value.bytes) << path << " " << tensor;
      }
    }
    const CaseFile file = load_case(path);
    expect_near(file.out, made.out, name + " out");
    expect_near(file.lse, made.lse, name + " lse");
  }
}

TEST(CaseFiles, EveryBackendPassesThem) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(IMBREX_DATA) + "/cases")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    for (const DeviceInfo& device : test_devices())
      for (const VerifyRow& row : verify_case(load_case(entry.path().string()), device, test_backends(device))) {
        EXPECT_TRUE(row.pass() || !row.refused.empty()) << entry.path().filename() << " " << row.backend << " on " << to_string(device.isa)
                                                        << " " << row.variant << ": " << row.judgement.failure;
      }
  }
  EXPECT_GE(files, 6);
}

}  // namespace
}  // namespace imbrex::test
