#pragma once
// Random steps of layers that keep a state of each request in a slot, and tensors that are on the host and on a device: what tests of such
// layers on a GPU and on the fake driver share.
#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "imbrex/batch.h"
#include "imbrex/device_stream.h"
#include "imbrex/plan.h"

namespace imbrex::cuda::test {

// A tensor on the host, and one on a device with the same strides, whose bytes between and behind the elements are there too.
class Twin {
 public:
  // `gap`: elements behind each innermost row; `shift`: in front of all.
  Twin(const DeviceStream& stream, DType dtype, const std::vector<int64_t>& sizes, int64_t gap = 0, int64_t shift = 0) : stream_(stream) {
    view_.dtype = dtype, view_.rank = int(sizes.size());
    int64_t stride = 1;
    for (int d = view_.rank - 1; d >= 0; --d) {
      view_.sizes[size_t(d)] = sizes[size_t(d)], view_.strides[size_t(d)] = stride;
      stride *= sizes[size_t(d)];
      if (d == view_.rank - 1 && d > 0) stride += gap;
    }
    shift_ = shift * size_of(dtype);
    bytes.assign(size_t(shift_ + std::max<int64_t>(stride, 1) * size_of(dtype)), char(0xff));
    device_ = stream.allocate(int64_t(bytes.size()));
  }
  std::vector<char> bytes;
  TensorView on_host() { return at(bytes.data(), {}); }
  TensorView on_device() const { return at(static_cast<char*>(device_.get()), stream_.device()); }
  // All elements and what lies between them, to what next() returns.
  void fill(const auto& next) {
    const int64_t count = (int64_t(bytes.size()) - shift_) / size_of(view_.dtype);
    for (int64_t i = 0; i < count; ++i) store_from_float(bytes.data() + shift_, view_.dtype, i, next());
  }
  void fill_random(std::mt19937& random) {  // [-2, 2)
    fill([&] { return float(int32_t(random())) * 0x1p-30f; });
  }
  // Rows of the first dimension from `row` on, to NaN.
  void poison_from(int64_t row) {
    const int64_t from = shift_ + row * view_.stride(0) * size_of(view_.dtype);
    if (from < int64_t(bytes.size())) std::fill(bytes.begin() + from, bytes.end(), char(0xff));
  }
  void upload() const { stream_.upload(device_.get(), bytes.data(), int64_t(bytes.size())); }
  std::vector<char> download() const {
    std::vector<char> there(bytes.size());
    stream_.download(there.data(), device_.get(), int64_t(there.size()));
    stream_.synchronize();
    return there;
  }

