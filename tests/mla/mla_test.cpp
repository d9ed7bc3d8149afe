// MLA: a part of its cases, what is refused, how a step is cut, and selection. What holds for every backend is in tests/conformance.
#include "imbrex/mla.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/mla/cases.h"
#include "count_allocations.h"
#include "expect_error.h"
#include "imbrex/batch_tools.h"
#include "mla/backend.h"
#include "mla/rounds.h"
#include "mla/slices.h"
#include "mla/spec_fields.h"
#include "mla_step.h"
#include "sanitizers.h"
#include "spec_table.h"

namespace imbrex {
namespace {

using test::kSmall, test::MlaStep;

// A part of the table of cases, which tests/conformance runs whole: here for the sanitizers that run all of this program.
TEST(Mla, CasesMatchTheReference) {
  int run = 0;
  for (size_t i = 0; i < mla_cases().size(); i += 13) {
    const MlaCase& c = mla_cases()[i];
    const MlaCaseInputs inputs = make_inputs(c);
    const Expected expected = expect(inputs);
    for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512})
      for (const BackendOf<MlaFamily>* backend : backends<MlaFamily>()) {
        DeviceInfo device = probe_cpu();
        if (isa > device.isa) continue;
        device.isa = isa;
        if (!backend->unsupported(c.spec, device).empty()) continue;
        const Judgement judgement = judge(expected, run_case(*backend, device, inputs, default_options(c.attention)));
        EXPECT_TRUE(judgement.pass()) << c.attention.name << " " << backend->name() << " on " << to_string(isa) << ": "
                                      << judgement.failure;
        ++run;
      }
  }
  EXPECT_GE(run, 40);
}

// Bit for bit, since of so few tokens all parts attend in latent space.
TEST(Mla, PartsGiveWhatTheWholeGives) {
  int run = 0;
  for (const BackendOf<MlaFamily>* backend : backends<MlaFamily>()) {
    MlaStep step(kSmall, {{5, 5}, {1, 30}, {4, 20}});
    const DeviceInfo device = probe_cpu();
    if (!backend->unsupported(step.spec, device).empty()) continue;
    const auto plan = backend->plan(step.spec, device, {.limits = {.max_num_reqs = 4, .max_num_tokens = 16, .max_seq_len = 64}});
    plan->update(step.batch);
    step.call(*plan);
    const std::vector<char> expected = step.output().bytes;
    const PartKeys keys = part_keys(step.spec.latent_spec());
    for (const std::vector<int32_t>& cuts : {std::vector<int32_t>{6}, {3}, {2, 8}}) {
      std::fill_n(step.out.out.as<char>(), expected.size(), 0);
      for (const DerivedBatch& part : split_batch(step.batch, keys, cuts)) {
        const int begin = part.first_token, end = begin + part.batch.num_tokens();
        plan->update(part.batch);
        MlaInputs in = step.in;
        in.q = step.in.q.slice(0, begin, end);
        plan->run(in, {step.out.out.slice(0, begin, end), step.out.lse.slice(0, begin, end)});
      }
      EXPECT_TRUE(step.output().bytes == expected) << backend->name() << " cut at " << cuts[0];
    }
    ++run;
  }
  EXPECT_GE(run, 2);
}

