// See case_runner.h. Context tokens are written in two steps, then the case's queries run in one step or in chunks.
#include "conformance/attention/case_runner.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "attention/kv_codec.h"
#include "attention/reference.h"
#include "attention/shared_keys.h"
#include "core/check.h"
#include "core/float_types.h"

namespace imbrex {
namespace {

// Positions [q_begin, q_end) of a request's query tokens, counted from its first one in the case; seq_len after the step.
struct StepRequest {
  int q_begin = 0, q_end = 0, seq_len = 0;
  int64_t first_key = 0;  // position of the key of token q_begin
};

// A Batch and the arrays it views.
struct Step {
  std::vector<int32_t> query_start_loc{0}, seq_lens, table, indptr{0}, indices, last_page_len, start_loc;
  std::vector<int64_t> slots;
  std::vector<uint8_t> mask;  // bytes, or bits
  std::vector<int32_t> mask_indptr, positions, parents, drafts;
  std::vector<NamedTensor> mask_tensors;
  Batch batch;
};

TensorView row_vector(void* data, DType dtype, size_t size) { return TensorView::contiguous(data, dtype, {int64_t(size)}); }

class Runner {
 public:
  Runner(const BackendOf<AttentionFamily>& backend, const DeviceInfo& device, const CaseInputs& in, const RunOptions& options)
      : backend_(backend), device_(device), in_(in), options_(options), spec_(run_spec(in, options)) {
    int64_t token = 0, key = 0;
    for (const CaseRequest& r : in.requests) {
      first_token_.push_back(token);
      first_key_.push_back(key);
      token += r.q_len;
      key += r.seq_len;
    }
    num_tokens_ = token;
    num_keys_ = key;
    limits_.shared_prompts = options.share_blocks;
    limits_.max_num_reqs = std::max(1, int(in.requests.size()));
    limits_.max_num_tokens = std::max<int>(1, int(std::max(token, key)));
    for (const CaseRequest& r : in.requests) limits_.max_seq_len = std::max(limits_.max_seq_len, r.seq_len);
  }

  RunResult run() {
    if (spec_.block_size > 0) hand_out_pages();
    make_cache();
    write_context();
    result_.out.assign(size_t(num_tokens_) * spec_.num_q_heads * spec_.head_dim_v, 0.f);
    result_.lse.assign(size_t(num_tokens_) * spec_.num_q_heads, 0.f);
    run_steps();
    compare_caches();
    return std::move(result_);
  }

 private:
  bool values_in_keys() const { return codec_of(spec_).values_in_keys; }
  bool cross() const { return spec_.kind == AttentionKind::encoder_decoder; }
  int context_len(const CaseRequest& r) const { return cross() ? r.seq_len : r.seq_len - r.q_len; }

  void hand_out_pages() {
    int64_t count = 3;
    for (const CaseRequest& r : in_.requests) count += (r.seq_len + spec_.block_size - 1) / spec_.block_size;
    std::vector<int32_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), 0);
    std::mt19937_64 random(options_.page_seed);
    for (size_t i = ids.size(); i > 1; --i) std::swap(ids[i - 1], ids[random() % i]);  // std::shuffle differs between libraries
    num_blocks_ = count;
    size_t next = 0;
    for (const CaseRequest& r : in_.requests) {
      std::vector<int32_t> blocks;
      first_own_block_.push_back(share_stem(r, blocks));
      while (int64_t(blocks.size()) * spec_.block_size < r.seq_len) blocks.push_back(ids[next++]);
      blocks_.push_back(std::move(blocks));
    }
  }

  // Takes the blocks that a request and an earlier one of the same id have in common: those within the context of both. Returns how many.
  int64_t share_stem(const CaseRequest& r, std::vector<int32_t>& blocks) const {
    int64_t most = 0;
    for (size_t other = 0; options_.share_blocks && other < blocks_.size(); ++other) {
      if (in_.requests[other].id != r.id) continue;
      const int64_t common = std::min(context_len(in_.requests[other]), context_len(r)) / spec_.block_size;
      if (common <= most) continue;
      most = common;
      blocks.assign(blocks_[other].begin(), blocks_[other].begin() + common);
    }
    return most;
  }

  KvCache with_scales(const KvCache& cache) const { return imbrex::with_scales(in_, spec_, cache); }

