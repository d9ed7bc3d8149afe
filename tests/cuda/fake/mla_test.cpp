// Latent attention's plan for GPUs on the fake driver: its cases beside the reference, both ways, eager and from graphs; what it launches
// and refuses; that a failed update changes nothing. Attention and products are host code there; the kernels between them are their texts,
// compiled for the host (tests/cuda/lanes).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "allocations.h"
#include "conformance/mla/cases.h"
#include "cuda/fake/mla_plans.h"
#include "expect_error.h"
#include "mla/backend.h"
#include "mla/reference.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;

TEST_F(FakeMla, CasesMatchTheReference) {
  int ran = 0;
  std::set<std::string> entries;
  for (const MlaCase& c : mla_cases()) {
    if (c.attention.seed % 4 != 0 || !sm80.unsupported(c.spec, device).empty()) continue;
    const BackendOf<MlaFamily>& backend = ran % 2 == 0 && sm90.unsupported(c.spec, device).empty() ? sm90 : sm80;
    const MlaCaseInputs inputs = make_inputs(c);
    const Expected expected = expect(inputs);
    RunOptions options = default_options(c.attention);
    struct Way {
      const char* name;
      MlaPlanMaker make;
      bool expands = true, in_graph = false;
    };
    for (const Way& way : {Way{"in latent space", forced(false, 0), false}, Way{"in a graph", forced(false, 0), false, true},
                           Way{"in slices in latent space", forced(false, 0, 5), false},
                           Way{"slices in a graph", forced(false, 0, 6), false, true}, Way{"expanded by 128", forced(true, 128)},
                           Way{"expanded by 24", forced(true, 24)}, Way{"expanded in slices, heads by heads", forced(true, 24, 7, 3)},
                           Way{"both ways", both_ways(40)}, Way{"both ways in slices", both_ways(40, 9)}}) {
      if (way.expands && (c.spec.absorbed || !can_expand_on_device(c.spec.mask) || fake::gather_variant_of(c.spec).empty())) continue;
      const RunResult result = run_case(backend, device, inputs, options, way.make, {.in_graph = way.in_graph});
      const Judgement judgement = judge(expected, result);
      EXPECT_TRUE(judgement.pass()) << c.attention.name << " " << way.name << ": " << judgement.failure;
      EXPECT_TRUE(result.violations.empty()) << c.attention.name << ": " << result.violations.front();
      options.check_cache = false;
    }
    for (const fake::Launch& launch : fake::state().launches) entries.insert(launch.entry);
    fake::state().launches.clear();
    ++ran;
  }
  EXPECT_GT(ran, 30);
  for (const char* entry : {"gather_latents_aligned", "gather_latents_unaligned", "copy_rows_16", "copy_rows_2", "add_parts"})
    EXPECT_TRUE(entries.contains(entry)) << entry;
}

// Records and latents whose rope parts lie apart, which no case of the table has: both ways beside the reference over the same bytes, which
// write_kv() has made.
TEST_F(FakeMla, FormatsInPartsAreRead) {
  for (const KvFormat format : {KvFormat::fp8_ds_mla, KvFormat::latent_rope})
    for (const int block_size : {1, 64}) {
      MlaCase c{.spec = {.num_heads = 2, .kv_dtype = DType::fp8_e4m3, .kv_format = format, .block_size = block_size}, .attention = {}};
      c.attention.spec = c.spec.latent_spec();
      c.attention.requests = {{5, 60, 0}, {1, 33, 1}, {20, 20, 2}};
      c.attention.seed = 3;
      c.attention.rope_factor = 0.6f;
      c.attention.out_dtype = DType::f32;
      const MlaCaseInputs inputs = make_inputs(c);
      RunOptions options = default_options(c.attention);
      const RunResult expected = run_case(mla_reference(), probe_cpu(), inputs, options);
      for (const bool expand : {false, true}) {
        const RunResult result = run_case(sm80, device, inputs, options, forced(expand, 48));
        EXPECT_TRUE(result.violations.empty()) << result.violations.front();
        ASSERT_EQ(result.out.size(), expected.out.size());
        double worst = 0, largest = 0;
        for (size_t i = 0; i < result.out.size(); ++i) {
          worst = std::max(worst, std::abs(double(result.out[i]) - double(expected.out[i])));
          largest = std::max(largest, std::abs(double(expected.out[i])));
        }
        EXPECT_LT(worst, 0.01 * largest) << c.spec.str() << (expand ? " expanded" : " in latent space");
      }
    }
}

