// Each limit of a backend has a line here that expects its code; a code that no line names fails the last test.
#include <gtest/gtest.h>

#include <algorithm>

#include "attention/kv_codec.h"
#include "expect_error.h"
#include "matrix.h"

namespace imbrex::test {
namespace {

constexpr const char* kOldGpu = "a GPU before Ampere";

DeviceInfo device_of(std::string_view name) {
  if (name != kOldGpu) return describe_device(name);
  DeviceInfo device = describe_device("a100");
  device.sm = 75;
  return device;
}

struct Refusal {
  const char* backend;
  const char* code;
  const char* device;
  void (*change)(AttentionSpec&);
};

constexpr auto nothing = [](AttentionSpec&) {};
constexpr auto packed = [](AttentionSpec& s) { s.kv_format = KvFormat::amx_packed; };

constexpr auto e4m3 = [](AttentionSpec& s) { s.q_dtype = s.kv_dtype = DType::fp8_e4m3; };

constexpr auto wide_f32 = [](AttentionSpec& s) {
  s.q_dtype = s.kv_dtype = DType::f32;
  s.head_dim_qk = 576, s.head_dim_v = 512;
};

constexpr auto records = [](AttentionSpec& s) {
  s.kv_format = KvFormat::fp8_ds_mla, s.kv_dtype = DType::fp8_e4m3;
  s.num_kv_heads = 1, s.head_dim_qk = 576, s.head_dim_v = 512;
};

constexpr auto score_mod = [](AttentionSpec& s) { s.score_mod = parse_expression("2.0 * score"); };

const Refusal kRefusals[] = {
    {"cuda_sm90", "device.type", "cpu", nothing},
    {"cuda_sm90", "device.sm", "a100", nothing},
    {"cuda_sm90", "device.sm", "b200", nothing},
    {"cuda_sm90", "spec.kv_format", "h200", packed},
    {"cuda_sm90", "spec.q_dtype", "h200", [](AttentionSpec& s) { s.q_dtype = s.kv_dtype = DType::f32; }},
    // What neither prefill nor decode has a kernel of its own for.
    {"cuda_sm90", "spec.kv_dtype", "h200", [](AttentionSpec& s) { s.kv_dtype = DType::f32; }},
    {"cuda_sm90", "spec.kv_dtype", "h200", [](AttentionSpec& s) { s.q_dtype = DType::f16; }},
    {"cuda_sm90", "spec.head_dim_qk", "h200", [](AttentionSpec& s) { s.head_dim_qk = s.head_dim_v = 320; }},
    {"cuda_sm90", "spec.num_q_heads", "h200", [](AttentionSpec& s) { s.num_q_heads = 258; }},
    {"cuda_sm90", "spec.num_q_heads", "h200", [](AttentionSpec& s) { s.num_q_heads = 512; }},
    {"cuda_sm90", "spec.score.relative_buckets", "h200",
     [](AttentionSpec& s) { s.num_q_heads = 64, s.score.relative_buckets = 32, s.score.relative_max_distance = 128; }},
    {"cuda_sm90", "spec.score.alibi_sqrt", "h200", [](AttentionSpec& s) { s.num_q_heads = 64, s.score.alibi = s.score.alibi_sqrt = true; }},
    {"cuda_sm90", "spec.head_dim_qk", "h200", [](AttentionSpec& s) { e4m3(s), s.head_dim_qk = s.head_dim_v = 320; }},
    {"cuda_sm90", "spec.num_q_heads", "h200", [](AttentionSpec& s) { e4m3(s), s.num_q_heads = 130; }},
    {"cuda_sm90", "spec.mask.custom", "h200", [](AttentionSpec& s) { e4m3(s), s.num_q_heads = 64, s.mask.custom = true; }},
    {"cuda_sm90", "spec.mask.positions", "h200", [](AttentionSpec& s) { s.mask.positions = true; }},
    {"cuda_sm90", "spec.mask.tree", "h200", [](AttentionSpec& s) { s.num_q_heads = 64, s.score.soft_cap = 20, s.mask.tree = true; }},
    {"cuda_sm90", "spec.score_mod", "h200", [](AttentionSpec& s) { s.num_q_heads = 64, s.score.soft_cap = 20, score_mod(s); }},
    {"cuda_sm90", "spec.mask_mod", "h200",
     [](AttentionSpec& s) { s.num_q_heads = 64, s.score.soft_cap = 20, s.mask_mod = parse_expression("kv <= head"); }},
    {"cuda_sm80", "spec.score_mod", "a100",
     [](AttentionSpec& s) {
       s.score_mod = parse_expression("float a[]; float b[]; float c[]; float d[]; float e[]; score + a[q] + b[q] + c[q] + d[q] + e[q]");
     }},
    {"cuda_sm80", "device.type", "cpu", nothing},
    {"cuda_sm80", "device.sm", kOldGpu, nothing},
    {"cuda_sm80", "spec.kv_format", "h200", packed},
    {"cuda_sm80", "spec.head_dim_qk", "l40s", wide_f32},
    {"cuda_sm80", "spec.q_dtype", "h200", [](AttentionSpec& s) { records(s), s.q_dtype = DType::f16; }},
    {"reference", "device.type", "h200", nothing},
    {"cpu_generic", "device.type", "h200", nothing},
    {"cpu_generic", "spec.kv_format", "cpu", packed},
    {"cpu_avx512", "device.type", "a100", nothing},
    {"cpu_avx512", "device.isa", "avx2,4 threads", nothing},
    {"cpu_avx512", "spec.kv_format", "avx512,4 threads", packed},
    {"cpu_generic", "spec.q_dtype", "cpu", e4m3},
    {"cpu_avx512", "spec.q_dtype", "avx512,4 threads", e4m3},
    {"cpu_amx", "spec.q_dtype", "amx,4 threads", e4m3},
    {"cpu_amx", "device.type", "b200", nothing},
    {"cpu_amx", "device.isa", "avx512,4 threads", nothing},
    {"cpu_amx", "spec.q_dtype", "amx,4 threads", [](AttentionSpec& s) { s.q_dtype = DType::f32; }},
    {"cpu_amx", "spec.q_dtype", "amx,4 threads", [](AttentionSpec& s) { s.q_dtype = DType::f16; }},
    {"cpu_amx", "spec.kv_dtype", "amx,4 threads", [](AttentionSpec& s) { s.kv_dtype = DType::f32; }},
    {"cpu_amx", "spec.kv_dtype", "amx,4 threads", [](AttentionSpec& s) { s.kv_dtype = DType::f16; }},
};

AttentionSpec plain_spec() {
  AttentionSpec spec;
  spec.num_q_heads = 8;
  spec.num_kv_heads = 2;
  spec.head_dim_qk = spec.head_dim_v = 64;
  return spec;
}

TEST(Refusals, HaveTheirCodes) {
  for (const Refusal& r : kRefusals) {
    const BackendOf<AttentionFamily>* backend = find_backend(r.backend);
    ASSERT_NE(backend, nullptr) << r.backend;
    AttentionSpec spec = plain_spec();
    r.change(spec);
    const DeviceInfo device = device_of(r.device);
    const auto reasons = backend->unsupported(spec, device);
    ASSERT_EQ(reasons.size(), 1u) << r.backend << " " << r.code << " on " << r.device;
    EXPECT_EQ(reasons[0].code, r.code) << r.backend;
    EXPECT_FALSE(reasons[0].wanted.empty());
    EXPECT_FALSE(reasons[0].actual.empty());
    EXPECT_NE(reasons[0].wanted, reasons[0].actual);
    EXPECT_EQ(error_code([&] { backend->plan(spec, device, {}); }), "backend.unsupported") << r.backend;
  }
}

TEST(Refusals, NoOtherCodeOccurs) {
  for (const BackendOf<AttentionFamily>* backend : backends())
    for (const char* name : {"cpu", "h200", "a100", "l40s", kOldGpu, "avx512,4 threads", "avx2,4 threads", "amx,4 threads"}) {
      const DeviceInfo device = device_of(name);
      for (const Case& c : cases())
        for (const KvFormat format : kv_formats()) {
          AttentionSpec spec = c.spec;
          spec.kv_format = format;
          for (const Reason& reason : backend->unsupported(spec, device)) {
            const bool listed = std::any_of(std::begin(kRefusals), std::end(kRefusals),
                                            [&](const Refusal& r) { return r.backend == backend->name() && r.code == reason.code; });
            ASSERT_TRUE(listed) << backend->name() << " refuses " << spec.str() << " on " << name << ": " << reason.str();
          }
        }
    }
}

}  // namespace
}  // namespace imbrex::test
