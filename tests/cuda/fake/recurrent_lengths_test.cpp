// Steps of recurrent layers whose lengths are on the device, on the fake driver: what the host can refuse, and which requests the kernels
// leave out and report.

#include "cuda/fake/recurrent_calls.h"
#include "expect_error.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;

TEST_F(RecurrentCalls, RefuseWhatTheHostSeesOfLengthsOnTheDevice) {
  const auto p = plan(spec, {.limits = limits, .on_device = true});
  const std::pair<const char*, void (*)(DeviceBatch&)> refusals[] = {
      {kFine, [](DeviceBatch&) {}},
      {kFine, [](DeviceBatch& b) { b.num_drafts = b.accepted_drafts = {}; }},
      {"batch.lengths", [](DeviceBatch& b) { b.query_start_loc.sizes[0] = 3; }},
      {"update.device", [](DeviceBatch& b) { b.seq_lens.device = {}; }},
      {"batch.state.size", [](DeviceBatch& b) { b.state_slots = {}; }},
      {"batch.state.size", [](DeviceBatch& b) { b.num_drafts.sizes[0] = 2; }},
      {"batch.state.size", [](DeviceBatch& b) { b.accepted_drafts.dtype = DType::i64; }},
      {"batch.num_tokens.limit", [](DeviceBatch& b) { b.max_num_tokens = 51; }},
      {kFine, [](DeviceBatch& b) { b.source_slots = b.state_slots; }},
      {"batch.state.size", [](DeviceBatch& b) { b.source_slots = b.query_start_loc; }},
      {"update.device", [](DeviceBatch& b) { b.source_slots = b.state_slots, b.source_slots.device = {}; }},
      {"batch.draft_parents.unexpected", [](DeviceBatch& b) { b.draft_parents = b.state_slots; }},
  };
  for (const auto& [code, spoil] : refusals) {
    DeviceBatch spoiled = on_device;
    spoil(spoiled);
    fake::state().launches.clear();
    EXPECT_EQ(error_code([&] { p->update_on_device(spoiled); }), code);
    EXPECT_EQ(fake::state().launches.size(), std::string(code) == kFine ? 1u : 0u) << code;
  }
  EXPECT_EQ(p->str(), "cuda_sm80 (sm_90a): planned on the device, for at most 6 tokens");
  in.q.sizes[0] = 5;
  EXPECT_EQ(error_code([&] { p->run(in, out); }), "recurrent.run.tensor");
}

TEST_F(RecurrentCalls, TellWhichRulesWereBroken) {
  if (!fake::has_texts()) GTEST_SKIP();
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
              b.query_start_loc = list({0, 2, 2, 7});
            }),
            "batch.num_tokens.limit: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.seq_lens = list({2, 7, 2});
            }),
            "batch.seq_len.shorter_than_query: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({-1, -1, 0}); }), "batch.state.slot: something else in request 0");
  // The state has two slots. Whichever thread block computes a request, it is told once, by its number.
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({1, -1, 2}); }), "batch.state.slot: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({7, -1, 0}); }), "batch.state.slot: something else in request 0");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.num_drafts = list({0, 0, 3}); }), "batch.state.num_drafts: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) {
              b.accepted_drafts = list({1, 0, 0});
            }),
            "batch.state.accepted_drafts: something else in request 0");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.state_slots = list({1, -1, 1}); }), "batch.state.shared: something else in request 2");
  // The first request is new, and reads no slot.
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.source_slots = list({-9, -9, 0}); }), "");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.source_slots = list({0, 0, -1}); }), "batch.state.source: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.source_slots = list({0, 0, 1}); }), "batch.state.source: something else in request 2");
  EXPECT_EQ(problems([&](DeviceBatch& b) { b.source_slots = list({0, 0, 2}); }), "batch.state.slot: something else in request 2");
  EXPECT_EQ(problems([](DeviceBatch&) {}), "");
}

// A draft that follows none of the tokens that it may leaves out its request.
TEST_F(RecurrentPlans, TellOfWrongTrees) {
  if (!fake::has_texts()) GTEST_SKIP();
  for (const RecurrentVariant& variant : recurrent_variants()) {
    if (!variant.layer.tree_drafts) continue;
    use(variant);
    RecurrentBesideReference beside(
        backend, device, {.spec = variant.with_drafts(3), .limits = {.max_num_reqs = 2, .max_num_tokens = 9}, .on_device = true});
    const auto problems = [&](std::vector<int32_t> parents) {
      const SlotStep step{
          .starts = {0, 4, 7}, .lens = {4, 3}, .slots = {1, 0}, .drafts = {2, 3}, .accepted = {0, 0}, .parents = std::move(parents)};
      beside.begin(step);
      beside.send(step), beside.update_on_device(), beside.layer();
      std::string codes;
      for (const Reason& r : beside.plan().device_problems(beside.stream().get())) codes += r.code + ": " + r.actual;
      return codes;
    };
    EXPECT_EQ(problems({7, 7, 1, 1, -1, -1, 0}), "");
    EXPECT_EQ(problems({7, 7, 0, 1, -1, -1, 0}), "batch.draft_parents.range: something else in request 0") << "not the last one";
    EXPECT_EQ(problems({7, 7, 1, 3, -1, -1, 0}), "batch.draft_parents.range: something else in request 0") << "itself";
    EXPECT_EQ(problems({7, 7, 1, 1, -1, 2, 0}), "batch.draft_parents.range: something else in request 1") << "a later one";
    EXPECT_EQ(problems({7, 7, 1, 1, -2, -1, 0}), "batch.draft_parents.range: something else in request 1") << "in front of the step";
  }
}