TEST_F(FakeMlaCalls, LaunchWhatTheyNeed) {
  const auto stream = open_stream(device);
  using Entries = std::vector<std::string>;
  const auto latent = plan(forced(false, 0), options);
  EXPECT_EQ(launched(*latent, stream->get()), Entries{});  // there is no step yet
  latent->update(batch_of(decode), stream->get());
  EXPECT_EQ(launched(*latent, stream->get()), (Entries{"copy_rows_16", "attention_sm80"}));  // products are not launched by the driver
  in.q.data = q.data() + 1;                                                                  // no row is aligned
  in.q.sizes[0] = 39;
  EXPECT_EQ(launched(*latent, stream->get()), (Entries{"copy_rows_2", "copy_rows_2", "attention_sm80"}));
  in.q = view(q, {40, 4, 48});
  const auto expanded = plan(forced(true, 32), options);
  expanded->update(batch_of(prompts), stream->get());
  // A round has 32 keys, and the requests are cut into 32 and 18, 32 and 1, and 19. The first round's two queries that are among its keys
  // see no others: attention writes their outputs. The last round has a step of decode beside one of prefill.
  EXPECT_TRUE(expanded->expands(0) && expanded->expands(2) && !expanded->expands(3)) << expanded->str();
  EXPECT_FALSE(latent->expands(0));
  const Entries entries = launched(*expanded, stream->get());
  const auto count = [&](std::string_view name) {
    return std::ranges::count_if(entries, [&](const std::string& entry) { return entry.starts_with(name); });
  };
  EXPECT_EQ(count("gather_latents_aligned"), 4) << expanded->str();
  EXPECT_EQ(count("add_parts"), 4);
  EXPECT_EQ(count("attention"), 6);
  stream->synchronize();
}

TEST_F(FakeMlaCalls, CaptureStepsInLatentSpaceAlone) {
  const auto stream = open_stream(device);
  const auto latent = plan(forced(false, 0), options), expanded = plan(forced(true, 32), options);
  EXPECT_TRUE(latent->capturable());
  EXPECT_FALSE(expanded->capturable());
  expanded->update(batch_of(prompts), stream->get());
  stream->capture([&] { EXPECT_EQ(error_code([&] { expanded->run(in, to, stream->get()); }), "mla.run.captured"); });
  // By its cost model, a plan of decode never expands, one of prompts may.
  const MlaSpec large{.num_heads = 16};
  for (const auto& [most, captures] : {std::pair(1, true), {4, true}, {0, false}}) {
    PlanOptions chosen{.limits = {.max_num_reqs = 2, .max_num_tokens = 2048, .max_seq_len = 1 << 13, .max_query_len = most}};
    fake::use_mla_texts(large);
    EXPECT_EQ(sm90.plan(large, device, chosen)->capturable(), captures) << most;
    chosen.load_on_demand = true;
    EXPECT_FALSE(sm90.plan(large, device, chosen)->capturable());
  }
  fake::use_mla_texts(spec);
  latent->update(batch_of(decode), stream->get());
  latent->update({}, stream->get());
  const DeviceGraph graph = stream->capture([&] {
    latent->run(in, to, stream->get());
    EXPECT_EQ(error_code([&] { latent->update(batch_of(decode), stream->get()); }), "update.captured");
  });
  for (const Lengths& lengths : {decode, prompts}) {
    latent->update(batch_of(lengths), stream->get());
    const std::string wanted = results(*latent, *stream);
    std::fill(out.begin(), out.end(), uint16_t(0x2222));
    stream->replay(graph);
    stream->synchronize();
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(out.data()), out.size() * 2) == wanted, true) << lengths.lens[0];
  }
  table[0] = 12;  // a block that the cache of the graph does not have
  EXPECT_EQ(error_code([&] { latent->update(batch_of(decode), stream->get()); }), "update.captured_cache");
}

// A step whose lengths are on the device, in arrays that a test changes.
struct LengthsOnDevice {
  std::vector<int32_t> starts, lens, table;
  std::vector<int64_t> slots;
  DeviceBatch batch() {
    constexpr Device gpu{DeviceType::cuda, 0};
    const auto list = [&](std::vector<int32_t>& v) { return TensorView::contiguous(v.data(), DType::i32, {int64_t(v.size())}, gpu); };
    return {.query_start_loc = list(starts),
            .seq_lens = list(lens),
            .block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(lens.size()), 4}, gpu),
            .slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {int64_t(slots.size())}, gpu),
            .max_num_tokens = int(slots.size())};
  }
};

