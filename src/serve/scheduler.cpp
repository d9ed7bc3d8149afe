// Continuous batching over paged KV caches and slots of states (see scheduler.h).
#include "serve/scheduler.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "core/check.h"
#include "model/groups.h"
#include "serve/hash.h"
#include "serve/scheduler_request.h"

namespace imbrex::serve {

namespace {

constexpr uint64_t kChoiceTag = 0x6472616674;

std::atomic<uint64_t> next_identity{1};

}  // namespace

Scheduler::Scheduler(const ModelSpec& model, SchedulerOptions options) : options_(std::move(options)), identity_(next_identity++) {
  imbrex::check(options_.max_num_batched_tokens >= 1, "scheduler.max_num_batched_tokens", "max_num_batched_tokens must be >= 1, is {}",
                options_.max_num_batched_tokens);
  imbrex::check(options_.max_num_seqs >= 1, "scheduler.max_num_seqs", "max_num_seqs must be >= 1, is {}", options_.max_num_seqs);
  imbrex::check(options_.max_seq_len >= 2, "scheduler.max_seq_len", "max_seq_len must be >= 2, is {}", options_.max_seq_len);
  imbrex::check(!model.cache_groups.empty(), "scheduler.groups", "{} must have at least one cache group, has none", model.name);
  imbrex::check(options_.num_blocks.size() == model.cache_groups.size(), "scheduler.num_blocks",
                "num_blocks must have one entry for each of the {} cache groups, has {}", model.cache_groups.size(),
                options_.num_blocks.size());
  for (size_t g = 0; g < model.cache_groups.size(); ++g) {
    const CacheGroup& group = model.cache_groups[g];
    if (group.holds_states()) continue;
    const AttentionSpec spec = *paged_attention(model.layers[size_t(group.layers.front())].spec);
    imbrex::check(spec.block_size >= 1, "scheduler.block_size", "group {} must have paged caches, has block_size {}", group.name,
                  spec.block_size);
    if (groups_.empty()) block_size_ = spec.block_size;
    imbrex::check(spec.block_size == block_size_, "scheduler.block_size.mixed", "all groups must have block_size {}, {} has {}",
                  block_size_, group.name, spec.block_size);
    groups_.emplace_back(int(g), options_.num_blocks[g], spec.mask);
  }
  if (groups_.size() < model.cache_groups.size()) {
    imbrex::check(options_.num_slots >= 1, "scheduler.num_slots", "num_slots must be >= 1 for the states of {}, is {}", model.name,
                  options_.num_slots);
    slots_ = std::make_unique<BlockPool>(options_.num_slots);
    if (groups_.empty()) block_size_ = std::max(options_.state_unit, 1);
    imbrex::check(!options_.prefix_sharing || (options_.state_unit >= block_size_ && options_.state_unit % block_size_ == 0),
                  "scheduler.state_unit", "state_unit must be a multiple of block_size {}, is {}", block_size_, options_.state_unit);
  }
  pools_.assign(model.cache_groups.size(), slots_.get());
  for (const Group& group : groups_) pools_[size_t(group.index)] = &group.pool;
}
Scheduler::~Scheduler() = default;

const BlockPool& Scheduler::pool(int group) const { return *pools_[size_t(group)]; }

double Scheduler::occupancy(int group) const {
  const BlockPool& p = pool(group);
  return double(p.num_blocks() - p.num_free()) / double(p.num_blocks());
}

std::string Scheduler::too_long(const TraceRequest& request) const {
  // The last output token is made, but nothing is computed from it.
  const int64_t tokens = int64_t(request.input_length) + request.output_length - 1;
  if (tokens > options_.max_seq_len) return fmt::format("{} tokens, max_seq_len is {}", tokens, options_.max_seq_len);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const int needed = groups_[g].peak_blocks(int(tokens), options_.max_num_batched_tokens, block_size_);
    if (needed > groups_[g].pool.num_blocks()) {
      return fmt::format("{} tokens need {} blocks of {} in KV group {}, which has {}", tokens, needed, block_size_, groups_[g].index,
                         groups_[g].pool.num_blocks());
    }
  }
  return {};
}

