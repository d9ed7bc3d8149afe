// Backends of attention from outside of the library.
#include "api/outside.h"
#include "attention/packed_mask.h"
#include "attention/plan_checks.h"
#include "attention/spec_fields.h"
#include "core/tensor_format.h"

namespace imbrex::api {
namespace {

const int32_t* data_of(std::span<const int32_t> list) { return list.empty() ? nullptr : list.data(); }

class OutsideAttentionPlan final : public OutsidePlan<AttentionFamily> {
 public:
  using OutsidePlan::OutsidePlan;

  void update(const Batch& given, Stream stream) override {
    if (validate_) validate(given, spec_, limits_, -1);
    check(given.packed_mask.device.type == DeviceType::cpu, "api.packed_mask",
          "expected a custom mask of bytes, which a backend from outside reads, or bits in host memory, got {}", given.packed_mask);
    std::vector<uint8_t>& bytes = mask_bytes_[size_t(which_)];
    const Batch batch = with_mask_bytes(given, bytes);
    const CTensor table(batch.block_table), indptr(batch.kv_indptr), indices(batch.kv_indices), last(batch.kv_last_page_len),
        start(batch.kv_start_loc), slots(batch.slot_mapping), mask(batch.custom_mask);
    const imbrex_batch b{.struct_size = sizeof b,
                         .num_reqs = batch.num_reqs(),
                         .query_start_loc = batch.query_start_loc.data(),
                         .seq_lens = batch.seq_lens.data(),
                         .block_table = table.get(),
                         .kv_indptr = indptr.get(),
                         .kv_indices = indices.get(),
                         .kv_last_page_len = last.get(),
                         .kv_start_loc = start.get(),
                         .slot_mapping = slots.get(),
                         .custom_mask = mask.get(),
                         .num_drafts = spec_.mask.tree ? data_of(batch.num_drafts) : nullptr,
                         .positions = data_of(batch.positions),
                         .draft_parents = data_of(batch.draft_parents)};
    const BatchReach reach = reach_of(batch, spec_, validate_);
    functions_->must(functions_->update(plan_, &b, stream), "update");
    which_ = 1 - which_;
    num_tokens_ = batch.num_tokens();
    slots_ = batch.slot_mapping;
    reach_ = reach;
  }

  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const override {
    check_write(spec_, device_, cache, k, v, slots_, num_tokens_, reach_);
    const CKvCache kv(cache);
    const CTensor new_k(k), new_v(v);
    functions_->must(functions_->write_kv(plan_, &kv.cache, new_k.get(), new_v.get(), stream), "write_kv");
  }

  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const override {
    check_run(spec_, device_, in, out, num_tokens_, reach_);
    const CKvCache kv(in.kv);
    const CTensor q(in.q), q_scale(in.q_scale), sinks(in.sinks), slopes(in.alibi_slopes), head_scales(in.head_scales),
        bias(in.relative_bias);
    const CTensor to(out.out), lse(out.lse);
    const imbrex_inputs inputs{.struct_size = sizeof inputs,
                               .q = q.get(),
                               .q_scale = q_scale.get(),
                               .kv = &kv.cache,
                               .sinks = sinks.get(),
                               .alibi_slopes = slopes.get(),
                               .head_scales = head_scales.get(),
                               .relative_bias = bias.get()};
    const imbrex_outputs outputs{.struct_size = sizeof outputs, .out = to.get(), .lse = lse.get()};
    functions_->must(functions_->run(plan_, &inputs, &outputs, stream), "run");
  }

 private:
  int num_tokens_ = 0;
  std::vector<uint8_t> mask_bytes_[2];  // of a packed mask, of the step and of the one that an update makes
  int which_ = 0;
  TensorView slots_;
  BatchReach reach_;
};

}  // namespace
}  // namespace imbrex::api

using namespace imbrex;
using namespace imbrex::api;

imbrex_status imbrex_register_backend(const imbrex_backend* given) {
  return guarded([&] {
    const imbrex_backend b = read(given, "backend");
    register_outside<OutsideAttentionPlan>(b, b.write_kv != nullptr && b.run != nullptr);
  });
}

imbrex_status imbrex_unregister_backend(const char* name) {
  return guarded([&] { unregister_outside<OutsideAttentionPlan>(name); });
}
