// Steps of the short convolution whose lengths are on the device, on the fake driver: what the host can refuse, and which requests the
// kernel leaves out and reports.
#include <cstring>

#include "cuda/fake/short_conv_calls.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;

TEST_F(ShortConvCalls, RefuseWhatTheHostSeesOfLengthsOnTheDevice) {
  const auto p = plan(spec, {.limits = limits, .on_device = true});
  const std::pair<const char*, void (*)(DeviceBatch&)> refusals[] = {
      {kFine, [](DeviceBatch&) {}},
      {kFine, [](DeviceBatch& b) { b.num_drafts = b.accepted_drafts = {}; }},
      {"batch.lengths", [](DeviceBatch& b) { b.query_start_loc.sizes[0] = 3; }},
      {"update.device", [](DeviceBatch& b) { b.seq_lens.device = {}; }},
      {"batch.state.size", [](DeviceBatch& b) { b.state_slots = {}; }},
      {"batch.state.size", [](DeviceBatch& b) { b.num_drafts.sizes[0] = 2; }},
      {"batch.state.size", [](DeviceBatch& b) { b.accepted_drafts.dtype = DType::i64; }},
      {"update.device", [](DeviceBatch& b) { b.state_slots.device.index = 1; }},
      {"batch.num_tokens.limit", [](DeviceBatch& b) { b.max_num_tokens = 51; }},
      {"batch.num_reqs.limit", [](DeviceBatch& b) { b.seq_lens.sizes[0] = 5; }},
  };
  for (const auto& [code, spoil] : refusals) {
    DeviceBatch spoiled = on_device;
    spoil(spoiled);
    fake::state().launches.clear();
    EXPECT_EQ(error_code([&] { p->update_on_device(spoiled); }), code);
    EXPECT_EQ(fake::state().launches.size(), std::string(code) == kFine ? 1u : 0u) << code;
  }
  EXPECT_EQ(p->str(), "cuda_sm80 (sm_90a): planned on the device, for at most 6 tokens");
  in.input.sizes[0] = 5;
  EXPECT_EQ(error_code([&] { p->run(in, out); }), "short_conv.run.tensor");
}

TEST_F(ShortConvCalls, TellWhichRulesWereBroken) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  const auto p = plan(spec, {.limits = limits, .on_device = true});
  const auto problems = [&](auto change) {
    DeviceBatch b = on_device;
    change(b);
    p->update_on_device(b);
    p->run(in, out);
    std::string codes;
    for (const Reason& r : p->device_problems()) codes += r.code + ": " + r.actual;
    return codes;
  };
  EXPECT_EQ(problems([](DeviceBatch&) {}), "");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.query_start_loc = list({0, 2, 1, 5});
            }),
            "batch.query_start_loc.monotone: something else in request 1");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.query_start_loc = list({1, 2, 2, 5});
            }),
            "batch.query_start_loc.monotone: something else in request 0");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.query_start_loc = list({0, 2, 2, 7});
            }),
            "batch.num_tokens.limit: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.seq_lens = list({2, 1001, 9}); }), "batch.seq_len.limit: something else in request 1");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.seq_lens = list({2, 7, 2});
            }),
            "batch.seq_len.shorter_than_query: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({-1, -1, 0}); }), "batch.state.slot: something else in request 0");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({1, -1, 2}); }), "batch.state.slot: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.num_drafts = list({0, 0, 3}); }), "batch.state.num_drafts: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.accepted_drafts = list({1, 0, 0});
            }),
            "batch.state.accepted_drafts: something else in request 0");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({1, -1, 1}); }), "batch.state.shared: something else in request 2");
  // A request without tokens, or one that is left out, shares nothing.
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({1, 0, 0}); }), "");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.state_slots = list({0, 0, 0}), b.num_drafts = list({0, 0, 3});
            }),
            "batch.state.num_drafts: something else in request 2");
  EXPECT_EQ(problems([](DeviceBatch&) {}), "");
}

