// The tensors of one benchmark (see bench_problem.h).
#include "serve/bench_problem.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <regex>

#include "core/check.h"
#include "core/float_types.h"
#include "imbrex/block_pool.h"

namespace imbrex::serve {
namespace {

constexpr int64_t kStep = 4096;  // keys that are made and written at a time

HostTensor random_f32(bool wanted, std::vector<int64_t> sizes, std::mt19937_64& random) {
  if (!wanted) return {};
  HostTensor t = HostTensor::make(DType::f32, std::move(sizes));
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, normal(random));
  return t;
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

// What an expression is to a sample, whose one request and first head have the number 0.
Expression of_sample(const Expression& whole, int request, const BenchRequest& r, int first_head) {
  if (whole.empty()) return {};
  std::string text = whole.text();
  const std::pair<const char*, std::string> values[] = {{"\\bbatch\\b", std::to_string(request)},
                                                        {"\\bhead\\b", "(head + " + std::to_string(first_head) + ")"},
                                                        {"\\bq_len\\b", std::to_string(r.q_len)},
                                                        {"\\bkv_len\\b", std::to_string(r.seq_len)}};
  for (const auto& [name, value] : values) text = std::regex_replace(text, std::regex(name), value);
  return parse_expression(text);
}

// Tensors of expressions, by type and rank: floats are of q heads, falling by powers of two as ALiBi's slopes do, or of these and keys;
// ints are of requests, a quarter of their keys, or of these and keys, numbers of documents of 1000 tokens; bools likewise, two of three
// true.
HostTensor expression_tensor(const ExpressionTensor& wanted, int64_t heads, const std::vector<int32_t>& seq_lens, std::mt19937_64& random) {
  constexpr int64_t kDocument = 1000;
  const int64_t longest = std::max<int64_t>(seq_lens.empty() ? 1 : *std::ranges::max_element(seq_lens), 1);
  check(wanted.rank <= 2, "bench.expression", "bench makes tensors with 1 or 2 indices, {} has {}", wanted.name, wanted.rank);
  const bool real = wanted.type == ExpressionType::real, each = wanted.rank == 1;
  std::vector<int64_t> sizes{real ? heads : std::max<int64_t>(int64_t(seq_lens.size()), 1)};
  if (!each) sizes.push_back(longest);
  if (real && !each) return random_f32(true, sizes, random);
  HostTensor t = HostTensor::make(real ? DType::f32 : wanted.type == ExpressionType::integer ? DType::i32 : DType::u8, sizes);
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    if (real)
      t.set(i, 1.0 / double(int64_t(1) << (1 + i % 8)));
    else if (wanted.type == ExpressionType::boolean)
      t.bytes[size_t(i)] = random() % 3 != 0;
    else
      reinterpret_cast<int32_t*>(t.bytes.data())[i] = int32_t(!each              ? i % longest / kDocument
                                                              : seq_lens.empty() ? 0
                                                                                 : seq_lens[size_t(i)] / 4);
  }
  return t;
}

// A bit for each byte, those of a request from a whole byte on.
HostTensor packed(const HostTensor& bytes, const std::vector<int64_t>& request_start) {
  std::vector<uint8_t> bits;
  for (size_t r = 0; r + 1 < request_start.size(); ++r)
    for (int64_t i = request_start[r], bit = 0; i < request_start[r + 1]; ++i, ++bit) {
      if (bit % 8 == 0) bits.push_back(0);
      bits.back() |= uint8_t((bytes.bytes[size_t(i)] != 0) << bit % 8);
    }
  HostTensor t = HostTensor::make(DType::u8, {int64_t(bits.size())});
  std::ranges::copy(bits, t.bytes.begin());
  return t;
}

}  // namespace

