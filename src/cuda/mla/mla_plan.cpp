// See mla_plan.h. What a plan is made of, and its update: which way each request takes, what the members compute, and lists of rows and
// keys for the device.
#include "cuda/mla/mla_plan.h"

#include <fmt/format.h>

#include <algorithm>

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

// The most pieces that a step within the limits has.
int64_t most_pieces(const PlanLimits& limits, int chunk) {
  const int64_t requests = std::min(limits.max_num_reqs, limits.max_num_tokens);
  return checked_mul("mla.scratch", requests, (int64_t(limits.max_seq_len) + chunk - 1) / chunk + 1);
}

}  // namespace

DeviceMlaPlan::DeviceMlaPlan(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, MlaParts parts)
    : spec_(spec),
      latent_spec_(spec.latent_spec()),
      round_specs_(round_specs(spec)),
      device_(device),
      options_(options),
      member_(options),
      parts_(std::move(parts)),
      rules_(parts_.rules()),
      context_(Context::of_device(device.device.index)) {
  const CurrentContext current(*context_);
  const std::string arch = arch_of(device);
  const auto open = std::make_shared<ContextDevice>(context_);
  const PlanLimits& limits = options.limits;
  chunk_ = parts_.chunk_keys > 0 ? parts_.chunk_keys : workspace_keys(spec, limits, parts_.hardware->expanded_bytes);
  const bool expands = rules_.may_expand = ever_expands(spec, parts_.rules(), limits);
  places_ = mla_scratch(spec, limits.max_num_tokens, chunk_, expands);
  workspace_ = gpu::workspace_for(open, context_->id(), options.workspace);
  member_.validate = false;  // the whole batch is checked before it is taken apart
  member_.on_device = false;
  PlanOptions latent_options = member_;
  latent_options.on_device = options.on_device && !expands;
  if (!spec.absorbed) {
    // This plan's scratch is in use while a member computes. Members compute one after the other.
    member_.workspace = latent_options.workspace = make_workspace(device);
    latent_options.out_dtype = spec.dtype;
  }
  latent_ = step_plan(parts_.latent->plan(latent_spec_, device, latent_options));
  const Plan::Lengths lengths = dynamic_cast<const Plan&>(*latent_).lengths();
  lengths_.num_tokens = lengths.num_tokens;
  if (latent_options.on_device) lengths_ = {lengths.num_tokens, lengths.num_reqs, lengths.query_start, lengths.seq_lens};
  member_.out_dtype.reset();
  member_.limits.max_seq_len = std::min(limits.max_seq_len, chunk_);
  member_.limits.min_query_len = 0;
  if (!spec.absorbed) launches_ = std::make_unique<MlaSteps>(context_, arch, spec, expands);
  write_kv_ = std::make_unique<WriteKv>(context_, arch, latent_spec_, true);
  workspace_->reserve(places_.bytes);

  const int64_t pieces = expands ? most_pieces(limits, chunk_) : 0,
                all_blocks = (int64_t(limits.max_seq_len) + spec.block_size - 1) / spec.block_size;
  ArrayLayout layout;
  latent_rows_ = layout.add<TokenRows>(expands ? limits.max_num_reqs : 0);
  key_rows_ = layout.add<KeyRows>(pieces);
  token_rows_ = layout.add<TokenRows>(2 * pieces);
  slots_ = layout.add<long>(limits.max_num_tokens);
  block_ids_ = layout.add<int>(expands ? std::min(checked_mul("mla.scratch", limits.max_num_reqs, all_blocks), kMaxHostBlocks) : 0);
  memory_ = std::make_unique<PlanArrays>(open, layout);
  // Those of the first round, so that their kernels are there; plans of other rounds share them.
  for (const RoundKind kind : {kCausalPart, kWholePart})
    if (expands && !options.load_on_demand && (kind == kWholePart || spec.mask.causal)) round_plan(0, kind);
}

bool DeviceMlaPlan::capturable() const { return latent_->capturable() && !rules_.may_expand; }

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
    if (next.ways.expand[size_t(r)] == 0) continue;
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

// Makes it where no step has needed it yet.
StepPlan& DeviceMlaPlan::round_plan(size_t round, RoundKind kind) {
  if (rounds_.size() <= round) rounds_.resize(round + 1);
  std::unique_ptr<StepPlan>& plan = rounds_[round][kind];
  if (plan == nullptr) {
    std::unique_ptr<AttentionPlan> made = parts_.expanded->plan(round_specs_[kind], device_, member_);
    if (auto* const of_cuda = dynamic_cast<Plan*>(made.get())) of_cuda->keys_come_late();
    plan = step_plan(std::move(made));
  }
  return *plan;
}

