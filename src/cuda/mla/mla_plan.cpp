// See mla_plan.h. What a plan is made of, and its update: which way each request takes, what the members compute, and lists of rows and
// keys for the device.
#include "cuda/mla/mla_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "core/tensor_format.h"
#include "cuda/driver/cublaslt.h"
#include "cuda/driver/open_device.h"
#include "cuda/mla/head_products.h"
#include "cuda/plan/plan.h"
#include "family/batch_checks.h"
#include "imbrex/workspace.h"
#include "mla/step.h"

namespace imbrex::cuda {
namespace {

// The most pieces that a step within the limits has. Only the last shape has requests that are cut into slices.
int64_t most_pieces(const PlanLimits& limits, const std::vector<RoundShape>& shapes) {
  int64_t each = 1;
  for (const RoundShape& shape : shapes)
    if (!shape.whole) each = std::max(each, (int64_t(limits.max_seq_len) + shape.keys - 1) / shape.keys + 1);
  return checked_mul("mla.scratch", std::min(limits.max_num_reqs, limits.max_num_tokens) + limits.max_num_tokens / shapes.back().tokens,
                     each);
}

}  // namespace

DeviceMlaPlan::DeviceMlaPlan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts)
    : spec_(spec),
      latent_spec_(spec.latent_spec()),
      device_(device),
      options_(options),
      parts_(std::move(parts)),
      outline_(outline(spec, device, options, parts_)),
      rules_(parts_.rules()),
      context_(Context::of_device(device.device.index)),
      rounds_(outline_.shapes.size()) {
  const CurrentContext current(*context_);
  const std::string arch = arch_of(device);
  const auto open = std::make_shared<ContextDevice>(context_);
  const PlanLimits& limits = options.limits;
  const bool expands = rules_.may_expand = outline_.may_expand;
  // Members compute one after the other, and their scratch is in front of this plan's own in one workspace.
  workspace_ = gpu::workspace_for(open, context_->id(), options.workspace);
  workspace_->reserve(outline_.bytes);
  options_.workspace = workspace_;
  if (!spec.absorbed) launches_ = std::make_unique<MlaSteps>(context_, arch, spec, expands);
  write_kv_ = std::make_unique<WriteKv>(context_, arch, latent_spec_, true);

  const int64_t pieces = expands ? most_pieces(limits, outline_.shapes) : 0, slices = int64_t(outline_.latent_slices),
                all_blocks = (int64_t(limits.max_seq_len) + spec.block_size - 1) / spec.block_size;
  ArrayLayout layout;
  num_tokens_ = layout.add<int>(1);
  latent_rows_ = layout.add<TokenRows>(slices + (expands ? limits.max_num_reqs : 0));
  key_rows_ = layout.add<KeyRows>(pieces);
  token_rows_ = layout.add<TokenRows>(2 * pieces);
  slots_ = layout.add<long>(limits.max_num_tokens);
  block_ids_ = layout.add<int>(expands ? std::min(checked_mul("mla.scratch", limits.max_num_reqs, all_blocks), kMaxHostBlocks) : 0);
  memory_ = std::make_unique<PlanArrays>(open, layout);
  // Those of the first slice and rounds, so that their kernels are there; plans of others share them. Graphs hold all slices.
  touched_latents_ = expands ? 1 : outline_.latent_slices;
  for (size_t i = 0; i < touched_latents_; ++i) latent_plan(i);
  for (size_t shape = 0; shape < outline_.shapes.size() && !options.load_on_demand; ++shape)
    for (const RoundKind kind : {kCausalPart, kWholePart})
      if (kind == kWholePart || spec.mask.causal) round_plan(shape, 0, kind);
}

bool DeviceMlaPlan::capturable() const { return latents_[0]->capturable() && !rules_.may_expand; }

// Makes the plan of a slice in latent space where no step has needed it yet.
StepPlan& DeviceMlaPlan::latent_plan(size_t i) {
  if (i == latents_.size()) {
    const PlanOptions member = latent_member(spec_, options_, outline_);
    std::unique_ptr<StepPlan> made = step_plan(parts_.latent->plan(latent_spec_, device_, member));
    const Plan::Lengths lengths = dynamic_cast<const Plan&>(*made).lengths();
    lengths_.push_back({.num_tokens = lengths.num_tokens});
    if (member.on_device) lengths_.back() = {lengths.num_tokens, lengths.num_reqs, lengths.query_start, lengths.seq_lens};
    latents_.push_back(std::move(made));
  }
  return *latents_[i];
}

