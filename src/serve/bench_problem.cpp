// The tensors of one benchmark: random data, pages in shuffled order, caches written by the backend itself. Used by bench.cpp.
#include "serve/bench_problem.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "core/check.h"
#include "core/float_types.h"

namespace imbrex::serve {
namespace {

// Rows are cut at random places out of one strip of normal numbers: as good as fresh ones for timing, at the speed of memcpy.
void fill_random(HostTensor& t, std::mt19937_64& random) {
  const int64_t count = t.num_elements(), row = t.sizes.back(), size = size_of(t.dtype), strip = std::max<int64_t>(row, 1 << 14);
  if (count == 0) return;
  std::vector<char> numbers(size_t((strip + row) * size));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < strip + row; ++i) store_from_float(numbers.data(), t.dtype, i, normal(random));
  for (int64_t at = 0; at < count; at += row) {
    std::memcpy(t.bytes.data() + at * size, numbers.data() + int64_t(random() % uint64_t(strip)) * size, size_t(row * size));
  }
}

HostTensor random_f32(bool wanted, std::vector<int64_t> sizes, std::mt19937_64& random) {
  if (!wanted) return {};
  HostTensor t = HostTensor::make(DType::f32, std::move(sizes));
  fill_random(t, random);
  return t;
}

// Rows [begin, end) and heads [head, head + heads) of a [rows, heads, dim] tensor.
HostTensor cut(const HostTensor& t, int64_t begin, int64_t end, int64_t head, int64_t heads) {
  HostTensor part = HostTensor::make(t.dtype, {end - begin, heads, t.sizes[2]});
  const int64_t head_bytes = t.sizes[2] * size_of(t.dtype);
  for (int64_t row = begin; row < end; ++row) {
    std::memcpy(part.bytes.data() + (row - begin) * heads * head_bytes, t.bytes.data() + (row * t.sizes[1] + head) * head_bytes,
                size_t(heads * head_bytes));
  }
  return part;
}

// Columns of a f32 [.., heads] parameter.
HostTensor cut_heads(const HostTensor& t, int64_t head, int64_t heads) {
  if (t.empty()) return {};
  std::vector<int64_t> sizes = t.sizes;
  sizes.back() = heads;
  HostTensor part = HostTensor::make(DType::f32, sizes);
  for (int64_t i = 0; i < part.num_elements(); ++i) part.set(i, t.get(i / heads * t.sizes.back() + head + i % heads));
  return part;
}

}  // namespace

BenchProblem::BenchProblem(const Backend& backend, const AttentionSpec& spec, const DeviceInfo& device,
                           const std::vector<BenchRequest>& requests, const BenchOptions& options)
    : spec_(spec), requests_(requests) {
  std::mt19937_64 random(options.seed);
  for (const BenchRequest& r : requests) {
    query_start_loc_.push_back(query_start_loc_.back() + r.q_len);
    seq_lens_.push_back(r.seq_len);
    key_start_.push_back(key_start_.back() + r.seq_len);
    mask_start_.push_back(mask_start_.back() + int64_t(r.q_len) * r.seq_len);
    limits_.max_seq_len = std::max(limits_.max_seq_len, r.seq_len);
  }
  limits_.max_num_reqs = int(requests.size());
  limits_.max_num_tokens = std::max(query_start_loc_.back(), 1);
  const int64_t tokens = query_start_loc_.back(), keys = key_start_.back(), heads = spec.num_q_heads;
  q_ = HostTensor::make(spec.q_dtype, {tokens, heads, spec.head_dim_qk});
  k_ = HostTensor::make(spec.kv_dtype, {keys, spec.num_kv_heads, spec.head_dim_qk});
  v_ = HostTensor::make(spec.kv_dtype, {keys, spec.num_kv_heads, spec.head_dim_v});
  for (HostTensor* t : {&q_, &k_, &v_}) fill_random(*t, random);
  out_ = HostTensor::make(DType::f32, {tokens, heads, spec.head_dim_v});
  lse_ = HostTensor::make(DType::f32, {tokens, heads});
  sinks_ = random_f32(spec.score.sinks, {heads}, random);
  alibi_slopes_ = random_f32(spec.score.alibi, {heads}, random);
  for (int64_t h = 0; spec.score.alibi && h < heads; ++h) alibi_slopes_.set(h, 1.0 / double(int64_t(1) << (1 + h % 8)));
  head_scales_ = random_f32(spec.score.head_scales, {heads}, random);
  relative_bias_ = random_f32(spec.score.relative_buckets > 0, {spec.score.relative_buckets, heads}, random);
  if (spec.mask.custom) {
    custom_mask_ = HostTensor::make(DType::u8, {std::max<int64_t>(mask_start_.back(), 1)});
    for (char& byte : custom_mask_.bytes) byte = random() % 3 != 0;
  }
  batch_.query_start_loc = query_start_loc_;
  batch_.seq_lens = seq_lens_;
  if (spec.mask.custom) batch_.custom_mask = custom_mask_.view();
  if (spec.block_size == 0) {
    batch_.kv_start_loc = TensorView::contiguous(key_start_.data(), DType::i32, {int64_t(key_start_.size())});
    cache_bytes_ = int64_t(k_.bytes.size() + v_.bytes.size());
    return;
  }
  make_tables(options.seed);
  for (int copy = 0; copy < options.kv_copies; ++copy) {
    caches_.emplace_back(spec, 1, num_blocks_, spec.kv_format == KvFormat::strided ? "lbhtd" : "lbh");
  }
  cache_bytes_ = caches_[0].bytes();
  write_caches(backend, device, options);
}

