// Latent attention through the C ABI: the same bits as through C++, and functions that are for another family.
#include <algorithm>
#include <random>

#include "api/handles.h"
#include "imbrex/imbrex.hpp"
#include "imbrex/mla.h"

namespace imbrex::test {
namespace {

constexpr int kHeads = 3, kRank = 32, kNope = 16, kRope = 8, kValue = 24, kMlaTokens = 7, kBlock = 16;

imbrex_mla_fields small_mla() {
  imbrex_mla_fields f = init(imbrex_mla_fields_init);
  f.num_heads = kHeads, f.kv_lora_rank = kRank, f.qk_nope_dim = kNope, f.qk_rope_dim = kRope, f.v_dim = kValue;
  f.dtype = f.kv_dtype = IMBREX_F32;
  f.block_size = kBlock, f.sinks = 1;
  return f;
}
SpecHandle mla_of(const imbrex_mla_fields& fields) {
  return make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_mla(&fields, out); });
}

// A request of six tokens without a past, and one behind eleven.
struct LatentStep {
  const int query_start_loc[3] = {0, 6, kMlaTokens}, seq_lens[2] = {6, 12};
  HostTensor<float> q{{kMlaTokens, kHeads, kNope + kRope}, kFloat}, kv_b{{kHeads, kNope + kValue, kRank}, kFloat},
      cache{{2, kBlock, 1, kRank + kRope}, kFloat}, sinks{{kHeads}, kFloat}, latents{{kMlaTokens, kRank}, kFloat},
      rope{{kMlaTokens, kRope}, kFloat}, out{{kMlaTokens, kHeads, kValue}, kFloat}, lse{{kMlaTokens, kHeads}, kFloat};
  HostTensor<int> table{{2, 1}, kInt};
  HostTensor<int64_t> slots{{kMlaTokens}, kLong};
  imbrex_kv_cache kv = init(imbrex_kv_cache_init);
  imbrex_batch batch = init(imbrex_batch_init);
  imbrex_mla_inputs inputs = init(imbrex_mla_inputs_init);
  imbrex_mla_outputs outputs = init(imbrex_mla_outputs_init);

  LatentStep() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &kv_b, &cache, &sinks, &latents, &rope}) std::ranges::generate(t->data, [&] { return normal(random); });
    table.data = {1, 0};
    for (int t = 0; t < 6; ++t) slots.data[size_t(t)] = kBlock + t;
    slots.data[6] = 11;
    kv.k = &cache.view;
    batch.num_reqs = 2, batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens;
    batch.block_table = &table.view, batch.slot_mapping = &slots.view;
    inputs.q = &q.view, inputs.kv_b = &kv_b.view, inputs.kv = &kv, inputs.sinks = &sinks.view;
    outputs.out = &out.view, outputs.lse = &lse.view;
  }
};

struct CApiMla : testing::Test {
  DeviceHandle device = cpu();
  SpecHandle spec = mla_of(small_mla());
  PlanHandle plan_for(const imbrex_spec* of) {
    const SelectionHandle selection = select_for(of, device.get());
    return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
  }
};

TensorView mla_view(HostTensor<float>& t) {
  TensorView v{.data = t.data.data(), .dtype = DType::f32, .rank = int(t.shape.size())};
  int64_t stride = 1;
  for (int d = v.rank - 1; d >= 0; --d)
    v.sizes[size_t(d)] = t.shape[size_t(d)], v.strides[size_t(d)] = stride, stride *= t.shape[size_t(d)];
  return v;
}

TEST_F(CApiMla, GivesTheBitsOfTheCppInterface) {
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_spec_str(spec.get()), "mla q3 latent32 nope16 rope8 v24 f32 block16 causal sinks");
  LatentStep c;
  const PlanHandle plan = plan_for(spec.get());
  ASSERT_NE(plan, nullptr) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_update(plan.get(), &c.batch, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_write_latents(plan.get(), &c.kv, &c.latents.view, &c.rope.view, nullptr), IMBREX_OK) << imbrex_last_error();
  ASSERT_EQ(imbrex_plan_run_mla(plan.get(), &c.inputs, &c.outputs, nullptr), IMBREX_OK) << imbrex_last_error();

  LatentStep cpp;
  const MlaSpec same{.num_heads = kHeads,
                     .kv_lora_rank = kRank,
                     .qk_nope_dim = kNope,
                     .qk_rope_dim = kRope,
                     .v_dim = kValue,
                     .dtype = DType::f32,
                     .kv_dtype = DType::f32,
                     .sinks = true};
  const DeviceInfo info = describe_device("cpu");
  const auto other = select<MlaFamily>(same, info).backend->plan(same, info, {});
  Batch batch;
  batch.query_start_loc = cpp.query_start_loc, batch.seq_lens = cpp.seq_lens;
  batch.block_table = TensorView::contiguous(cpp.table.data.data(), DType::i32, {2, 1});
  batch.slot_mapping = TensorView::contiguous(cpp.slots.data.data(), DType::i64, {kMlaTokens});
  other->update(batch);
  const KvCache kv{.k = mla_view(cpp.cache)};
  other->write_kv(kv, mla_view(cpp.latents), mla_view(cpp.rope));
  other->run({.q = mla_view(cpp.q), .kv_b = mla_view(cpp.kv_b), .kv = kv, .sinks = mla_view(cpp.sinks)},
             {.out = mla_view(cpp.out), .lse = mla_view(cpp.lse)});
  EXPECT_EQ(c.out.data, cpp.out.data);
  EXPECT_EQ(c.lse.data, cpp.lse.data);
  EXPECT_EQ(c.cache.data, cpp.cache.data);
  EXPECT_TRUE(std::ranges::any_of(c.out.data, [](float x) { return x != 0; }));
}