TEST(Mla, WhatIsWrongIsRefusedAndTheStepBeforeStays) {
  for (const std::string name : {"cpu_generic", "reference"}) {
    MlaStep step(kSmall, {{2, 2}, {3, 9}});
    step.spec.sinks = true;
    step.in.sinks = step.make(DType::f32, {2});
    const auto plan = find_backend<MlaFamily>(name)->plan(step.spec, probe_cpu(),
                                                          {.limits = {.max_num_reqs = 4, .max_num_tokens = 16, .max_seq_len = 64}});
    plan->update(step.batch);
    step.call(*plan);
    const std::vector<char> expected = step.output().bytes;
    const auto refused = [&](const std::function<void(Batch&, std::vector<int32_t>&)>& change) {
      Batch batch = step.batch;
      std::vector<int32_t> list;
      change(batch, list);
      return test::error_code([&] { plan->update(batch); });
    };
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 2, 1}, b.query_start_loc = l; }), "batch.query_start_loc.monotone");
    EXPECT_EQ(refused([](Batch& b, auto& l) { l = {0, 2, 17}, b.query_start_loc = l; }), "batch.seq_len.shorter_than_query");
    EXPECT_EQ(refused([](Batch& b, auto&) { b.block_table = {}; }), "batch.keys.missing");
    EXPECT_EQ(test::error_code([&] { plan->update_on_device({}); }), "update.on_device");
    const auto run = [&](const std::function<void(MlaInputs&, MlaOutputs&)>& change) {
      MlaInputs in = step.in;
      MlaOutputs out = step.out;
      change(in, out);
      return test::error_code([&] { plan->run(in, out); });
    };
    EXPECT_EQ(run([](auto& in, auto&) { in.q.sizes[0] = 4; }), "mla.run.q");
    EXPECT_EQ(run([](auto& in, auto&) { in.q.sizes[2] = 16; }), "mla.run.q");
    EXPECT_EQ(run([](auto& in, auto&) { in.q.dtype = DType::bf16; }), "mla.run.q");
    EXPECT_EQ(run([](auto& in, auto&) { in.kv_b = {}; }), "mla.run.kv_b");
    EXPECT_EQ(run([](auto& in, auto&) { in.kv_b.sizes[1] = 39; }), "mla.run.kv_b");
    EXPECT_EQ(run([](auto& in, auto&) { in.kv_b.strides[2] = 2; }), "mla.run.kv_b");
    EXPECT_EQ(run([](auto& in, auto&) { in.kv.k.sizes[3] = 32; }), "kv_cache.k.head_dim");
    EXPECT_EQ(run([](auto& in, auto&) { in.kv.k.sizes[0] = 1; }), "run.block_id");
    EXPECT_EQ(run([](auto& in, auto&) { in.sinks = {}; }), "run.sinks");
    EXPECT_EQ(run([](auto&, auto& out) { out.out.sizes[2] = 16; }), "mla.run.out");
    EXPECT_EQ(run([](auto&, auto& out) { out.out.strides[0] = 24; }), "tensor.overlap");
    EXPECT_EQ(run([](auto&, auto& out) { out.lse.dtype = DType::i32; }), "run.lse");
    const auto write = [&](const std::function<void(KvCache&, TensorView&, TensorView&)>& change) {
      KvCache cache = step.in.kv;
      TensorView latent = step.latent, rope = step.rope;
      change(cache, latent, rope);
      return test::error_code([&] { plan->write_kv(cache, latent, rope); });
    };
    EXPECT_EQ(write([](auto&, auto& latent, auto&) { latent.sizes[1] = 31; }), "mla.write_kv.latent");
    EXPECT_EQ(write([](auto&, auto& latent, auto&) { latent.dtype = DType::u8; }), "mla.write_kv.latent");
    EXPECT_EQ(write([](auto&, auto&, auto& rope) { rope = {}; }), "mla.write_kv.rope");
    EXPECT_EQ(write([](auto& cache, auto&, auto&) { cache.k.sizes[0] = 1; }), "write_kv.slot");
    EXPECT_EQ(run([](auto&, auto&) {}), "nothing thrown");
    EXPECT_EQ(step.output().bytes, expected);
  }
  MlaSpec nope = kSmall;
  nope.qk_rope_dim = 0;
  MlaStep step(nope, {{1, 5}});
  const auto plan = find_backend<MlaFamily>("cpu_generic")->plan(step.spec, probe_cpu(), {});
  plan->update(step.batch);
  EXPECT_EQ(test::error_code([&] { plan->write_kv(step.in.kv, step.latent, step.latent); }), "mla.write_kv.rope");
  EXPECT_EQ(test::error_code([&] { step.call(*plan); }), "nothing thrown");
  EXPECT_EQ(test::error_code([&] { find_backend<MlaFamily>("reference")->plan(kSmall, probe_cpu(), {.out_dtype = DType::bf16}); }),
            "backend.out_dtype");
  EXPECT_EQ(test::error_code([&] { find_backend<MlaFamily>("reference")->plan(kSmall, describe_device("h200"), {}); }),
            "backend.unsupported");
}

TEST(Mla, SpecsHaveRules) {
  const auto invalid = [](const std::function<void(MlaSpec&)>& change) {
    MlaSpec spec = kSmall;
    change(spec);
    return test::error_code([&] { spec.validate(); });
  };
  EXPECT_EQ(invalid([](MlaSpec&) {}), "nothing thrown");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.num_heads = 0; }), "spec.num_q_heads");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.kv_lora_rank = 12; }), "mla.kv_lora_rank");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.qk_nope_dim = 0; }), "mla.qk_nope_dim");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.kv_lora_rank = 512, s.qk_rope_dim = 72; }), "mla.qk_rope_dim");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.v_dim = 584; }), "mla.v_dim");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.dtype = DType::fp8_e4m3; }), "mla.dtype");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.kv_dtype = DType::i32; }), "spec.kv_dtype");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.kv_format = KvFormat::strided; }), "mla.kv_format");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.block_size = 0; }), "mla.block_size");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.scale = 1.f / 0.f; }), "mla.scale");
  EXPECT_EQ(invalid([](MlaSpec& s) { s.mask.window_left = -2; }), "spec.mask.window_left");
}