  void make_cache() {
    if (spec_.block_size == 0) {
      const int64_t rows = num_keys_ + 2 * kRaggedMargin;
      const auto place = [&](std::optional<SpreadTensor>& to, const HostTensor& from, int dim) {
        to.emplace(spec_.kv_dtype, rows, spec_.num_kv_heads, dim, options_.poison);
        for (int64_t row = 0; row < num_keys_; ++row) to->copy_row(row + kRaggedMargin, from, row);
        return to->view;
      };
      const HostTensor keys = as_cached(in_.k, spec_.kv_dtype, in_.k_scale);
      KvCache cache;
      if (codec_of(spec_).layout(spec_, KvPart::k_rope)) {
        const int behind = spec_.head_dim_qk - spec_.head_dim_v;
        const HostTensor& scale = in_.k_rope_scale.empty() ? in_.k_scale : in_.k_rope_scale;
        cache.k = place(ragged_k_, first_elements(keys, spec_.head_dim_v), spec_.head_dim_v);
        cache.k_rope = place(ragged_v_, as_cached(last_elements(in_.k, behind), spec_.kv_dtype, scale), behind);
      } else {
        cache.k = place(ragged_k_, keys, spec_.head_dim_qk);
      }
      if (!values_in_keys()) cache.v = place(ragged_v_, as_cached(in_.v, spec_.kv_dtype, in_.v_scale), spec_.head_dim_v);
      cache_ = with_scales(cache);
      return;
    }
    for (int i = 0; i < (options_.check_cache ? 2 : 1); ++i) {  // the second is written by the reference
      memory_.emplace_back(spec_, 2, num_blocks_, options_.order);
      for (int layer = 0; layer < 2; ++layer)
        for (const KvPart part : kKvParts) poison_view(part_of(memory_[size_t(i)].layer(layer), part));
    }
    cache_ = with_scales(memory_[0].layer(1));
  }

  // All elements of a view of any strides; what is stored as bytes holds elements of kv_dtype.
  void poison_view(const TensorView& t) const {
    const DType dtype = t.dtype == DType::u8 ? spec_.kv_dtype : t.dtype;
    const int64_t size = size_of(t.dtype);
    for_each_run(
        t, [&](int64_t offset, int64_t count) { fill_poison(t.as<char>() + offset * size, size_t(count * size), dtype, options_.poison); });
  }

  // visit(offset, count): elements that lie side by side.
  template <class Visit>
  static void for_each_run(const TensorView& t, Visit visit, int dim = 0, int64_t base = 0) {
    if (t.empty()) return;
    const int64_t run = dim + 1 == t.rank && t.stride(dim) == 1 ? t.size(dim) : 1;
    for (int64_t i = 0; i < t.size(dim); i += run) {
      const int64_t at = base + i * t.stride(dim);
      dim + 1 == t.rank ? visit(at, run) : for_each_run(t, visit, dim + 1, at);
    }
  }

