// Batches that are parts of another: see batch_tools.h.
#include <algorithm>
#include <limits>

#include "attention/draft_tree.h"
#include "attention/packed_mask.h"
#include "attention/token_rows.h"
#include "core/check.h"
#include "core/tensor_format.h"
#include "family/batch_checks.h"
#include "imbrex/batch_tools.h"
#include "imbrex/spec.h"

namespace imbrex {
namespace {

bool in_host_memory(const TensorView& t) { return t.device.type == DeviceType::cpu; }

// What a part has of its own.
struct Memory {
  std::vector<int32_t> query_start_loc, seq_lens, kv_indptr, kv_start_loc, positions;
  std::vector<int32_t> num_drafts, accepted_drafts, source_slots, draft_parents, mask_indptr;
  std::vector<int64_t> slots;
  std::vector<uint8_t> custom_mask;
};

// A list of a part: a view of the batch's until a number in it changes.
class List {
 public:
  List(std::span<const int32_t> of_batch, std::vector<int32_t>& own) : view_(of_batch), own_(own) {}
  void set(size_t i, int32_t value) {
    if (view_[i] == value) return;
    if (own_.empty()) {
      own_.assign(view_.begin(), view_.end());
      view_ = own_;
    }
    own_[i] = value;
  }
  int32_t operator[](size_t i) const { return view_[i]; }
  bool is_own() const { return !own_.empty(); }
  std::span<const int32_t> view() const { return view_; }

 private:
  std::span<const int32_t> view_;
  std::vector<int32_t>& own_;
};

void check_list(std::span<const int32_t> list, const char* name, size_t num_reqs) {
  check(list.empty() || list.size() == num_reqs, "batch.state.size", "{}: expected {} entries, got {}", name, num_reqs, list.size());
}

void check_rows(const TensorView& t, DType dtype, int rank, int64_t rows, const char* code, const char* name) {
  const bool ok = t.empty() || (t.dtype == dtype && t.rank == rank && t.size(0) >= rows);
  check(ok && (t.empty() || t.size(rank - 1) <= 1 || t.stride(rank - 1) == 1), code,
        "{}: expected {} of {} dimensions, {} rows and innermost stride 1, got {}", name, to_string(dtype), rank, rows, t);
}

int64_t mask_bytes(const Batch& batch, int num_reqs) {
  int64_t bytes = 0;
  for (int r = 0; r < num_reqs; ++r)
    check(!__builtin_add_overflow(bytes, int64_t(batch.query_len(r)) * batch.seq_lens[size_t(r)], &bytes), "batch.custom_mask.size",
          "expected rows whose bytes fit 63 bits, got more up to request {}", r);
  return bytes;
}

// What parts rely on. That ids and slots are within a cache is for the plan that is given a part.
void check_batch(const Batch& batch, PartKeys keys) {
  constexpr int kAny = std::numeric_limits<int>::max();
  check_lengths(batch, {.max_num_reqs = kAny, .max_num_tokens = kAny, .max_seq_len = kAny}, false);
  const int64_t reqs = batch.num_reqs(), tokens = batch.num_tokens();
  check_rows(batch.block_table, DType::i32, 2, reqs, "batch.block_table.rows", "block_table");
  check_rows(batch.kv_indptr, DType::i32, 1, reqs + 1, "batch.kv_indptr.size", "kv_indptr");
  check_rows(batch.kv_indices, DType::i32, 1, 0, "batch.kv_indices.size", "kv_indices");
  check_rows(batch.kv_last_page_len, DType::i32, 1, reqs, "batch.kv_last_page_len.size", "kv_last_page_len");
  check_rows(batch.kv_start_loc, DType::i32, 1, reqs + 1, "batch.kv_start_loc.size", "kv_start_loc");
  check_rows(batch.slot_mapping, DType::i64, 1, tokens, "batch.slot_mapping.size", "slot_mapping");
  check_rows(batch.custom_mask, DType::u8, 1, batch.custom_mask.empty() ? 0 : mask_bytes(batch, int(reqs)), "batch.custom_mask.size",
             "custom_mask");
  check_packed_mask(batch);
  check_list(batch.state_slots, "state_slots", size_t(reqs));
  check_list(batch.num_drafts, "num_drafts", size_t(reqs));
  check_list(batch.accepted_drafts, "accepted_drafts", size_t(reqs));
  check_list(batch.source_slots, "source_slots", size_t(reqs));
  check(batch.draft_parents.empty() || int64_t(batch.draft_parents.size()) >= tokens, "batch.draft_parents.size",
        "expected {} entries, got {}", tokens, batch.draft_parents.size());
  check(batch.positions.empty() || int64_t(batch.positions.size()) >= tokens, "batch.positions.size", "expected {} positions, got {}",
        tokens, batch.positions.size());
  check(batch.positions.empty() || keys == PartKeys::all_with_positions, "batch.part.keys",
        "expected all_with_positions for a batch with {} positions, got {}", batch.positions.size(),
        keys == PartKeys::all ? "all" : "up_to_queries");
}

// Makes one part: requests [first, last) of a batch, with the query tokens of some ranges of it.
class Part {
 public:
  Part(const Batch& whole, PartKeys keys, int first, int last, std::vector<TokenRange> ranges, int first_token, bool has_padding)
      : whole_(whole),
        keys_(keys),
        first_(first),
        last_(last),
        ranges_(std::move(ranges)),
        first_token_(first_token),
        has_padding_(has_padding),
        memory_(std::make_shared<Memory>()) {
    find_kept();
  }

