#pragma once
// Random batches through one captured graph and through eager calls, bit for bit: on a GPU, and on the fake driver.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "attention/draft_tree.h"
#include "attention/kv_codec.h"
#include "attention/shared_keys.h"
#include "cuda/driver/memory.h"
#include "cuda/graph.h"
#include "imbrex/backend.h"

namespace imbrex::cuda::test {

struct GraphProblem {
  AttentionSpec spec;  // paged; under Mask::tree requests are random trees, or chains
  PlanLimits limits{.max_num_reqs = 12, .max_num_tokens = 300, .max_seq_len = 3000};
  bool device_arrays = false;   // block table, slots and mask in device memory, where they stay; otherwise on the host
  bool device_lengths = false;  // with device_arrays: the graph has an update_on_device() in it, and copies of lengths between its replays
  bool packed_mask = false;     // a custom mask has bits
  bool shared_blocks = false;   // in half of the steps requests begin with blocks of others; with host arrays plans share items then
  bool balanced = false;        // lists follow the load
  bool apart = false;           // a third plan has its arrays in device memory, so that it shares none: the bits are the same
  bool shared_scratch = false;  // of both plans; in the middle a third, larger one joins them
  bool beside = false;          // eager calls have a stream of their own: both plans run at the same time, several times
  int keys = 12800;             // that the cache has room for
  int batches = 100;
  unsigned seed = 1;
};

// One step: any mix of padded and empty requests, decode, verify, chunks and whole prompts, in pages of their own.
struct RandomStep {
  std::vector<int32_t> starts{0}, lens, table, parents;
  std::vector<int64_t> slots;
  std::vector<uint8_t> mask;
  int width = 0;

  RandomStep(const GraphProblem& p, int num_blocks, std::mt19937& random) {
    const auto below = [&](int n) { return int(random() % unsigned(std::max(n, 1))); };
    const int longest = p.limits.max_query_len > 0 ? p.limits.max_query_len : p.limits.max_num_tokens;
    std::vector<int32_t> pages(static_cast<size_t>(num_blocks));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random);
    width = (p.limits.max_seq_len + p.spec.block_size - 1) / p.spec.block_size;
    const int count = below(p.limits.max_num_reqs + 1);
    const bool only_decode = below(3) == 0;
    const bool shares = p.shared_blocks && below(2) == 0;
    size_t page = 0;
    for (int r = 0; r < count; ++r) {
      const int left = std::min(longest, p.limits.max_num_tokens - starts.back());
      const int kind = only_decode ? 2 : below(6);
      int context = below(kind == 5 ? 1 : p.limits.max_seq_len), other = -1;  // other: whose blocks it begins with, as long as that is
      if (shares && r > 0 && below(p.balanced ? 15 : 5) > 0) {
        other = p.balanced ? std::max(0, r - 1 - below(2)) : below(r);  // where lists follow the load, neighbours share
        context = std::max(0, lens[size_t(other)] - below(60));
      }
      int q_len = kind < 2 ? 0 : kind == 2 ? 1 : kind == 3 ? 1 + below(16) : 1 + below(150);
      q_len = std::min(q_len, left);
      int seq_len = kind == 0 ? 0 : std::min(context + q_len, p.limits.max_seq_len);
      while ((seq_len + p.spec.block_size - 1) / p.spec.block_size > int(pages.size() - page)) seq_len /= 2;
      q_len = std::min(q_len, seq_len);
      starts.push_back(starts.back() + q_len);
      lens.push_back(seq_len);
      const size_t row = table.size();
      table.resize(row + size_t(width), -1);
      int common = 0;  // blocks, all of them within the contexts of both requests
      if (other >= 0) {
        const int context_of_other = lens[size_t(other)] - (starts[size_t(other) + 1] - starts[size_t(other)]);
        common = std::min(context_of_other, seq_len - q_len) / p.spec.block_size;
        if (below(p.balanced ? 9 : 3) == 0) common = below(common + 1);
      }
      for (int b = 0; b * p.spec.block_size < seq_len; ++b)
        table[row + size_t(b)] = b < common ? table[size_t(other * width + b)] : pages[page++];
      for (int j = seq_len - q_len; j < seq_len; ++j)
        slots.push_back(below(20) == 0 ? -1
                                       : int64_t(table[row + size_t(j / p.spec.block_size)]) * p.spec.block_size + j % p.spec.block_size);
      if (p.spec.mask.custom)
        for (int i = 0; i < (p.packed_mask ? (q_len * seq_len + 7) / 8 : q_len * seq_len); ++i)
          mask.push_back(uint8_t(p.packed_mask ? below(256) : below(3) > 0));
      if (p.spec.mask.tree) {
        const bool chain = q_len > kMostTreeTokens || below(4) == 0;
        for (int t = 0; t < q_len; ++t) parents.push_back(chain ? t - 1 : below(t + 1) - 1);
      }
    }
  }
};