// Tokens 4 and 5 of the first request both follow token 3; the fields that are not read change nothing.
TEST_F(CApiMla, TakesTreesOfDrafts) {
  imbrex_mla_fields fields = small_mla();
  fields.tree = 1, fields.reserved = fields.reserved_2 = -1;
  const SpecHandle of_trees = mla_of(fields);
  ASSERT_NE(of_trees, nullptr) << imbrex_last_error();
  EXPECT_STREQ(imbrex_spec_str(of_trees.get()), "mla q3 latent32 nope16 rope8 v24 f32 block16 causal tree sinks");
  const PlanHandle plan = plan_for(of_trees.get());
  const int chain[kMlaTokens] = {-1, 0, 1, 2, 3, 4, -1}, siblings[kMlaTokens] = {-1, 0, 1, 2, 3, 3, -1}, wrong[kMlaTokens] = {-1, 0, 2};
  LatentStep plain, of_chain, of_siblings;
  of_chain.batch.draft_parents = chain, of_siblings.batch.draft_parents = siblings;
  for (LatentStep* step : {&plain, &of_chain, &of_siblings}) {
    ASSERT_EQ(imbrex_plan_update(plan.get(), &step->batch, nullptr), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_plan_write_latents(plan.get(), &step->kv, &step->latents.view, &step->rope.view, nullptr), IMBREX_OK);
    ASSERT_EQ(imbrex_plan_run_mla(plan.get(), &step->inputs, &step->outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  }
  EXPECT_EQ(of_chain.out.data, plain.out.data);
  constexpr long kRow = kHeads * kValue;
  EXPECT_TRUE(std::equal(plain.out.data.begin(), plain.out.data.begin() + 5 * kRow, of_siblings.out.data.begin()));
  EXPECT_FALSE(std::equal(plain.out.data.begin() + 5 * kRow, plain.out.data.begin() + 6 * kRow, of_siblings.out.data.begin() + 5 * kRow));
  of_chain.batch.draft_parents = wrong;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &of_chain.batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.draft_parents.range");
}

TEST_F(CApiMla, PackedMasksAreMasksOfBytes) {
  imbrex_mla_fields fields = small_mla();
  fields.custom_mask = 1;
  const SpecHandle masked = mla_of(fields);
  const PlanHandle plan = plan_for(masked.get());
  LatentStep of_bytes, of_bits;
  HostTensor<uint8_t> bytes({36 + 12}, {1, 8, 1}), bits({8}, {1, 8, 1});
  bits.data = {0xff, 0xa5, 0x3c, 0x77, 0xff, 0x9c, 0x5b, 0xe7};  // 36 of 40 bits, a byte that is skipped, and 12 of 16
  const int32_t mask_indptr[] = {0, 6, 8};
  for (int i = 0; i < 48; ++i)
    bytes.data[size_t(i)] = bits.data[size_t(i < 36 ? i / 8 : 6 + (i - 36) / 8)] >> (i < 36 ? i : i - 36) % 8 & 1;
  of_bytes.batch.custom_mask = &bytes.view;
  of_bits.batch.packed_mask = &bits.view, of_bits.batch.mask_indptr = mask_indptr;
  for (LatentStep* step : {&of_bytes, &of_bits}) {
    ASSERT_EQ(imbrex_plan_update(plan.get(), &step->batch, nullptr), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_plan_write_latents(plan.get(), &step->kv, &step->latents.view, &step->rope.view, nullptr), IMBREX_OK);
    ASSERT_EQ(imbrex_plan_run_mla(plan.get(), &step->inputs, &step->outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  }
  EXPECT_EQ(of_bits.out.data, of_bytes.out.data);
  of_bits.batch.mask_indptr = nullptr;
  EXPECT_EQ(imbrex_plan_update(plan.get(), &of_bits.batch, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.packed_mask.size");
}

TEST_F(CApiMla, CachesAreThoseOfLatentSpace) {
  const AllocationHandle pages =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 2, 3, nullptr, out); });
  ASSERT_NE(pages, nullptr) << imbrex_last_error();
  EXPECT_EQ(imbrex_kv_allocation_bytes(pages.get()), 2 * 3 * kBlock * (kRank + kRope) * int64_t(sizeof(float)));
  LatentStep c, direct;
  ASSERT_EQ(imbrex_kv_allocation_layer(pages.get(), 1, &c.kv), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(c.kv.v, nullptr);
  ASSERT_EQ(c.kv.k->ndim, 4);
  float* const rows = static_cast<float*>(c.kv.k->data);
  std::ranges::copy(c.cache.data, rows);
  const PlanHandle plan = plan_for(spec.get());
  for (LatentStep* step : {&c, &direct}) {
    ASSERT_EQ(imbrex_plan_update(plan.get(), &step->batch, nullptr), IMBREX_OK) << imbrex_last_error();
    ASSERT_EQ(imbrex_plan_write_latents(plan.get(), &step->kv, &step->latents.view, &step->rope.view, nullptr), IMBREX_OK);
    ASSERT_EQ(imbrex_plan_run_mla(plan.get(), &step->inputs, &step->outputs, nullptr), IMBREX_OK) << imbrex_last_error();
  }
  EXPECT_EQ(c.out.data, direct.out.data);
  const int from[] = {1}, to[] = {2};
  ASSERT_EQ(imbrex_copy_blocks(spec.get(), &c.kv, from, to, 1, nullptr), IMBREX_OK) << imbrex_last_error();
  constexpr int kBlockElements = kBlock * (kRank + kRope);
  EXPECT_TRUE(std::equal(rows + kBlockElements, rows + 2 * kBlockElements, rows + 2 * kBlockElements));
  const CopierHandle copier = make_handle<CopierHandle>([&](auto** out) { return imbrex_block_copier_create(device.get(), nullptr, out); });
  const int back[] = {2}, first[] = {0};
  ASSERT_EQ(imbrex_block_copier_copy(copier.get(), spec.get(), &c.kv, back, first, 1, nullptr), IMBREX_OK) << imbrex_last_error();
  EXPECT_TRUE(std::equal(rows, rows + kBlockElements, rows + kBlockElements));
}

TEST_F(CApiMla, WhatIsForOneFamilyRefusesTheOther) {
  const SpecHandle attention = spec_of(small_fields());
  const PlanHandle latent = plan_for(spec.get()), attend = plan_for(attention.get());
  LatentStep step;
  EXPECT_EQ(imbrex_plan_run_mla(attend.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  EXPECT_EQ(imbrex_plan_write_latents(attend.get(), &step.kv, &step.latents.view, &step.rope.view, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  EXPECT_EQ(imbrex_plan_write_kv(latent.get(), &step.kv, &step.latents.view, nullptr, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.family");
  int64_t bytes = -1;
  const SelectionHandle selection = select_for(spec.get(), device.get());
  EXPECT_EQ(imbrex_selection_workspace_bytes(selection.get(), nullptr, &bytes), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(bytes, 0) << "a CPU's plans keep their scratch";
}

TEST_F(CApiMla, WrongFieldsAndTensorsHaveTheirCodes) {
  imbrex_mla_fields fields = small_mla();
  fields.kv_format = 99;
  EXPECT_EQ(mla_of(fields), nullptr);
  EXPECT_EQ(last_code(), "api.enum");
  fields = small_mla(), fields.v_dim = 7;
  EXPECT_EQ(mla_of(fields), nullptr);
  EXPECT_EQ(last_code(), "mla.v_dim");
  const PlanHandle plan = plan_for(spec.get());
  LatentStep step;
  ASSERT_EQ(imbrex_plan_update(plan.get(), &step.batch, nullptr), IMBREX_OK);
  EXPECT_EQ(imbrex_plan_write_latents(plan.get(), &step.kv, &step.latents.view, nullptr, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "mla.write_kv.rope");
  step.inputs.kv_b = nullptr;
  EXPECT_EQ(imbrex_plan_run_mla(plan.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "mla.run.kv_b");
  step.inputs.q = nullptr;
  EXPECT_EQ(imbrex_plan_run_mla(plan.get(), &step.inputs, &step.outputs, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
}

}  // namespace
}  // namespace imbrex::test