 private:
  TensorView at(char* data, Device device) const {
    TensorView view = view_;
    view.data = data + shift_, view.device = device;
    return view;
  }
  const DeviceStream& stream_;
  TensorView view_;
  int64_t shift_ = 0;
  std::shared_ptr<void> device_;
};

// A step of some requests, each with a slot of its own.
struct SlotStep {
  std::vector<int32_t> starts{0}, lens, slots, drafts, accepted;
  std::vector<int32_t> sources = {}, parents = {};  // empty: as in Batch
  int tokens() const { return starts.back(); }
  template <class Spec>
  Batch batch(const Spec& spec) const {
    Batch b;
    b.query_start_loc = starts, b.seq_lens = lens, b.state_slots = slots, b.source_slots = sources;
    if (spec.num_drafts > 0) b.num_drafts = drafts, b.accepted_drafts = accepted;
    if (spec.tree_drafts) b.draft_parents = parents;
    return b;
  }
};

struct SlotProblem {
  PlanLimits limits;
  int longest = 60;  // tokens of a request in a step
  int num_drafts = 0;
  bool trees = false;    // of drafts
  bool sources = false;  // requests may read other slots than they write
  unsigned seed = 1;
};

// The number of earlier tokens of each slot's request, for steps that follow each other as those of a server do.
class SlotRequests {
 public:
  SlotRequests(const SlotProblem& problem, int num_slots) : p_(problem), slots_(size_t(num_slots)), random_(problem.seed) {}
  SlotStep next() {
    SlotStep step;
    std::vector<int32_t> order(slots_.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    const int kind = below(4), count = below(std::min(p_.limits.max_num_reqs, int(order.size())) + 1);
    for (int r = 0; r < count; ++r) {
      const bool moves = p_.sources && size_t(count + r) < order.size() && below(2) == 0;
      // A source that two requests read: neither writes it.
      if (moves && r > 0 && step.sources.back() >= 0 && step.sources.back() != step.slots.back() && below(3) == 0)
        order[size_t(r)] = step.sources.back();
      const int32_t source = order[size_t(r)], written = order[size_t(moves ? count + r : r)];
      Slot slot = slots_[size_t(source)];
      if (below(5) == 0) slot = {};  // another request gets it
      const int left = p_.limits.max_num_tokens - step.tokens(), most = kind == 0 ? 1 : kind == 1 ? 9 : p_.longest;
      const int q_len = std::min(below(6) == 0 ? 0 : 1 + below(below(2) == 0 ? most : std::min(most, 9)), left);
      const int drafts = kind == 2 ? 0 : std::min(below(p_.num_drafts + 1), q_len);
      const int accepted = below(slot.drafts + 1), done = slot.done + (q_len > 0 ? accepted : 0);
      step.starts.push_back(step.tokens() + q_len);
      step.lens.push_back(done + q_len);
      step.slots.push_back(q_len > 0 ? written : -7);
      if (p_.sources) step.sources.push_back(q_len > 0 && done > 0 ? source : -3);
      for (int t = 0; p_.trees && t < q_len; ++t) {
        const int certain = q_len - drafts;
        step.parents.push_back(t < certain ? -9 : certain - 1 + below(t - certain + 1));
      }
      step.drafts.push_back(q_len > 0 ? drafts : 99);
      step.accepted.push_back(q_len == 0 ? -5 : done == 0 ? 0 : accepted);
      if (q_len > 0) slots_[size_t(written)] = {done + q_len - drafts, drafts};
    }
    return step;
  }

 private:
  struct Slot {
    int done = 0, drafts = 0;  // tokens that stay, and those behind them that a step may keep
  };
  int below(int n) { return int(random_() % unsigned(std::max(n, 1))); }
  SlotProblem p_;
  std::vector<Slot> slots_;
  std::mt19937 random_;
};

// The lists of a step in a device's memory, as many as the limits allow: requests that a step does not have are without tokens.
class SlotLists {
 public:
  SlotLists(const DeviceStream& stream, int max_num_reqs, int max_num_tokens) {
    for (int i = 0; i < 6; ++i) lists_.emplace_back(stream, DType::i32, std::vector<int64_t>{max_num_reqs + (i == 0)});
    lists_.emplace_back(stream, DType::i32, std::vector<int64_t>{max_num_tokens});
  }
  void send(const SlotStep& step) {
    const auto put = [&](size_t list, const std::vector<int32_t>& values, int32_t rest) {
      int32_t* const to = lists_[list].on_host().as<int32_t>();
      std::fill_n(to, lists_[list].bytes.size() / 4, rest);
      std::copy(values.begin(), values.end(), to);
      lists_[list].upload();
    };
    put(0, step.starts, step.tokens()), put(1, step.lens, 0), put(2, step.slots, -1), put(3, step.drafts, -1), put(4, step.accepted, -1);
    put(5, step.sources.empty() ? step.slots : step.sources, -1);
    if (!step.parents.empty()) put(6, step.parents, -9);
  }
  template <class Spec>
  DeviceBatch batch(const Spec& spec) const {
    DeviceBatch batch{.query_start_loc = lists_[0].on_device(), .seq_lens = lists_[1].on_device()};
    batch.state_slots = lists_[2].on_device(), batch.source_slots = lists_[5].on_device();
    if (spec.tree_drafts) batch.draft_parents = lists_[6].on_device();
    if (spec.num_drafts > 0) batch.num_drafts = lists_[3].on_device(), batch.accepted_drafts = lists_[4].on_device();
    return batch;
  }

 private:
  std::vector<Twin> lists_;  // starts, lens, slots, drafts, accepted, sources, parents
};

}  // namespace imbrex::cuda::test