TEST_F(FakeMlaCalls, LengthsOnTheDeviceGiveTheSameResults) {
  const auto stream = open_stream(device);
  options.on_device = true;
  const auto on_host = plan(forced(false, 0), options), p = plan(forced(false, 0), options);
  LengthsOnDevice there{decode.starts, decode.lens, table, std::vector<int64_t>(40, -1)};
  DeviceGraph graph;
  for (const bool in_graph : {false, true})
    for (const Lengths& lengths : {decode, prompts}) {
      on_host->update(batch_of(lengths), stream->get());
      const std::string wanted = results(*on_host, *stream);
      there.starts.assign(lengths.starts.begin(), lengths.starts.end()), there.lens.assign(lengths.lens.begin(), lengths.lens.end());
      std::fill(out.begin(), out.end(), uint16_t(0x2222));
      const auto step = [&] {
        p->update_on_device(there.batch(), stream->get());
        p->run(in, to, stream->get());
      };
      if (in_graph && graph == nullptr) graph = stream->capture(step);
      if (in_graph)
        stream->replay(graph);
      else
        step();
      stream->synchronize();
      EXPECT_TRUE(p->device_problems(stream->get()).empty());
      EXPECT_TRUE(std::string(reinterpret_cast<const char*>(out.data()), out.size() * 2) == wanted) << in_graph << lengths.lens[0];
    }
  EXPECT_NE(p->str().find("planned on the device, for at most 40 tokens"), std::string::npos) << p->str();
  Batch again = batch_of(decode);  // from the host again
  again.block_table = there.batch().block_table;
  p->update(again, stream->get());
  on_host->update(batch_of(decode), stream->get());
  EXPECT_TRUE(results(*p, *stream) == results(*on_host, *stream));
}

TEST_F(FakeMlaCalls, RequestsThatBreakRulesOnTheDeviceAreLeftOut) {
  const auto stream = open_stream(device);
  options.on_device = true;
  const auto on_host = plan(forced(false, 0), options), p = plan(forced(false, 0), options);
  LengthsOnDevice there{{0, 1, 3, 4}, {40, 65, 20}, table, std::vector<int64_t>(40, -1)};
  const Lengths without{{0, 1, 1, 2}, {40, 0, 20}};
  on_host->update(batch_of(without), stream->get());
  constexpr size_t kRow = 4 * 40;
  const std::string wanted = results(*on_host, *stream);
  for (const bool in_graph : {false, true}) {
    std::fill(lse.begin(), lse.end(), 7.f);
    if (in_graph) {
      const DeviceGraph graph = stream->capture([&] {
        p->update_on_device(there.batch(), stream->get());
        p->run(in, to, stream->get());
      });
      std::fill(out.begin(), out.end(), uint16_t(0x2222));
      stream->replay(graph);
      stream->synchronize();
    } else {
      p->update_on_device(there.batch(), stream->get());
      results(*p, *stream);
    }
    const std::vector<Reason> problems = p->device_problems(stream->get());
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_EQ(problems[0].str(), "batch.seq_len.limit: wanted 0 to 64 keys, got something else in request 1");
    EXPECT_EQ(std::memcmp(out.data(), wanted.data(), 2 * kRow), 0);
    for (size_t i = kRow; i < out.size(); ++i) {
      const bool of_request_2 = i / kRow == 3;
      ASSERT_TRUE(of_request_2 || out[i] == 0x2222) << i;
    }
    EXPECT_EQ(lse[4], 7.f);
    EXPECT_NE(lse[12], 7.f);
    EXPECT_NE(out[3 * kRow], 0x2222);
  }
}

TEST_F(FakeMlaCalls, NewLatentsOfAStepOnTheDeviceGoToItsSlots) {
  const auto stream = open_stream(device);
  options.on_device = true;
  const auto p = plan(forced(false, 0), options);
  LengthsOnDevice there{decode.starts, decode.lens, table, {16, 33, 50, 70, 71}};
  p->update_on_device(there.batch(), stream->get());
  std::vector<uint16_t> latents(5 * 64, 0x3f80), ropes(5 * 16, 0x4000), before = cache;
  p->write_kv(in.kv, view(latents, {5, 64}), view(ropes, {5, 16}), stream->get());
  stream->synchronize();
  for (size_t slot = 0; slot < 12 * 16; ++slot) {
    const bool written = slot == 16 || slot == 33 || slot == 50;  // 70 and 71 are of tokens that the step does not have
    for (size_t i = 0; i < 80; ++i) ASSERT_EQ(cache[slot * 80 + i], !written ? before[slot * 80 + i] : i < 64 ? 0x3f80 : 0x4000) << slot;
  }
}