void Scheduler::add(const TraceRequest& request, int id, double arrival_s) {
  imbrex::check(request.input_length >= 1 && request.output_length >= 1, "scheduler.request.length",
                "request {}: input and output must be >= 1, are {} and {}", id, request.input_length, request.output_length);
  const int with_ids = request.input_length - request.system_tokens;
  const int ids = options_.prefix_block == 0 ? 0 : blocks_of(with_ids, options_.prefix_block);
  imbrex::check(options_.prefix_block == 0 || request.prefix_ids.size() == size_t(ids), "scheduler.request.prefix_ids",
                "request {}: {} input tokens need {} prefix ids, got {}", id, with_ids, ids, request.prefix_ids.size());
  for (const TokenSpan& image : request.images) {
    imbrex::check(options_.images && image.begin >= 0 && image.begin < image.end && image.end <= request.input_length &&
                      image.end - image.begin <= options_.max_num_batched_tokens,
                  "scheduler.request.images",
                  "request {}: expected images in its {} input tokens, of at most {} tokens that a step may have, got [{}, {})", id,
                  request.input_length, options_.images ? options_.max_num_batched_tokens : 0, image.begin, image.end);
  }
  imbrex::check(arrival_s >= last_arrival_, "scheduler.request.order", "request {}: arrival must be >= {} s, is {} s", id, last_arrival_,
                arrival_s);
  const std::string reason = too_long(request);
  imbrex::check(reason.empty(), "scheduler.request.too_long", "request {} can never run: {}", id, reason);
  auto r = std::make_unique<Request>();
  r->trace = &request;
  r->record = {.id = id,
               .arrival_s = arrival_s,
               .first_scheduled_s = 0,
               .first_token_s = 0,
               .last_token_s = 0,
               .input_length = request.input_length,
               .output_length = request.output_length};
  r->tables.resize(groups_.size());
  last_arrival_ = arrival_s;
  future_.push_back(std::move(r));
}

std::optional<double> Scheduler::next_arrival() const {
  if (future_.empty()) return std::nullopt;
  return future_.front()->record.arrival_s;
}

// Drafts behind the one token that a request has left to compute. What they stand for are tokens that it makes, but for its last one, from
// which nothing is computed.
void Scheduler::add_drafts(Request& r, int budget) const {
  r.drafts = {};
  const int count = std::min(options_.drafts.tokens, budget), depth = r.trace->output_length - r.generated - 1;
  if (r.remaining() != 1 || count <= 0 || depth <= 0) return;
  r.drafts =
      make_drafts(options_.drafts, count, depth, hash_numbers(options_.seed, kChoiceTag, uint64_t(r.record.id), uint64_t(r.computed)));
}

// Blocks for the next `tokens`, in every group or in none. Gives back blocks that no later query of the request sees.
bool Scheduler::reserve(Request& r, int tokens) {
  const int wanted = blocks_of(int64_t(r.computed) + tokens, block_size_);
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    Request::Table& table = r.tables[g];
    if (group.limited()) {
      const int needed = std::min(first_needed_block(r.computed, group.mask, block_size_), int(table.blocks.size()));
      if (needed > table.first_held) {
        group.pool.release(std::span(table.blocks).subspan(size_t(table.first_held), size_t(needed - table.first_held)));
        table.first_held = needed;
      }
    }
    if (wanted - int(table.blocks.size()) > group.pool.num_free()) return false;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    Request::Table& table = r.tables[g];
    if (wanted > int(table.blocks.size())) groups_[g].pool.allocate(wanted - int(table.blocks.size()), table.blocks);
  }
  return true;
}