// A request that is left out is as if it were not there: nothing of it is written, and the others have the same bits.
TEST_F(ShortConvCalls, LeaveOutWhatBreaksRules) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  const auto p = plan(spec, {.limits = limits, .on_device = true});
  const auto results = [&](const DeviceBatch& b) {
    std::memset(in.state.data, 0x11, 2 * 4 * 64 * 2), std::memset(out.out.data, 0x22, 6 * 64 * 2);
    p->update_on_device(b);
    p->run(in, out);
    const char *const s = in.state.as<char>(), *const o = out.out.as<char>();
    return std::pair(std::string(s, s + 2 * 4 * 64 * 2), std::string(o, o + 6 * 64 * 2));
  };
  for (int i = 0; i < 6 * 192; ++i) in.input.as<uint16_t>()[i] = uint16_t(0x3f00 + i % 251);
  for (int i = 0; i < 64 * 3; ++i) in.weight.as<uint16_t>()[i] = uint16_t(0x3f00 + i % 101);
  const auto [state, output] = results(on_device);
  DeviceBatch bad = on_device;
  bad.state_slots = list({2, -1, 0});  // of the first one, whose tokens come first
  const auto [bad_state, bad_output] = results(bad);
  constexpr size_t kSlot = 4 * 64 * 2, kRow = 64 * 2;
  EXPECT_EQ(bad_state.substr(0, kSlot), state.substr(0, kSlot));
  EXPECT_EQ(bad_state.substr(kSlot), std::string(kSlot, 0x11));
  EXPECT_EQ(bad_output.substr(0, 2 * kRow), std::string(2 * kRow, 0x22));
  EXPECT_EQ(bad_output.substr(2 * kRow), output.substr(2 * kRow));
  EXPECT_NE(state.substr(kSlot), bad_state.substr(kSlot));

  // Of requests with one slot none is computed: nobody knows whose it is.
  bad.state_slots = list({0, -1, 0});
  const auto [shared_state, shared_output] = results(bad);
  EXPECT_EQ(shared_state, std::string(2 * kSlot, 0x11));
  EXPECT_EQ(shared_output, std::string(6 * kRow, 0x22));
}

// More requests than the kernel has threads, and than it tells apart between its two passes; and slots so far apart that some have one bit
// in its claims.
TEST_F(ShortConvCalls, FindSlotsOfSeveralRequests) {
  if (!fake::has_short_conv_texts()) GTEST_SKIP();
  fake::Launch planned;
  const auto run_text = fake::state().on_launch;
  fake::state().on_launch = [&](const fake::Launch& launch) { run_text(launch), planned = launch; };
  for (const int reqs : {700, 32 * kPlanStateBatchThreads + 700}) {
    const auto p = plan(spec, {.limits = {.max_num_reqs = reqs, .max_num_tokens = reqs}, .on_device = true});
    std::mt19937 random(11);
    std::vector<int32_t> starts{0}, lens(size_t(reqs), 5), slots;
    for (int r = 0; r < reqs; ++r) starts.push_back(r + 1), slots.push_back(r < 60 ? r % 3 * (1 << 17) + r / 3 : r);
    std::shuffle(slots.begin(), slots.end(), random);
    DeviceBatch all{.query_start_loc = list(starts), .seq_lens = list(lens), .state_slots = list(slots)};
    const auto left_out = [&] {
      p->update_on_device(all);
      PlanStateBatchParams params;
      std::memcpy(&params, planned.all_params.at(0).data(), sizeof params);
      std::vector<int> out;
      for (int r = 0; r < reqs; ++r)
        if (params.requests[r].slot != slots[size_t(r)]) out.push_back(params.requests[r].slot == -1 ? r : -r);
      return out;
    };
    EXPECT_EQ(left_out(), std::vector<int>{}) << reqs;
    EXPECT_TRUE(p->device_problems().empty());
    // Slots that others write may not be read, those that nobody writes may.
    std::vector<int32_t> sources = slots;
    sources[7] = slots[90], sources[680] = slots[2], sources[100] = sources[101] = 1 << 20;
    all.source_slots = list(sources);
    EXPECT_EQ(left_out(), (std::vector<int>{7, 680}));
    ASSERT_EQ(p->device_problems().at(0).code, "batch.state.source");
    all.source_slots = {};
    const int last = reqs - 1;
    slots[size_t(last)] = slots[3], slots[4] = slots[260], slots[650] = slots[260];
    all.state_slots = list(slots);
    EXPECT_EQ(left_out(), (std::vector<int>{3, 4, 260, 650, last}));
    const std::vector<Reason> problems = p->device_problems();
    ASSERT_EQ(problems.size(), 1u);
    EXPECT_EQ(problems[0].str(),
              "batch.state.shared: wanted a slot of its own for each request, got something else in request " + std::to_string(last));
  }
}

}  // namespace
}  // namespace imbrex::cuda