class GraphAgainstEager {
 public:
  GraphAgainstEager(const Backend& backend, const DeviceInfo& device, ContextPtr context, const GraphProblem& problem)
      : p_(problem),
        backend_(backend),
        info_(device),
        context_(std::move(context)),
        stream_(context_),
        eager_stream_(context_),
        device_(device.device),
        random_(problem.seed) {
    if (p_.shared_scratch) workspace_ = make_workspace(device);
    for (Side* side : sides()) {
      side->plan = backend.plan(p_.spec, device, options());
      side->k = fill(rows(p_.keys, p_.spec.num_kv_heads, p_.spec.head_dim_qk, p_.spec.kv_dtype), 5);
      side->v = fill(rows(p_.keys, p_.spec.num_kv_heads, p_.spec.head_dim_v, p_.spec.kv_dtype), 6);
      side->out = rows(p_.limits.max_num_tokens, p_.spec.num_q_heads, p_.spec.head_dim_v, p_.spec.q_dtype);
      side->lse = rows(p_.limits.max_num_tokens, p_.spec.num_q_heads, 1, DType::f32);
      const int64_t width = (p_.limits.max_seq_len + p_.spec.block_size - 1) / p_.spec.block_size;
      side->table = DeviceBuffer(context_, size_t(p_.limits.max_num_reqs * width) * sizeof(int32_t));
      side->slots = DeviceBuffer(context_, size_t(p_.limits.max_num_tokens) * sizeof(int64_t));
      side->starts = DeviceBuffer(context_, size_t(p_.limits.max_num_reqs + 1) * sizeof(int32_t));
      side->lens = DeviceBuffer(context_, size_t(p_.limits.max_num_reqs) * sizeof(int32_t));
      side->mask = DeviceBuffer(context_, size_t(p_.limits.max_num_tokens) * size_t(p_.limits.max_seq_len));
      side->parents = DeviceBuffer(context_, size_t(p_.limits.max_num_tokens) * sizeof(int32_t));
    }
    q_ = fill(rows(p_.limits.max_num_tokens, p_.spec.num_q_heads, p_.spec.head_dim_qk, p_.spec.q_dtype), 1);
    new_k_ = fill(rows(p_.limits.max_num_tokens, p_.spec.num_kv_heads, p_.spec.head_dim_qk, p_.spec.q_dtype), 2);
    new_v_ = fill(rows(p_.limits.max_num_tokens, p_.spec.num_kv_heads, p_.spec.head_dim_v, p_.spec.q_dtype), 3);
    sinks_ = fill(DeviceBuffer(context_, size_t(p_.spec.num_q_heads) * sizeof(float)), 4);
  }

  void run() {
    const CurrentContext current(*context_);
    {
      RandomStep first(p_, num_blocks(), random_);
      while (p_.device_arrays && first.slots.empty()) first = RandomStep(p_, num_blocks(), random_);  // it has to say where its arrays are
      if (!p_.device_lengths) update(graph_, first);
    }
    const Graph graph(stream_.get(), [&] {
      if (p_.device_lengths) update_on_device(graph_);
      layer(graph_);
    });
    int merged = 0, shared = 0;
    for (int batch = 0; batch < p_.batches && !testing::Test::HasFailure(); ++batch) {
      if (workspace_ && batch == p_.batches / 2) grow();
      const RandomStep step(p_, num_blocks(), random_);
      for (Side* side : sides()) {
        fill_bytes(side->out.address(), 0xff, side->out.bytes(), stream_.get());
        fill_bytes(side->lse.address(), 0xff, side->lse.bytes(), stream_.get());
        if (p_.device_lengths && side == &graph_) {
          send(graph_, step);
        } else {
          update(*side, step);
        }
      }
      for (int time = 0; time < (p_.beside ? 5 : 1); ++time) {
        graph.replay();
        layer(eager_);
      }
      if (p_.apart) layer(apart_);
      stream_.synchronize(), eager_stream_.synchronize();
      const std::string what = eager_.plan->str() + ", batch " + std::to_string(batch);
      if (p_.device_lengths) {
        EXPECT_EQ(graph_.plan->device_problems(stream_.get()), std::vector<Reason>{}) << what;
      } else {
        EXPECT_EQ(eager_.plan->str(), graph_.plan->str());
      }
      merged += what.find(" 0 merges") == std::string::npos;
      shared += what.find("items shared by requests") != std::string::npos;
      if (p_.apart) {
        EXPECT_TRUE(bytes(apart_.out) == bytes(eager_.out)) << what << ", apart";
        EXPECT_TRUE(bytes(apart_.lse) == bytes(eager_.lse)) << what << ", apart";
        EXPECT_EQ(apart_.plan->str().find("items shared by requests"), std::string::npos);
      }
      EXPECT_TRUE(bytes(graph_.out) == bytes(eager_.out)) << what;
      EXPECT_TRUE(bytes(graph_.lse) == bytes(eager_.lse)) << what;
      EXPECT_TRUE(bytes(graph_.k) == bytes(eager_.k)) << what;
      EXPECT_TRUE(bytes(graph_.v) == bytes(eager_.v)) << what;
      const std::vector<unsigned char> out = bytes(graph_.out);
      const size_t row = size_t(p_.spec.num_q_heads * p_.spec.head_dim_v) * size_t(size_of(p_.spec.q_dtype));
      const size_t used = row * size_t(step.starts.back());
      EXPECT_TRUE(std::all_of(out.begin() + long(used), out.end(), [](unsigned char b) { return b == 0xff; })) << "padding, " << what;
      EXPECT_TRUE(used == 0 || !std::all_of(out.begin(), out.begin() + long(used), [](unsigned char b) { return b == 0xff; })) << what;
    }
    EXPECT_GT(merged, p_.batches / 20) << "too few batches had merges";
    if (p_.shared_blocks && !p_.device_arrays) {
      EXPECT_GT(shared, p_.batches / 20) << "too few batches had shared items";
    } else {
      EXPECT_EQ(shared, 0);
    }
  }