// Likewise of a round.
StepPlan& DeviceMlaPlan::round_plan(size_t shape, size_t round, RoundKind kind) {
  std::vector<RoundPlans>& plans = rounds_[shape];
  if (plans.size() <= round) plans.resize(round + 1);
  std::unique_ptr<StepPlan>& plan = plans[round][kind];
  if (plan == nullptr) {
    const RoundShape& of = outline_.shapes[shape];
    const AttentionSpec spec = round_specs(of_heads(spec_, of.heads))[kind];
    std::unique_ptr<AttentionPlan> made = parts_.expanded->plan(spec, device_, round_member(options_, of));
    if (auto* const of_cuda = dynamic_cast<Plan*>(made.get())) of_cuda->keys_come_late();
    plan = step_plan(std::move(made));
  }
  return *plan;
}

void DeviceMlaPlan::cut_latent(const Batch& batch, Step& next) const {
  next.latent_slices.clear();
  for (int r = 0; r < batch.num_reqs(); ++r)
    if (!next.ways.expands(r)) next.latent_slices.add(batch, r, outline_.latent_tokens);
  next.latent_tokens = 0;
  if (next.latent.size() < next.latent_slices.size()) next.latent.resize(next.latent_slices.size());
  size_t ranges = 0;
  for (size_t i = 0; i < next.latent_slices.size(); ++i) {
    const MlaSlice& from = next.latent_slices[i];
    LatentSlice& to = next.latent[i];
    BatchPart& part = to.part;
    part.ranges.clear();
    part.query_start_loc.assign(1, 0);
    to.seq_lens.clear();
    for (const MlaQueries& queries : from.queries) {
      part.query_start_loc.resize(size_t(queries.request) + 1, part.query_start_loc.back());
      part.query_start_loc.push_back(part.query_start_loc.back() + queries.q_end - queries.q_begin);
      if (!part.ranges.empty() && part.ranges.back().end == queries.q_begin)
        part.ranges.back().end = queries.q_end;
      else
        part.ranges.push_back({queries.q_begin, queries.q_end});
      const int keys = keys_of(batch, spec_.mask, queries);
      if (keys == batch.seq_lens[queries.request]) continue;
      if (to.seq_lens.empty()) to.seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
      to.seq_lens[size_t(queries.request)] = keys;
    }
    part.query_start_loc.resize(size_t(batch.num_reqs()) + 1, part.query_start_loc.back());
    part.num_tokens = from.num_tokens;
    next.latent_tokens += part.num_tokens;
    to.first_range = ranges;
    ranges += part.ranges.size();
  }
}

void DeviceMlaPlan::cut_rounds(const Batch& batch, Step& next) const {
  next.round_slices.resize(outline_.shapes.size());
  for (MlaSlices& of_shape : next.round_slices) of_shape.clear();
  for (int r = 0; r < batch.num_reqs(); ++r) {
    if (!next.ways.expands(r)) continue;
    const size_t shape = outline_.shape_of(batch.query_len(r), batch.seq_lens[r]);
    next.round_slices[shape].add(batch, r, outline_.shapes[shape].tokens, outline_.shapes[shape].whole);
  }
  next.rounds.make(spec_, batch, next.round_slices, outline_.shapes);
}

// Where the device finds the blocks of requests with expanded keys.
void DeviceMlaPlan::place_blocks(const Batch& batch, Step& next) const {
  next.sent_ids.clear();
  next.block_ids = next.block_starts = nullptr;
  if (next.rounds.num_rounds == 0) return;
  const bool starts_there = !batch.kv_indptr.empty() && !on_host(batch.kv_indptr);
  if (!starts_there) find_keys(batch, next.keys);
  const TensorView& ids = !batch.block_table.empty() ? batch.block_table : batch.kv_indices;
  const bool sends = on_host(ids);
  next.block_ids = sends ? memory_->device(block_ids_) : ids.as<const int>();
  if (starts_there) next.block_starts = batch.kv_indptr.as<const int>();
  std::vector<long> first(size_t(batch.num_reqs()), 0);
  for (int r = 0; r < batch.num_reqs() && !starts_there; ++r) {
    if (!next.ways.expands(r)) continue;
    first[size_t(r)] = sends ? long(next.sent_ids.size()) : next.keys.start[size_t(r)];
    if (!sends) continue;
    const int* const from = next.keys.ids_of(r);
    next.sent_ids.insert(next.sent_ids.end(), from, from + (int64_t(batch.seq_lens[r]) + spec_.block_size - 1) / spec_.block_size);
  }
  check(next.sent_ids.size() <= block_ids_.capacity, "update.block_ids",
        "expected host block tables with {} blocks in use at most, got {}: put them into device memory", block_ids_.capacity,
        next.sent_ids.size());
  for (KeyRows& range : next.rounds.key_rows) range.first_block = first[size_t(range.request)];
}