BenchProblem::BenchProblem(const BackendOf<AttentionFamily>& backend, const AttentionSpec& spec, const DeviceInfo& device,
                           const std::vector<BenchRequest>& requests, const BenchOptions& options, const DeviceStream& stream)
    : spec_(spec), requests_(requests), stream_(stream), synthetic_(options.seed), common_keys_(options.common_keys) {
  for (const BenchRequest& r : requests) {
    query_start_loc_.push_back(query_start_loc_.back() + r.q_len);
    seq_lens_.push_back(r.seq_len);
    key_start_.push_back(key_start_.back() + r.seq_len);
    mask_start_.push_back(mask_start_.back() + int64_t(r.q_len) * r.seq_len);
    limits_.max_seq_len = std::max(limits_.max_seq_len, r.seq_len);
    limits_.max_query_len = std::max(limits_.max_query_len, r.q_len);
  }
  limits_.shared_prompts = options.common_keys > 0;
  limits_.max_num_reqs = int(requests.size());
  limits_.max_num_tokens = std::max(query_start_loc_.back(), 1);
  q_numbers_ = numbers_of(spec.q_dtype);
  kv_numbers_ = numbers_of(new_kv_dtype());
  make_parameters(options);
  const auto own = [&](DeviceTensor t) { return owned_.emplace_back(std::move(t)).view; };
  const int64_t tokens = query_start_loc_.back(), keys = key_start_.back();
  inputs_.q = own(stream.tensor(spec.q_dtype, {tokens, spec.num_q_heads, spec.head_dim_qk}));
  make_rows(Side::q, 0, inputs_.q);
  out_ = stream.tensor(DType::f32, {tokens, spec.num_q_heads, spec.head_dim_v});
  lse_ = stream.tensor(DType::f32, {tokens, spec.num_q_heads});
  batch_.query_start_loc = query_start_loc_;
  batch_.seq_lens = seq_lens_;
  check(spec.mask.custom || !options.packed_mask, "bench.packed_mask", "a packed mask needs a layer with a custom mask, got {}",
        spec.str());
  if (options.packed_mask)
    batch_.packed_mask = (packed_mask_ = packed(parameters_.custom_mask, mask_start_)).view();
  else if (spec.mask.custom)
    batch_.custom_mask = parameters_.custom_mask.view();
  batch_.mask_tensors = mask_tensors_;
  batch_.positions = positions_;
  batch_.draft_parents = draft_parents_;
  if (spec.block_size == 0) {
    check(common_keys_ == 0, "bench.common_keys", "ragged keys have no blocks to be common, got {} common keys", common_keys_);
    check(options.kv_order.empty(), "bench.kv_order", "ragged keys have no order to choose, got \"{}\"", options.kv_order);
    inputs_.kv.k = own(stream.tensor(spec.kv_dtype, {keys, spec.num_kv_heads, spec.head_dim_qk}));
    make_rows(Side::k, 0, inputs_.kv.k);
    if (!values_in_keys()) {
      inputs_.kv.v = own(stream.tensor(spec.kv_dtype, {keys, spec.num_kv_heads, spec.head_dim_v}));
      make_rows(Side::v, 0, inputs_.kv.v);
    }
    if (codec_of(spec).layout(spec, KvPart::k_rope)) {  // parts of one tensor
      TensorView &k = inputs_.kv.k, &rope = inputs_.kv.k_rope;
      rope = k;
      rope.data = k.as<char>() + spec.head_dim_v * size_of(spec.kv_dtype);
      k.sizes[2] = spec.head_dim_v, rope.sizes[2] = spec.head_dim_qk - spec.head_dim_v;
    }
    batch_.kv_start_loc = TensorView::contiguous(key_start_.data(), DType::i32, {int64_t(key_start_.size())});
    cache_bytes_ = keys * spec.kv_bytes_per_token();
    return;
  }
  make_tables(options.seed);
  const auto add_cache = [&] {
    const std::string order = options.kv_order.empty() ? "lbhtd" : options.kv_order;
    caches_.emplace_back(spec, 1, num_blocks_, order, &stream);
  };
  add_cache();
  cache_bytes_ = caches_[0].bytes();
  for (int copies = copies_wanted(options.kv_copies); int(caches_.size()) < copies;) add_cache();
  write_caches(backend, device, options);
}

BenchProblem::Numbers BenchProblem::numbers_of(DType dtype) const {
  const auto pool = synthetic_.pool();
  Numbers numbers{.host = HostTensor::make(dtype, {int64_t(pool.size())}), .device = {}};
  for (size_t i = 0; i < pool.size(); ++i) store_from_float(numbers.host.bytes.data(), dtype, int64_t(i), bf16_to_float(pool[i]));
  numbers.device = stream_.copy_of(numbers.host.view());
  return numbers;
}

