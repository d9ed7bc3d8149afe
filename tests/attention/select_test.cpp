// Tests of selection: order, force, aliases, reasons, proposals, and devices that are only described.
#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <set>

#include "attention/fake_backend.h"
#include "imbrex/error.h"
#include "imbrex/model.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

AttentionSpec llama() {
  AttentionSpec spec;
  spec.num_q_heads = 32;
  spec.num_kv_heads = 8;
  spec.head_dim_qk = spec.head_dim_v = 128;
  return spec;
}

// A device that no backend of the house runs on.
DeviceInfo old_gpu() {
  DeviceInfo device = describe_device("a100");
  device.sm = 70;
  return device;
}

// Registers backends for one test.
struct Outside {
  explicit Outside(std::vector<std::pair<std::string, FakeBackend::Refuse>> fakes) {
    for (auto& [name, refuse] : fakes) {
      register_backend(std::make_shared<FakeBackend>(name, std::move(refuse)));
      names.push_back(name);
    }
  }
  ~Outside() {
    for (const auto& name : names) unregister_backend(name);
  }
  std::vector<std::string> names;
};

std::vector<Reason> nothing(const AttentionSpec&, const DeviceInfo&) { return {}; }
std::vector<Reason> everything(const AttentionSpec&, const DeviceInfo&) { return {{"spec.mood", "sunny", "rain"}}; }

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), "select.forced");
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

SelectOptions force(std::string_view name) {
  SelectOptions options;
  options.forced = name;
  return options;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Select, FirstThatRunsWins) {
  const Outside outside({{"refuses", everything}, {"runs", nothing}, {"also_runs", nothing}});
  const Selection selection = select(llama(), describe_device("cpu"));
  ASSERT_NE(selection.backend, nullptr);
  EXPECT_EQ(selection.backend->name(), "runs");
  EXPECT_TRUE(contains(selection.rule, "first of ")) << selection.rule;
  ASSERT_GE(selection.candidates.size(), 4u);
  EXPECT_EQ(selection.candidates[0].reasons.at(0).code, "spec.mood");
  EXPECT_TRUE(selection.proposals.empty());
  const std::string table = selection.str();
  EXPECT_TRUE(contains(table, "refuses"));
  EXPECT_TRUE(contains(table, "sunny"));
  EXPECT_TRUE(contains(table, "rain"));
}

TEST(Select, DescribedDevicesAnswer) {
  for (const char* device : {"h200", "b200", "a100", "avx512,32 threads"}) {
    const Selection selection = select(llama(), describe_device(device));
    EXPECT_EQ(selection.candidates.size(), backends().size()) << device;
    for (const Candidate& candidate : selection.candidates) {
      for (const Reason& reason : candidate.reasons) {
        EXPECT_FALSE(reason.code.empty() || reason.wanted.empty() || reason.actual.empty()) << device;
      }
    }
  }
  EXPECT_NE(select(llama(), describe_device("avx512,32 threads")).backend, nullptr);
  for (const char* device : {"h200", "b200", "a100", "h100", "rtx5090", "l40s"}) {
    const Selection selection = select(llama(), describe_device(device));
    ASSERT_NE(selection.backend, nullptr) << device;
    EXPECT_EQ(selection.backend->name(), describe_device(device).sm == 90 ? "cuda_sm90" : "cuda_sm80") << device;
  }
}

TEST(Select, TilesThatDoNotFitAreAReason) {
  AttentionSpec spec = llama();
  spec.head_dim_qk = 576;
  spec.head_dim_v = 512;
  spec.q_dtype = spec.kv_dtype = DType::f32;
  const Selection selection = select(spec, describe_device("l40s"));
  EXPECT_EQ(selection.backend, nullptr);
  ASSERT_EQ(selection.candidates[1].backend->name(), "cuda_sm80");
  ASSERT_EQ(selection.candidates[1].reasons.size(), 1u);
  EXPECT_EQ(selection.candidates[1].reasons[0].str(),
            "spec.head_dim_qk: wanted dimensions of which f32 tiles fit 99 KiB of shared memory, got 576 and 512");
}

