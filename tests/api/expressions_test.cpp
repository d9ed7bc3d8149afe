// Expressions through the C ABI: texts in a spec and back, tensors by name, and what is refused.
#include <algorithm>
#include <array>
#include <random>

#include "api/handles.h"

namespace imbrex::test {
namespace {

constexpr int kRowTokens = 20;

// One request without a cache, whose tensors lie as they are.
struct RowStep {
  int query_start_loc[2] = {0, kRowTokens}, seq_lens[1] = {kRowTokens};
  HostTensor<int> starts{{2}, kInt};
  HostTensor<float> q{{kRowTokens, 4, 64}, kFloat}, k{{kRowTokens, 2, 64}, kFloat}, v{{kRowTokens, 2, 64}, kFloat},
      out{{kRowTokens, 4, 64}, kFloat};
  imbrex_batch batch = init(imbrex_batch_init);
  imbrex_kv_cache keys = init(imbrex_kv_cache_init);
  imbrex_inputs inputs = init(imbrex_inputs_init);
  imbrex_outputs outputs = init(imbrex_outputs_init);

  RowStep() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &k, &v}) std::ranges::generate(t->data, [&] { return normal(random); });
    starts.data = {0, kRowTokens};
    batch.num_reqs = 1, batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens, batch.kv_start_loc = &starts.view;
    keys.k = &k.view, keys.v = &v.view;
    inputs.q = &q.view, inputs.kv = &keys;
    outputs.out = &out.view;
  }
};

class CApiExpressions : public testing::Test {
 protected:
  static imbrex_spec_fields fields() {
    imbrex_spec_fields f = small_fields();
    f.block_size = 0;
    return f;
  }
  // Outputs of a layer; empty where the step or the call was refused.
  std::vector<float> run(const imbrex_spec_fields& f, RowStep& rows) {
    const SpecHandle spec = spec_of(f);
    EXPECT_NE(spec, nullptr) << imbrex_last_error();
    const SelectionHandle selection = select_for(spec.get(), device_.get());
    const PlanHandle plan = make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(selection.get(), nullptr, out); });
    if (imbrex_plan_update(plan.get(), &rows.batch, nullptr) != IMBREX_OK) return {};
    if (imbrex_plan_run(plan.get(), &rows.inputs, &rows.outputs, nullptr) != IMBREX_OK) return {};
    return rows.out.data;
  }
  DeviceHandle device_ = cpu();
};

TEST_F(CApiExpressions, MasksHaveTheBitsOfFields) {
  imbrex_spec_fields window = fields(), text = fields();
  window.window_left = 6;
  text.causal = 0, text.mask_mod = "int width[]; kv <= q & q - kv < width[batch]";
  HostTensor<int> width{{1}, kInt};
  width.data = {7};
  const char* const name = "width";
  const imbrex_tensor* const tensor = &width.view;
  RowStep built_in, by_text;
  by_text.batch.mask_tensors = {&name, &tensor, 1, 0};
  const std::vector<float> expected = run(window, built_in);
  EXPECT_GT(std::ranges::count_if(expected, [](float x) { return x != 0.f; }), int64_t(expected.size()) / 2);
  EXPECT_EQ(run(text, by_text), expected);
}

TEST_F(CApiExpressions, ScoresHaveTensorsOfACall) {
  imbrex_spec_fields plain = fields(), text = fields();
  plain.scale = 0.25f;
  text.scale = 0.125f, text.score_mod = "float gain[]; score * gain[head]";
  HostTensor<float> gain{{4}, kFloat};
  gain.data.assign(4, 2.f);
  const char* const name = "gain";
  const imbrex_tensor* const tensor = &gain.view;
  RowStep built_in, by_text;
  by_text.inputs.score_tensors = {&name, &tensor, 1, 0};
  const std::vector<float> expected = run(plain, built_in), given = run(text, by_text);
  ASSERT_EQ(given.size(), expected.size());
  for (size_t i = 0; i < given.size(); ++i) EXPECT_NEAR(given[i], expected[i], 2e-6) << i;
}

TEST_F(CApiExpressions, TextsComeBack) {
  imbrex_spec_fields f = fields();
  f.mask_mod = "int doc[]; doc[q]==doc[kv]", f.score_mod = "2.0 * score";
  const SpecHandle spec = spec_of(f);
  ASSERT_NE(spec, nullptr) << imbrex_last_error();
  imbrex_spec_fields back = init(imbrex_spec_fields_init);
  ASSERT_EQ(imbrex_spec_get_fields(spec.get(), &back), IMBREX_OK);
  EXPECT_STREQ(back.mask_mod, "int doc[]; doc[q] == doc[kv]");
  EXPECT_STREQ(back.score_mod, "2.0 * score");
  EXPECT_NE(spec_of(back), nullptr) << imbrex_last_error();
  EXPECT_NE(std::string(imbrex_spec_str(spec.get())).find("mask_mod(doc[q] == doc[kv])"), std::string::npos);
  const SpecHandle none = spec_of(fields());
  ASSERT_EQ(imbrex_spec_get_fields(none.get(), &back), IMBREX_OK);
  EXPECT_EQ(back.mask_mod, nullptr);
  EXPECT_EQ(back.score_mod, nullptr);
}

TEST_F(CApiExpressions, WhatIsMissingOrWrongIsRefused) {
  imbrex_spec_fields f = fields();
  f.mask_mod = "kv <=";
  EXPECT_EQ(spec_of(f), nullptr);
  EXPECT_EQ(last_code(), "expression.syntax");
  f.mask_mod = "int doc[]; doc[q] == doc[kv]";
  RowStep rows;
  EXPECT_TRUE(run(f, rows).empty());
  EXPECT_EQ(last_code(), "expression.tensor");
  rows.batch.mask_tensors = {nullptr, nullptr, 1, 0};
  EXPECT_TRUE(run(f, rows).empty());
  EXPECT_EQ(last_code(), "api.null");
  rows.batch.mask_tensors = {nullptr, nullptr, -1, 0};
  EXPECT_TRUE(run(f, rows).empty());
  EXPECT_EQ(last_code(), "api.tensor");
  HostTensor<float> wrong{{kRowTokens}, kFloat};
  const char* const name = "doc";
  const imbrex_tensor* const tensor = &wrong.view;
  rows.batch.mask_tensors = {&name, &tensor, 1, 0};
  EXPECT_TRUE(run(f, rows).empty());
  EXPECT_EQ(last_code(), "expression.tensor");
}

}  // namespace
}  // namespace imbrex::test