// A waiting request may run when its whole prompt finds room beside what running prompts still need: a prompt that is preempted
// half-way is work lost. With nothing else running every request that add() took finds room.
bool Scheduler::admit(Request& r, int budget) {
  if (slots_ && slots_->num_free() == 0) return false;  // one comes back with the next request that ends
  if (blocked_free_) {                                  // nothing to hope for before blocks were given back
    bool more = running_.empty();
    for (size_t g = 0; g < groups_.size(); ++g) more |= groups_[g].pool.num_free() > (*blocked_free_)[g];
    if (!more) return false;
  }
  const int tokens = r.num_tokens();
  int hit = 0;
  if (options_.prefix_sharing) {
    extend_hashes(r, tokens);
    hit = find_hit(r, tokens);
  }
  bool room = true;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    Request::Table& table = r.tables[g];
    table.blocks.reserve(size_t(blocks_of(int64_t(r.trace->input_length) + r.trace->output_length, block_size_)));
    table.first_held = hit > 0 ? first_needed_block(hit * block_size_, group.mask, block_size_) : 0;
    table.blocks.assign(size_t(table.first_held), 0);
    group.pool.lookup(std::span(r.hashes).subspan(size_t(table.first_held), size_t(hit - table.first_held)), table.blocks);
    table.published = hit;
    int64_t needed = group.peak_blocks(tokens, options_.max_num_batched_tokens, block_size_) - table.held();
    for (const auto& other : running_) {
      needed += std::max(0, group.peak_blocks(other->num_tokens(), options_.max_num_batched_tokens, block_size_) - other->tables[g].held());
    }
    room &= needed <= group.pool.num_free();
  }
  if (!room && !running_.empty()) {
    release_cache(r);
    blocked_free_.emplace();
    for (const Group& group : groups_) blocked_free_->push_back(group.pool.num_free());
    return false;
  }
  blocked_free_.reset();
  if (slots_) take_slot(r, hit);
  r.computed = hit * block_size_;
  r.stamp = next_stamp_++;
  r.scheduled = next_tokens(r, budget);
  imbrex::check(reserve(r, r.scheduled), "scheduler.invariant", "request {} must find room for {} tokens, does not", r.record.id,
                r.scheduled);
  if (!r.admitted) {
    ++stats_.admitted;
    stats_.prompt_tokens += r.trace->input_length;
    stats_.prefix_hit_tokens += r.computed;
    r.record.hit_tokens = r.computed;
    r.admitted = true;
  } else {
    stats_.resumed_hit_tokens += r.computed;
  }
  return true;
}

void Scheduler::release_cache(Request& r) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Request::Table& table = r.tables[g];
    groups_[g].pool.release(std::span(table.blocks).subspan(size_t(table.first_held)));
    table.blocks.clear();
    table.first_held = table.published = 0;
  }
  if (slots_) slots_->release(r.slot), slots_->release(r.source);
  r.slot.clear(), r.source.clear();
}

void Scheduler::preempt_newest() {
  Request& r = *newest();
  release_cache(r);
  r.computed = 0;
  r.scheduled = r.accepted = 0;
  r.drafts = {};
  r.stamp = -1;
  ++r.record.preemptions;
  ++stats_.preemptions;
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  blocked_free_.reset();
}

bool Scheduler::step(double now, StepPlan& out) {
  imbrex::check(!in_step_, "scheduler.step.order", "finish_step must follow a step before the next one");
  while (!future_.empty() && future_.front()->record.arrival_s <= now) {
    waiting_.push_back(std::move(future_.front()));
    future_.pop_front();
  }
  int budget = options_.max_num_batched_tokens;
  bool preempted = false;
  for (const bool decode : {true, false}) {
    for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
      Request& r = *running_[i];
      if (r.scheduled > 0 || (r.remaining() == 1) != decode) continue;
      const int tokens = next_tokens(r, budget);
      add_drafts(r, budget - tokens);
      bool room = reserve(r, tokens + r.drafts.count());
      if (!room && r.drafts.count() > 0) r.drafts = {}, room = reserve(r, tokens);
      while (!room) {
        budget += newest()->scheduled;
        const bool itself = newest() == &r;
        preempt_newest();
        preempted = true;
        if (itself) break;
        room = reserve(r, tokens);
      }
      if (!room) break;
      r.scheduled = tokens + r.drafts.count();
      budget -= r.scheduled;
    }
  }
  while (!preempted && !waiting_.empty() && int(running_.size()) < options_.max_num_seqs && budget > 0) {
    Request& r = *waiting_.front();
    if (!admit(r, budget)) break;
    if (r.record.preemptions == 0) r.record.first_scheduled_s = now;
    budget -= r.scheduled;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
  imbrex::check(!preempted || !running_.empty(), "scheduler.invariant", "a request that is alone must find room");
  if (running_.empty()) return false;
  write_plan(out);
  in_step_ = true;
  ++stats_.steps;
  return true;
}

