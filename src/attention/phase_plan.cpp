// plan_by_phase(): a composite plan that sends short queries (decode) to one backend and the others (prefill) to another.
//
// Each phase sees the batch with its own tokens only: every request stays, those of the other phase with no query tokens, so block
// tables, CSR arrays and seq_lens are passed through untouched. That leaves the token axis:
//  - the tokens of a phase are contiguous (engines order a step by phase, or it is all one phase): views, nothing is copied;
//  - they are not: q, k, v are gathered into scratch and out, lse scattered back. That costs one copy of those rows a layer, and needs
//    host memory: on other devices such a batch is refused, and the caller orders its requests by phase.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "attention/plan_checks.h"
#include "attention/step_plan.h"
#include "core/check.h"
#include "core/stream_capture.h"
#include "family/begin_plan.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

// Uninitialised memory for rows of one tensor; pages that are never touched cost nothing.
class RowBuffer {
 public:
  RowBuffer(int64_t rows, int64_t row_bytes)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(size_t(checked_mul("phase_plan.size", rows, row_bytes)))) {}
  std::byte* data() const { return memory_.get(); }

 private:
  std::unique_ptr<std::byte[]> memory_;
};

struct Range {
  int begin, end;  // tokens of the batch
};

// Calls body(row of the phase, row of the batch) for every token of the ranges, spread over the threads by rows.
template <class F>
void for_rows(const ParallelFor& threads, const std::vector<Range>& ranges, const F& body) {
  struct Argument {
    const std::vector<Range>& ranges;
    const F& body;
    int num_workers;
  } argument{ranges, body, threads.invoke ? std::max(threads.num_workers, 1) : 1};
  const auto work = [](void* pointer, int worker) {
    const auto& a = *static_cast<Argument*>(pointer);
    int row = 0;
    for (const Range& range : a.ranges) {
      for (int token = range.begin; token < range.end; ++token, ++row) {
        if (row % a.num_workers == worker) a.body(row, token);
      }
    }
  };
  if (argument.num_workers == 1) {
    work(&argument, 0);
  } else {
    threads.invoke(threads.context, argument.num_workers, work, &argument);
  }
}

// Rows of heads, or of one number a head (lse). The target's numbers lie next to each other.
void copy_row(const TensorView& from, int64_t from_row, const TensorView& to, int64_t to_row) {
  const int64_t size = size_of(from.dtype), dim = from.rank == 2 ? 1 : from.size(2), stride = from.rank == 2 ? 1 : from.stride(2);
  const auto* source = from.as<const std::byte>() + from_row * from.stride(0) * size;
  auto* target = to.as<std::byte>() + to_row * to.stride(0) * size;
  for (int64_t h = 0; h < from.size(1); ++h) {
    const auto* head = source + h * from.stride(1) * size;
    auto* copy = target + h * to.stride(1) * size;
    if (stride == 1) {
      std::memcpy(copy, head, size_t(dim * size));
    } else {
      for (int64_t d = 0; d < dim; ++d) std::memcpy(copy + d * size, head + d * stride * size, size_t(size));
    }
  }
}

// What one of the phases has of a step.
struct PhasePart {
  std::vector<Range> ranges;  // token ranges, merged where they touch; empty: nothing to do this step
  int num_tokens = 0;
  std::vector<int32_t> query_start_loc;
  std::vector<int64_t> slots;        // slot_mapping of this phase's tokens, when gathered
  std::vector<uint8_t> custom_mask;  // likewise

  bool contiguous() const { return ranges.size() == 1; }
};

class PhasePlan final : public StepPlan {
 public:
  PhasePlan(const Backend& prefill, const Backend& decode, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options,
            int decode_max_q)
      : spec_(spec),
        device_(device.device),
        options_(options),
        decode_max_q_(decode_max_q),
        scratch_rows_(device.device.type == DeviceType::cpu ? options.limits.max_num_tokens : 0),
        q_rows_(scratch_rows_, int64_t(spec.num_q_heads) * spec.head_dim_qk * sizeof(float)),
        k_rows_(scratch_rows_, int64_t(spec.num_kv_heads) * spec.head_dim_qk * sizeof(float)),
        v_rows_(scratch_rows_, int64_t(spec.num_kv_heads) * spec.head_dim_v * sizeof(float)),
        out_rows_(scratch_rows_, int64_t(spec.num_q_heads) * spec.head_dim_v * sizeof(float)),
        lse_rows_(scratch_rows_, int64_t(spec.num_q_heads) * sizeof(float)) {
    PlanOptions part_options = options;
    part_options.validate = false;  // the whole batch is checked here, before it is taken apart
    if (device.present && part_options.workspace == nullptr)
      part_options.workspace = make_workspace(device);  // one part computes after the other
    phases_[1] = {"prefill", step_plan(prefill.plan(spec, device, part_options))};
    PlanLimits& part = part_options.limits;
    part.max_query_len = part.max_query_len > 0 ? std::min(part.max_query_len, decode_max_q) : decode_max_q;
    part.min_query_len = std::min(part.min_query_len, part.max_query_len);
    phases_[0] = {"decode", step_plan(decode.plan(spec, device, part_options))};
    if (!phases_[0].plan->can_revert() && phases_[1].plan->can_revert()) std::swap(order_[0], order_[1]);
  }

