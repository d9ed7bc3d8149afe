// See mla_bench.h.
#include "serve/mla_bench.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "attention/kv_codec.h"
#include "conformance/mla/cases.h"
#include "core/check.h"
#include "core/float_types.h"
#include "imbrex/block_pool.h"
#include "imbrex/device_stream.h"
#include "mla/cost.h"
#include "serve/bench.h"
#include "serve/synthetic.h"

namespace imbrex::serve {
namespace {

constexpr int kLatentsAtOnce = 4096;  // latents that are made and written at a time
constexpr int kSampledQueries = 4;

// The tensors of one benchmark, where the device has them.
class MlaProblem {
 public:
  MlaProblem(const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const std::vector<BenchRequest>& requests,
             const MlaBenchOptions& options, const DeviceStream& stream)
      : spec_(spec), requests_(requests), stream_(stream), synthetic_(options.seed), common_keys_(options.common_keys) {
    make_tables(options.seed);
    const int64_t tokens = starts_.back(), rows = int64_t(spec.qk_nope_dim) + spec.v_dim;
    q_ = stream.copy_of(rows_of(Side::q, 0, tokens * spec.num_heads, spec.q_dim(), spec.dtype).view());
    q_.view = TensorView::contiguous(q_.view.data, spec.dtype, {tokens, spec.num_heads, spec.q_dim()}, stream.device());
    out_ = stream.tensor(spec.dtype, {tokens, spec.num_heads, spec.out_dim()});
    lse_ = stream.tensor(DType::f32, {tokens, spec.num_heads});
    if (spec.sinks) sinks_ = stream.copy_of(HostTensor::make(DType::f32, {spec.num_heads}).view());
    const HostTensor weight = spec.absorbed ? HostTensor{} : weights(0, spec.num_heads);
    const AttentionSpec latent = spec.latent_spec();
    copy_bytes_ = num_blocks_ * block_bytes(latent) + (spec.absorbed ? 0 : spec.num_heads * rows * spec.kv_lora_rank * size_of(spec.dtype));
    for (int copies = copies_wanted(options.copies); int(copies_.size()) < copies;)
      copies_.push_back(
          {KvAllocation(latent, 1, num_blocks_, "lbhtd", &stream), spec.absorbed ? DeviceTensor{} : stream.copy_of(weight.view())});
    write_caches(backend, device, options);
  }

  const Batch& batch() const { return batch_; }
  PlanLimits limits() const { return limits_; }
  int64_t copy_bytes() const { return copy_bytes_; }
  int copies() const { return int(copies_.size()); }
  MlaInputs inputs(int copy) const {
    const Copy& c = copies_[size_t(copy)];
    return {.q = q_.view, .kv_b = c.kv_b.view, .kv = c.cache.layer(0), .sinks = sinks_.view};
  }
  MlaOutputs outputs() const { return {.out = out_.view, .lse = lse_.view}; }

  // One query of one head, as a request of its own, which has the keys of the query's path where the request is a tree of drafts; and what
  // run() has left of it.
  MlaCaseInputs sample(int request, int query, int head) const;
  RunResult actual(int request, int query, int head) const;

 private:
  struct Copy {
    KvAllocation cache;
    DeviceTensor kv_b;
  };

  void make_tables(uint64_t seed) {
    int max_blocks = 1;
    const auto blocks_of = [&](const BenchRequest& r) { return (r.seq_len + spec_.block_size - 1) / spec_.block_size; };
    for (size_t i = 0; i < requests_.size(); ++i) {
      const BenchRequest& r = requests_[i];
      starts_.push_back(starts_.back() + r.q_len);
      lens_.push_back(r.seq_len);
      key_start_.push_back(key_start_.back() + r.seq_len);
      num_blocks_ += blocks_of(r) - common_keys(i) / spec_.block_size;
      max_blocks = std::max(max_blocks, blocks_of(r));
      limits_.max_seq_len = std::max(limits_.max_seq_len, r.seq_len);
      limits_.max_query_len = std::max(limits_.max_query_len, r.q_len);
      // Two drafts behind each, as far as there are, in a request that is short enough for a tree.
      for (int t = 0; spec_.mask.tree && t < r.q_len; ++t) parents_.push_back(is_tree(r) ? (t + 1) / 2 - 1 : t - 1);
    }
    limits_.max_num_reqs = int(requests_.size());
    limits_.max_num_tokens = std::max(starts_.back(), 1);
    limits_.shared_prompts = common_keys_ > 0;
    num_blocks_ = std::max<int64_t>(num_blocks_, 1);
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
    table_.assign(requests_.size() * size_t(max_blocks), 0);
    size_t next = 0;
    for (size_t r = 0; r < requests_.size(); ++r) {
      const int common = common_keys(r) / spec_.block_size;
      std::copy_n(table_.begin(), common, table_.begin() + int64_t(r) * max_blocks);
      for (int b = common; b < blocks_of(requests_[r]); ++b) table_[r * size_t(max_blocks) + size_t(b)] = ids[next++];
    }
    batch_.query_start_loc = starts_, batch_.seq_lens = lens_, batch_.draft_parents = parents_;
    batch_.block_table = TensorView::contiguous(table_.data(), DType::i32, {int64_t(requests_.size()), max_blocks});
  }