void Scheduler::write_plan(StepPlan& out) {
  const size_t max_seqs = size_t(options_.max_num_seqs);
  if (out.owner != identity_) {
    out.owner = identity_;
    out.stride = blocks_of(int64_t(options_.max_seq_len) + options_.drafts.tokens, block_size_);  // a tree may end behind the request
    out.groups.assign(pools_.size(), {});
    for (const Group& of_pages : groups_) {
      StepPlan::Group& group = out.groups[size_t(of_pages.index)];
      group.rows.assign(max_seqs, {});
      group.block_table.assign(max_seqs * size_t(out.stride), 0);
    }
  }
  out.query_start_loc.assign(1, 0);
  for (auto* array : {&out.seq_lens, &out.request_ids, &out.first_positions, &out.fresh_from, &out.state_slots, &out.source_slots,
                      &out.num_drafts, &out.accepted_drafts, &out.draft_parents, &out.positions})
    array->clear();
  out.drafts.clear();
  out.makes_token.clear();
  for (StepPlan::Group& group : out.groups) group.slot_mapping.clear(), group.kept_slots.clear();
  out.moves = false;

  for (const bool decode : {true, false}) {
    for (const auto& request : running_) {
      const Request& r = *request;
      if (r.scheduled == 0 || (r.remaining() == 1) != decode) continue;
      const size_t row = out.seq_lens.size();
      const int end = r.computed + r.scheduled;
      out.query_start_loc.push_back(out.query_start_loc.back() + r.scheduled);
      out.seq_lens.push_back(end);
      out.request_ids.push_back(r.record.id);
      out.first_positions.push_back(r.computed);
      out.fresh_from.push_back(r.ever_computed);
      out.makes_token.push_back(end - r.drafts.count() == r.num_tokens());
      const std::vector<int32_t>& source = r.source.empty() ? r.slot : r.source;
      out.state_slots.insert(out.state_slots.end(), r.slot.begin(), r.slot.end());
      out.source_slots.insert(out.source_slots.end(), source.begin(), source.end());
      for (int p = r.computed; options_.images && p < end; ++p) out.positions.push_back(last_seen(*r.trace, p));
      if (options_.drafts.tokens > 0) {
        const int certain = r.scheduled - r.drafts.count();
        out.drafts.push_back(r.drafts);
        out.num_drafts.push_back(r.drafts.count()), out.accepted_drafts.push_back(r.accepted);
        for (int t = 0; options_.drafts.tree && t < r.scheduled; ++t)
          out.draft_parents.push_back(t < certain ? t - 1 : r.drafts.parents[size_t(t - certain)] + certain);
      }
      for (size_t g = 0; g < groups_.size(); ++g) {
        StepPlan::Group& group = out.groups[size_t(groups_[g].index)];
        const std::vector<int32_t>& blocks = r.tables[g].blocks;
        StepPlan::Group::Row& up_to_date = group.rows[row];
        if (up_to_date.stamp != r.stamp) up_to_date = {.stamp = r.stamp, .filled = 0};
        std::copy(blocks.begin() + int64_t(up_to_date.filled), blocks.end(),
                  group.block_table.begin() + int64_t(row) * out.stride + int64_t(up_to_date.filled));
        up_to_date.filled = blocks.size();
        append_slots(blocks, block_size_, r.computed, end, group.slot_mapping);
        if (!options_.drafts.tree) continue;
        group.kept_slots.resize(group.slot_mapping.size(), -1);
        const auto first_draft = int64_t(group.slot_mapping.size()) - r.drafts.count();
        for (size_t depth = 0; depth < r.drafts.kept.size(); ++depth) {
          if (const int draft = r.drafts.kept[depth]; draft != int(depth)) {
            group.kept_slots[size_t(first_draft + draft)] = group.slot_mapping[size_t(first_draft) + depth];
            out.moves = true;
          }
        }
      }
    }
  }
}