TEST(Mla, IsMadeOfTwoKindsOfAttention) {
  const MlaSpec spec{.num_heads = 128, .kv_dtype = DType::fp8_e4m3, .block_size = 64, .sinks = true};
  EXPECT_EQ(spec.str(), "mla q128 latent512 nope128 rope64 v128 bf16 kv=fp8_e4m3 block64 causal sinks");
  EXPECT_EQ(spec.latent_spec().str(), "decoder q128/kv1 d576/512 bf16 kv=fp8_e4m3 block64 latent causal scale=0.0721688 sinks");
  EXPECT_EQ(spec.expanded_spec().str(), "decoder q128/kv128 d192/128 bf16 ragged causal scale=0.0721688 sinks");
  EXPECT_EQ(spec.kv_bytes_per_token(), 576);
}

// Which way a request takes follows from the request alone.
TEST(Mla, TheCostModelSendsDecodeToLatentSpaceAndPromptsToExpandedKeys) {
  const MlaRates even{.products = 1e11, .expansion = 1e11, .latent = 1e11, .expanded = 1e11, .bytes = 1e10};
  MlaSpec spec{.num_heads = 128};
  for (const auto& [q_len, seq_len, expand] : {std::tuple(1, 4096, false),
                                               {4, 131072, false},
                                               {32, 4096, false},
                                               {4096, 4096, true},
                                               {512, 4096, true},
                                               {1024, 131072, true},
                                               {128, 128, true}})
    EXPECT_EQ(cost_of(spec, even, q_len, seq_len).expand(), expand)
        << q_len << " of " << seq_len << ": " << cost_of(spec, even, q_len, seq_len).str();
  spec.mask.window_left = 127;  // of 131072 keys only the last ones are made
  EXPECT_LT(cost_of(spec, even, 512, 131072).expanded, cost_of(spec, even, 512, 2048).expanded * 1.01);
}

TEST(Mla, PiecesCoverEachKeyOfARequestOnce) {
  const std::vector<int32_t> starts{0, 40, 41, 141, 141}, lens{40, 1000, 300, 7};
  Batch batch;
  batch.query_start_loc = starts;
  batch.seq_lens = lens;
  for (const Mask& mask : {Mask{}, Mask{.causal = false}, Mask{.window_left = 100}})
    for (const int chunk : {7, 64, 128, 1000}) {
      std::vector<MlaRound> rounds;
      size_t count = 0;
      for (const int r : {0, 1, 2}) add_pieces(batch, {r, starts[size_t(r)], starts[size_t(r) + 1]}, mask, chunk, rounds, 0, count);
      std::map<int, std::vector<MlaPiece>> pieces;
      for (size_t i = 0; i < count; ++i) {
        EXPECT_LE(rounds[i].num_keys(), chunk);
        EXPECT_EQ(size_t(rounds[i].num_rows()), rounds[i].positions.size());
        for (const MlaPiece& piece : rounds[i].pieces) pieces[piece.request].push_back(piece);
      }
      for (const int r : {0, 1, 2}) {
        const KeySpan span = seen_keys(mask, batch.query_len(r), lens[size_t(r)]);
        int64_t next = span.begin;
        for (const MlaPiece& piece : pieces[r]) {
          EXPECT_EQ(piece.key_begin, next);
          EXPECT_EQ(piece.first, next == span.begin);
          EXPECT_EQ(piece.last, piece.key_end == span.end);
          EXPECT_EQ(piece.q_end, starts[size_t(r) + 1]);
          EXPECT_TRUE(!piece.first || piece.q_begin == starts[size_t(r)]);
          next = piece.key_end;
        }
        EXPECT_EQ(next, span.end) << mask.str() << " chunk " << chunk << " request " << r;
      }
    }
}

// The memory of a step is there before run(), and a warm update needs none either.
TEST(Mla, RunAndWarmUpdatesAllocateNothing) {
  for (const bool expand : {false, true}) {
    MlaStep step(kSmall, {{2, 2}, {1, 60}, {40, 64}});
    const PlanOptions options{.limits = {.max_num_reqs = 4, .max_num_tokens = 64, .max_seq_len = 64}};
    MlaParts parts =
        dynamic_cast<const MlaCompositeBackend&>(*find_backend<MlaFamily>("cpu_generic")).parts(step.spec, probe_cpu(), options);
    parts.expand = expand;
    parts.chunk_keys = 24;
    const auto plan = make_mla_plan(step.spec, probe_cpu(), options, std::move(parts));
    for (int i = 0; i < 2; ++i) plan->update(step.batch), step.call(*plan);
    EXPECT_EQ(test::count_allocations([&] { step.call(*plan); }), 0) << plan->str();
    EXPECT_EQ(test::count_allocations([&] { plan->update(step.batch); }), 0) << plan->str();
  }
}