// The host makes the list, or the device does: other requests have the bits that they have alone, outputs of padding are zeros, and lists
// say nothing of it but its tokens.
TEST_F(RecurrentCalls, PadWithRequestsOfOneSlot) {
  if (!fake::has_texts()) GTEST_SKIP();
  const SlotStep padded{.starts = {0, 1, 3, 3, 6, 6}, .lens = {9, 2, 7, 9, 4}, .slots = {5, 1, 5, 5, 5}};
  for (const bool device : {false, true}) {
    const auto p = plan(spec, {.limits = {.max_num_reqs = 5, .max_num_tokens = 50, .max_seq_len = 1000}, .on_device = device});
    Batch on_host = padded.batch(spec);
    DeviceBatch there{.query_start_loc = list(padded.starts),
                      .seq_lens = list(padded.lens),
                      .state_slots = list(padded.slots),
                      .num_drafts = list({9, 0, 9, -9, 9}),
                      .accepted_drafts = list({9, 0, 9, -9, 9}),
                      .pad_slot = 5,
                      .max_num_tokens = 6};
    const std::vector<int32_t> wrong{9, 0, 9, -9, 9};
    on_host.num_drafts = on_host.accepted_drafts = wrong, on_host.pad_slot = 5;
    const auto update = [&] { device ? p->update_on_device(there) : p->update(on_host); };
    begin();
    update();
    p->run(in, out);
    EXPECT_TRUE(p->device_problems().empty());
    const std::string all_states = states(), all_outputs = outputs();
    EXPECT_EQ(all_outputs.substr(0, kRowBytes), std::string(kRowBytes, 0));
    EXPECT_EQ(all_outputs.substr(3 * kRowBytes), std::string(3 * kRowBytes, 0));
    EXPECT_EQ(all_states.substr(0, kSlotBytes), first_state.substr(0, kSlotBytes));
    EXPECT_NE(all_states.substr(kSlotBytes), first_state.substr(kSlotBytes));
    begin();
    const SlotStep alone{.starts = {0, 0, 1, 3}, .lens = {0, 1, 2}, .slots = {-1, 0, 1}};
    p->update(alone.batch(spec));
    p->run(in, out);
    EXPECT_EQ(outputs().substr(kRowBytes, 2 * kRowBytes), all_outputs.substr(kRowBytes, 2 * kRowBytes));
    EXPECT_EQ(states().substr(kSlotBytes), all_states.substr(kSlotBytes));

    there.pad_slot.reset(), on_host.pad_slot.reset();
    if (device) {
      update();
      EXPECT_FALSE(p->device_problems().empty());
    } else {
      EXPECT_EQ(error_code([&] { update(); }), "batch.state.num_drafts");
    }
  }
}

// A graph has a launch for padding where its step has a pad_slot, though none of its requests is padding; without one, later steps may
// have none.
TEST_F(RecurrentCalls, PadInGraphs) {
  if (!fake::has_texts()) GTEST_SKIP();
  const auto stream = open_stream(device);
  const auto p = plan(spec, {.limits = limits});
  const auto capture = [&] { return stream->capture([&] { p->run(in, out, stream->get()); }); };
  batch.pad_slot = 1;
  SlotStep none = step;
  none.slots = {0, -1, 1};
  Batch first = none.batch(spec);
  first.pad_slot = 7;
  p->update(first, stream->get());
  const DeviceGraph with = capture();
  p->update(batch, stream->get());  // whose first request is padding
  begin();
  stream->replay(with);
  stream->synchronize();
  EXPECT_EQ(outputs().substr(0, 2 * kRowBytes), std::string(2 * kRowBytes, 0));
  EXPECT_NE(outputs().substr(2 * kRowBytes, kRowBytes), std::string(kRowBytes, 0));
  EXPECT_EQ(states().substr(kSlotBytes), first_state.substr(kSlotBytes));
  first.pad_slot.reset();
  p->update(first, stream->get());
  const DeviceGraph without = capture();
  EXPECT_EQ(error_code([&] { p->update(batch, stream->get()); }), "update.captured_padding");
  batch.pad_slot = 9;
  EXPECT_NO_THROW(p->update(batch, stream->get()));
}