void BenchProblem::make_parameters(const BenchOptions& options) {
  std::mt19937_64 random(options.seed);
  const int64_t heads = spec_.num_q_heads;
  const ScoreMod& score = spec_.score;
  parameters_.sinks = random_f32(score.sinks, {heads}, random);
  parameters_.alibi_slopes = random_f32(score.alibi, {heads}, random);
  for (int64_t h = 0; score.alibi && h < heads; ++h) parameters_.alibi_slopes.set(h, 1.0 / double(int64_t(1) << (1 + h % 8)));
  parameters_.head_scales = random_f32(score.head_scales, {heads}, random);
  parameters_.relative_bias = random_f32(score.relative_buckets > 0, {score.relative_buckets, heads}, random);
  if (spec_.mask.custom) {
    parameters_.custom_mask = HostTensor::make(DType::u8, {std::max<int64_t>(mask_start_.back(), 1)});
    for (char& byte : parameters_.custom_mask.bytes) byte = random() % 3 != 0;
  }
  // The last query first, as a rank of a context-parallel group has it that takes a chunk from either end of a prompt.
  for (size_t r = 0; spec_.mask.positions && r < seq_lens_.size(); ++r)
    for (int t = query_start_loc_[r]; t < query_start_loc_[r + 1]; ++t) positions_.push_back(seq_lens_[r] - 1 - (t - query_start_loc_[r]));
  // Two drafts behind each, as far as there are, in a request that is short enough for a tree.
  for (size_t r = 0; spec_.mask.tree && r < seq_lens_.size(); ++r)
    for (int t = 0, count = requests_[r].q_len; t < count; ++t) draft_parents_.push_back(is_tree(r) ? (t + 1) / 2 - 1 : t - 1);
  for (const Expression* e : {&spec_.score_mod, &spec_.mask_mod})
    for (const ExpressionTensor& wanted : e->empty() ? std::span<const ExpressionTensor>() : e->tensors())
      if (std::ranges::find(parameters_.expression_tensors, wanted.name, &NamedHostTensor::name) == parameters_.expression_tensors.end())
        parameters_.expression_tensors.push_back({wanted.name, expression_tensor(wanted, heads, seq_lens_, random)});
  const auto place = [&](const HostTensor& t) { return t.empty() ? TensorView{} : owned_.emplace_back(stream_.copy_of(t.view())).view; };
  inputs_.sinks = place(parameters_.sinks);
  inputs_.alibi_slopes = place(parameters_.alibi_slopes);
  inputs_.head_scales = place(parameters_.head_scales);
  inputs_.relative_bias = place(parameters_.relative_bias);
  mask_tensors_ = parameters_.named_tensors();
  for (const auto& [name, tensor] : parameters_.expression_tensors) score_tensors_.push_back({name, place(tensor)});
  inputs_.score_tensors = score_tensors_;
}

void BenchProblem::make_tables(uint64_t seed) {
  const auto blocks_of = [&](const BenchRequest& r) { return (r.seq_len + spec_.block_size - 1) / spec_.block_size; };
  for (size_t r = 0; r < requests_.size(); ++r) {
    num_blocks_ += blocks_of(requests_[r]) - common_keys(r) / spec_.block_size;
    max_blocks_ = std::max(max_blocks_, blocks_of(requests_[r]));
  }
  num_blocks_ = std::max<int64_t>(num_blocks_, 1);
  std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), std::mt19937_64(seed));
  table_.assign(requests_.size() * size_t(max_blocks_), 0);
  size_t next = 0;
  for (size_t r = 0; r < requests_.size(); ++r) {
    const int common = common_keys(r) / spec_.block_size;
    std::copy_n(table_.begin(), common, table_.begin() + int64_t(r) * max_blocks_);
    for (int b = common; b < blocks_of(requests_[r]); ++b) table_[r * size_t(max_blocks_) + size_t(b)] = ids[next++];
  }
  batch_.block_table = TensorView::contiguous(table_.data(), DType::i32, {int64_t(requests_.size()), max_blocks_});
}

int BenchProblem::common_keys(size_t request) const {
  if (request == 0 || common_keys_ == 0) return 0;
  const BenchRequest &first = requests_[0], &r = requests_[request];
  return std::min({common_keys_, first.seq_len - first.q_len, r.seq_len - r.q_len}) / spec_.block_size * spec_.block_size;
}

// The number of caches that keep keys out of a GPU's L2 when calls take turns at them: several hundred megabytes, where they fit.
int BenchProblem::copies_wanted(int asked) const {
  if (asked > 0) return asked;
  if (!stream_.asynchronous()) return 1;
  constexpr int64_t kSmall = 64'000'000, kInTurn = 600'000'000;
  const int64_t wanted = std::min<int64_t>(cache_bytes_ > kSmall ? 8 : 64, kInTurn / cache_bytes_ + 1);
  return int(std::clamp<int64_t>(stream_.free_bytes() / 10 * 9 / cache_bytes_, 1, wanted));
}