void DeviceMlaPlan::prepare_members(const Batch& batch, Step& next, Stream stream) {
  committed_.clear();
  Batch of_latent = batch;
  of_latent.slot_mapping = {};
  latent_->prepare(batch_of(of_latent, next.latent), stream);
  committed_.push_back(latent_.get());
  for (size_t i = 0; i < next.rounds.num_rounds; ++i)
    for (const RoundKind kind : {kCausalPart, kWholePart}) {
      if (next.rounds.rounds[i].rows[kind].num_rows() == 0) continue;
      StepPlan& plan = round_plan(i, kind);
      plan.prepare(next.rounds.batch_of(i, kind), stream);
      committed_.push_back(&plan);
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
  if (step.latent.ranges.size() > 1) {
    TokenRows* to = m.put(latent_rows_, step.latent.ranges.size());
    int row = 0;
    for (const TokenRange& range : step.latent.ranges) {
      *to++ = {.row = row, .token = range.begin, .first = 1, .last = 1};
      row += range.end - range.begin;
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
  take_part(batch, next.latent, [&](int r) { return next.ways.expand[size_t(r)] == 0; });
  next.rounds.make(spec_, batch, next.ways.expand, chunk_);
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
    has_step_ = memory_->is_whole() && latent_->has_step();
    throw;
  }
  steps_.flip();
  has_step_ = true;
}

void DeviceMlaPlan::update_on_device(const DeviceBatch& batch, Stream stream) {
  check(options_.on_device, "update.on_device", "expected a plan made with PlanOptions::on_device, got one without");
  check(!rules_.may_expand, "update.on_device",
        "expected limits that keep every request in latent space, since the host decides which requests have their keys expanded, got {} "
        "query tokens of a request",
        most_queries());
  const CurrentContext current(*context_);
  const TensorView slots = place_slots(batch.slot_mapping, is_captured(cu_stream(stream)));
  Step& next = steps_.spare();
  next.num_tokens = next.latent.num_tokens = max_tokens(batch, options_.limits);
  next.latent.ranges.assign(1, {0, next.num_tokens});
  next.rounds.num_rounds = 0;
  latent_->update_on_device(batch, stream);
  next.on_device = true;
  next.slots = slots;
  next.reach = {};
  next.ways = {};
  steps_.flip();
  has_step_ = true;
}

std::vector<Reason> DeviceMlaPlan::device_problems(Stream stream) { return latent_->device_problems(stream); }

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
                         .now = lengths_.num_tokens};
  write_kv_->run_latents(cache, latent, rope, tokens, cu);
  if (!captured) return;
  captured_write_ = true;
  captured_blocks_ = std::min(captured_blocks_, cache.k.size(0));
}

std::string DeviceMlaPlan::str() const {
  const Step& step = steps_.now();
  std::string text = parts_.name + ":";
  if (step.num_tokens == 0) return text + " nothing";
  if (step.latent.num_tokens > 0)
    text += fmt::format(" {} tokens in latent space ({}){}", step.latent.num_tokens, latent_->str(), step.ways.largest[0].str());
  if (const size_t count = step.rounds.num_rounds; count > 0) {
    const RoundPlans& first = rounds_[0];
    text += fmt::format("{} {} tokens with expanded keys in {} round{} of {} keys at most ({}){}", step.latent.num_tokens > 0 ? ";" : "",
                        step.num_tokens - step.latent.num_tokens, count, count == 1 ? "" : "s", chunk_,
                        (first[kCausalPart] ? first[kCausalPart] : first[kWholePart])->str(), step.ways.largest[1].str());
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

int64_t workspace_bytes(const MlaSpec& spec, const PlanOptions& options, int chunk_keys, bool may_expand) {
  return cuda::mla_scratch(spec, options.limits.max_num_tokens, chunk_keys, may_expand).bytes;
}

}  // namespace

extern const MlaHardware mla_on_cuda;
const MlaHardware mla_on_cuda{.refusals = refusals,
                              .products = products,
                              .can_expand = cuda::can_expand_on_device,
                              .rounds = cuda::round_specs,
                              .expanded_bytes = int64_t{512} << 20,
                              .plan = plan,
                              .workspace_bytes = workspace_bytes};

}  // namespace imbrex