// Where the device finds the slots. A write_kv() that is captured together with an update_on_device() reads those which that names.
TensorView DeviceMlaPlan::place_slots(const TensorView& slots, bool captured) const {
  if (!on_host(slots)) check_memory(slots, "slot_mapping", "update.device", device_.device);
  const TensorView placed = slots.empty() || !on_host(slots)
                                ? slots
                                : TensorView::contiguous(memory_->device(slots_), DType::i64, {int64_t(slots_.capacity)}, device_.device);
  check(captured || !captured_write_ || placed.empty() || placed.data == steps_.now().slots.data, "update.moved",
        "a captured graph reads the slots of an earlier update from another place");
  return placed;
}

// Under Mask::tree: what a slice has of a request that is cut, which is a chain, follows the request's keys in front of it.
static void begin_parts_anew(const Batch& batch, BatchPart& part, Batch& of) {
  const auto& starts = part.query_start_loc;
  for (int r = 0; r < batch.num_reqs() && !of.draft_parents.empty(); ++r) {
    const int first = starts[size_t(r)], count = starts[size_t(r) + 1] - first;
    if (count == 0 || count == batch.query_len(r)) continue;
    if (of.draft_parents.data() != part.draft_parents.data()) {
      part.draft_parents.assign(of.draft_parents.begin(), of.draft_parents.end());
      of.draft_parents = part.draft_parents;
    }
    std::iota(part.draft_parents.begin() + first, part.draft_parents.begin() + first + count, -1);
  }
}

// Of a host's block table only the rows of the slice's requests are passed on, since each slice's plan sends them.
Batch DeviceMlaPlan::batch_of_slice(const Batch& batch, LatentSlice& slice) const {
  Batch of = batch_of(batch, slice.part);
  begin_parts_anew(batch, slice.part, of);
  if (!slice.seq_lens.empty()) of.seq_lens = slice.seq_lens;
  if (outline_.latent_slices == 1 || batch.block_table.empty() || !on_host(batch.block_table)) return of;
  const auto& starts = slice.part.query_start_loc;
  const size_t first = size_t(std::ranges::upper_bound(starts, 0) - starts.begin()) - 1;
  const size_t end = size_t(std::ranges::lower_bound(starts, starts.back()) - starts.begin());
  of.query_start_loc = of.query_start_loc.subspan(first, end - first + 1);
  of.seq_lens = of.seq_lens.subspan(first, end - first);
  if (!of.num_drafts.empty()) of.num_drafts = of.num_drafts.subspan(first, end - first);
  if (!of.mask_indptr.empty()) of.mask_indptr = of.mask_indptr.subspan(first, end - first + 1);
  of.block_table = batch.block_table.slice(0, int64_t(first), int64_t(end));
  return of;
}

void DeviceMlaPlan::prepare_members(const Batch& batch, Step& next, Stream stream) {
  committed_.clear();
  const auto prepare = [&](StepPlan& plan, const Batch& of) {
    plan.prepare(of, stream);
    committed_.push_back(&plan);
  };
  Batch of_latent = batch;
  of_latent.slot_mapping = {};
  // A graph may hold slices that this step does not have.
  const size_t slices = next.latent_slices.size(), before = touched_latents_;
  touched_latents_ = std::max(slices, before);
  for (size_t i = 0; i < touched_latents_; ++i) prepare(latent_plan(i), i < slices ? batch_of_slice(of_latent, next.latent[i]) : Batch{});
  for (size_t i = 0; i < next.rounds.num_rounds; ++i) {
    const DeviceRounds::Round& round = next.rounds.rounds[i];
    for (const RoundKind kind : {kCausalPart, kWholePart})
      if (round.rows[kind].num_rows() > 0) prepare(round_plan(round.shape, round.of_shape, kind), next.rounds.batch_of(i, kind));
  }
  std::stable_partition(committed_.begin(), committed_.end(), [](const StepPlan* plan) { return plan->can_revert(); });
}