TEST_F(FakeMlaCalls, LengthsOnTheDeviceHaveToBeAskedForAndKeepRequestsInLatentSpace) {
  const auto stream = open_stream(device);
  LengthsOnDevice there{decode.starts, decode.lens, table, std::vector<int64_t>(40, -1)};
  const auto code = [&](const MlaPlanMaker& make) {
    const auto p = plan(make, options);
    p->update(batch_of(decode), stream->get());
    const std::string before = results(*p, *stream);
    const std::string found = error_code([&] { p->update_on_device(there.batch(), stream->get()); });
    EXPECT_TRUE(results(*p, *stream) == before);
    return found;
  };
  EXPECT_EQ(code(forced(false, 0)), "update.on_device");
  options.on_device = true;
  EXPECT_EQ(code(both_ways(32)), "update.on_device");
  there.lens.pop_back();
  EXPECT_EQ(code(forced(false, 0)), "batch.lengths");
}

TEST_F(FakeMlaCalls, RefuseWhatIsWrong) {
  const auto stream = open_stream(device);
  const auto p = plan(forced(false, 0), options);
  p->update(batch_of(decode), stream->get());
  const auto run_code = [&](auto change) {
    MlaInputs inputs = in;
    MlaOutputs outputs = to;
    change(inputs, outputs);
    return error_code([&] { p->run(inputs, outputs, stream->get()); });
  };
  EXPECT_EQ(run_code([](auto& i, auto&) { i.q.device = {}; }), "mla.run.q");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.kv_b = {}; }), "mla.run.kv_b");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.kv_b.data = i.kv_b.template as<char>() + 2; }), "mla.run.kv_b");
  EXPECT_EQ(run_code([](auto& i, auto&) { i.kv.k.sizes[0] = 5; }), "run.block_id");
  EXPECT_EQ(run_code([](auto&, auto& o) { o.out.sizes[2] = 32; }), "mla.run.out");
  EXPECT_EQ(error_code([&] { p->update_on_device({}, stream->get()); }), "update.on_device");
  const Lengths many{{0, 10, 20, 41}, {50, 33, 60}};
  EXPECT_EQ(error_code([&] { p->update(batch_of(many), stream->get()); }), "batch.num_tokens.limit");
  EXPECT_EQ(sm90.unsupported(spec, probe_cpu()).at(0).str(), "device.type: wanted cuda, got cpu");
  stream->synchronize();
}

// After an update of which anything has failed, the plan computes the step before, bit for bit; or no step, where the driver goes on
// failing.
template <class Fault>
class FakeMlaUpdateGuarantee : public FakeMlaCalls {};
using MlaFaults = testing::Types<fake::FailCall<false>, fake::FailCall<true>, imbrex::test::FailAllocation>;
TYPED_TEST_SUITE(FakeMlaUpdateGuarantee, MlaFaults);

TYPED_TEST(FakeMlaUpdateGuarantee, Holds) {
  const auto stream = open_stream(this->device);
  int failures = 0;
  for (long number = 1; number < 400; number += 1 + number / 3) {
    const auto p = this->plan(this->both_ways(32), this->options);
    p->update(this->batch_of(this->decode), stream->get());
    const std::string before = this->results(*p, *stream), text = p->str();
    bool updated = false, failed = false;
    {
      const TypeParam fault(number);
      try {
        p->update(this->batch_of(this->prompts), stream->get());
        updated = true;
      } catch (const std::exception&) {
      }
      failed = fault.has_failed();
    }
    if (!failed) break;
    ++failures;
    if (!updated) {
      EXPECT_EQ(p->str(), text);
      try {
        EXPECT_TRUE(this->results(*p, *stream) == before) << number;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), "plan.no_step");
        EXPECT_TRUE((std::is_same_v<TypeParam, fake::FailCall<true>>));
      }
    }
    p->update(this->batch_of(this->prompts), stream->get());
    const std::string after = this->results(*p, *stream);
    const auto fresh = this->plan(this->both_ways(32), this->options);
    fresh->update(this->batch_of(this->prompts), stream->get());
    EXPECT_TRUE(this->results(*fresh, *stream) == after) << number;
    EXPECT_FALSE(after == before);
    if (this->HasFailure()) return;
  }
  EXPECT_GT(failures, 5);
}

}  // namespace
}  // namespace imbrex::cuda