TEST(Select, NothingRunsIsAnAnswer) {
  const Selection selection = select(llama(), old_gpu());
  ASSERT_EQ(selection.backend, nullptr);
  EXPECT_EQ(selection.rule, "nothing runs it");
  for (const Candidate& candidate : selection.candidates) EXPECT_FALSE(candidate.reasons.empty()) << candidate.backend->name();
}

TEST(Select, ForcedByName) {
  const Outside outside({{"runs", nothing}, {"refuses", everything}});
  SelectOptions options;
  options.forced = "reference";
  const Selection selection = select(llama(), describe_device("cpu"), options);
  EXPECT_EQ(selection.backend->name(), "reference");
  EXPECT_TRUE(contains(selection.rule, "slow")) << selection.rule;
  options.forced = "refuses";
  const std::string message = message_of([&] { select(llama(), describe_device("cpu"), options); });
  EXPECT_TRUE(contains(message, "sunny") && contains(message, "rain")) << message;
  options.forced = "no_such";
  EXPECT_TRUE(contains(message_of([&] { select(llama(), describe_device("cpu"), options); }), "reference"));
}

TEST(Select, PhaseForceIsStronger) {
  const Outside outside({{"a", nothing}, {"b", nothing}, {"c", nothing}});
  SelectOptions options{.forced = "a", .forced_prefill = "b", .forced_decode = "c"};
  const auto chosen = [&](Phase phase) {
    options.phase = phase;
    return std::string(select(llama(), describe_device("cpu"), options).backend->name());
  };
  EXPECT_EQ(chosen(Phase::any), "a");
  EXPECT_EQ(chosen(Phase::prefill), "b");
  EXPECT_EQ(chosen(Phase::decode), "c");
}

TEST(Select, EnvironmentForces) {
  const Outside outside({{"a", nothing}, {"b", nothing}});
  setenv("IMBREX_BACKEND", "b", 1);
  const Selection selection = select(llama(), describe_device("cpu"));
  EXPECT_EQ(select(llama(), describe_device("cpu"), force("a")).backend->name(), "a");
  unsetenv("IMBREX_BACKEND");
  EXPECT_EQ(selection.backend->name(), "b");
  EXPECT_EQ(selection.rule, "forced by IMBREX_BACKEND");
}

TEST(Select, AliasesNameOurBackends) {
  std::set<std::string_view> origins;
  for (const BackendAlias& alias : backend_aliases()) {
    origins.insert(alias.origin);
    EXPECT_FALSE(alias.note.empty()) << alias.name;
    const auto options = force(alias.name);
    EXPECT_EQ(alias.family.empty(), alias.backends.empty()) << alias.name;
    if (alias.backends.empty()) {
      const std::string message = message_of([&] { select(llama(), describe_device("cpu"), options); });
      EXPECT_TRUE(contains(message, std::string(alias.note))) << message;
    }
  }
  EXPECT_EQ(origins, (std::set<std::string_view>{"vllm", "sglang"}));
  if (find_backend("cpu_generic") == nullptr) GTEST_SKIP() << "built without CPU backends";
  const Selection selection = select(llama(), describe_device("cpu"), force("cpu_attn"));
  EXPECT_TRUE(contains(selection.rule, "CPU_ATTN")) << selection.rule;
  EXPECT_TRUE(selection.backend->name().starts_with("cpu_"));
}