  // Keys whose blocks are those of request 0.
  int common_keys(size_t request) const {
    if (request == 0) return 0;
    const BenchRequest &first = requests_[0], &r = requests_[request];
    return std::min({common_keys_, first.seq_len - first.q_len, r.seq_len - r.q_len}) / spec_.block_size * spec_.block_size;
  }

  bool is_tree(const BenchRequest& r) const { return spec_.mask.tree && r.q_len <= kMostTreeTokens; }

  // New latents come in the cache's type, unless it quantises them by scales of its own.
  DType new_dtype() const { return codec_of(spec_.kv_format).scales_inside ? spec_.dtype : spec_.kv_dtype; }

  // Rows [first, first + count) of an endless matrix: stretches of one array of numbers, the same whenever they are made.
  HostTensor rows_of(Side side, int64_t first, int64_t count, int dim, DType dtype) const {
    HostTensor rows = HostTensor::make(dtype, {count, dim});
    const auto pool = synthetic_.pool();
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t* const from = pool.data() + synthetic_.offset(side, 0, 0, uint64_t(first + i));
      if (dtype == DType::bf16) {
        std::memcpy(&rows.bytes[size_t(i * dim) * 2], from, size_t(dim) * 2);
      } else {
        for (int d = 0; d < dim; ++d) store_from_float(rows.bytes.data(), dtype, i * dim + d, bf16_to_float(from[d]));
      }
    }
    return rows;
  }

  // Of heads [first, first + count): keys and values then are as large as their latents.
  HostTensor weights(int first, int count) const {
    const int64_t rows = int64_t(spec_.qk_nope_dim) + spec_.v_dim, rank = spec_.kv_lora_rank;
    HostTensor weight = rows_of(Side::v, first * rows, count * rows, spec_.kv_lora_rank, spec_.dtype);
    for (int64_t i = 0; i < weight.num_elements(); ++i) weight.set(i, weight.get(i) / std::sqrt(double(rank)));
    weight.sizes = {count, rows, rank};
    return weight;
  }

  // The number that stays out of a GPU's L2 when calls take turns: several hundred megabytes, where they fit.
  int copies_wanted(int asked) const {
    if (asked > 0) return asked;
    if (!stream_.asynchronous()) return 1;
    constexpr int64_t kInTurn = 600'000'000, kMost = 64;
    const int64_t wanted = std::min(kMost, kInTurn / copy_bytes_ + 1);
    return int(std::clamp<int64_t>(stream_.free_bytes() / 10 * 9 / copy_bytes_, 1, wanted));
  }

  // Latents [0, count) of a request.
  HostTensor latents_of(size_t request, int64_t count) const {
    const int64_t common = std::min<int64_t>(common_keys(request), count);
    HostTensor latents = rows_of(Side::k, 0, common, spec_.latent_dim(), new_dtype());
    const HostTensor own = rows_of(Side::k, key_start_[request] + common, count - common, spec_.latent_dim(), new_dtype());
    latents.bytes.insert(latents.bytes.end(), own.bytes.begin(), own.bytes.end());
    latents.sizes[0] = count;
    return latents;
  }

  void write_caches(const BackendOf<MlaFamily>&, const DeviceInfo&, const MlaBenchOptions&);