 private:
  const SharingWherever plans_;  // steps are short
  struct Side {
    std::unique_ptr<imbrex::Plan> plan;
    DeviceBuffer k, v, out, lse, table, slots, mask, parents, starts, lens;
  };

  std::vector<Side*> sides() {
    if (p_.apart) return {&graph_, &eager_, &apart_};
    return {&graph_, &eager_};
  }
  CUstream stream_of(const Side& side) const { return p_.beside && &side == &eager_ ? eager_stream_.get() : stream_.get(); }
  int num_blocks() const { return p_.keys / p_.spec.block_size; }
  PlanOptions options() const {
    PlanLimits limits = p_.limits;
    limits.shared_prompts = p_.shared_blocks;
    return {
        .limits = limits, .threads = {}, .balanced = p_.balanced, .on_device = p_.device_lengths, .out_dtype = {}, .workspace = workspace_};
  }
  // The graph's memory stays; what the eager plan finds from now on is elsewhere.
  void grow() {
    const int64_t before = workspace_->bytes();
    PlanOptions larger = options();
    larger.limits.max_num_reqs *= 4, larger.limits.max_num_tokens *= 4, larger.limits.max_seq_len *= 4;
    larger_ = backend_.plan(p_.spec, info_, larger);
    EXPECT_GT(workspace_->bytes(), before);
    EXPECT_GT(before, 0);
  }
  DeviceBuffer rows(int64_t count, int64_t heads, int64_t dim, DType dtype) const {
    return DeviceBuffer(context_, size_t(count * heads * dim * size_of(dtype)));
  }
  // Bytes that are small numbers in every type: the high byte of a 16-bit float, and any fp8, decide the exponent.
  DeviceBuffer fill(DeviceBuffer buffer, unsigned seed) const {
    std::mt19937 random(seed);
    std::vector<uint32_t> words((buffer.bytes() + 3) / 4);
    std::ranges::generate(words, [&] { return uint32_t(random() & 0x8f8f8f8f) | 0x30303030; });
    copy_to_device(buffer.address(), words.data(), buffer.bytes(), stream_.get());
    stream_.synchronize();
    return buffer;
  }
  std::vector<unsigned char> bytes(const DeviceBuffer& buffer) const {
    std::vector<unsigned char> values(buffer.bytes());
    copy_to_host(values.data(), buffer.address(), values.size(), stream_.get());
    stream_.synchronize();
    return values;
  }
  TensorView view(const DeviceBuffer& buffer, DType dtype, std::initializer_list<int64_t> sizes) const {
    return TensorView::contiguous(buffer.as<void>(), dtype, sizes, device_);
  }

