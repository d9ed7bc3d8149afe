// Prefixes that the scheduler's requests share (see scheduler.h): blocks of keys and values, and states behind them.
#include <algorithm>
#include <utility>

#include "core/check.h"
#include "serve/scheduler_request.h"

namespace imbrex::serve {

void Scheduler::extend_hashes(Request& r, int tokens) const {
  const size_t wanted = size_t(tokens / block_size_);
  ids_.resize(size_t(block_size_));
  while (r.hashes.size() < wanted) {
    const int begin = int(r.hashes.size()) * block_size_;
    for (int i = 0; i < block_size_; ++i) {
      ids_[size_t(i)] = token_id(options_.seed, *r.trace, options_.prefix_block, r.record.id, begin + i);
    }
    r.hashes.push_back(hash_block(r.hashes.empty() ? 0 : r.hashes.back(), ids_));
  }
}

// Of the first `hit` blocks those, counted from the first, that every group has cached as far as a query after them needs them. Groups
// without a window need all of them; the others only those that the next query sees.
int Scheduler::find_pages(const Request& r, int hit) const {
  const std::span<const BlockHash> hashes = std::span(r.hashes).first(size_t(hit));
  for (const Group& group : groups_) {
    if (!group.limited()) hit = std::min(hit, group.pool.peek(hashes.first(size_t(hit))));
  }
  // Every missing block moves the hit in front of it, so that the walk is linear.
  for (bool moved = true; moved && hit > 0;) {
    moved = false;
    for (const Group& group : groups_) {
      if (!group.limited()) continue;
      int first = first_needed_block(hit * block_size_, group.mask, block_size_);
      for (int j = hit - 1; j >= first; --j) {
        if (group.pool.peek(hashes.subspan(size_t(j), 1)) == 1) continue;
        hit = j;
        first = first_needed_block(hit * block_size_, group.mask, block_size_);
        moved = true;
      }
    }
  }
  return hit;
}

// Blocks that a request of so many tokens finds: of pages as many as are cached, and where the model keeps states, as many as there is a
// state behind too. That pages are cached further than a state says where prompts part.
int Scheduler::find_hit(Request& r, int tokens) const {
  int hit = find_pages(r, (tokens - 1) / block_size_);  // one token must be computed
  if (!slots_) return hit;
  r.branch = groups_.empty() ? 0 : place_of_state(r, hit * block_size_);
  for (int before = -1; hit > 0 && hit != before;) {
    while (hit > 0 && slots_->peek(std::span(r.hashes).subspan(size_t(hit - 1), 1)) == 0) --hit;
    before = hit;
    hit = find_pages(r, hit);
  }
  return hit;
}

// A slot for a request that begins behind `hit` blocks, whose first step reads the state that is kept there; or that state's own slot where
// no other is free.
void Scheduler::take_slot(Request& r, int hit) {
  if (hit == 0) {
    slots_->allocate(1, r.slot);
    return;
  }
  std::vector<int32_t> kept;
  slots_->lookup(std::span(r.hashes).subspan(size_t(hit - 1), 1), kept);
  if (slots_->allocate(1, r.slot)) {
    r.source = std::move(kept);
    return;
  }
  const auto own = slots_->make_writable(kept.front());
  imbrex::check(own.has_value(), "scheduler.invariant", "request {} must find a state slot, there are {}", r.record.id,
                slots_->num_blocks());
  r.slot.assign(1, *own);
}

// The last multiple of state_unit within so many tokens that is not within an image, since steps do not end there.
int Scheduler::place_of_state(const Request& r, int tokens) const {
  for (;;) {
    const int place = tokens / options_.state_unit * options_.state_unit;
    const TokenSpan* const image = image_at(*r.trace, place);
    if (image == nullptr || image->begin == place) return place;
    tokens = image->begin;
  }
}

int Scheduler::last_kept(const Request& r) const { return place_of_state(r, r.trace->input_length - 1); }

// The tokens of a request's next step, at most so many. A step ends where a state is to be kept, and not within an image: where one does
// not fit, the step ends in front of it, so that the request may have to wait for a step with more room.
int Scheduler::next_tokens(const Request& r, int budget) const {
  const int end = r.computed + std::min(r.remaining(), budget);
  int stop = end;
  if (slots_ && options_.prefix_sharing) {
    for (const int kept : {r.branch, last_kept(r)})
      if (kept > r.computed) stop = std::min(stop, kept);
  }
  const TokenSpan* const image = image_at(*r.trace, stop);
  if (image != nullptr && image->begin < stop) stop = std::max(r.computed, image->begin);
  return stop - r.computed;
}

void Scheduler::publish_blocks(Request& r) {
  if (!options_.prefix_sharing) return;
  extend_hashes(r, r.computed);
  const int full = r.computed / block_size_;
  for (size_t g = 0; g < groups_.size(); ++g) {
    Request::Table& table = r.tables[g];
    for (int j = std::max(table.published, table.first_held); j < full; ++j) {
      groups_[g].pool.publish(table.blocks[size_t(j)], r.hashes[size_t(j)]);
    }
    table.published = std::max(table.published, full);
  }
}

// Keeps the request's state where others may need it: in its slot, which the next step reads and does not write.
void Scheduler::keep_state(Request& r) {
  if (!slots_ || !options_.prefix_sharing || r.computed == 0 || r.accepted > 0 || (r.computed != r.branch && r.computed != last_kept(r)))
    return;
  const BlockHash& hash = r.hashes[size_t(r.computed / block_size_ - 1)];
  std::vector<int32_t> next;
  if (slots_->peek(std::span(&hash, 1)) == 1 || !slots_->allocate(1, next)) return;
  slots_->publish(r.slot.front(), hash);
  r.source = std::move(r.slot), r.slot = std::move(next);
  ++stats_.kept_states;
}

}  // namespace imbrex::serve
