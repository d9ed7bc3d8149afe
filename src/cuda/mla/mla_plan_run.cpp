// The part of mla_plan.h that computes a layer: requests in latent space, then round after round.
#include <algorithm>

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/open_device.h"
#include "cuda/mla/head_products.h"
#include "cuda/mla/mla_plan.h"
#include "mla/slices.h"
#include "mla/step.h"

namespace imbrex::cuda {
namespace {

using Tokens = MlaSteps::Tokens;

// Rows of heads of some tokens, as log-sum-exps have them too.
TensorView rows(const TensorView& t, int64_t begin, int64_t end) { return t.empty() ? t : t.slice(0, begin, end); }

}  // namespace

// dim 0: without that dimension.
TensorView DeviceMlaPlan::in_scratch(const Memory& memory, int64_t place, DType dtype, int64_t num_rows, int64_t heads, int64_t dim) const {
  void* const data = static_cast<char*>(memory.scratch->data.get()) + place;
  return dim > 0 ? TensorView::contiguous(data, dtype, {num_rows, heads, dim}, device_.device)
                 : TensorView::contiguous(data, dtype, {num_rows, heads}, device_.device);
}

void DeviceMlaPlan::run(const MlaInputs& in, const MlaOutputs& out, Stream stream) const {
  check(has_step_, "plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept",
        str());
  const Step& step = steps_.now();
  check_run(spec_, device_.device, in, out, step.num_tokens, step.reach);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  if (captured) captured_blocks_ = std::min(captured_blocks_, in.kv.k.size(0));
  if (spec_.absorbed) return latents_[0]->run({.q = in.q, .kv = in.kv, .sinks = in.sinks}, {.out = out.out, .lse = out.lse}, stream);
  check(are_aligned(in.kv_b), "mla.run.kv_b", "kv_b: expected rows that begin at multiples of 16 bytes, got {} at {}", in.kv_b,
        in.kv_b.data);
  check(!options_.out_dtype || out.out.dtype == *options_.out_dtype, "run.out_dtype",
        "expected an output of {}, as the plan was asked for, got one of {}", to_string(options_.out_dtype.value_or(out.out.dtype)),
        to_string(out.out.dtype));
  const Memory memory{.scratch = workspace_->memory(), .stream = cu, .captured = captured};
  check(
      !memory.captured || capturable(), "mla.run.captured",
      "expected a plan whose limits keep every request in latent space, so that a graph can replay any step, got one of {} query tokens of "
      "a request",
      most_query_len(options_.limits));
  // A graph computes as many rows as its tensors have, whatever steps it is replayed for, and writes out those that there are. So does a
  // step whose lengths are on the device, with as many rows as it may have.
  const int captured_rows = int(
      std::min<int64_t>({in.q.size(0), out.out.size(0), out.lse.empty() ? INT32_MAX : out.lse.size(0), options_.limits.max_num_tokens}));
  const int rows = captured ? captured_rows : step.on_device ? step.num_tokens : 0;
  const size_t slices = rows > 0 ? most_slices(rows, outline_.latent_tokens, most_query_len(options_.limits)) : step.latent_slices.size();
  for (size_t i = 0; i < slices; ++i) run_latent(step, i, rows, in, out, memory);
  for (const DeviceRounds::Slice& slice : step.rounds.slices) {
    const int heads = outline_.shapes[slice.shape].heads, groups = (spec_.num_heads + heads - 1) / heads;
    // Where groups do not divide the heads, the last ones overlap, and write the same results twice.
    for (int g = 0; g < groups; ++g) {
      const Group group{outline_.rounds[slice.shape], slice, std::min(g * heads, spec_.num_heads - heads), heads};
      for (size_t i = slice.first_round; i < slice.end_round; ++i) run_round(step, i, group, in, out, memory);
    }
  }
  if (memory.captured && (captured_scratch_.empty() || captured_scratch_.back() != memory.scratch))
    captured_scratch_.push_back(memory.scratch);
}

// all_rows: of all slices, where a graph or the device knows how many of them there are; else 0.
void DeviceMlaPlan::run_latent(const Step& step, size_t slice, int all_rows, const MlaInputs& in, const MlaOutputs& out,
                               const Memory& memory) const {
  const int heads = spec_.num_heads, rank = spec_.kv_lora_rank, nope = spec_.qk_nope_dim, most = outline_.latent_tokens;
  const bool any = all_rows > 0;
  const BatchPart* const part = any ? nullptr : &step.latent[slice].part;
  const int num_rows =
      any ? int(std::min<int64_t>(most, all_rows - least_tokens_before(slice, most, most_query_len(options_.limits)))) : part->num_tokens;
  const bool neighbours = any ? slice == 0 : part->contiguous();
  const int begin = any ? 0 : part->ranges.front().begin;
  RangeList<TokenRows> list{};
  // Where any step may come, all requests are in latent space, so that a slice's tokens are one range.
  if (!neighbours)
    list = {.ranges = memory_->device(latent_rows_) + (any ? slice : step.latent[slice].first_range),
            .count = any ? 1 : int(part->ranges.size())};
  // Rows of requests that are left out are computed and not written out.
  const LengthsThere now = any ? lengths_[slice] : LengthsThere{}, read{.num_tokens = now.num_tokens};
  // Tensors of which row i is token i of the batch, or of the neighbours that are all there are.
  const auto of_tokens = [&](const TensorView& t) { return t.empty() || !neighbours ? t : t.slice(0, begin, begin + num_rows); };
  const TensorView q = of_tokens(in.q), outputs = of_tokens(out.out);
  const MlaDeviceScratch& places = outline_.latent;
  const ProductPlace place{.stream = memory.stream, .workspace = static_cast<char*>(memory.scratch->data.get()) + places.products};

  const TensorView latent_q = in_scratch(memory, places.latent_q, spec_.dtype, num_rows, heads, spec_.latent_dim());
  TensorView of_nope = q.slice(2, 0, nope);
  if (!neighbours || !are_aligned(of_nope)) {
    const TensorView copy = in_scratch(memory, places.nope, spec_.dtype, num_rows, heads, nope);
    launches_->copy_rows(of_nope, copy, Tokens::from, list, num_rows, read, memory.stream);
    of_nope = copy;
  }
  parts_.products->by_columns(of_nope, in.kv_b.slice(1, 0, nope), latent_q.slice(2, 0, rank), place);
  if (spec_.qk_rope_dim > 0)
    launches_->copy_rows(q.slice(2, nope, spec_.qk_dim()), latent_q.slice(2, rank, spec_.latent_dim()), Tokens::from, list, num_rows, read,
                         memory.stream);

  const TensorView latent_out = in_scratch(memory, places.latent_out, spec_.dtype, num_rows, heads, rank);
  TensorView lse = of_tokens(out.lse);
  if (!lse.empty() && !neighbours) lse = in_scratch(memory, places.latent_lse, DType::f32, num_rows, heads, 0);
  latents_[slice]->run({.q = latent_q, .kv = in.kv, .sinks = in.sinks}, {.out = latent_out, .lse = lse}, memory.stream);

  const bool direct = neighbours && !any && are_aligned(outputs);
  const TensorView made = direct ? outputs : in_scratch(memory, places.out, out.out.dtype, num_rows, heads, spec_.v_dim);
  parts_.products->by_rows(latent_out, in.kv_b.slice(1, nope, in.kv_b.size(1)), made, place);
  if (!direct) launches_->copy_rows(made, outputs, Tokens::to, list, num_rows, now, memory.stream);
  if (!lse.empty() && !neighbours) launches_->copy_rows(lse, out.lse, Tokens::to, list, num_rows, now, memory.stream);
}

void DeviceMlaPlan::run_round(const Step& step, size_t round, const Group& group, const MlaInputs& in, const MlaOutputs& out,
                              const Memory& memory) const {
  const MlaRound& pieces = step.rounds.pieces[round];
  const MlaDeviceScratch& places = group.places;
  const int heads = group.num_heads, rank = spec_.kv_lora_rank, nope = spec_.qk_nope_dim, num_keys = pieces.num_keys();
  const TensorView latents = in_scratch(memory, places.latents, spec_.dtype, num_keys, 1, rank);
  const KvCache expanded{.k = in_scratch(memory, places.k, spec_.dtype, num_keys, heads, spec_.qk_dim()),
                         .v = in_scratch(memory, places.v, spec_.dtype, num_keys, heads, spec_.v_dim)};
  const RangeList<KeyRows> list{.ranges = memory_->device(key_rows_) + step.rounds.rounds[round].first_key_range,
                                .count = int(pieces.pieces.size())};
  launches_->gather(in.kv, {.list = list, .num_keys = num_keys, .block_ids = step.block_ids, .block_starts = step.block_starts}, latents,
                    expanded.k, memory.stream);
  TensorView each_head = latents;
  each_head.sizes[1] = heads, each_head.strides[1] = 0;
  const ProductPlace place{.stream = memory.stream, .workspace = static_cast<char*>(memory.scratch->data.get()) + places.products};
  const TensorView weight = group.weight(in.kv_b);
  parts_.products->by_rows(each_head, weight.slice(1, 0, nope), expanded.k.slice(2, 0, nope), place);
  parts_.products->by_rows(each_head, weight.slice(1, nope, weight.size(1)), expanded.v, place);
  for (const RoundKind kind : {kCausalPart, kWholePart}) run_part(step, round, kind, group, expanded, in, out, memory);
}

void DeviceMlaPlan::run_part(const Step& step, size_t round, RoundKind kind, const Group& group, const KvCache& expanded,
                             const MlaInputs& in, const MlaOutputs& out, const Memory& memory) const {
  const DeviceRounds::Round& of = step.rounds.rounds[round];
  const RoundRows& part = of.rows[kind];
  const MlaDeviceScratch& places = group.places;
  const int num_rows = part.num_rows(), heads = group.num_heads;
  if (num_rows == 0) return;
  const RangeList<TokenRows> list{.ranges = memory_->device(token_rows_) + part.first_range, .count = int(part.num_ranges)};
  const StepPlan& plan = *rounds_[of.shape][of.of_shape][kind];
  const TensorView q = group.of(in.q), outputs = group.of(out.out), lse = group.of(out.lse);
  AttentionInputs inputs{.q = q, .kv = expanded};
  if (part.contiguous) {
    inputs.q = rows(q, part.tokens.begin, part.tokens.end);
  } else {
    inputs.q = in_scratch(memory, places.q, spec_.dtype, num_rows, heads, spec_.qk_dim());
    launches_->copy_rows(q, inputs.q, Tokens::from, list, num_rows, {}, memory.stream);
  }
  if (part.contiguous && part.complete && !spec_.sinks)
    return plan.run(inputs,
                    {.out = rows(outputs, part.tokens.begin, part.tokens.end), .lse = rows(lse, part.tokens.begin, part.tokens.end)},
                    memory.stream);
  const PartialResult result{.out = in_scratch(memory, places.part_out, DType::f32, num_rows, heads, spec_.v_dim),
                             .lse = in_scratch(memory, places.part_lse, DType::f32, num_rows, heads, 0)};
  const PartialResult sum{.out = in_scratch(memory, places.sum_out, DType::f32, group.slice.num_tokens, heads, spec_.v_dim),
                          .lse = in_scratch(memory, places.sum_lse, DType::f32, group.slice.num_tokens, heads, 0)};
  plan.run(inputs, {.out = result.out, .lse = result.lse}, memory.stream);
  launches_->add(result, sum, list, num_rows, group.sinks(in.sinks), outputs, lse, memory.stream);
}

}  // namespace imbrex::cuda