  void prepare(const Batch& batch, Stream stream) override {
    if (options_.validate) validate(batch, spec_, options_.limits, -1);
    check(batch.num_tokens() <= options_.limits.max_num_tokens, "update.limits", "expected at most {} tokens, got {}",
          options_.limits.max_num_tokens, batch.num_tokens());
    Step& next = steps_.spare();
    for (size_t i : order_) {
      PhasePart& part = next.parts[i];
      divide(batch, part, i == 0);
      check(part.ranges.size() < 2 || device_.type == DeviceType::cpu, "phase_plan.interleaved",
            "{} tokens next to each other on {}, got {} separate runs: order the batch by phase", phases_[i].name, device_.str(),
            part.ranges.size());
    }
    for (size_t i : order_)
      if (!next.parts[i].ranges.empty()) phases_[i].plan->prepare(part_batch(batch, next.parts[i]), stream);
    next.slots = batch.slot_mapping;
    next.num_tokens = batch.num_tokens();
    next.reach = reach_of(batch, spec_, options_.validate);
  }

  // A plan that cannot be taken back comes last: when it fails, the others are.
  void commit(Stream stream) override {
    size_t done = 0;
    try {
      for (; done < order_.size(); ++done)
        if (const size_t i = order_[done]; !steps_.spare().parts[i].ranges.empty()) phases_[i].plan->commit(stream);
    } catch (...) {
      while (done-- > 0)
        if (const size_t i = order_[done]; !steps_.spare().parts[i].ranges.empty()) phases_[i].plan->revert(stream);
      throw;
    }
    steps_.flip();
  }
  void revert(Stream stream) noexcept override {
    for (size_t i : order_)
      if (!steps_.now().parts[i].ranges.empty()) phases_[i].plan->revert(stream);
    steps_.flip();
  }
  bool can_revert() const noexcept override { return phases_[0].plan->can_revert() && phases_[1].plan->can_revert(); }
  bool has_step() const noexcept override {
    for (size_t i : order_)
      if (!steps_.now().parts[i].ranges.empty() && !phases_[i].plan->has_step()) return false;
    return true;
  }

  void write_kv(const KvCache& kv, const TensorView& k, const TensorView& v, Stream stream) const override {
    const Step& step = steps_.now();
    check_step(*this);
    check_capture(stream);
    check_write(spec_, device_, kv, k, v, step.slots, step.num_tokens, step.reach);
    for (size_t i : order_) {
      const PhasePart& part = step.parts[i];
      if (part.ranges.empty()) continue;
      phases_[i].plan->write_kv(kv, tokens_of(part, k, k_rows_), tokens_of(part, v, v_rows_), stream);
    }
  }

  void run(const Inputs& inputs, const Outputs& outputs, Stream stream) const override {
    const Step& step = steps_.now();
    check_step(*this);
    check_capture(stream);
    check_run(spec_, device_, inputs, outputs, step.num_tokens, step.reach);
    for (size_t i : order_) {
      const PhasePart& part = step.parts[i];
      if (part.ranges.empty()) continue;
      Inputs part_inputs = inputs;
      part_inputs.q = tokens_of(part, inputs.q, q_rows_);
      const Outputs part_outputs{output_of(part, outputs.out, out_rows_), output_of(part, outputs.lse, lse_rows_)};
      phases_[i].plan->run(part_inputs, part_outputs, stream);
      if (part.contiguous()) continue;
      for_rows(options_.threads, part.ranges, [&](int row, int token) {
        copy_row(part_outputs.out, row, outputs.out, token);
        if (!outputs.lse.empty()) copy_row(part_outputs.lse, row, outputs.lse, token);
      });
    }
  }

  std::string str() const override {
    std::string text = fmt::format("by phase, decode is up to {} query tokens", decode_max_q_);
    for (size_t i = 0; i < phases_.size(); ++i) {
      const PhasePart& part = steps_.now().parts[i];
      text += part.ranges.empty()
                  ? fmt::format("; {}: nothing", phases_[i].name)
                  : fmt::format("; {}{}: {}", phases_[i].name, part.contiguous() ? "" : " (gathered)", phases_[i].plan->str());
    }
    return text;
  }

 private:
  struct Phase {
    const char* name;
    std::unique_ptr<StepPlan> plan;
  };
  struct Step {
    std::array<PhasePart, 2> parts;  // of phases_
    TensorView slots;
    BatchReach reach;
    int num_tokens = 0;
  };

  // A graph would repeat the rows of this step's phases, and a phase that has no tokens now would be missing.
  void check_capture(Stream stream) const {
    check(!is_captured(device_, stream), "phase_plan.captured",
          "expected a stream that captures nothing: which rows are whose differs from step to step. Capture a plan of one backend");
  }