void Scheduler::finish_step(double now) {
  imbrex::check(in_step_, "scheduler.step.order", "finish_step needs a step under way");
  in_step_ = false;
  for (auto& request : running_) {
    Request& r = *request;
    if (r.scheduled == 0) continue;
    const int kept = int(r.drafts.kept.size()), tokens = r.scheduled - r.drafts.count() + kept;
    (r.remaining() == 1 ? stats_.decode_tokens : stats_.prefill_tokens) += tokens;
    stats_.recomputed_tokens += std::clamp(r.ever_computed - r.computed, 0, tokens);
    stats_.drafts += r.drafts.count(), stats_.kept_drafts += kept, stats_.output_tokens += kept;
    if (r.generated == 0 && r.computed + tokens >= r.num_tokens()) r.record.first_token_s = now;
    r.computed += tokens;
    r.generated += kept;
    r.accepted = r.drafts.last_kept();
    r.scheduled = 0, r.drafts = {};
    r.ever_computed = std::max(r.ever_computed, r.computed);
    if (slots_) slots_->release(r.source);
    r.source.clear();
    publish_blocks(r);
    keep_state(r);
    if (r.remaining() > 0) continue;
    ++r.generated;
    ++stats_.output_tokens;
    if (r.generated < r.trace->output_length) continue;
    r.record.last_token_s = now;
    finished_.push_back(r.record);
    release_cache(r);
    request.reset();
  }
  std::erase(running_, nullptr);
}

void Scheduler::check() const {
  std::vector<std::vector<int>> refs;
  for (const Group& group : groups_) {
    group.pool.check();
    refs.emplace_back(size_t(group.pool.num_blocks()), 0);
  }
  if (slots_) slots_->check();
  std::vector<int> owners(slots_ ? size_t(slots_->num_blocks()) : 0, 0), readers = owners;
  int64_t stamp = -1;
  for (const auto& r : running_) {
    imbrex::check(r->slot.size() == (slots_ ? 1u : 0u), "scheduler.invariant", "request {} must have {} state slots, has {}", r->record.id,
                  slots_ ? 1 : 0, r->slot.size());
    for (const int32_t slot : r->slot) ++owners[size_t(slot)];
    for (const int32_t slot : r->source) ++readers[size_t(slot)];
    imbrex::check(r->stamp > stamp, "scheduler.invariant", "admissions must be in order: expected more than {}, is {}", stamp, r->stamp);
    stamp = r->stamp;
    for (size_t g = 0; g < groups_.size(); ++g) {
      const Request::Table& table = r->tables[g];
      const int expected = blocks_of(int64_t(r->computed) + r->scheduled, block_size_);
      const int most = expected + blocks_of(options_.drafts.tokens, block_size_);  // those of drafts that were not kept stay
      imbrex::check(int(table.blocks.size()) >= expected && int(table.blocks.size()) <= most, "scheduler.invariant",
                    "request {} must have {} to {} blocks, has {}", r->record.id, expected, most, table.blocks.size());
      for (size_t j = size_t(table.first_held); j < table.blocks.size(); ++j) ++refs[g][size_t(table.blocks[j])];
    }
  }
  for (size_t s = 0; s < owners.size(); ++s) {
    imbrex::check(slots_->ref_count(int32_t(s)) == owners[s] + readers[s] && owners[s] + (readers[s] > 0) <= 1, "scheduler.invariant",
                  "state slot {} must have {} references, of one owner or of requests that read it, has {}", s, owners[s] + readers[s],
                  slots_->ref_count(int32_t(s)));
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    for (size_t b = 0; b < refs[g].size(); ++b) {
      imbrex::check(groups_[g].pool.ref_count(int32_t(b)) == refs[g][b], "scheduler.invariant",
                    "block {} of group {} must have {} references, has {}", b, g, refs[g][b], groups_[g].pool.ref_count(int32_t(b)));
    }
  }
}

}  // namespace imbrex::serve