// A request that is left out is as if it were not there: nothing of it is written, and the others have the same bits.
TEST_F(RecurrentCalls, LeaveOutWhatBreaksRules) {
  if (!fake::has_texts()) GTEST_SKIP();
  const auto p = plan(spec, {.limits = limits, .on_device = true});
  const auto step_of = [&](const DeviceBatch& b) {
    begin();
    p->update_on_device(b);
    p->run(in, out);
    return std::pair(states(), outputs());
  };
  const auto [state, output] = step_of(on_device);
  DeviceBatch bad = on_device;
  bad.state_slots = list({2, -1, 0});  // of the first one, whose tokens come first
  const auto [bad_state, bad_output] = step_of(bad);
  EXPECT_EQ(bad_state.substr(0, kSlotBytes), state.substr(0, kSlotBytes));
  EXPECT_EQ(bad_state.substr(kSlotBytes), first_state.substr(kSlotBytes));
  EXPECT_EQ(bad_output.substr(0, 2 * kRowBytes), std::string(2 * kRowBytes, 0x22));
  EXPECT_EQ(bad_output.substr(2 * kRowBytes), output.substr(2 * kRowBytes));
  EXPECT_NE(state.substr(kSlotBytes), bad_state.substr(kSlotBytes));
  EXPECT_NE(state.substr(0, kSlotBytes), first_state.substr(0, kSlotBytes));

  // Of requests with one slot none is computed: nobody knows whose it is.
  bad.state_slots = list({0, -1, 0});
  const auto [shared_state, shared_output] = step_of(bad);
  EXPECT_EQ(shared_state, first_state);
  EXPECT_EQ(shared_output, std::string(6 * kRowBytes, 0x22));

  // A request beyond the rows of the tensors, which the host takes for shorter than they are.
  RecurrentInputs shorter = in;
  shorter.q.sizes[0] = 5;
  DeviceBatch longer = on_device;
  longer.query_start_loc = list({0, 2, 2, 6}), longer.seq_lens = list({2, 7, 10}), longer.max_num_tokens = 5;
  begin();
  p->update_on_device(longer);
  p->run(shorter, out);
  EXPECT_EQ(states().substr(0, kSlotBytes), first_state.substr(0, kSlotBytes));
  EXPECT_EQ(outputs().substr(2 * kRowBytes), std::string(4 * kRowBytes, 0x22));
  ASSERT_EQ(p->device_problems().size(), 3u);
}

// Where starts of requests fall, or do not begin at 0, no request is computed, by chunks or token by token: nobody knows which tokens are
// meant.
TEST_F(RecurrentPlans, ComputeNothingWhereStartsFall) {
  if (!fake::has_texts()) GTEST_SKIP();
  for (const RecurrentVariant& variant : recurrent_variants()) {
    use(variant);
    RecurrentBesideReference beside(
        backend, device,
        {.spec = variant.layer, .limits = {.max_num_reqs = 12, .max_num_tokens = 220, .max_seq_len = 1 << 20}, .on_device = true});
    for (const std::vector<int32_t>& starts : {std::vector<int32_t>{128, 160, 164, 200}, {0, 130, 40, 80}}) {
      const SlotStep step{.starts = starts, .lens = {300, 301, 302}, .slots = {4, 2, 5}, .drafts = {0, 0, 0}, .accepted = {0, 0, 0}};
      beside.begin(step);
      const std::vector<char> state = beside.state(), out = beside.output();
      beside.send(step), beside.update_on_device(), beside.layer();
      EXPECT_TRUE(beside.state() == state && beside.output() == out) << variant.name << ", from " << starts[0];
      EXPECT_EQ(beside.plan().device_problems(beside.stream().get()).size(), 1u) << variant.name;
    }
  }
}

// Heads that share a thread block, of which the first block tells what is wrong.
TEST_F(RecurrentPlans, NarrowHeadsLeaveOutWhatBreaksRules) {
  if (!fake::has_texts()) GTEST_SKIP();
  use(recurrent_variants().back());
  test::RecurrentProblem problem{.spec = recurrent_variants().back().layer, .on_device = true};
  problem.spec.num_v_heads = 200;
  RecurrentBesideReference beside(backend, device, problem);
  const SlotStep step{.starts = {0, 2, 5, 6}, .lens = {2, 3, 1}, .slots = {4, 17, 5}, .drafts = {0, 0, 0}, .accepted = {0, 0, 0}};
  beside.begin(step);
  beside.send(step), beside.update_on_device(), beside.layer();
  const std::vector<char> out = beside.output(), untouched(size_t(3 * 200 * 2), 0x5a);
  const long row = 200 * 2;
  EXPECT_TRUE(std::equal(untouched.begin(), untouched.end(), out.begin() + 2 * row));
  EXPECT_FALSE(std::equal(untouched.begin(), untouched.begin() + 2 * row, out.begin()));
  EXPECT_FALSE(std::equal(untouched.begin(), untouched.begin() + row, out.begin() + 5 * row));
  const std::vector<Reason> problems = beside.plan().device_problems(beside.stream().get());
  ASSERT_EQ(problems.size(), 1u);
  EXPECT_EQ(problems[0].code + ": " + problems[0].actual, "batch.state.slot: something else in request 1");
}

}  // namespace
}  // namespace imbrex::cuda