// A plan tells of each request of its step which way it chose: here requests with more queries than a tenth of their keys are expanded.
TEST(Mla, PlansTellWhichRequestsAreExpanded) {
  MlaStep step(kSmall, {{2, 2}, {1, 60}, {0, 5}, {40, 64}});
  const PlanOptions options{.limits = {.max_num_reqs = 4, .max_num_tokens = 64, .max_seq_len = 64}};
  const BackendOf<MlaFamily>& backend = *find_backend<MlaFamily>("cpu_generic");
  MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(step.spec, probe_cpu(), options);
  parts.rates = {.products = 1, .expansion = 10, .latent = 1e30, .expanded = 1e30, .bytes = 1e30};
  const auto plan = make_mla_plan(step.spec, probe_cpu(), options, std::move(parts));
  EXPECT_FALSE(plan->expands(0));  // there is no step yet
  plan->update(step.batch);
  const std::vector<bool> expected{false, true, false, false, true, false};  // of no requests but 0 to 3
  for (int r = -1; r < 5; ++r) EXPECT_EQ(plan->expands(r), expected[size_t(r + 1)]) << r << ": " << plan->str();
  const auto reference = find_backend<MlaFamily>("reference")->plan(step.spec, probe_cpu(), options);
  reference->update(step.batch);
  EXPECT_FALSE(reference->expands(3));
}

TEST(Mla, IsSelectedWithReasons) {
  const MlaSpec spec{.num_heads = 16};
  const auto selection = select<MlaFamily>(spec, describe_device("avx2,4 threads"));
  EXPECT_EQ(selection.backend->name(), "cpu_generic");
  EXPECT_EQ(select<MlaFamily>(spec, describe_device("avx512,4 threads")).backend->name(), "cpu_avx512");
  EXPECT_EQ(select<MlaFamily>(spec, describe_device("amx,4 threads")).backend->name(), "cpu_amx");
  const auto amx = std::ranges::find_if(selection.candidates, [](const auto& c) { return c.backend->name() == "cpu_amx"; });
  ASSERT_NE(amx, selection.candidates.end());
  ASSERT_FALSE(amx->reasons.empty());
  EXPECT_EQ(amx->reasons[0].code, "device.isa");
  MlaSpec half = spec;
  half.dtype = half.kv_dtype = DType::f16;
  EXPECT_EQ(select<MlaFamily>(half, describe_device("amx,4 threads")).backend->name(), "cpu_avx512");
  EXPECT_EQ(select<MlaFamily>(spec, describe_device("h200")).backend->name(), "cuda_sm90");
  EXPECT_EQ(select<MlaFamily>(spec, describe_device("a100")).backend->name(), "cuda_sm80");
  DeviceInfo old = describe_device("h200");
  old.sm = 75;
  const auto on_gpu = select<MlaFamily>(spec, old);
  EXPECT_EQ(on_gpu.backend, nullptr);
  ASSERT_FALSE(on_gpu.proposals.empty());
  EXPECT_TRUE(on_gpu.proposals.back().starts_with("device cpu: ")) << on_gpu.proposals.back();
  const auto kernels = find_backend<MlaFamily>("cpu_generic")->kernel_choices(spec, describe_device("avx512,4 threads"));
  ASSERT_EQ(kernels.size(), 2u);
  EXPECT_TRUE(kernels[0].requests.starts_with("in latent space by cpu_generic")) << kernels[0].requests;
  EXPECT_TRUE(kernels[1].requests.starts_with("with expanded keys (first of 3 that run it) by cpu_avx512")) << kernels[1].requests;
}