// Writes the step's lists to pinned memory, from where they are sent.
void DeviceMlaPlan::put(const Batch& batch, const Step& step) {
  PlanArrays& m = *memory_;
  const DeviceRounds& rounds = step.rounds;
  check(rounds.key_rows.size() <= key_rows_.capacity && rounds.token_rows.size() <= token_rows_.capacity, "update.limits",
        "expected a batch within the limits: {} pieces, got {}", key_rows_.capacity, rounds.key_rows.size());
  m.begin();
  *m.put(num_tokens_, 1) = step.num_tokens;
  if (const size_t slices = step.latent_slices.size(); slices > 0) {
    const LatentSlice& last = step.latent[slices - 1];
    TokenRows* to = m.put(latent_rows_, last.first_range + last.part.ranges.size());
    for (size_t i = 0; i < slices; ++i) {
      int row = 0;
      for (const TokenRange& range : step.latent[i].part.ranges) {
        *to++ = {.row = row, .token = range.begin, .sum = 0, .first = 1, .last = 1};
        row += range.end - range.begin;
      }
    }
  }
  if (!rounds.key_rows.empty()) std::ranges::copy(rounds.key_rows, m.put(key_rows_, rounds.key_rows.size()));
  if (!rounds.token_rows.empty()) std::ranges::copy(rounds.token_rows, m.put(token_rows_, rounds.token_rows.size()));
  if (const TensorView& slots = batch.slot_mapping; !slots.empty() && on_host(slots)) {
    long* to = m.put(slots_, size_t(step.num_tokens));
    for (int t = 0; t < step.num_tokens; ++t) to[t] = slots.as<const int64_t>()[t * slots.stride(0)];
  }
  if (!step.sent_ids.empty()) std::ranges::copy(step.sent_ids, m.put(block_ids_, step.sent_ids.size()));
}

void DeviceMlaPlan::update(const Batch& batch, Stream stream) {
  if (options_.validate) validate(batch, latent_spec_, options_.limits, -1);
  check(batch.num_reqs() <= options_.limits.max_num_reqs && batch.num_tokens() <= options_.limits.max_num_tokens, "update.limits",
        "expected at most {} requests and {} tokens, got {} and {}", options_.limits.max_num_reqs, options_.limits.max_num_tokens,
        batch.num_reqs(), batch.num_tokens());
  Step& next = steps_.spare();
  next.num_tokens = batch.num_tokens();
  next.on_device = false;
  next.reach = reach_of(batch, latent_spec_, options_.validate);
  check(next.reach.block < captured_blocks_ && next.reach.slot < captured_blocks_ * spec_.block_size, "update.captured_cache",
        "a captured graph has a cache of {} blocks of {} tokens, the batch has block {} and slot {}", captured_blocks_, spec_.block_size,
        next.reach.block, next.reach.slot);
  next.slots = place_slots(batch.slot_mapping, false);
  decide_ways(spec_, rules_, batch, next.ways);
  cut_latent(batch, next);
  cut_rounds(batch, next);
  place_blocks(batch, next);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  check(!is_captured(cu), "update.captured", "expected a stream that captures nothing: update() is not part of a graph");
  prepare_members(batch, next, stream);
  put(batch, next);
  try {
    memory_->send(cu);
  } catch (...) {
    has_step_ = memory_->is_whole();
    throw;
  }
  try {
    commit_together(committed_, stream);
  } catch (...) {
    memory_->take_back(cu);
    has_step_ = memory_->is_whole() && std::ranges::all_of(latents_, [](const auto& latent) { return latent->has_step(); });
    throw;
  }
  steps_.flip();
  touched_latents_ = next.latent_slices.size();
  has_step_ = true;
}