  // Arrays of one step whose layer has such a mask.
  Step make_step(const std::vector<StepRequest>& requests, const Mask& mask, bool write) const {
    Step step;
    const int padding = options_.padding_tokens;
    size_t width = 1;
    for (const auto& blocks : blocks_) width = std::max(width, blocks.size() + 1);
    if (spec_.block_size > 0 && !options_.csr)
      step.table.assign(std::max<size_t>(1, requests.size()) * width, poison_index(options_.poison));
    for (size_t r = 0; r < requests.size(); ++r) {
      const StepRequest& s = requests[r];
      step.query_start_loc.push_back(step.query_start_loc.back() + s.q_end - s.q_begin);
      step.seq_lens.push_back(s.seq_len);
      step.start_loc.push_back(int32_t(kRaggedMargin + first_key_[r]));
      if (spec_.block_size > 0) {
        const int used = (s.seq_len + spec_.block_size - 1) / spec_.block_size;
        if (options_.csr) {
          step.indices.insert(step.indices.end(), blocks_[r].begin(), blocks_[r].begin() + used);
          step.indptr.push_back(int32_t(step.indices.size()));
          step.last_page_len.push_back(s.seq_len == 0 ? 0 : (s.seq_len - 1) % spec_.block_size + 1);
        } else {
          std::copy_n(blocks_[r].begin(), used, step.table.begin() + int64_t(r * width));
        }
        for (int t = s.q_begin; t < s.q_end; ++t) {
          const int64_t j = s.first_key + t - s.q_begin;
          const bool own = j / spec_.block_size >= first_own_block_[r];  // the others are written once, by the request that had them first
          step.slots.push_back(write && own ? int64_t(blocks_[r][size_t(j / spec_.block_size)]) * spec_.block_size + j % spec_.block_size
                                            : -1);
        }
      }
      for (int t = s.q_begin; mask.positions && t < s.q_end; ++t) step.positions.push_back(int32_t(in_.positions.get(first_token_[r] + t)));
      for (int t = s.q_begin; mask.tree && !in_.draft_parents.empty() && t < s.q_end; ++t)
        step.parents.push_back(in_.parent_of(first_token_[r], t));
      if (!step.parents.empty() && options_.page_seed / 4 % 2 == 1) say_drafts(step, s.q_end - s.q_begin);
      if (!mask.custom) continue;
      const uint8_t* rows = reinterpret_cast<const uint8_t*>(in_.custom_mask.bytes.data()) + mask_start(r);
      const int stride = in_.requests[r].seq_len;
      if (options_.packed_mask && options_.csr) step.mask.push_back(0xff), step.mask_indptr.push_back(int32_t(step.mask.size()));
      int64_t bits = 0;
      for (int t = s.q_begin; t < s.q_end; ++t)
        for (const uint8_t *shown = rows + int64_t(t) * stride, *end = shown + s.seq_len; shown < end; ++shown) {
          if (!options_.packed_mask || bits % 8 == 0) step.mask.push_back(options_.packed_mask ? 0xff : *shown);
          if (options_.packed_mask && *shown == 0) step.mask.back() &= uint8_t(~(1u << bits % 8));
          ++bits;
        }
    }
    if (!step.mask_indptr.empty()) step.mask_indptr.push_back(int32_t(step.mask.size()));
    step.start_loc.push_back(int32_t(kRaggedMargin + num_keys_));
    step.indices.insert(step.indices.end(), 2, poison_index(options_.poison));
    step.slots.insert(step.slots.end(), size_t(padding), options_.poison == Poison::ones ? -1 : 0);

    Batch& b = step.batch;
    b.query_start_loc = step.query_start_loc;
    b.seq_lens = step.seq_lens;
    if (spec_.block_size == 0) {
      b.kv_start_loc = row_vector(step.start_loc.data(), DType::i32, step.start_loc.size());
    } else if (options_.csr) {
      b.kv_indptr = row_vector(step.indptr.data(), DType::i32, step.indptr.size());
      b.kv_indices = row_vector(step.indices.data(), DType::i32, step.indices.size());
      if (!requests.empty()) b.kv_last_page_len = row_vector(step.last_page_len.data(), DType::i32, step.last_page_len.size());
    } else {
      b.block_table = TensorView::contiguous(step.table.data(), DType::i32, {int64_t(requests.size()), int64_t(width) - 1});
      b.block_table.strides[0] = int64_t(width);
    }
    if (spec_.block_size > 0) b.slot_mapping = row_vector(step.slots.data(), DType::i64, step.slots.size());
    b.positions = step.positions;
    step.mask_tensors = in_.named_tensors();
    b.mask_tensors = step.mask_tensors;
    b.draft_parents = step.parents;
    b.num_drafts = step.drafts;
    b.mask_indptr = step.mask_indptr;
    if (mask.custom && !step.mask.empty())
      (options_.packed_mask ? b.packed_mask : b.custom_mask) = row_vector(step.mask.data(), DType::u8, step.mask.size());
    return step;
  }

  // That the first tokens of the step's last request, as far as they are a chain, are no drafts: then nobody reads their parents.
  static void say_drafts(Step& step, int tokens) {
    int certain = 0;
    for (auto parent = step.parents.end() - tokens; certain < tokens && *parent == certain - 1; ++parent) {
      *parent = -77;
      ++certain;
    }
    step.drafts.resize(step.seq_lens.size(), 0);
    step.drafts.back() = tokens - certain;
  }

  int64_t mask_start(size_t request) const {
    int64_t start = 0;
    for (size_t r = 0; r < request; ++r) start += int64_t(in_.requests[r].q_len) * in_.requests[r].seq_len;
    return start;
  }

  std::unique_ptr<AttentionPlan> make_plan(const BackendOf<AttentionFamily>& backend, const DeviceInfo& device,
                                           const AttentionSpec& spec) const {
    PlanOptions options;
    options.limits = limits_;
    options.threads = options_.threads;
    options.balanced = options_.balanced;
    options.load_on_demand = true;
    return backend.plan(spec, device, options);
  }