void BenchProblem::make_tables(uint64_t seed) {
  const auto blocks_of = [&](const BenchRequest& r) { return (r.seq_len + spec_.block_size - 1) / spec_.block_size; };
  for (const BenchRequest& r : requests_) {
    num_blocks_ += blocks_of(r);
    max_blocks_ = std::max(max_blocks_, blocks_of(r));
  }
  num_blocks_ = std::max<int64_t>(num_blocks_, 1);
  std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  table_.assign(requests_.size() * size_t(max_blocks_), 0);
  size_t next = 0;
  for (size_t r = 0; r < requests_.size(); ++r) {
    for (int b = 0; b < blocks_of(requests_[r]); ++b) table_[r * size_t(max_blocks_) + size_t(b)] = ids[next++];
  }
  batch_.block_table = TensorView::contiguous(table_.data(), DType::i32, {int64_t(requests_.size()), max_blocks_});
}

// Every key goes through the backend's own write_kv, some thousand tokens at a time.
void BenchProblem::write_caches(const Backend& backend, const DeviceInfo& device, const BenchOptions& options) {
  constexpr int kStep = 4096;
  AttentionSpec spec = spec_;
  spec.mask.custom = false;
  PlanOptions plan_options;
  plan_options.limits = {1, kStep, limits_.max_seq_len};
  plan_options.threads = options.threads;
  const auto plan = backend.plan(spec, device, plan_options);
  for (size_t r = 0; r < requests_.size(); ++r) {
    for (int begin = 0; begin < requests_[r].seq_len; begin += kStep) {
      const int end = std::min(begin + kStep, requests_[r].seq_len);
      std::vector<int64_t> slots;
      for (int t = begin; t < end; ++t) {
        slots.push_back(int64_t(table_[r * size_t(max_blocks_) + size_t(t / spec_.block_size)]) * spec_.block_size + t % spec_.block_size);
      }
      const int32_t query_start_loc[] = {0, end - begin}, seq_lens[] = {end};
      Batch batch;
      batch.query_start_loc = query_start_loc;
      batch.seq_lens = seq_lens;
      batch.block_table = batch_.block_table.slice(0, int64_t(r), int64_t(r) + 1);
      batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {int64_t(slots.size())});
      plan->update(batch);
      for (const KvAllocation& cache : caches_) {
        plan->write_kv(cache.layer(0), k_.view().slice(0, key_start_[r] + begin, key_start_[r] + end),
                       v_.view().slice(0, key_start_[r] + begin, key_start_[r] + end));
      }
    }
  }
}

Inputs BenchProblem::inputs(int copy) const {
  Inputs inputs;
  inputs.q = q_.view();
  if (spec_.block_size == 0) {
    inputs.kv.k = k_.view();
    inputs.kv.v = v_.view();
  } else {
    inputs.kv = caches_[size_t(copy)].layer(0);
  }
  inputs.sinks = sinks_.view();
  inputs.alibi_slopes = alibi_slopes_.view();
  inputs.head_scales = head_scales_.view();
  inputs.relative_bias = relative_bias_.view();
  return inputs;
}

int BenchProblem::sample_queries(int request, int query) const { return spec_.mask.causal ? 1 : requests_[size_t(request)].q_len - query; }

CaseInputs BenchProblem::sample(int request, int query, int kv_head) const {
  const BenchRequest& r = requests_[size_t(request)];
  const int queries = sample_queries(request, query), group = spec_.group_size();
  const int seq_len = spec_.mask.causal ? r.seq_len - r.q_len + query + 1 : r.seq_len;
  const int64_t token = query_start_loc_[size_t(request)] + query, key = key_start_[size_t(request)];
  CaseInputs in;
  in.spec = spec_;
  in.spec.num_q_heads = group;
  in.spec.num_kv_heads = 1;
  in.spec.kv_format = KvFormat::strided;
  in.spec.block_size = 0;
  in.requests = {{queries, seq_len, 0}};
  in.q = cut(q_, token, token + queries, int64_t(kv_head) * group, group);
  in.k = cut(k_, key, key + seq_len, kv_head, 1);
  in.v = cut(v_, key, key + seq_len, kv_head, 1);
  in.sinks = cut_heads(sinks_, int64_t(kv_head) * group, group);
  in.alibi_slopes = cut_heads(alibi_slopes_, int64_t(kv_head) * group, group);
  in.head_scales = cut_heads(head_scales_, int64_t(kv_head) * group, group);
  in.relative_bias = cut_heads(relative_bias_, int64_t(kv_head) * group, group);
  if (spec_.mask.custom) {
    in.custom_mask = HostTensor::make(DType::u8, {int64_t(queries) * seq_len});
    for (int i = 0; i < queries; ++i) {
      std::memcpy(in.custom_mask.bytes.data() + int64_t(i) * seq_len,
                  custom_mask_.bytes.data() + mask_start_[size_t(request)] + int64_t(query + i) * r.seq_len, size_t(seq_len));
    }
  }
  return in;
}

void BenchProblem::actual(int request, int query, int kv_head, int num_queries, std::vector<float>& out, std::vector<float>& lse) const {
  const int64_t token = query_start_loc_[size_t(request)] + query, group = spec_.group_size(), first = int64_t(kv_head) * group;
  const HostTensor rows = cut(out_, token, token + num_queries, first, group);
  out.resize(size_t(rows.num_elements()));
  std::memcpy(out.data(), rows.bytes.data(), rows.bytes.size());
  lse.clear();
  for (int64_t t = token; t < token + num_queries; ++t) {
    for (int64_t h = first; h < first + group; ++h) lse.push_back(float(lse_.get(t * spec_.num_q_heads + h)));
  }
}

}  // namespace imbrex::serve