  const MlaSpec spec_;
  const std::vector<BenchRequest> requests_;
  const DeviceStream& stream_;
  const Synthetic synthetic_;
  PlanLimits limits_{.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = 1};
  std::vector<int32_t> starts_{0}, lens_, parents_, table_;
  std::vector<int64_t> key_start_{0};
  int64_t num_blocks_ = 0, copy_bytes_ = 0;
  const int common_keys_;
  Batch batch_;
  DeviceTensor q_, out_, lse_, sinks_;
  std::vector<Copy> copies_;
};

// Every latent goes through the backend's own write_kv, some thousand tokens at a time.
void MlaProblem::write_caches(const BackendOf<MlaFamily>& backend, const DeviceInfo& device, const MlaBenchOptions& options) {
  const auto plan = backend.plan(
      spec_, device, {.limits = {1, kLatentsAtOnce, std::max(limits_.max_seq_len, kLatentsAtOnce)}, .threads = options.threads});
  const int64_t rank = spec_.kv_lora_rank;
  for (size_t r = 0; r < requests_.size(); ++r) {
    for (int begin = common_keys(r); begin < requests_[r].seq_len; begin += kLatentsAtOnce) {
      const int end = std::min(begin + kLatentsAtOnce, requests_[r].seq_len);
      const TensorView blocks = batch_.block_table.slice(0, int64_t(r), int64_t(r) + 1);
      std::vector<int64_t> slots;
      append_slots({blocks.as<const int32_t>(), size_t(blocks.size(1))}, spec_.block_size, begin, end, slots);
      const int32_t query_start_loc[] = {0, end - begin}, seq_lens[] = {end};
      Batch batch;
      batch.query_start_loc = query_start_loc, batch.seq_lens = seq_lens, batch.block_table = blocks;
      batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {int64_t(slots.size())});
      plan->update(batch, stream_.get());
      const DeviceTensor rows =
          stream_.copy_of(rows_of(Side::k, key_start_[r] + begin, end - begin, spec_.latent_dim(), new_dtype()).view());
      const TensorView rope = spec_.qk_rope_dim > 0 ? rows.view.slice(1, rank, spec_.latent_dim()) : TensorView{};
      for (const Copy& copy : copies_) plan->write_kv(copy.cache.layer(0), rows.view.slice(1, 0, rank), rope, stream_.get());
      stream_.synchronize();
    }
  }
}

MlaCaseInputs MlaProblem::sample(int request, int query, int head) const {
  const BenchRequest& r = requests_[size_t(request)];
  const int context = r.seq_len - r.q_len, dim = spec_.latent_dim();
  std::vector<int> path;  // of a tree: the query and those above it
  if (is_tree(r))
    for (int t = query; t >= 0; t = parents_[size_t(starts_[size_t(request)]) + size_t(t)]) path.insert(path.begin(), t);
  const int in_order = is_tree(r) ? context : spec_.mask.causal ? context + query + 1 : r.seq_len, seq_len = in_order + int(path.size());
  MlaCaseInputs in{.spec = spec_, .attention = {}, .kv_b = {}};
  in.spec.num_heads = 1;
  in.spec.mask.tree = false;
  CaseInputs& a = in.attention;
  a.requests = {{1, seq_len, 0}};
  a.spec = in.spec.latent_spec();
  a.k = latents_of(size_t(request), in_order);
  for (const int t : path) {
    const HostTensor key = rows_of(Side::k, key_start_[size_t(request)] + context + t, 1, dim, new_dtype());
    a.k.bytes.insert(a.k.bytes.end(), key.bytes.begin(), key.bytes.end());
  }
  a.k.sizes = {seq_len, 1, dim};
  if (codec_of(spec_.kv_format).scales_inside) {  // what the records stand for
    a.v = first_elements(a.k, spec_.kv_lora_rank);
    a.k = as_read(a, KvPart::k);
    in.spec.kv_dtype = DType::f32;
  }
  in.spec.kv_format = KvFormat::latent;
  a.spec = in.spec.latent_spec();
  a.spec.kv_format = KvFormat::strided, a.spec.block_size = 0;
  a.v = first_elements(a.k, spec_.kv_lora_rank);
  const int64_t row = (int64_t(starts_[size_t(request)]) + query) * spec_.num_heads + head;
  const HostTensor q = rows_of(Side::q, row, 1, spec_.q_dim(), spec_.dtype);
  a.q = HostTensor::make(spec_.dtype, {1, 1, dim});
  std::memcpy(a.q.bytes.data(), q.bytes.data(), std::min(q.bytes.size(), a.q.bytes.size()));
  if (spec_.sinks) a.sinks = HostTensor::make(DType::f32, {1});
  if (!spec_.absorbed) in.kv_b = weights(head, 1);
  return in;
}

RunResult MlaProblem::actual(int request, int query, int head) const {
  const int64_t row = (int64_t(starts_[size_t(request)]) + query) * spec_.num_heads + head, dim = spec_.out_dim();
  HostTensor out = HostTensor::make(spec_.dtype, {dim}), lse = HostTensor::make(DType::f32, {1});
  stream_.download(out.bytes.data(), out_.view.as<char>() + row * dim * size_of(spec_.dtype), int64_t(out.bytes.size()));
  stream_.download(lse.bytes.data(), lse_.view.as<float>() + row, sizeof(float));
  stream_.synchronize();
  RunResult result;
  for (int64_t i = 0; i < dim; ++i) result.out.push_back(float(out.get(i)));
  result.lse = {float(lse.get(0))};
  return result;
}