  // The keys and values of a step's tokens to their slots, by the backend and for comparison by the reference.
  void write(const Step& step, const std::vector<StepRequest>& requests, const AttentionPlan& plan, const AttentionSpec& spec) {
    const int64_t rows = step.batch.num_tokens() + options_.padding_tokens;
    SpreadTensor k(in_.k.dtype, rows, spec_.num_kv_heads, spec_.head_dim_qk, options_.poison);
    SpreadTensor v(in_.v.dtype, rows, spec_.num_kv_heads, spec_.head_dim_v, options_.poison);
    const TensorView new_v = values_in_keys() ? TensorView{} : v.view;
    int64_t row = 0;
    for (size_t r = 0; r < requests.size(); ++r)
      for (int t = requests[r].q_begin; t < requests[r].q_end; ++t, ++row) {
        const int64_t key = first_key_[r] + requests[r].first_key + t - requests[r].q_begin;
        k.copy_row(row, in_.k, key);
        v.copy_row(row, in_.v, key);
      }
    plan.write_kv(cache_, k.view, new_v);
    if (memory_.size() < 2) return;
    const auto law = make_plan(reference_backend(), probe_cpu(), spec);
    law->update(step.batch);
    law->write_kv(with_scales(memory_[1].layer(1)), k.view, new_v);
  }

  void write_context() {
    if (spec_.block_size == 0) return;
    AttentionSpec spec = spec_;
    spec.kind = AttentionKind::decoder;
    spec.mask = {}, spec.mask_mod = {};
    spec.score = {}, spec.score_mod = {};
    const auto plan = make_plan(backend_, device_, spec);
    for (int part = 0; part < 2; ++part) {
      std::vector<StepRequest> requests;
      for (const CaseRequest& r : in_.requests) {
        const int context = context_len(r), half = context * 3 / 5, begin = part == 0 ? 0 : half, end = part == 0 ? half : context;
        requests.push_back({.q_begin = begin, .q_end = end, .seq_len = end, .first_key = begin});
      }
      const Step step = make_step(requests, {}, true);
      plan->update(step.batch);
      write(step, requests, *plan, spec);
    }
  }

  void run_steps() {
    const auto plan = make_plan(backend_, device_, spec_);
    std::vector<int> done(in_.requests.size(), 0);
    for (bool more = true; more;) {
      more = false;
      std::vector<StepRequest> requests;
      for (size_t r = 0; r < in_.requests.size(); ++r) {
        const CaseRequest& request = in_.requests[r];
        const int end = options_.chunk > 0 ? std::min(request.q_len, done[r] + options_.chunk) : request.q_len;
        const int seq_len = cross() ? request.seq_len : context_len(request) + end;
        requests.push_back({.q_begin = done[r], .q_end = end, .seq_len = seq_len, .first_key = context_len(request) + done[r]});
        more = more || end < request.q_len;
        done[r] = end;
      }
      const Step step = make_step(requests, spec_.mask, !cross());
      plan->update(step.batch);
      if (spec_.block_size > 0 && !cross()) write(step, requests, *plan, spec_);
      attend(step, requests, *plan);
    }
  }

  void attend(const Step& step, const std::vector<StepRequest>& requests, const AttentionPlan& plan) {
    const int heads = spec_.num_q_heads, dim = spec_.head_dim_v;
    const int64_t tokens = step.batch.num_tokens(), rows = tokens + options_.padding_tokens;
    SpreadTensor q(spec_.q_dtype, rows, heads, spec_.head_dim_qk, options_.poison),
        out(options_.out_dtype, rows, heads, dim, options_.poison);
    SpreadTensor lse(DType::f32, rows, 1, heads, options_.poison);
    int64_t row = 0;
    for (size_t r = 0; r < requests.size(); ++r)
      for (int t = requests[r].q_begin; t < requests[r].q_end; ++t) q.copy_row(row++, in_.q, first_token_[r] + t);
    const std::vector<NamedTensor> score_tensors = in_.named_tensors();
    AttentionInputs inputs{.q = q.view,
                           .q_scale = in_.q_scale.view(),
                           .kv = cache_,
                           .sinks = in_.sinks.view(),
                           .alibi_slopes = in_.alibi_slopes.view(),
                           .head_scales = in_.head_scales.view(),
                           .relative_bias = in_.relative_bias.view(),
                           .score_tensors = score_tensors};
    AttentionOutputs outputs{.out = out.view, .lse = lse.view};
    outputs.lse.rank = 2;
    outputs.lse.sizes = {rows, heads};
    outputs.lse.strides = {lse.view.stride(0), 1};
    plan.run(inputs, outputs);

    row = 0;
    std::vector<double> stored(static_cast<size_t>(dim));
    for (size_t r = 0; r < requests.size(); ++r)
      for (int t = requests[r].q_begin; t < requests[r].q_end; ++t, ++row) {
        const int64_t token = first_token_[r] + t;
        for (int h = 0; h < heads; ++h) {
          load_as_doubles(out.at(row, h), options_.out_dtype, 0, 1, stored);
          std::copy(stored.begin(), stored.end(), result_.out.begin() + (token * heads + h) * dim);
          fill_poison(out.at(row, h), size_t(dim * size_of(options_.out_dtype)), options_.out_dtype, options_.poison);
        }
        std::memcpy(&result_.lse[size_t(token * heads)], lse.at(row, 0), size_t(heads) * sizeof(float));
        fill_poison(lse.at(row, 0), size_t(heads) * sizeof(float), DType::f32, options_.poison);
      }
    for (const auto& [what, tensor] : {std::pair<const char*, const SpreadTensor&>{"out", out}, {"lse", lse}})
      if (std::string written = foreign_write(what, tensor, options_.poison, tokens); !written.empty())
        result_.violations.push_back(std::move(written));
  }