void DeviceMlaPlan::update_on_device(const DeviceBatch& batch, Stream stream) {
  check(options_.on_device, "update.on_device", "expected a plan made with PlanOptions::on_device, got one without");
  check(!rules_.may_expand, "update.on_device",
        "expected limits that keep every request in latent space, since the host decides which requests have their keys expanded, got {} "
        "query tokens of a request",
        most_query_len(options_.limits));
  const CurrentContext current(*context_);
  const TensorView slots = place_slots(batch.slot_mapping, is_captured(cu_stream(stream)));
  Step& next = steps_.spare();
  next.num_tokens = next.latent_tokens = max_tokens(batch, options_.limits);
  next.latent_slices.clear();
  next.rounds.num_rounds = 0, next.rounds.slices.clear();
  latents_[0]->update_on_device(batch, stream);
  touched_latents_ = 1;
  next.on_device = true;
  next.slots = slots;
  next.reach = {};
  next.ways = {};
  steps_.flip();
  has_step_ = true;
}

std::vector<Reason> DeviceMlaPlan::device_problems(Stream stream) { return latents_[0]->device_problems(stream); }

void DeviceMlaPlan::write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream stream) const {
  check(has_step_, "plan.no_step", "expected a step to compute: the last update of {} failed, and the step before could not be kept",
        str());
  const Step& step = steps_.now();
  check_write(spec_, device_.device, cache, latent, rope, step.slots, step.num_tokens, step.reach);
  const CurrentContext current(*context_);
  const CUstream cu = cu_stream(stream);
  const bool captured = is_captured(cu);
  // In a graph all requests are in latent space: their tokens are those of the step.
  const NewTokens tokens{.slots = step.slots,
                         .num_tokens = step.num_tokens,
                         .reach = step.reach,
                         .captured_tokens = step.on_device ? step.num_tokens
                                            : captured     ? options_.limits.max_num_tokens
                                                           : 0,
                         .now = outline_.latent_slices == 1 ? lengths_[0].num_tokens : memory_->device(num_tokens_)};
  write_kv_->run_latents(cache, latent, rope, tokens, cu);
  if (!captured) return;
  captured_write_ = true;
  captured_blocks_ = std::min(captured_blocks_, cache.k.size(0));
}

std::string DeviceMlaPlan::str() const {
  const Step& step = steps_.now();
  std::string text = parts_.name + ":";
  if (step.num_tokens == 0) return text + " nothing";
  if (step.latent_tokens > 0) {
    const size_t slices = step.latent_slices.size();
    text += fmt::format(" {} tokens in latent space{} ({}){}", step.latent_tokens, slices > 1 ? fmt::format(" in {} slices", slices) : "",
                        latents_[0]->str(), step.ways.largest[0].str());
  }
  if (const size_t count = step.rounds.num_rounds; count > 0) {
    const DeviceRounds::Round& last = step.rounds.rounds[count - 1];
    const RoundShape& shape = outline_.shapes[last.shape];
    text +=
        fmt::format("{} {} tokens with expanded keys in {} round{} of {} heads and {} keys at most ({}){}",
                    step.latent_tokens > 0 ? ";" : "", step.num_tokens - step.latent_tokens, count, count == 1 ? "" : "s", shape.heads,
                    shape.keys, rounds_[last.shape][last.of_shape][last.rows[kCausalPart].num_rows() > 0 ? kCausalPart : kWholePart]->str(),
                    step.ways.largest[1].str());
  }
  return text;
}

}  // namespace imbrex::cuda

namespace imbrex {
namespace {

std::vector<Reason> refusals(const MlaSpec&, const DeviceInfo& device) {
  std::string why;
  // What a device that is only described has beside it is not known.
  if (!device.present || cuda::cublaslt(&why) != nullptr) return {};
  return {{"mla.products", "cuBLASLt, which multiplies by the weight of kv_b_proj", why}};
}

std::unique_ptr<HeadProducts> products(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
  return cuda::cublaslt_products(cuda::Context::of_device(device.device.index), spec, options.out_dtype);
}

std::unique_ptr<MlaPlan> plan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts) {
  return std::make_unique<cuda::DeviceMlaPlan>(spec, device, options, std::move(parts));
}

int64_t workspace_bytes(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, const MlaParts& parts) {
  return cuda::outline(spec, device, options, parts).bytes;
}

}  // namespace

extern const MlaHardware mla_on_cuda;
const MlaHardware mla_on_cuda{.refusals = refusals,
                              .products = products,
                              .can_expand = cuda::can_expand_on_device,
                              .rounds = cuda::round_specs,
                              .chunk_keys = cuda::device_chunk_keys,
                              .plan = plan,
                              .workspace_bytes = workspace_bytes};

}  // namespace imbrex