void BenchProblem::make_rows(Side side, int64_t first, const TensorView& to) const {
  const int heads = int(to.size(1));
  std::vector<uint64_t> keys;
  std::vector<int32_t> offsets;
  for (int64_t begin = 0; begin < to.size(0); begin += kStep) {
    const int64_t count = std::min(kStep, to.size(0) - begin);
    keys.resize(size_t(count));
    std::iota(keys.begin(), keys.end(), uint64_t(first + begin));
    offsets.resize(size_t(count * heads));
    synthetic_.offsets(side, 0, keys, heads, offsets.data());
    const DeviceTensor where = stream_.copy_of(TensorView::contiguous(offsets.data(), DType::i32, {count * heads}));
    TensorView rows = to.slice(0, begin, begin + count);  // and the same as a matrix
    rows.rank = 2;
    rows.sizes = {count * heads, to.size(2)};
    rows.strides = {to.size(2), 1};
    stream_.gather(numbers(side).device.view, where.view, rows);
    stream_.synchronize();
  }
}

// Every key goes through the backend's own write_kv, some thousand tokens at a time.
void BenchProblem::write_caches(const BackendOf<AttentionFamily>& backend, const DeviceInfo& device, const BenchOptions& options) {
  AttentionSpec spec = spec_;
  spec.mask.custom = false, spec.mask_mod = {}, spec.score_mod = {};
  const PlanOptions plan_options{
      .limits = {1, int(kStep), std::max(limits_.max_seq_len, int(kStep))}, .threads = options.threads, .load_on_demand = true};
  const auto plan = backend.plan(spec, device, plan_options);
  const DeviceTensor k = stream_.tensor(new_kv_dtype(), {kStep, spec.num_kv_heads, spec.head_dim_qk});
  const DeviceTensor v = values_in_keys() ? DeviceTensor{} : stream_.tensor(spec.kv_dtype, {kStep, spec.num_kv_heads, spec.head_dim_v});
  for (size_t r = 0; r < requests_.size(); ++r) {
    for (int64_t begin = common_keys(r); begin < requests_[r].seq_len; begin += kStep) {
      const int64_t end = std::min<int64_t>(begin + kStep, requests_[r].seq_len);
      std::vector<int64_t> slots;
      append_slots(std::span(table_).subspan(r * size_t(max_blocks_), size_t(max_blocks_)), spec_.block_size, int(begin), int(end), slots);
      const int32_t query_start_loc[] = {0, int32_t(end - begin)}, seq_lens[] = {int32_t(end)};
      Batch batch;
      batch.query_start_loc = query_start_loc;
      batch.seq_lens = seq_lens;
      batch.block_table = batch_.block_table.slice(0, int64_t(r), int64_t(r) + 1);
      batch.slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {int64_t(slots.size())});
      plan->update(batch, stream_.get());
      const TensorView new_k = k.view.slice(0, 0, end - begin);
      const TensorView new_v = values_in_keys() ? TensorView{} : v.view.slice(0, 0, end - begin);
      make_rows(Side::k, key_start_[r] + begin, new_k);
      if (!values_in_keys()) make_rows(Side::v, key_start_[r] + begin, new_v);
      for (const KvAllocation& cache : caches_) plan->write_kv(cache.layer(0), new_k, new_v, stream_.get());
    }
  }
  stream_.synchronize();
}

AttentionInputs BenchProblem::inputs(int copy) const {
  AttentionInputs inputs = inputs_;
  if (spec_.block_size > 0) inputs.kv = caches_[size_t(copy)].layer(0);
  return inputs;
}

// Rows as the backend has them, on the host for the reference: heads [head, head + num_heads) of tokens or keys [first, first + count).
HostTensor BenchProblem::host_rows(Side side, int64_t first, int64_t count, int head, int num_heads, int dim) const {
  const HostTensor& from = numbers(side).host;
  HostTensor rows = HostTensor::make(from.dtype, {count, num_heads, dim});
  const int64_t size = size_of(from.dtype);
  char* to = rows.bytes.data();
  for (int64_t i = first; i < first + count; ++i) {
    for (int h = head; h < head + num_heads; ++h, to += dim * size)
      std::memcpy(to, from.bytes.data() + synthetic_.offset(side, 0, h, uint64_t(i)) * size, size_t(dim * size));
  }
  return rows;
}