  void compare_caches() {
    if (memory_.size() < 2) return;
    for (int layer = 0; layer < 2; ++layer)
      for (const KvPart part : kKvParts) {
        const KvCache a = memory_[0].layer(layer), b = memory_[1].layer(layer);
        const TensorView &mine = part_of(a, part), &law = part_of(b, part);
        const int64_t size = size_of(mine.dtype);
        int64_t different = 0, first = -1;
        const auto same = [&](int64_t offset, int64_t count) {
          return std::memcmp(mine.as<char>() + offset * size, law.as<char>() + offset * size, size_t(count * size)) == 0;
        };
        for_each_run(mine, [&](int64_t offset, int64_t count) {
          if (same(offset, count)) return;
          for (const int64_t end = offset + count; offset < end; ++offset)
            if (!same(offset, 1) && different++ == 0) first = offset;
        });
        if (different > 0)
          result_.violations.push_back(
              fmt::format("write_kv: {} elements of {} of layer {} differ from the reference's, the first is {}, not {}", different,
                          to_string(part), layer, load_as_float(mine.data, mine.dtype, first), load_as_float(law.data, law.dtype, first)));
      }
  }

  static constexpr int64_t kRaggedMargin = 2;  // poisoned rows before and after the ragged keys

  const BackendOf<AttentionFamily>& backend_;
  const DeviceInfo& device_;
  const CaseInputs& in_;
  const RunOptions& options_;
  AttentionSpec spec_;
  PlanLimits limits_{.max_num_reqs = 1, .max_num_tokens = 1, .max_seq_len = 1};
  std::vector<int64_t> first_token_, first_key_;  // rows of each request in in_.q and in_.k
  int64_t num_tokens_ = 0, num_keys_ = 0, num_blocks_ = 0;
  std::vector<std::vector<int32_t>> blocks_;
  std::vector<int64_t> first_own_block_;  // of each request: those in front of it are shared
  std::vector<KvAllocation> memory_;
  std::optional<SpreadTensor> ragged_k_, ragged_v_;  // the second: values, or k_rope
  KvCache cache_;
  RunResult result_;
};

}  // namespace

RunOptions default_options(const Case& c) {
  RunOptions options;
  options.kv_format = c.spec.kv_format;
  options.block_size = c.spec.block_size;
  options.csr = c.csr;
  options.order = c.order;
  options.page_seed = c.seed;
  options.padding_tokens = c.padding_tokens;
  options.out_dtype = c.out_dtype;
  options.packed_mask = c.packed_mask;
  return options;
}

AttentionSpec run_spec(const CaseInputs& in, const RunOptions& options) {
  AttentionSpec spec = in.spec;
  spec.kv_format = options.kv_format;
  spec.block_size = options.block_size;
  return spec;
}

bool holds(KvFormat format, const AttentionSpec& of_case) {
  const KvFormat own = of_case.kv_format;
  if (codec_of(format).scales_inside || (own != KvFormat::strided && own != KvFormat::latent)) return format == own;
  return !codec_of(format).values_in_keys || codec_of(own).values_in_keys;
}

RunResult run_case(const BackendOf<AttentionFamily>& backend, const DeviceInfo& device, const CaseInputs& in, const RunOptions& options) {
  const SharingWherever plans;
  return Runner(backend, device, in, options).run();
}

}  // namespace imbrex
