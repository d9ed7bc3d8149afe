#pragma once
// Continuous batching over paged KV caches and slots of states: which tokens of which requests are computed in the next step, and where
// their keys and states are. A request takes one slot, for all groups of states, when it is admitted, and gives it back when it finishes or
// is preempted. A state exists at a request's last token only: a later request may begin from it where it was kept, under the hash of the
// block that ends there. Then the slot is kept as it is, and the request goes on in another one; nothing is copied, since a step may read a
// state from another slot than it writes. Kept are states at the last multiple of state_unit in front of a prompt's last token,
// and where a prompt was seen to part from earlier ones, whose pages are cached further than a state is; a step ends there. Used by the
// replay. Like vLLM V1: running requests first, then waiting ones, prompts in chunks, preemption by recomputation.
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "imbrex/block_pool.h"
#include "imbrex/model.h"
#include "serve/step_plan.h"
#include "serve/trace.h"

namespace imbrex::serve {

struct SchedulerOptions {
  int max_num_batched_tokens = 2048;
  int max_num_seqs = 128;
  int max_seq_len = 131072;     // input and output of a request; sizes the block tables
  std::vector<int> num_blocks;  // of each of the model's cache groups; not looked at where it is of states
  int num_slots = 0;            // of states, for models that keep some
  int prefix_block = 0;         // Trace::prefix_block
  bool prefix_sharing = true;
  int state_unit = 0;   // states of prefixes are kept at multiples of so many tokens, a multiple of block_size; with prefix_sharing
  DraftOptions drafts;  // of requests that make tokens
  bool images = false;  // requests may have some: steps say the positions of queries (StepPlan::positions), and do not end within an image
  uint64_t seed = 1;
};

struct RequestRecord {
  int id = 0;
  double arrival_s = 0, first_scheduled_s = 0, first_token_s = 0, last_token_s = 0;
  int input_length = 0, output_length = 0;
  int hit_tokens = 0;  // found in the cache at first admission
  int preemptions = 0;
};

struct SchedulerStats {
  int64_t steps = 0, preemptions = 0;
  int64_t admitted = 0;
  int64_t prompt_tokens = 0, prefix_hit_tokens = 0;  // of admitted requests; hits of first admissions
  int64_t prefill_tokens = 0, decode_tokens = 0;     // computed; recomputation is prefill
  int64_t recomputed_tokens = 0;                     // computed again after a preemption
  int64_t resumed_hit_tokens = 0;                    // found in the cache after a preemption, so not computed again
  int64_t output_tokens = 0;
  int64_t drafts = 0, kept_drafts = 0;  // made, and of these those that became tokens: of decode_tokens
  int64_t kept_states = 0;              // that later requests may begin from
};

class Scheduler {
 public:
  // Error scheduler.* for options that do not fit the model.
  Scheduler(const ModelSpec&, SchedulerOptions);
  ~Scheduler();

  // Why the caches could never hold the request; empty when they can.
  std::string too_long(const TraceRequest&) const;
  // Arrivals must not decrease. The request must outlive the scheduler. Error scheduler.request.* when it is too long.
  void add(const TraceRequest&, int id, double arrival_s);

  // The next step at time `now`; false when no request that has arrived is left. finish_step() must follow.
  bool step(double now, StepPlan& out);
  void finish_step(double now);  // the step's tokens are computed

  std::optional<double> next_arrival() const;  // of a request that has not been looked at yet
  int num_running() const { return int(running_.size()); }
  int num_waiting() const { return int(waiting_.size()); }  // arrived, not running
  bool done() const { return running_.empty() && waiting_.empty() && future_.empty(); }
  const SchedulerStats& stats() const { return stats_; }
  std::span<const RequestRecord> finished() const { return finished_; }
  // The pool of a cache group. Groups of states share one pool, whose blocks are the slots.
  const BlockPool& pool(int group) const;
  double occupancy(int group) const;  // share of blocks or slots in use
  void check() const;                 // Error scheduler.invariant or block_pool.invariant if the books do not balance

 private:
  struct Group;
  struct Request;
  Request* newest() { return running_.back().get(); }
  void extend_hashes(Request&, int tokens) const;
  int find_pages(const Request&, int hit) const;
  int find_hit(Request&, int tokens) const;
  void take_slot(Request&, int hit);
  int last_kept(const Request&) const;
  int place_of_state(const Request&, int tokens) const;
  int next_tokens(const Request&, int budget) const;
  void add_drafts(Request&, int budget) const;
  bool reserve(Request&, int tokens);
  bool admit(Request&, int budget);
  void preempt_newest();
  void release_cache(Request&);
  void publish_blocks(Request&);
  void keep_state(Request&);
  void write_plan(StepPlan&);

  SchedulerOptions options_;
  uint64_t identity_;  // of this scheduler among all, so that a StepPlan of another one is not taken for up to date
  int block_size_ = 1;
  int64_t next_stamp_ = 0;
  bool in_step_ = false;
  double last_arrival_ = 0;
  std::vector<Group> groups_;                              // of pages
  std::vector<const BlockPool*> pools_;                    // by the model's cache groups
  std::unique_ptr<BlockPool> slots_;                       // null: the model keeps no states
  std::deque<std::unique_ptr<Request>> future_, waiting_;  // in order of arrival; the preempted are in front of the others
  std::vector<std::unique_ptr<Request>> running_;          // in order of arrival
  std::vector<RequestRecord> finished_;
  std::optional<std::vector<int>> blocked_free_;  // free blocks per group when the first waiting request was last turned away
  mutable std::vector<uint64_t> ids_;             // scratch of extend_hashes
  SchedulerStats stats_;
};

}  // namespace imbrex::serve