  // That no request with a state lacks some of its tokens.
  void check_whole_states() const {
    for (int r = first_; r < last_ && !whole_.state_slots.empty(); ++r)
      check(kept(r).count == 0 || kept(r).count == whole_.query_len(r), "batch.part.states",
            "expected all tokens of request {}, or none, since it has a state, got {} of {}", r, kept(r).count, whole_.query_len(r));
  }

  DerivedBatch make() {
    part_ = whole_;
    part_.mask_tensors = {};  // a mask_mod reads them by the numbers of requests, which are others in the part
    take_lengths();
    take_keys();
    take_slots();
    take_custom_mask();
    take_positions();
    take_states();
    return {.batch = part_, .first_request = first_, .first_token = first_token_, .memory = memory_};
  }

 private:
  struct Kept {  // of a request: its first token of the part, the end of its last, and how many there are
    int begin = 0, end = 0, count = 0;
  };

  int begin_of(int r) const { return whole_.query_start_loc[size_t(r)]; }
  int end_of(int r) const { return whole_.query_start_loc[size_t(r) + 1]; }
  size_t num_reqs() const { return size_t(last_ - first_); }
  const Kept& kept(int r) const { return kept_[size_t(r - first_)]; }
  bool together() const { return ranges_.size() <= 1; }  // the tokens follow one another
  int num_tokens() const { return part_.num_tokens(); }
  // `more`: entries behind that of the last request.
  std::span<const int32_t> requests_of(std::span<const int32_t> list, size_t more = 0) const {
    return list.empty() ? list : list.subspan(size_t(first_), num_reqs() + more);
  }
  std::span<const int32_t> tokens_of(std::span<const int32_t> list) const {
    return has_padding_ ? list.subspan(size_t(first_token_)) : list.subspan(size_t(first_token_), size_t(num_tokens()));
  }
  template <class F>
  void for_tokens(const F& f) const {
    for (const TokenRange& range : ranges_)
      for (int t = range.begin; t < range.end; ++t) f(t);
  }

  void find_kept() {
    kept_.resize(num_reqs());
    size_t i = 0;
    for (int r = first_; r < last_; ++r) {
      Kept& k = kept_[size_t(r - first_)];
      for (; i < ranges_.size() && ranges_[i].begin < end_of(r); ++i) {
        const int begin = std::max(ranges_[i].begin, begin_of(r)), end = std::min(ranges_[i].end, end_of(r));
        if (begin < end) {
          if (k.count == 0) k.begin = begin;
          k.end = end;
          k.count += end - begin;
        }
        if (ranges_[i].end > end_of(r)) break;
      }
    }
  }

