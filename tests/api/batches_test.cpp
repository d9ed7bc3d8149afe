// The order of requests and parts of batches through the C ABI: results are those of C++, parts are taken by plans, and each refusal has
// its code.
#include <algorithm>
#include <array>
#include <climits>
#include <vector>

#include "api/handles.h"

namespace imbrex::test {
namespace {

using DerivedHandle = std::unique_ptr<imbrex_derived_batch, Free<imbrex_derived_batch, imbrex_derived_batch_free>>;
using Counts = std::array<int32_t, 6>;

Counts numbers_of(const imbrex_phase_counts& c) {
  return {c.decodes, c.extends, c.prefills, c.decode_tokens, c.extend_tokens, c.prefill_tokens};
}

TEST(CApiBatches, OrdersAndPhases) {
  const int32_t query[] = {100, 10, 1}, context[] = {0, 50, 10}, prompts[] = {100, 99, 11};
  int32_t order[3] = {}, swaps[6] = {}, num_swaps = -1;
  ASSERT_EQ(imbrex_reorder_batch(query, context, nullptr, 3, 1, order, swaps, &num_swaps), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(std::vector<int32_t>(order, order + 3), (std::vector<int32_t>{2, 1, 0}));
  EXPECT_EQ(num_swaps, 1);
  EXPECT_EQ(std::minmax(swaps[0], swaps[1]), std::minmax(0, 2));
  ASSERT_EQ(imbrex_reorder_batch(query, context, prompts, 3, 1, order, nullptr, &num_swaps), IMBREX_OK);
  ASSERT_EQ(imbrex_reorder_batch(nullptr, nullptr, nullptr, 0, 1, nullptr, nullptr, &num_swaps), IMBREX_OK);
  EXPECT_EQ(num_swaps, 0);
  EXPECT_EQ(imbrex_reorder_batch(query, context, nullptr, 3, -1, order, nullptr, &num_swaps), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.phases.threshold");
  EXPECT_EQ(imbrex_reorder_batch(query, nullptr, nullptr, 3, 1, order, nullptr, &num_swaps), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_reorder_batch(query, context, nullptr, -3, 1, order, nullptr, &num_swaps), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.count");

  const int32_t starts[] = {0, 1, 3, 7, 12, 18}, lens[] = {10, 11, 20, 5, 6};
  imbrex_phase_options options = init(imbrex_phase_options_init);
  imbrex_phase_counts counts{};
  options.decode_threshold = 3;
  ASSERT_EQ(imbrex_split_decodes_prefills_and_extends(starts, lens, 5, &options, &counts), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(numbers_of(counts), (Counts{2, 1, 2, 3, 4, 11}));
  options.num_tokens = 20;
  ASSERT_EQ(imbrex_split_decodes_and_prefills(starts, 5, &options, &counts), IMBREX_OK);
  EXPECT_EQ(numbers_of(counts), (Counts{2, 0, 3, 3, 0, 17}));
  const uint8_t prefilling[] = {0, 1, 1, 1, 1};
  options.short_extends_are_decodes = 0, options.is_prefilling = prefilling;
  ASSERT_EQ(imbrex_split_decodes_and_prefills(starts, 5, &options, &counts), IMBREX_OK);
  EXPECT_EQ(numbers_of(counts), (Counts{1, 0, 4, 1, 0, 19}));
  ASSERT_EQ(imbrex_split_decodes_and_prefills(starts, 5, nullptr, &counts), IMBREX_OK);
  EXPECT_EQ(numbers_of(counts), (Counts{1, 0, 4, 1, 0, 17}));
  options.uniform = 2;
  EXPECT_EQ(imbrex_split_decodes_and_prefills(starts, 5, &options, &counts), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.enum");
  EXPECT_EQ(imbrex_split_decodes_and_prefills(nullptr, 5, nullptr, &counts), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");

  int32_t ends[5] = {}, num_ranges = 0;
  ASSERT_EQ(imbrex_split_prefill_chunks(lens, 5, 21, ends, &num_ranges), IMBREX_OK);
  EXPECT_EQ(std::vector<int32_t>(ends, ends + num_ranges), (std::vector<int32_t>{2, 3, 5}));
  EXPECT_EQ(imbrex_split_prefill_chunks(lens, 5, -1, ends, &num_ranges), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.chunks.workspace");
}

// A prompt of 20 tokens and a decode behind 30 keys.
struct CApiParts : testing::Test {
  int32_t starts[3] = {0, 20, 21}, lens[2] = {20, 31};
  HostTensor<int> table{{2, 2}, kInt};
  HostTensor<int64_t> slots{{21}, kLong};
  HostTensor<float> q{{21, 4, 64}, kFloat}, k{{21, 2, 64}, kFloat}, v{{21, 2, 64}, kFloat};
  DeviceHandle device = cpu();
  SpecHandle spec = spec_of(small_fields());
  AllocationHandle memory =
      make_handle<AllocationHandle>([&](auto** out) { return imbrex_kv_allocation_create(spec.get(), device.get(), 1, 8, nullptr, out); });
  imbrex_kv_cache cache = init(imbrex_kv_cache_init);
  imbrex_batch batch = init(imbrex_batch_init);
  PlanHandle plan;

  void SetUp() override {
    ASSERT_EQ(imbrex_kv_allocation_layer(memory.get(), 0, &cache), IMBREX_OK);
    table.data = {7, 3, 5, 1};
    for (int t = 0; t < 20; ++t) slots.data[size_t(t)] = t < 16 ? 7 * 16 + t : 3 * 16 + t - 16;
    slots.data[20] = 1 * 16 + 14;
    for (size_t i = 0; i < q.data.size(); ++i) q.data[i] = float(i * 37 % 101) / 50 - 1;
    for (size_t i = 0; i < k.data.size(); ++i) k.data[i] = float(i * 29 % 67) / 33 - 1, v.data[i] = float(i * 31 % 71) / 35 - 1;
    batch.num_reqs = 2, batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.block_table = &table.view, batch.slot_mapping = &slots.view;
    const SelectionHandle selection = select_for(spec.get(), device.get());
    plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
  }

  // Attention of a batch to the rows of q that are given.
  std::vector<float> run(const imbrex_batch& of, const std::vector<int64_t>& rows, bool writes) {
    const int64_t count = int64_t(rows.size());
    HostTensor<float> given({count, 4, 64}, kFloat), out({count, 4, 64}, kFloat);
    for (size_t i = 0; i < rows.size(); ++i) std::copy_n(q.data.begin() + rows[i] * 256, 256, given.data.begin() + long(i) * 256);
    EXPECT_EQ(imbrex_plan_update(plan.get(), &of, nullptr), IMBREX_OK) << imbrex_last_error();
    if (writes) {
      EXPECT_EQ(imbrex_plan_write_kv(plan.get(), &cache, &k.view, &v.view, nullptr), IMBREX_OK) << imbrex_last_error();
    }
    imbrex_inputs inputs = init(imbrex_inputs_init);
    imbrex_outputs outputs = init(imbrex_outputs_init);
    inputs.q = &given.view, inputs.kv = &cache, outputs.out = &out.view;
    EXPECT_EQ(imbrex_plan_run(plan.get(), &inputs, &outputs, nullptr), IMBREX_OK) << imbrex_last_error();
    return out.data;
  }
};

std::vector<int64_t> rows_from(int64_t begin, int64_t end) {
  std::vector<int64_t> rows;
  for (int64_t t = begin; t < end; ++t) rows.push_back(t);
  return rows;
}

TEST_F(CApiParts, PartsGiveTheBitsOfTheWhole) {
  const std::vector<float> whole = run(batch, rows_from(0, 21), true);
  const int32_t cuts[] = {7, 20};
  imbrex_derived_batch* made[3] = {};
  ASSERT_EQ(imbrex_split_batch(spec.get(), &batch, cuts, 2, made), IMBREX_OK) << imbrex_last_error();
  std::vector<float> parts;
  const int32_t ends[] = {7, 20, 21}, requests[] = {0, 0, 1};
  for (int i = 0; i < 3; ++i) {
    const DerivedHandle part(made[i]);
    imbrex_batch of_part = init(imbrex_batch_init);
    ASSERT_EQ(imbrex_derived_batch_get(part.get(), &of_part), IMBREX_OK);
    const int32_t first = imbrex_derived_batch_first_token(part.get());
    EXPECT_EQ(first, i == 0 ? 0 : ends[i - 1]);
    EXPECT_EQ(imbrex_derived_batch_first_request(part.get()), requests[i]);
    EXPECT_EQ(of_part.slot_mapping->data, slots.data.data() + first);
    const std::vector<float> out = run(of_part, rows_from(first, ends[i]), false);
    parts.insert(parts.end(), out.begin(), out.end());
  }
  EXPECT_EQ(parts, whole);

  const int32_t tokens[] = {19, 20};
  const DerivedHandle kept = make_handle<DerivedHandle>([&](auto** out) { return imbrex_keep_tokens(spec.get(), &batch, tokens, 2, out); });
  imbrex_batch of_kept = init(imbrex_batch_init);
  ASSERT_EQ(imbrex_derived_batch_get(kept.get(), &of_kept), IMBREX_OK);
  EXPECT_EQ(run(of_kept, {19, 20}, false), std::vector<float>(whole.begin() + 19 * 256, whole.end()));
}

// Every field of a C batch is there in a part of it that is all of it.
TEST_F(CApiParts, EveryFieldIsKept) {
  HostTensor<int> indptr({3}, kInt), indices({4}, kInt), last({2}, kInt), rows({3}, kInt);
  HostTensor<uint8_t> mask({20 * 20 + 31}, {1, 8, 1});
  indptr.data = {0, 2, 4}, rows.data = {0, 20, 51};
  const int32_t list[2] = {1, 2};
  const std::vector<int32_t> of_tokens(21, 3);
  batch.kv_indptr = &indptr.view, batch.kv_indices = &indices.view, batch.kv_last_page_len = &last.view, batch.kv_start_loc = &rows.view;
  batch.custom_mask = &mask.view, batch.state_slots = batch.num_drafts = batch.accepted_drafts = batch.source_slots = list;
  batch.positions = batch.draft_parents = of_tokens.data();
  batch.has_pad_slot = 1, batch.pad_slot = -7;
  imbrex_spec_fields fields = small_fields();
  fields.positions = 1;
  const SpecHandle with_positions = spec_of(fields);
  imbrex_derived_batch* made = nullptr;
  ASSERT_EQ(imbrex_split_batch(with_positions.get(), &batch, nullptr, 0, &made), IMBREX_OK) << imbrex_last_error();
  const DerivedHandle part(made);
  imbrex_batch all = init(imbrex_batch_init);
  ASSERT_EQ(imbrex_derived_batch_get(part.get(), &all), IMBREX_OK);
  EXPECT_EQ(all.num_reqs, 2);
  EXPECT_EQ(all.query_start_loc, starts);
  EXPECT_EQ(all.seq_lens, lens);
  EXPECT_EQ(all.block_table->data, table.data.data());
  EXPECT_EQ(all.kv_indptr->data, indptr.data.data());
  EXPECT_EQ(all.kv_indices->data, indices.data.data());
  EXPECT_EQ(all.kv_last_page_len->data, last.data.data());
  EXPECT_EQ(all.kv_start_loc->data, rows.data.data());
  EXPECT_EQ(all.slot_mapping->data, slots.data.data());
  EXPECT_EQ(all.custom_mask->data, mask.data.data());
  for (const int32_t* of_requests : {all.state_slots, all.num_drafts, all.accepted_drafts, all.source_slots}) EXPECT_EQ(of_requests, list);
  EXPECT_EQ(all.positions, of_tokens.data());
  EXPECT_EQ(all.draft_parents, of_tokens.data());
  EXPECT_EQ(all.has_pad_slot, 1);
  EXPECT_EQ(all.pad_slot, -7);

  HostTensor<uint8_t> bits({50 + 4 + 3}, {1, 8, 1});
  const int32_t mask_indptr[3] = {0, 53, 57};
  batch.custom_mask = nullptr, batch.packed_mask = &bits.view, batch.mask_indptr = mask_indptr;
  ASSERT_EQ(imbrex_split_batch(with_positions.get(), &batch, nullptr, 0, &made), IMBREX_OK) << imbrex_last_error();
  const DerivedHandle packed(made);
  ASSERT_EQ(imbrex_derived_batch_get(packed.get(), &all), IMBREX_OK);
  EXPECT_EQ(all.custom_mask, nullptr);
  EXPECT_EQ(all.packed_mask->data, bits.data.data());
  EXPECT_EQ(all.mask_indptr, mask_indptr);
}

TEST_F(CApiParts, Refusals) {
  const int32_t high[] = {22}, gap[] = {3, 5};
  imbrex_derived_batch* made[2] = {};
  EXPECT_EQ(imbrex_split_batch(spec.get(), &batch, high, 1, made), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.part.cuts");
  EXPECT_EQ(made[0], nullptr);
  EXPECT_EQ(imbrex_split_batch(spec.get(), &batch, high, -1, made), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.count");
  EXPECT_EQ(imbrex_split_batch(nullptr, &batch, high, 1, made), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_split_batch(spec.get(), &batch, high, 1, nullptr), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_keep_tokens(spec.get(), &batch, gap, 2, made), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.part.gap");
  EXPECT_EQ(imbrex_derived_batch_get(nullptr, &batch), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "api.null");
  EXPECT_EQ(imbrex_derived_batch_first_token(nullptr), 0);
  imbrex_derived_batch_free(nullptr);
  // A window that is not causal needs positions, which the spec that is otherwise equal has.
  imbrex_spec_fields fields = small_fields();
  fields.causal = 0, fields.window_left = 4;
  const SpecHandle window = spec_of(fields);
  const int32_t cut[] = {7};
  EXPECT_EQ(imbrex_split_batch(window.get(), &batch, cut, 1, made), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "batch.part.keys");
  fields.positions = 1;
  const SpecHandle with_positions = spec_of(fields);
  ASSERT_EQ(imbrex_split_batch(with_positions.get(), &batch, cut, 1, made), IMBREX_OK) << imbrex_last_error();
  const DerivedHandle front(made[0]), back(made[1]);
  imbrex_batch part = init(imbrex_batch_init);
  ASSERT_EQ(imbrex_derived_batch_get(back.get(), &part), IMBREX_OK);
  EXPECT_EQ(part.positions[0], 7);
  // Layers of other families have no mask but their order, or that of attention.
  imbrex_short_conv_fields conv = init(imbrex_short_conv_fields_init);
  conv.dim = 8;
  const SpecHandle of_states = make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create_short_conv(&conv, out); });
  const DerivedHandle some =
      make_handle<DerivedHandle>([&](auto** out) { return imbrex_keep_tokens(of_states.get(), &batch, cut, 1, out); });
  ASSERT_EQ(imbrex_derived_batch_get(some.get(), &part), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(part.seq_lens[0], 8);
}

}  // namespace
}  // namespace imbrex::test