TEST(Select, EveryFieldHasItsProposal) {
  struct Row {
    const char* proposal;
    void (*spoil)(AttentionSpec&);
    FakeBackend::Refuse refuse;
  };
  const auto unless = [](bool ok) { return ok ? std::vector<Reason>{} : everything({}, {}); };
  const std::vector<Row> rows{
      {"kv_dtype bf16: fake", [](auto& s) { s.kv_dtype = DType::f16; }, [&](auto& s, auto&) { return unless(s.kv_dtype == DType::bf16); }},
      {"q_dtype bf16: fake", [](auto& s) { s.q_dtype = DType::f32; }, [&](auto& s, auto&) { return unless(s.q_dtype == DType::bf16); }},
      {"block_size 32: fake", [](auto& s) { s.block_size = 24; }, [&](auto& s, auto&) { return unless(s.block_size % 32 == 0); }},
      {"kv_format amx_packed: fake", [](auto&) {}, [&](auto& s, auto&) { return unless(s.kv_format == KvFormat::amx_packed); }},
      {"head_dim 80 (zero-padded, scale kept): fake", [](auto& s) { s.head_dim_qk = s.head_dim_v = 72; },
       [&](auto& s, auto&) { return unless(s.head_dim_qk % 16 == 0 && std::abs(s.score.scale - 1 / std::sqrt(72.f)) < 1e-6f); }},
      {"without soft cap (changes the result): fake", [](auto& s) { s.score.soft_cap = 50; },
       [&](auto& s, auto&) { return unless(s.score.soft_cap == 0); }},
      {"without custom mask (changes the result): fake", [](auto& s) { s.mask.custom = true; },
       [&](auto& s, auto&) { return unless(!s.mask.custom); }},
      {"block_size 32 and kv_dtype bf16: fake",
       [](auto& s) {
         s.block_size = 24;
         s.kv_dtype = DType::f16;
       },
       [&](auto& s, auto&) { return unless(s.block_size % 32 == 0 && s.kv_dtype == DType::bf16); }},
  };
  for (const Row& row : rows) {
    AttentionSpec spec = llama();
    row.spoil(spec);
    std::vector<std::pair<std::string, FakeBackend::Refuse>> fakes{{"fake", row.refuse}};
    const Outside outside(std::move(fakes));
    // Other backends may run the spec too; hide them behind a device that only the fake takes.
    const Selection selection = select(spec, old_gpu());
    ASSERT_EQ(selection.backend, nullptr) << row.proposal;
    ASSERT_FALSE(selection.proposals.empty()) << row.proposal;
    EXPECT_EQ(selection.proposals[0], row.proposal);
  }
}

TEST(Select, NearestProposalFirst) {
  const Outside outside({{"fake", [](const AttentionSpec& s, const DeviceInfo&) {
                            return s.kv_dtype == DType::bf16 || s.score.soft_cap == 0 ? std::vector<Reason>{} : everything({}, {});
                          }}});
  AttentionSpec spec = llama();
  spec.kv_dtype = DType::fp8_e4m3;
  spec.score.soft_cap = 30;
  const Selection selection = select(spec, old_gpu());
  ASSERT_GE(selection.proposals.size(), 2u);
  EXPECT_EQ(selection.proposals[0], "kv_dtype bf16: fake");
  EXPECT_EQ(selection.proposals[1], "without soft cap (changes the result): fake");
}

TEST(Select, EveryPresetAndDeviceUnder50Milliseconds) {
  ASSERT_FALSE(model_presets().empty());
  for (const ModelPreset& preset : model_presets()) {
    for (const char* name : {"cpu", "h200", "b200", "a100"}) {
      const DeviceInfo device = describe_device(name);
      const std::clock_t start = std::clock();  // of this process: others may be in its way
      try {
        const ModelSpec model = load_model(preset.name);
        for (const auto& kind : model.kinds()) {
          std::visit(
              [&]<class Spec>(const Spec& layer) {
                const auto selection = select<FamilyOf<Spec>>(layer, device);
                EXPECT_EQ(selection.candidates.size(), backends<FamilyOf<Spec>>().size());
                EXPECT_TRUE(device.device.type != DeviceType::cpu || selection.backend != nullptr) << preset.name;
              },
              kind.spec);
        }
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), "model.family.later") << preset.name << ": " << e.what();
      }
      EXPECT_LT(1e3 * double(std::clock() - start) / CLOCKS_PER_SEC, 50) << preset.name << " on " << name;
    }
  }
}

}  // namespace
}  // namespace imbrex