  void take_lengths() {
    std::vector<int32_t>& starts = memory_->query_start_loc;
    starts.assign(1, 0);
    List lens(requests_of(whole_.seq_lens), memory_->seq_lens);
    for (int r = first_; r < last_; ++r) {
      const Kept& k = kept(r);
      starts.push_back(starts.back() + k.count);
      if (k.count == 0 || keys_ != PartKeys::up_to_queries) continue;
      check(k.count == k.end - k.begin, "batch.part.gap",
            "expected tokens of request {} that follow one another where its keys end with them (a spec with positions takes any), got {} "
            "of the tokens from {} to {}",
            r, k.count, k.begin, k.end - 1);
      // Fewer keys than queries may follow: queries in front of the first key see none.
      lens.set(size_t(r - first_), std::max(0, whole_.seq_lens[size_t(r)] - (end_of(r) - k.end)));
    }
    part_.seq_lens = lens.view();
    shortened_ = lens.is_own();
    const auto& all = whole_.query_start_loc;
    const bool begins_so = all.size() >= size_t(first_) + starts.size() && std::equal(starts.begin(), starts.end(), all.begin() + first_);
    part_.query_start_loc = begins_so ? all.subspan(size_t(first_), starts.size()) : std::span<const int32_t>(starts);
  }

  void take_keys() {
    if (!whole_.block_table.empty()) part_.block_table = whole_.block_table.slice(0, first_, last_);
    if (!whole_.kv_last_page_len.empty())
      part_.kv_last_page_len = shortened_ ? TensorView() : whole_.kv_last_page_len.slice(0, first_, last_);
    if (!whole_.kv_indptr.empty()) take_csr();
    if (!whole_.kv_start_loc.empty()) take_ragged();
  }

  // On a host the part's block lists begin at 0. A device's kernels read starts as they are, so that its arrays are views.
  void take_csr() {
    part_.kv_indptr = whole_.kv_indptr.slice(0, first_, last_ + 1);
    if (!in_host_memory(whole_.kv_indptr)) return;
    const auto* starts = part_.kv_indptr.as<const int32_t>();
    const int32_t base = starts[0];
    if (base == 0) return;
    check(base > 0, "batch.kv_indptr.monotone", "kv_indptr is {} at request {}", base, first_);
    for (size_t r = 0; r <= num_reqs(); ++r) {
      check(starts[r] >= base, "batch.kv_indptr.monotone", "kv_indptr falls from {} to {} up to request {}", base, starts[r],
            size_t(first_) + r);
      memory_->kv_indptr.push_back(starts[r] - base);
    }
    part_.kv_indptr = TensorView::contiguous(memory_->kv_indptr.data(), DType::i32, {int64_t(memory_->kv_indptr.size())});
    if (whole_.kv_indices.empty()) return;
    check(base <= whole_.kv_indices.size(0), "batch.kv_indices.size", "expected at least {} entries, got {}", base, whole_.kv_indices);
    part_.kv_indices = whole_.kv_indices.slice(0, base, whole_.kv_indices.size(0));
  }

  // Rows of a request are as many as its keys, and end where those of the next one begin.
  void take_ragged() {
    part_.kv_start_loc = whole_.kv_start_loc.slice(0, first_, last_ + 1);
    if (!shortened_ || !in_host_memory(whole_.kv_start_loc)) return;
    const auto* starts = part_.kv_start_loc.as<const int32_t>();
    memory_->kv_start_loc.assign(starts, starts + num_reqs() + 1);
    int32_t left_out = 0;  // of the last request that has keys
    for (size_t i = 0; i < num_reqs(); ++i) {
      const int32_t given = whole_.seq_lens[size_t(first_) + i];
      check(left_out == 0 || given == 0, "batch.part.rows",
            "expected no keys behind those of a request that leaves out its last {} (a spec with positions leaves out none), got {} of "
            "request {}",
            left_out, given, size_t(first_) + i);
      left_out += given - part_.seq_lens[i];
      if (left_out == 0) continue;
      check(int64_t(starts[i + 1]) - starts[i] == given, "batch.kv_start_loc.length", "request {} has {} rows but seq_lens {}",
            size_t(first_) + i, int64_t(starts[i + 1]) - starts[i], given);
      memory_->kv_start_loc[i + 1] -= left_out;
    }
    part_.kv_start_loc = TensorView::contiguous(memory_->kv_start_loc.data(), DType::i32, {int64_t(memory_->kv_start_loc.size())});
  }

