// Structs of the C ABI: callers of other versions, defaults, and a layout that stays as it is.
#include <cstddef>
#include <fstream>
#include <sstream>
#include <utility>

#include "api/handles.h"
#include "api/structs.h"
#include "expect_error.h"

namespace imbrex::test {
namespace {

// tests/api/abi_1.txt: what programs that were built with version 1 of the header take for granted. A change of a line breaks them;
// lines for new fields come behind the last field of a struct.
std::string layout() {
  std::ostringstream out;
#define STRUCT(type) out << #type << " " << sizeof(type) << "\n"
#define FIELD(type, field) out << "  " << #field << " " << offsetof(type, field) << " " << sizeof(type::field) << "\n"
#include "api/abi_fields.inl"
#undef STRUCT
#undef FIELD
  return out.str();
}

TEST(CApiStructs, LayoutIsThatOfVersion1) {
  std::ifstream file(IMBREX_ABI_FOLDER "/abi_1.txt");
  std::stringstream expected;
  expected << file.rdbuf();
  EXPECT_EQ(layout(), expected.str());
}

TEST(CApiStructs, DefaultsAreThoseOfCpp) {
  const imbrex_spec_fields fields = init(imbrex_spec_fields_init);
  imbrex_spec_fields small = small_fields();
  EXPECT_EQ(api::spec_of(&small).mask, Mask{});
  EXPECT_EQ(api::spec_of(&small).score, ScoreMod{});
  EXPECT_EQ(fields.block_size, AttentionSpec{}.block_size);
  imbrex_plan_options given = init(imbrex_plan_options_init);
  const PlanOptions options = api::plan_options_of(&given);
  EXPECT_EQ(options.limits.max_num_tokens, PlanLimits{}.max_num_tokens);
  EXPECT_EQ(options.limits.max_seq_len, PlanLimits{}.max_seq_len);
  EXPECT_TRUE(options.validate);
  EXPECT_FALSE(options.balanced || options.on_device || options.load_on_demand);
  EXPECT_FALSE(options.out_dtype.has_value());
  int32_t out_dtype = IMBREX_BF16;
  given.out_dtype = &out_dtype;
  EXPECT_EQ(api::plan_options_of(&given).out_dtype, DType::bf16);
  out_dtype = 99;
  EXPECT_EQ(imbrex::test::error_code([&] { api::plan_options_of(&given); }), "api.enum");
}

TEST(CApiStructs, FieldsGoThereAndBack) {
  imbrex_spec_fields f = small_fields();
  f.window_left = 100, f.window_right = 0, f.soft_cap = 30.f, f.scale = 0.25f, f.sinks = 1, f.head_scales = 1, f.causal = 0, f.chunk = 64;
  f.block_size = 32, f.head_dim_v = 128, f.alibi = 1, f.alibi_sqrt = 1, f.chunk_lookback = 3;
  const SpecHandle spec = spec_of(f);
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  imbrex_spec_fields back{};
  back.struct_size = sizeof back;
  ASSERT_EQ(imbrex_spec_get_fields(spec.get(), &back), IMBREX_OK);
  EXPECT_EQ(std::memcmp(&f, &back, sizeof f), 0);
  EXPECT_STRNE(imbrex_spec_str(spec.get()), "");
}

TEST(CApiStructs, TreesOfDraftsAreNamed) {
  imbrex_spec_fields f = small_fields();
  f.tree = 1, f.reserved = f.reserved_2 = -1;  // the others are not read
  const SpecHandle spec = spec_of(f);
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  EXPECT_NE(std::string(imbrex_spec_str(spec.get())).find("causal tree"), std::string::npos);
  f.custom_mask = 1;
  EXPECT_EQ(spec_of(f), nullptr);
  const int32_t starts[] = {0, 3}, lens[] = {9}, parents[] = {-1, 0, 0}, drafts[] = {2};
  imbrex_batch b = init(imbrex_batch_init);
  b.num_reqs = 1, b.query_start_loc = starts, b.seq_lens = lens, b.draft_parents = parents, b.num_drafts = drafts;
  std::vector<NamedTensor> mask_tensors;
  const Batch batch = api::batch_of(&b, mask_tensors);
  EXPECT_EQ(batch.draft_parents.size(), 3u);
  EXPECT_EQ(batch.draft_parents[2], 0);
  EXPECT_EQ(batch.num_drafts[0], 2);
}

// A later header's struct has more fields: fine while nobody sets them.
struct Later {
  imbrex_spec_fields known;
  int64_t unknown;
};

TEST(CApiStructs, CallersOfLaterAndEarlierVersions) {
  Later later{};
  imbrex_spec_fields_init(&later.known, sizeof later);
  EXPECT_EQ(later.known.struct_size, sizeof later);
  EXPECT_EQ(later.unknown, 0);
  const imbrex_spec_fields small = small_fields();
  later.known = small;
  later.known.struct_size = sizeof later;
  EXPECT_NE(spec_of(later.known), nullptr) << imbrex_last_error();
  later.unknown = 1;
  imbrex_spec* none = nullptr;
  EXPECT_EQ(imbrex_spec_create(&later.known, &none), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.struct_size");

  imbrex_spec_fields earlier = small;  // of the first version, behind which there may be anything
  earlier.struct_size = api::kFirstSize<imbrex_spec_fields>;
  earlier.chunk_lookback = -7, earlier.alibi_sqrt = 1;
  EXPECT_NE(spec_of(earlier), nullptr) << imbrex_last_error();

  // The last two are what memory holds that nobody has set.
  constexpr size_t kFirst = api::kFirstSize<imbrex_spec_fields>;
  for (const size_t size : {size_t(0), sizeof(size_t), kFirst - 4, size_t(0x7ffe12345678), SIZE_MAX}) {
    imbrex_spec_fields shorter = small;
    shorter.struct_size = size;
    EXPECT_EQ(imbrex_spec_create(&shorter, &none), IMBREX_INVALID);
    EXPECT_EQ(last_code(), "api.struct_size");
  }
  imbrex_device_properties properties{};  // whose size is not set
  EXPECT_EQ(imbrex_device_get_properties(cpu().get(), &properties), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.struct_size");
}

// The numbers are those of imbrex.h, whatever order the instruction sets have here.
TEST(CApiStructs, InstructionSetsKeepTheirNumbers) {
  const std::pair<const char*, int> sets[] = {{"generic", 0},      {"avx2", 1}, {"avx512", 2},
                                              {"amx_emulated", 3}, {"amx", 4},  {"avx512_bf16", 5}};
  for (const std::pair<const char*, int>& set : sets) {
    const DeviceHandle device = make_handle<DeviceHandle>([&](auto** out) { return imbrex_device_create(set.first, out); });
    imbrex_device_properties properties{};
    properties.struct_size = sizeof properties;
    ASSERT_EQ(imbrex_device_get_properties(device.get(), &properties), IMBREX_OK);
    EXPECT_EQ(properties.cpu_isa, set.second) << set.first;
  }
}

TEST(CApiStructs, ValuesThatAreNone) {
  const auto code = [](auto&& change) {
    imbrex_spec_fields f = small_fields();
    change(f);
    imbrex_spec* none = nullptr;
    EXPECT_EQ(imbrex_spec_create(&f, &none), IMBREX_INVALID);
    EXPECT_EQ(none, nullptr);
    return last_code();
  };
  EXPECT_EQ(code([](auto& f) { f.kind = 4; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.q_dtype = -1; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.kv_dtype = 8; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.kv_format = IMBREX_KV_LATENT_ROPE + 1; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.causal = 2; }), "api.enum");
  EXPECT_EQ(code([](auto& f) { f.num_kv_heads = 3; }).substr(0, 5), "spec.");
  EXPECT_EQ(imbrex_spec_create(nullptr, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  imbrex_device* device = nullptr;
  EXPECT_EQ(imbrex_device_create("abacus", &device), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "device.unknown");
  EXPECT_EQ(imbrex_device_create(nullptr, &device), IMBREX_INVALID);
}

}  // namespace
}  // namespace imbrex::test
