// See run_list.h.
#include "cpu/run_list.h"

#include <algorithm>
#include <atomic>
#include <thread>

namespace imbrex::cpu {
namespace {

constexpr int kMergeHeads = 8;  // that a worker takes at a time
int merge_shares(const AttentionParams& params) { return (params.num_q_heads + kMergeHeads - 1) / kMergeHeads; }

struct Run {
  const AttentionParams& params;
  const Kernels& kernels;
  const Schedule& schedule;
  ScratchMemory scratch;
  int num_workers;
  int num_tasks, num_merges;  // items times kv heads, several of which may be one task; merges times shares of the q heads
  std::atomic<int> next_task{0}, tasks_done{0}, next_merge{0};

  // A value that is not finite makes every row of its item NaN, also those that give it the weight zero. Smaller items separate the rows
  // that see it from those that do not, and a row has the same bits in any item. Rows of one token see the same keys, custom masks aside.
  void run(const WorkItem& item, int head, NextTask next, char* memory) const {
    if (kernels.attention(params, item, head, next, memory) || item.q_end - item.q_begin == 1 || see_the_same(item)) return;
    WorkItem front = item, back = item;
    front.q_end = back.q_begin = item.q_begin + (item.q_end - item.q_begin) / 2;
    if (item.partial >= 0) back.partial += back.q_begin - item.q_begin;
    run(front, head, {}, memory);
    run(back, head, {}, memory);
  }

  // Whether all queries of an item see the same keys. Where positions rise, the first and the last one decide.
  bool see_the_same(const WorkItem& item) const {
    if (params.tokens || params.positions) return false;
    const auto seen_by = [&](int token) {
      return visible_keys(params, position_of(params, item.table, token), params.seq_lens[item.table]);
    };
    const Visible first = seen_by(item.q_begin), last = seen_by(item.q_end - 1);
    return first.lo == last.lo && first.hi == last.hi;
  }

  bool is_for(const WorkItem& item, int kv_head) const {
    const ItemDetails* const details = details_of(params, item);
    return !details || details->kv_head < 0 || details->kv_head == kv_head;
  }

  void work(int worker) {
    const int heads = params.num_kv_heads, together = params.heads_together, groups = heads / together;
    kernels.enter();
    for (int t; (t = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
      const auto task_at = [&](int task) { return NextTask{&schedule.work[size_t(task / groups)], task % groups * together}; };
      // Neighbouring tasks are about equally long, so every other worker will take one before this worker is free again.
      const int next = next_task.load(std::memory_order_relaxed) + num_workers - 1;
      const NextTask own = task_at(t);
      if (is_for(*own.item, own.kv_head))
        run(*own.item, own.kv_head, next < num_tasks ? task_at(next) : NextTask{}, scratch.data + worker * scratch.bytes_each);
      if (num_merges > 0) tasks_done.fetch_add(1, std::memory_order_release);
    }
    kernels.leave();
    if (num_merges == 0) return;
    // Whoever took a task is running, so this wait ends; it is short because the longest items went first.
    while (tasks_done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
    for (int m; (m = next_merge.fetch_add(1, std::memory_order_relaxed)) < num_merges;) {
      const int shares = merge_shares(params), begin = m % shares * kMergeHeads;
      kernels.merge(params, schedule.merges[size_t(m / shares)], begin, std::min(begin + kMergeHeads, params.num_q_heads));
    }
  }
};

}  // namespace

void invoke(const ParallelFor& threads, ParallelFor::Body body, void* argument) {
  if (threads.invoke != nullptr && threads.num_workers > 1) {
    threads.invoke(threads.context, threads.num_workers, body, argument);
  } else {
    body(argument, 0);
  }
}

void set_details(const ListDetails& details, AttentionParams& a) {
  const auto data_of = [](const auto& list) { return list.empty() ? nullptr : list.data(); };
  a.tokens = data_of(details.tokens);
  a.request_of = data_of(details.request_of);
  a.parts = data_of(details.parts);
  a.details = data_of(details.items);
  a.stretches = data_of(details.stretches);
}

void run_list(const AttentionParams& params, const Kernels& kernels, const Schedule& schedule, ScratchMemory scratch,
              const ParallelFor& threads) {
  Run run{.params = params,
          .kernels = kernels,
          .schedule = schedule,
          .scratch = scratch,
          .num_workers = std::max(threads.num_workers, 1),
          .num_tasks = int(schedule.work.size()) * (params.num_kv_heads / params.heads_together),
          .num_merges = int(schedule.merges.size()) * merge_shares(params)};
  if (run.num_tasks == 0) return;
  invoke(
      threads, [](void* r, int worker) { static_cast<Run*>(r)->work(worker); }, &run);
}

}  // namespace imbrex::cpu