  void check_gatherable(const TensorView& t, const char* name) const {
    check(in_host_memory(t), "batch.part.memory", "{}: expected host memory, to gather what the part keeps of it, got {}", name, t);
  }

  void take_slots() {
    const TensorView& slots = whole_.slot_mapping;
    if (slots.empty()) return;
    if (together()) {
      part_.slot_mapping = slots.slice(0, first_token_, has_padding_ ? slots.size(0) : first_token_ + num_tokens());
      return;
    }
    check_gatherable(slots, "slot_mapping");
    for_tokens([&](int t) { memory_->slots.push_back(slots.as<const int64_t>()[t * slots.stride(0)]); });
    part_.slot_mapping = TensorView::contiguous(memory_->slots.data(), DType::i64, {num_tokens()});
  }

  // Requests that are whole keep their bits where they are; of others, rows become bytes.
  void take_packed_mask() {
    bool all_whole = !shortened_;
    for (int r = first_; r < last_; ++r) all_whole = all_whole && (kept(r).count == 0 || kept(r).count == whole_.query_len(r));
    if (all_whole) {
      part_.mask_indptr = requests_of(mask_indptr_of(whole_, memory_->mask_indptr), 1);
      return;
    }
    check_gatherable(whole_.packed_mask, "packed_mask");
    std::vector<long> starts;
    find_mask_starts(whole_, starts);
    std::vector<uint8_t>& rows = memory_->custom_mask;
    int r = first_;
    for_tokens([&](int t) {
      while (t >= end_of(r)) ++r;
      const size_t at = rows.size(), kept_width = size_t(part_.seq_lens[size_t(r - first_)]);
      rows.resize(at + kept_width);
      unpack_bits(whole_.packed_mask.as<const uint8_t>(), starts[size_t(r)] + long(t - begin_of(r)) * whole_.seq_lens[size_t(r)],
                  long(kept_width), rows.data() + at);
    });
    part_.packed_mask = {}, part_.mask_indptr = {};
    if (!rows.empty()) part_.custom_mask = TensorView::contiguous(rows.data(), DType::u8, {int64_t(rows.size())});
  }

  void take_custom_mask() {
    const TensorView& mask = whole_.custom_mask;
    if (!whole_.packed_mask.empty()) take_packed_mask();
    if (mask.empty()) return;
    const bool is_view = together() && !shortened_;
    int64_t row = mask_bytes(whole_, first_), begin = row, end = row;
    if (!is_view) check_gatherable(mask, "custom_mask");
    size_t i = 0;  // of the ranges
    for (int r = first_; r < last_; ++r) {
      const int64_t width = whole_.seq_lens[size_t(r)], kept_width = part_.seq_lens[size_t(r - first_)];
      const Kept& k = kept(r);
      if (k.count > 0 && begin == end) begin = row + (k.begin - begin_of(r)) * width;
      if (k.count > 0) end = row + (k.end - begin_of(r)) * width;
      for (; !is_view && i < ranges_.size() && ranges_[i].begin < end_of(r); ++i) {
        for (int t = std::max(ranges_[i].begin, begin_of(r)); t < std::min(ranges_[i].end, end_of(r)); ++t) {
          const auto* bytes = mask.as<const uint8_t>() + row + (t - begin_of(r)) * width;
          memory_->custom_mask.insert(memory_->custom_mask.end(), bytes, bytes + kept_width);
        }
        if (ranges_[i].end > end_of(r)) break;
      }
      row += int64_t(end_of(r) - begin_of(r)) * width;
    }
    part_.custom_mask = is_view ? mask.slice(0, begin, end)
                                : TensorView::contiguous(memory_->custom_mask.data(), DType::u8, {int64_t(memory_->custom_mask.size())});
  }