  template <class T>
  TensorView place(const DeviceBuffer& buffer, const std::vector<T>& values, DType dtype, std::initializer_list<int64_t> sizes,
                   bool on_device) const {
    if (!on_device) return TensorView::contiguous(const_cast<T*>(values.data()), dtype, sizes);
    copy_to_device(buffer.address(), values.data(), values.size() * sizeof(T), stream_.get());
    stream_.synchronize();
    return view(buffer, dtype, sizes);
  }
  template <class AnyBatch>
  TensorView& mask_of(AnyBatch& batch) const {
    return p_.packed_mask ? batch.packed_mask : batch.custom_mask;
  }
  void update(Side& side, const RandomStep& step) {
    Batch batch;
    batch.query_start_loc = step.starts;
    batch.seq_lens = step.lens;
    const int64_t reqs = int64_t(step.lens.size());
    const bool on_device = p_.device_arrays || &side == &apart_;
    if (reqs > 0) batch.block_table = place(side.table, step.table, DType::i32, {reqs, step.width}, on_device);
    const int64_t slots = on_device ? p_.limits.max_num_tokens : int64_t(step.slots.size());  // on a device: for any later batch
    if (!step.slots.empty()) batch.slot_mapping = place(side.slots, step.slots, DType::i64, {slots}, on_device);
    if (!step.mask.empty()) mask_of(batch) = place(side.mask, step.mask, DType::u8, {int64_t(step.mask.size())}, on_device);
    batch.draft_parents = step.parents;
    stream_.synchronize();  // memory is as it should be, whatever stream comes next
    side.plan->update(batch, stream_of(side));
  }
  // For the largest batch, which is what the graph is captured with: requests that a step does not have are padding.
  void update_on_device(Side& side) const {
    const int64_t reqs = p_.limits.max_num_reqs, width = (p_.limits.max_seq_len + p_.spec.block_size - 1) / p_.spec.block_size;
    DeviceBatch batch{.query_start_loc = view(side.starts, DType::i32, {reqs + 1}),
                      .seq_lens = view(side.lens, DType::i32, {reqs}),
                      .block_table = view(side.table, DType::i32, {reqs, width}),
                      .slot_mapping = view(side.slots, DType::i64, {p_.limits.max_num_tokens})};
    if (p_.spec.mask.custom) mask_of(batch) = view(side.mask, DType::u8, {int64_t(side.mask.bytes())});
    if (p_.spec.mask.tree) batch.draft_parents = view(side.parents, DType::i32, {p_.limits.max_num_tokens});
    side.plan->update_on_device(batch, stream_.get());
  }
  void send(const Side& side, RandomStep step) const {
    step.starts.resize(size_t(p_.limits.max_num_reqs) + 1, step.starts.back());
    step.lens.resize(size_t(p_.limits.max_num_reqs), 0);
    const auto copy = [&](const DeviceBuffer& to, const auto& values) {
      copy_to_device(to.address(), values.data(), values.size() * sizeof values[0], stream_.get());
    };
    copy(side.starts, step.starts), copy(side.lens, step.lens), copy(side.table, step.table), copy(side.slots, step.slots);
    copy(side.mask, step.mask), copy(side.parents, step.parents);
    stream_.synchronize();
  }
  void layer(const Side& side) const {
    const AttentionSpec& s = p_.spec;
    const int64_t tokens = p_.limits.max_num_tokens;
    const bool has_values = !codec_of(s).values_in_keys;
    const KvCache cache{
        .k = view(side.k, s.kv_dtype, {num_blocks(), s.block_size, s.num_kv_heads, s.head_dim_qk}),
        .v = has_values ? view(side.v, s.kv_dtype, {num_blocks(), s.block_size, s.num_kv_heads, s.head_dim_v}) : TensorView{},
        .k_scale = {},
        .v_scale = {}};
    side.plan->write_kv(cache, view(new_k_, s.q_dtype, {tokens, s.num_kv_heads, s.head_dim_qk}),
                        has_values ? view(new_v_, s.q_dtype, {tokens, s.num_kv_heads, s.head_dim_v}) : TensorView{}, stream_of(side));
    Inputs in{.q = view(q_, s.q_dtype, {tokens, s.num_q_heads, s.head_dim_qk}), .kv = cache};
    if (s.score.sinks) in.sinks = view(sinks_, DType::f32, {s.num_q_heads});
    side.plan->run(in,
                   {.out = view(side.out, s.q_dtype, {tokens, s.num_q_heads, s.head_dim_v}),
                    .lse = view(side.lse, DType::f32, {tokens, s.num_q_heads})},
                   stream_of(side));
  }

  GraphProblem p_;
  const Backend& backend_;
  DeviceInfo info_;
  ContextPtr context_;
  OwnedStream stream_, eager_stream_;
  Device device_;
  std::mt19937 random_;
  std::shared_ptr<Workspace> workspace_;  // null: each plan has its own
  Side graph_, eager_, apart_;
  std::unique_ptr<imbrex::Plan> larger_;
  DeviceBuffer q_, new_k_, new_v_, sinks_;
};

inline AttentionSpec graph_spec(DType kv = DType::bf16) {
  return {.num_q_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .kv_dtype = kv};
}

}  // namespace imbrex::cuda::test