  // Which tokens the part has, and where each request's tokens begin among them.
  void divide(const Batch& batch, PhasePart& part, bool is_decode) const {
    part.ranges.clear();
    part.query_start_loc.assign(1, 0);
    for (int r = 0; r < batch.num_reqs(); ++r) {
      const int q_len = batch.query_len(r);
      const bool mine = q_len > 0 && (q_len <= decode_max_q_) == is_decode;
      part.query_start_loc.push_back(part.query_start_loc.back() + (mine ? q_len : 0));
      if (!mine) continue;
      const Range range{batch.query_start_loc[r], batch.query_start_loc[r + 1]};
      if (!part.ranges.empty() && part.ranges.back().end == range.begin) {
        part.ranges.back().end = range.end;
      } else {
        part.ranges.push_back(range);
      }
    }
    part.num_tokens = part.query_start_loc.back();
  }

  Batch part_batch(const Batch& batch, PhasePart& part) const {
    Batch result = batch;
    result.query_start_loc = part.query_start_loc;
    if (part.contiguous()) {
      if (!batch.slot_mapping.empty()) result.slot_mapping = batch.slot_mapping.slice(0, part.ranges[0].begin, part.ranges[0].end);
    } else if (!batch.slot_mapping.empty()) {
      part.slots.clear();
      for (const Range& range : part.ranges) {
        for (int t = range.begin; t < range.end; ++t) {
          part.slots.push_back(batch.slot_mapping.as<const int64_t>()[t * batch.slot_mapping.stride(0)]);
        }
      }
      result.slot_mapping = TensorView::contiguous(part.slots.data(), DType::i64, {part.num_tokens});
    }
    if (!batch.custom_mask.empty()) result.custom_mask = part_custom_mask(batch, part);
    return result;
  }

  // The mask rows of a part lie together when its tokens do, because the rows follow the tokens.
  TensorView part_custom_mask(const Batch& batch, PhasePart& part) const {
    part.custom_mask.clear();
    int64_t offset = 0, begin = -1, end = -1;
    for (int r = 0; r < batch.num_reqs(); ++r) {
      const int64_t bytes = int64_t(batch.query_len(r)) * batch.seq_lens[r];
      const bool mine = part.query_start_loc[r + 1] > part.query_start_loc[r];
      if (mine && part.contiguous()) {
        if (begin < 0) begin = offset;
        end = offset + bytes;
      } else if (mine) {
        const auto* rows = batch.custom_mask.as<const uint8_t>() + offset;
        part.custom_mask.insert(part.custom_mask.end(), rows, rows + bytes);
      }
      offset += bytes;
    }
    if (part.contiguous()) return batch.custom_mask.slice(0, begin, end);
    return TensorView::contiguous(part.custom_mask.data(), DType::u8, {int64_t(part.custom_mask.size())});
  }

  TensorView scratch(const PhasePart& part, const TensorView& like, const RowBuffer& buffer) const {
    if (like.rank == 2) return TensorView::contiguous(buffer.data(), like.dtype, {part.num_tokens, like.size(1)});
    return TensorView::contiguous(buffer.data(), like.dtype, {part.num_tokens, like.size(1), like.size(2)});
  }

  TensorView tokens_of(const PhasePart& part, const TensorView& all, const RowBuffer& buffer) const {
    if (part.contiguous()) return all.slice(0, part.ranges[0].begin, part.ranges[0].end);
    const TensorView gathered = scratch(part, all, buffer);
    for_rows(options_.threads, part.ranges, [&](int row, int token) { copy_row(all, token, gathered, row); });
    return gathered;
  }

  TensorView output_of(const PhasePart& part, const TensorView& all, const RowBuffer& buffer) const {
    if (all.empty()) return all;
    return part.contiguous() ? all.slice(0, part.ranges[0].begin, part.ranges[0].end) : scratch(part, all, buffer);
  }

  AttentionSpec spec_;
  Device device_;
  PlanOptions options_;
  int decode_max_q_;
  int64_t scratch_rows_;
  std::array<Phase, 2> phases_;           // decode, prefill
  std::array<size_t, 2> order_ = {0, 1};  // in which they are updated and run
  TwoSteps<Step> steps_;
  RowBuffer q_rows_, k_rows_, v_rows_, out_rows_, lse_rows_;  // of one part at a time
};

}  // namespace

std::unique_ptr<Plan> plan_by_phase(const Backend& prefill, const Backend& decode, const AttentionSpec& spec, const DeviceInfo& device,
                                    const PlanOptions& options, int decode_max_q) {
  spec.validate();
  check_options(options);
  check(decode_max_q >= 1, "phase_plan.decode_max_q", "at least 1 query token, got {}", decode_max_q);
  return std::make_unique<PhasePlan>(prefill, decode, spec, device, options, decode_max_q);
}

}  // namespace imbrex