  void take_positions() {
    if (keys_ != PartKeys::all_with_positions) return;
    std::vector<int32_t>& made = memory_->positions;
    if (!whole_.positions.empty() && together()) {
      part_.positions = tokens_of(whole_.positions);
      return;
    }
    if (!whole_.positions.empty()) for_tokens([&](int t) { made.push_back(whole_.positions[size_t(t)]); });
    size_t i = 0;
    for (int r = first_; whole_.positions.empty() && r < last_; ++r)
      for (; i < ranges_.size() && ranges_[i].begin < end_of(r); ++i) {
        for (int t = std::max(ranges_[i].begin, begin_of(r)); t < std::min(ranges_[i].end, end_of(r)); ++t) {
          const int64_t position = int64_t(whole_.seq_lens[size_t(r)]) - end_of(r) + t;
          check(position >= 0 && position <= kMostPosition, "batch.positions.range", "position of token {} is {}, expected 0 to {}", t,
                position, kMostPosition);
          made.push_back(int32_t(position));
        }
        if (ranges_[i].end > end_of(r)) break;
      }
    part_.positions = made;
  }

  void take_states() {
    part_.state_slots = requests_of(whole_.state_slots), part_.pad_slot = whole_.pad_slot;
    List drafts(requests_of(whole_.num_drafts), memory_->num_drafts),
        accepted(requests_of(whole_.accepted_drafts), memory_->accepted_drafts),
        sources(requests_of(whole_.source_slots), memory_->source_slots);
    if (!whole_.draft_parents.empty() && !together())
      for_tokens([&](int t) { memory_->draft_parents.push_back(whole_.draft_parents[size_t(t)]); });
    const bool own = !memory_->draft_parents.empty();
    List parents(whole_.draft_parents.empty() || own ? memory_->draft_parents : tokens_of(whole_.draft_parents), memory_->draft_parents);
    const bool is_any = !whole_.state_slots.empty() || !whole_.draft_parents.empty();
    const bool all_are_drafts = whole_.num_drafts.empty() && !whole_.draft_parents.empty();  // of Mask::tree
    for (int r = first_; r < last_ && is_any; ++r) {
      const Kept& k = kept(r);
      const int skipped = k.begin - begin_of(r), dropped = end_of(r) - k.end, q_len = end_of(r) - begin_of(r);
      if (k.count == 0 || k.count == q_len) continue;
      const size_t i = size_t(r - first_);
      if (whole_.pad_slot && !part_.state_slots.empty() && part_.state_slots[i] == *whole_.pad_slot) continue;
      check(!all_are_drafts || is_chain(whole_, r), "batch.part.drafts",
            "expected all {} tokens of request {}, which are a tree, or none, got {}", q_len, r, k.count);
      const int last_drafts = drafts.view().empty() ? 0 : drafts[i];
      check(last_drafts >= 0 && last_drafts <= q_len, "batch.state.num_drafts", "expected 0 to {} drafts of request {}, got {}", q_len, r,
            last_drafts);
      check((skipped == 0 || skipped <= q_len - last_drafts) && (dropped == 0 || dropped >= last_drafts), "batch.part.drafts",
            "expected a cut of request {} in front of its last {} tokens, which are drafts, got tokens {} to {} of {}", r, last_drafts,
            skipped, q_len - dropped - 1, q_len);
      if (dropped > 0 && last_drafts > 0) drafts.set(i, 0);
      if (skipped == 0) continue;
      if (!accepted.view().empty()) accepted.set(i, 0);
      if (!sources.view().empty() && !part_.state_slots.empty()) sources.set(i, part_.state_slots[i]);
      if (parents.view().empty() || (dropped > 0 && !all_are_drafts)) continue;
      const size_t end = size_t(part_.query_start_loc[i + 1]);
      for (size_t t = end - size_t(all_are_drafts ? k.count : last_drafts); t < end; ++t)
        parents.set(t, int32_t(int64_t(parents[t]) - skipped));
    }
    part_.num_drafts = drafts.view();
    part_.accepted_drafts = accepted.view();
    part_.source_slots = sources.view();
    part_.draft_parents = parents.view();
  }