HostTensor BenchProblem::host_keys(Side side, int request, int64_t count, int head, int dim) const {
  const int64_t common = std::min<int64_t>(common_keys(size_t(request)), count);
  HostTensor keys = host_rows(side, key_start_[size_t(request)] + common, count - common, head, 1, dim);
  if (common == 0) return keys;
  HostTensor all = host_rows(side, key_start_[0], common, head, 1, dim);
  all.bytes.insert(all.bytes.end(), keys.bytes.begin(), keys.bytes.end());
  all.sizes[0] = count;
  return all;
}

bool BenchProblem::is_tree(size_t request) const { return spec_.mask.tree && requests_[request].q_len <= kMostTreeTokens; }

int BenchProblem::sample_queries(int request, int query) const {
  return spec_.mask.causal && !is_tree(size_t(request)) ? 1 : requests_[size_t(request)].q_len - query;
}

CaseInputs BenchProblem::sample(int request, int query, int kv_head) const {
  const BenchRequest& r = requests_[size_t(request)];
  const int queries = sample_queries(request, query), group = spec_.group_size(), first = kv_head * group;
  const int seq_len = spec_.mask.causal && !spec_.mask.positions && !is_tree(size_t(request)) ? r.seq_len - r.q_len + query + 1 : r.seq_len;
  const int64_t token = query_start_loc_[size_t(request)] + query;
  CaseInputs in;
  in.spec = spec_;
  in.spec.num_q_heads = group;
  in.spec.num_kv_heads = 1;
  in.spec.score_mod = of_sample(spec_.score_mod, request, r, first), in.spec.mask_mod = of_sample(spec_.mask_mod, request, r, first);
  in.expression_tensors = parameters_.expression_tensors;
  if (!codec_of(spec_).scales_inside) in.spec.kv_format = KvFormat::strided, in.spec.block_size = 0;
  in.requests = {{queries, seq_len, 0}};
  in.q = host_rows(Side::q, token, queries, first, group, spec_.head_dim_qk);
  in.k = host_keys(Side::k, request, seq_len, kv_head, spec_.head_dim_qk);
  in.v = host_keys(values_in_keys() ? Side::k : Side::v, request, seq_len, kv_head, spec_.head_dim_v);
  in.sinks = cut_heads(parameters_.sinks, first, group);
  in.alibi_slopes = cut_heads(parameters_.alibi_slopes, first, group);
  in.head_scales = cut_heads(parameters_.head_scales, first, group);
  in.relative_bias = cut_heads(parameters_.relative_bias, first, group);
  if (spec_.mask.custom) {
    in.custom_mask = HostTensor::make(DType::u8, {int64_t(queries) * seq_len});
    for (int i = 0; i < queries; ++i) {
      std::memcpy(in.custom_mask.bytes.data() + int64_t(i) * seq_len,
                  parameters_.custom_mask.bytes.data() + mask_start_[size_t(request)] + int64_t(query + i) * r.seq_len, size_t(seq_len));
    }
  }
  if (is_tree(size_t(request)))
    in.draft_parents = tensor_of(std::vector<int32_t>(draft_parents_.begin() + token, draft_parents_.begin() + token + queries));
  if (spec_.mask.positions)
    in.positions = tensor_of(std::vector<int32_t>(positions_.begin() + token, positions_.begin() + token + queries));
  return in;
}

void BenchProblem::actual(int request, int query, int kv_head, int num_queries, std::vector<float>& out, std::vector<float>& lse) const {
  const int64_t token = query_start_loc_[size_t(request)] + query;
  // Heads [first, first + group) of the tokens' rows.
  const auto fetch = [&](const TensorView& from, int64_t dim) {
    const int64_t group = spec_.group_size() * dim, first = kv_head * group, row = spec_.num_q_heads * dim;
    std::vector<float> rows(size_t(num_queries * row)), part;
    stream_.download(rows.data(), from.as<float>() + token * row, num_queries * row * size_of(DType::f32));
    stream_.synchronize();
    for (int64_t t = 0; t < num_queries; ++t)
      part.insert(part.end(), rows.begin() + t * row + first, rows.begin() + t * row + first + group);
    return part;
  };
  out = fetch(out_.view, spec_.head_dim_v);
  lse = fetch(lse_.view, 1);
}

}  // namespace imbrex::serve