// The last query of a few requests or one in the middle, each of another head.
void check_outputs(const BackendOf<MlaFamily>& backend, const MlaProblem& problem, const MlaSpec& spec,
                   const std::vector<BenchRequest>& requests, MlaBenchResult& result) {
  int taken = 0;
  for (size_t r = 0; r < requests.size() && taken < kSampledQueries; r += std::max<size_t>(1, requests.size() / kSampledQueries)) {
    if (requests[r].q_len == 0) continue;
    const int request = int(r), query = taken % 2 == 1 ? requests[r].q_len / 2 : requests[r].q_len - 1;
    const int head = int(int64_t(taken) * (spec.num_heads - 1) / (kSampledQueries - 1));
    const Expected expected = expect(problem.sample(request, query, head));
    const Judgement judgement = judge(expected, problem.actual(request, query, head));
    check(judgement.pass(), "bench.check", "{} on {}: request {}, query {}, head {} differs from the reference: {}", backend.name(),
          spec.str(), request, query, head, judgement.failure);
    result.check_error = std::max(result.check_error, judgement.out.max);
    result.check_allowed = std::max(result.check_allowed, expected.bounds.max);
    ++taken;
  }
}

}  // namespace

MlaWork work_of(const MlaSpec& spec, const std::vector<BenchRequest>& requests) {
  const AttentionSpec latent = spec.latent_spec(), expanded = spec.expanded_spec();
  const double product = spec.absorbed ? 0 : operations_of(spec).product;
  MlaWork work{.weight_bytes = product / 2 * double(size_of(spec.dtype))};
  for (const BenchRequest& r : requests) {
    const Work in_latent = work_of(latent, {r});
    work.kv_bytes += in_latent.kv_bytes;
    const double keys = in_latent.kv_bytes / double(spec.kv_bytes_per_token());
    const double fewer = in_latent.flops + product * r.q_len;
    work.flops += spec.absorbed ? in_latent.flops : std::min(fewer, work_of(expanded, {r}).flops + product * keys);
  }
  return work;
}

MlaBenchResult bench(const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device,
                     const std::vector<BenchRequest>& requests, const MlaBenchOptions& options) {
  check(!spec.mask.custom && !spec.mask.positions, "bench.mla.mask", "expected a mask that lengths say all of, got {}", spec.str());
  check(!options.check || spec.qk_nope_dim <= spec.kv_lora_rank, "bench.mla.dims",
        "a check is for queries whose part without a position is at most as long as a latent, got {}", spec.str());
  MlaBenchResult result{work_of(spec, requests)};
  const auto stream = open_stream(device, options.threads);
  const MlaProblem problem(backend, spec, device, requests, options, *stream);
  result.copy_bytes = problem.copy_bytes();
  result.copies = problem.copies();
  const auto plan = backend.plan(spec, device, {.limits = problem.limits(), .threads = options.threads, .balanced = options.balanced});
  result.captured = stream->asynchronous() && plan->capturable();
  result.plan_s = best_seconds([&] { plan->update(problem.batch(), stream->get()); });
  result.plan = plan->str();
  const MlaOutputs outputs = problem.outputs();
  plan->run(problem.inputs(0), outputs, stream->get());
  if (options.check) check_outputs(backend, problem, spec, requests, result);
  int copy = 0;
  const auto run = [&] {
    plan->run(problem.inputs(copy), outputs, stream->get());
    copy = (copy + 1) % result.copies;
  };
  static_cast<Timing&>(result) = time_calls(run, *stream, result.captured, result.copies, options);
  return result;
}

Share share_of(const MlaBenchResult& r, const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const Ceilings& c,
               const DeviceInfo& device) {
  if (c.dram_read <= 0) return {};
  const bool in_cache = stays_in_cache(r.copy_bytes * r.copies, c, device);
  const double memory = (r.kv_bytes + r.weight_bytes) / r.median_s / (in_cache ? c.l3_read : c.dram_read);
  const double arithmetic = r.flops / r.median_s / c.flops_for(backend.name(), to_string(spec.dtype));
  if (arithmetic >= memory) return {arithmetic, "flop"};
  return {memory, in_cache ? "L3" : "DRAM"};
}

}  // namespace imbrex::serve