  const Batch& whole_;
  const PartKeys keys_;
  const int first_, last_;
  const std::vector<TokenRange> ranges_;  // ascending, apart from each other
  const int first_token_;
  const bool has_padding_;  // the part has what follows the batch's tokens
  std::vector<Kept> kept_;
  std::shared_ptr<Memory> memory_;
  Batch part_;
  bool shortened_ = false;  // some request has fewer keys than in the whole batch
};

// The first request with a token behind the cut, or all of them.
int request_at(const Batch& batch, int cut) {
  const auto& starts = batch.query_start_loc;
  return starts.empty() ? 0 : int(std::upper_bound(starts.begin() + 1, starts.end(), cut) - starts.begin()) - 1;
}

}  // namespace

PartKeys part_keys(const AttentionSpec& spec) {
  const Mask& mask = spec.mask;
  if (mask.positions) return PartKeys::all_with_positions;
  if (mask.causal) return PartKeys::up_to_queries;
  const bool by_position =
      mask.window_left >= 0 || mask.window_right >= 0 || mask.chunk > 0 || spec.score.alibi || spec.score.relative_buckets > 0;
  check(!by_position, "batch.part.keys",
        "expected a spec that is causal, or has positions, or neither window, chunk nor position bias, got {}", spec.str());
  return PartKeys::all;
}

std::vector<DerivedBatch> split_batch(const Batch& batch, PartKeys keys, std::span<const int32_t> cuts) {
  check_batch(batch, keys);
  const int num_reqs = batch.num_reqs(), num_tokens = batch.num_tokens();
  std::vector<DerivedBatch> parts;
  int begin = 0;
  for (size_t i = 0; i <= cuts.size(); ++i) {
    const bool is_last = i == cuts.size();
    const int end = is_last ? num_tokens : cuts[i];
    check(end >= begin && end <= num_tokens, "batch.part.cuts", "expected cuts in rising order up to {} tokens, got {} behind {}",
          num_tokens, end, begin);
    const int first = i == 0 ? 0 : request_at(batch, begin);
    int last = is_last ? num_reqs : request_at(batch, end);
    if (last < num_reqs && batch.query_start_loc[size_t(last)] < end) ++last;  // a request that is cut
    std::vector<TokenRange> ranges;
    if (begin < end) ranges.push_back({begin, end});
    parts.push_back(Part(batch, keys, first, last, std::move(ranges), begin, is_last).make());
    begin = end;
  }
  return parts;
}

std::array<DerivedBatch, 2> split_batch(const Batch& batch, PartKeys keys, int cut) {
  const int32_t cuts[] = {cut};
  std::vector<DerivedBatch> parts = split_batch(batch, keys, std::span<const int32_t>(cuts));
  return {std::move(parts[0]), std::move(parts[1])};
}

DerivedBatch keep_tokens(const Batch& batch, PartKeys keys, std::span<const int32_t> tokens) {
  check_batch(batch, keys);
  const int num_tokens = batch.num_tokens();
  std::vector<TokenRange> ranges;
  int next = 0;  // the least token that may follow
  for (const int32_t t : tokens) {
    check(t >= next && t < num_tokens, "batch.part.tokens", "expected rising tokens below {}, got {} where {} is the least that may follow",
          num_tokens, t, next);
    if (ranges.empty() || ranges.back().end != t) ranges.push_back({t, t});
    ranges.back().end = next = t + 1;
  }
  const int first_token = ranges.empty() ? 0 : ranges[0].begin;
  Part part(batch, keys, 0, batch.num_reqs(), std::move(ranges), first_token, false);
  part.check_whole_states();
  return part.make();
}

int nearest_boundary(const Batch& batch, int token) {
  const auto& starts = batch.query_start_loc;
  if (starts.empty()) return 0;
  const auto at = std::lower_bound(starts.begin(), starts.end(), token);
  if (at == starts.end()) return starts.back();
  return at == starts.begin() || int64_t(*at) - token < int64_t(token) - at[-1] ? *at : at[-1];
}

}  // namespace imbrex
