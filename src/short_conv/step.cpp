// See step.h.
#include "short_conv/step.h"

#include <algorithm>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "family/batch_checks.h"
#include "family/begin_plan.h"

namespace imbrex {
namespace {

void check_states(const ShortConvSpec& spec, const Batch& batch) {
  const size_t num_reqs = size_t(batch.num_reqs());
  const auto check_size = [&](std::span<const int32_t> list, const char* name, bool optional) {
    check(list.size() == num_reqs || (optional && list.empty()), "batch.state.size", "{}: expected {} entries, got {}", name, num_reqs,
          list.size());
  };
  check_size(batch.state_slots, "state_slots", false);
  check_size(batch.num_drafts, "num_drafts", true);
  check_size(batch.accepted_drafts, "accepted_drafts", true);
  std::vector<int32_t> slots;
  for (int r = 0; r < int(num_reqs); ++r) {
    const int q_len = batch.query_len(r);
    if (q_len == 0) continue;
    check(batch.state_slots[r] >= 0, "batch.state.slot", "expected a slot of 0 or more for request {}, got {}", r, batch.state_slots[r]);
    slots.push_back(batch.state_slots[r]);
    const int drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[r], most = std::min(spec.num_drafts, q_len);
    check(drafts >= 0 && drafts <= most, "batch.state.num_drafts", "expected 0 to {} drafts of request {} with {} tokens, got {}", most, r,
          q_len, drafts);
    const int accepted = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r];
    const int kept = batch.context_len(r) == 0 ? 0 : spec.num_drafts;
    check(accepted >= 0 && accepted <= kept, "batch.state.accepted_drafts", "expected 0 to {} accepted drafts of request {}, got {}", kept,
          r, accepted);
  }
  std::sort(slots.begin(), slots.end());
  const auto twice = std::adjacent_find(slots.begin(), slots.end());
  check(twice == slots.end(), "batch.state.shared", "expected a slot of its own for each request, slot {} has two",
        twice == slots.end() ? 0 : *twice);
}

void check_tensor(const TensorView& t, const char* name, Device device, DType dtype, std::initializer_list<int64_t> sizes,
                  bool at_least_rows) {
  bool fits = t.rank == int(sizes.size()) && t.dtype == dtype && t.device == device && t.data != nullptr;
  std::string wanted;
  int d = 0;
  for (const int64_t size : sizes) {
    const bool more = d == 0 && at_least_rows;
    fits = fits && (more ? t.size(d) >= size : t.size(d) == size);
    ++d;
  }
  if (fits && (t.size(t.rank - 1) <= 1 || t.stride(t.rank - 1) == 1)) return;
  for (const int64_t size : sizes) wanted += (wanted.empty() ? at_least_rows ? ">= " : "" : ", ") + std::to_string(size);
  fail("short_conv.run.tensor", "{}: expected {}[{}] on {} with innermost stride 1, got {}", name, to_string(dtype), wanted, device, t);
}

}  // namespace

void begin_plan(const BackendOf<ShortConvFamily>& backend, const ShortConvSpec& spec, const DeviceInfo& device, const PlanOptions& options,
                std::string_view kernels) {
  spec.validate();
  check(!options.out_dtype || *options.out_dtype == spec.dtype, "backend.out_dtype", "expected outputs of {} in {}, got {}", spec.str(),
        to_string(spec.dtype), to_string(options.out_dtype.value_or(spec.dtype)));
  begin_plan(backend, spec.str(), backend.unsupported(spec, device), device, options, kernels);
}

void read_batch(const ShortConvSpec& spec, const PlanLimits& limits, const Batch& batch, bool checked, ShortConvStep& step) {
  if (checked) {
    check_lengths(batch, limits, true);
    check_states(spec, batch);
  }
  step.requests.clear();
  step.num_tokens = batch.num_tokens();
  step.num_slots = 0;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    if (batch.query_len(r) == 0) continue;
    step.requests.push_back({.begin = batch.query_start_loc[r],
                             .end = batch.query_start_loc[r + 1],
                             .slot = batch.state_slots[r],
                             .fresh = batch.context_len(r) == 0,
                             .first_row = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[r],
                             .drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[r]});
    step.num_slots = std::max(step.num_slots, int64_t(batch.state_slots[r]) + 1);
  }
}

void check_run(const ShortConvSpec& spec, Device device, const ShortConvInputs& in, const ShortConvOutputs& out, int num_tokens,
               int64_t num_slots) {
  check_tensor(in.bcx, "bcx", device, spec.dtype, {num_tokens, 3 * int64_t(spec.dim)}, true);
  check_tensor(in.weight, "weight", device, spec.dtype, {spec.dim, spec.width}, false);
  check(spec.bias != in.bias.empty(), "short_conv.run.bias", "bias: {} by the spec, but {}", spec.bias ? "needed" : "not used",
        in.bias.empty() ? "not given" : "given");
  if (spec.bias) check_tensor(in.bias, "bias", device, spec.dtype, {spec.dim}, false);
  check_tensor(in.state, "state", device, spec.dtype, {num_slots, spec.state_rows(), spec.dim}, true);
  check_tensor(out.out, "out", device, spec.dtype, {num_tokens, spec.dim}, true);
  check_layout(in.bcx, "bcx");
  check_layout(in.weight, "weight");
  check_layout(in.bias, "bias");
  check_written_layout(in.state, "state");
  check_written_layout(out.out, "out");
}

}  // namespace imbrex