// Known without a GPU, and bounded: longer requests and steps take no more.
TEST(Mla, AGpusWorkspaceFollowsFromTheLimits) {
  const DeviceInfo h200 = describe_device("h200");
  const auto bytes = [&](const MlaSpec& of, const PlanLimits& limits, const char* name = "cuda_sm90") {
    return find_backend<MlaFamily>(name)->workspace_bytes(of, h200, {.limits = limits});
  };
  constexpr int64_t kMost = 256'000'000;
  for (const int heads : {1, 16, 20, 37, 64, 128})
    for (const DType dtype : {DType::bf16, DType::f32})
      for (const char* name : {"cuda_sm90", "cuda_sm80"})
        for (const int tokens : {1, 512, 8192, 1 << 17})
          for (const int reqs : {64, 1024}) {
            if (test::kAddressSanitizer && reqs != 64) continue;  // which is slow
            MlaSpec spec{.num_heads = heads, .dtype = dtype, .kv_dtype = dtype};
            if (!find_backend<MlaFamily>(name)->unsupported(spec, h200).empty()) continue;
            EXPECT_LE(bytes(spec, {.max_num_reqs = reqs, .max_num_tokens = tokens}, name), kMost) << name << " " << spec.str();
            EXPECT_LE(bytes(spec, {.max_num_reqs = reqs, .max_num_tokens = tokens, .max_query_len = 1}, name), kMost);
            spec.mask.window_left = 1000;
            EXPECT_LE(bytes(spec, {.max_num_reqs = reqs, .max_num_tokens = tokens}, name), kMost) << name << " " << spec.str();
          }
  const MlaSpec spec{.num_heads = 128};
  const int64_t small = bytes(spec, {.max_num_tokens = 1024, .max_seq_len = 16384});
  EXPECT_NEAR(double(small), double(bytes(spec, {.max_num_tokens = 1024, .max_seq_len = 1 << 20})), 1 << 20);
  const int64_t decode = bytes(spec, {.max_num_tokens = 256, .max_query_len = 1});  // no request is expanded, and no step is cut
  EXPECT_GE(decode, int64_t{256} * 128 * (576 + 512) * 2);
  EXPECT_LT(decode, small);
  MlaSpec absorbed = spec;
  absorbed.absorbed = true;
  EXPECT_EQ(bytes(absorbed, {}), find_backend<AttentionFamily>("cuda_sm90")->workspace_bytes(spec.latent_spec(), h200, {}));
}

TEST(Mla, SlicesHaveEachQueryOnceAndCutRequestsByThemselves) {
  const std::vector<int32_t> starts{0, 40, 41, 41, 141, 150}, lens{40, 1000, 9, 300, 50};
  Batch batch;
  batch.query_start_loc = starts, batch.seq_lens = lens;
  MlaSlices slices;
  for (const int most : {7, 40, 64, 1000}) {
    slices.clear();
    for (const int r : {0, 1, 2, 4, 3}) slices.add(batch, r, most);
    std::map<int, int> next;  // query of each request
    for (size_t i = 0; i < slices.size(); ++i) {
      int tokens = 0;
      std::set<int> requests;
      for (const auto& [r, begin, end] : slices[i].queries) {
        EXPECT_TRUE(requests.insert(r).second) << "twice in a slice";
        EXPECT_EQ(begin - starts[size_t(r)], next[r]);
        EXPECT_EQ(next[r] % most, 0);
        EXPECT_EQ(keys_of(batch, Mask{}, {r, begin, end}), lens[size_t(r)] - (starts[size_t(r) + 1] - end));
        EXPECT_EQ(keys_of(batch, Mask{.causal = false}, {r, begin, end}), lens[size_t(r)]);
        next[r] += end - begin, tokens += end - begin;
      }
      EXPECT_EQ(slices[i].num_tokens, tokens);
      EXPECT_LE(tokens, most);
    }
    for (const int r : {0, 1, 3, 4}) EXPECT_EQ(next[r], batch.query_len(r));
    EXPECT_LE(slices.size(), most_slices(150, most, 100));
    int before = 0;
    for (size_t i = 0; i < slices.size(); before += slices[i++].num_tokens) EXPECT_GE(before, least_tokens_before(i, most, 100));
  }
  EXPECT_EQ(most_slices(512, 448, 1), 2u);
  EXPECT_EQ(most_slices(448, 448, 448), 1u);
  EXPECT_TRUE(can_cut_queries(Mask{.window_left = 5}));
  EXPECT_FALSE(can_cut_queries(Mask{.causal = false, .window_left = 5}));
  EXPECT_FALSE(can_cut_queries(Mask{.custom = true}));
}

// A field that the table of fields does not have would be lost on the way through the C ABI, Python and case files.
TEST(Mla, TheTableHasEveryFieldOnce) {
  const std::map<std::string_view, int> rows = test::rows_of_parts<MlaSpec>();
  EXPECT_EQ(rows.at("mask"), test::num_fields<Mask>());
  EXPECT_EQ(rows.at("spec") + 1, test::num_fields<MlaSpec>());  // one of them is the mask
}

}  // namespace
}  // namespace imbrex
