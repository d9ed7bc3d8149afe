// See outline.h.
#include "cuda/mla/outline.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/mla/head_products.h"
#include "mla/slices.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kUnit = 256;                        // bytes that a tensor's place is a multiple of
constexpr int64_t kMostScratch = int64_t{244} << 20;  // of a workspace: less than 256 * 10^6
constexpr int kTokenUnit = 32, kLeastTokens = 64;     // of a slice that is not the whole step
static_assert(kLeastTokens >= kMostTreeTokens, "a request that is a tree is not cut");
// Queries of a request that share an expansion of its keys: that of 8192 keys costs as much as attention of 400 queries to them.
constexpr int kSliceTokens = 4096, kLeastSliceTokens = 512;
// Keys of a request that are expanded together: to merge their results with others costs a twentieth of attention to them.
constexpr int kChunkKeys = 8192, kKeyUnit = 128;
// With few heads at a time a launch needs many queries, so that there is work for all multiprocessors.
constexpr int kFewHeads = 16, kRowsOfFewHeads = 1 << 14;

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

class Places {
 public:
  explicit Places(int64_t begin) : bytes_(begin) {}
  // The place of a tensor of so many rows of heads.
  int64_t take(int64_t rows, int64_t heads, int64_t head_bytes) {
    const int64_t begin = bytes_;
    const int64_t size = checked_mul("mla.scratch", checked_mul("mla.scratch", rows, heads), head_bytes);
    check(!__builtin_add_overflow(bytes_, (size / kUnit + 1) * kUnit, &bytes_), "mla.scratch", "{} and {} bytes do not fit 63 bits", begin,
          size);
    return begin;
  }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_;
};

// Places behind the scratch of the plans of attention, `members` bytes.
MlaDeviceScratch latent_places(const MlaSpec& spec, int64_t members, int tokens) {
  const int64_t heads = spec.num_heads, size = size_of(spec.dtype);
  Places places(round_up(members, kUnit));
  MlaDeviceScratch s;
  s.products = places.take(1, 1, kProductWorkspaceBytes);
  // Outputs are made when queries are done with; queries' first parts are multiplied before there are outputs in latent space.
  s.latent_q = s.out = places.take(tokens, heads, std::max<int64_t>(spec.latent_dim() * size, spec.v_dim * int64_t(sizeof(float))));
  s.latent_out = s.nope = places.take(tokens, heads, std::max(spec.kv_lora_rank, spec.qk_nope_dim) * size);
  s.latent_lse = places.take(tokens, heads, sizeof(float));
  s.end = places.bytes();
  return s;
}

MlaDeviceScratch round_places(const MlaSpec& spec, int64_t members, const RoundShape& shape) {
  const int64_t heads = shape.heads, size = size_of(spec.dtype);
  Places places(round_up(members, kUnit));
  MlaDeviceScratch s;
  s.products = places.take(1, 1, kProductWorkspaceBytes);
  s.latents = places.take(shape.keys, 1, spec.kv_lora_rank * size);
  s.k = places.take(shape.keys, heads, spec.qk_dim() * size);
  s.v = places.take(shape.keys, heads, spec.v_dim * size);
  const int64_t rows = shape.whole ? 0 : shape.tokens;
  s.q = places.take(rows, heads, spec.qk_dim() * size);
  for (int64_t* out : {&s.part_out, &s.sum_out}) *out = places.take(rows, heads, spec.v_dim * int64_t(sizeof(float)));
  for (int64_t* lse : {&s.part_lse, &s.sum_lse}) *lse = places.take(rows, heads, sizeof(float));
  s.end = places.bytes();
  return s;
}

// The outline of a spec, in the making.
class Maker {
 public:
  Maker(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, const MlaParts& parts)
      : spec_(spec), device_(device), options_(options), parts_(parts) {}

  MlaOutline make() {
    o_.may_expand = ever_expands(spec_, parts_.rules(), options_.limits);
    choose_latent();
    o_.bytes = o_.latent.end;
    if (!o_.may_expand) return o_;
    if (parts_.chunk_keys > 0 || parts_.slice_tokens > 0 || parts_.group_heads > 0) {
      add_shape(parts_.slice_tokens > 0 ? parts_.slice_tokens : kSliceTokens);
    } else if (!add_whole_shapes()) {
      for (int tokens = kLeastSliceTokens; tokens <= kSliceTokens; tokens *= 2) add_shape(tokens);
    }
    for (const MlaDeviceScratch& of : o_.rounds) o_.bytes = std::max(o_.bytes, of.end);
    return o_;
  }

 private:
  // The scratch where slices in latent space have so many tokens.
  MlaDeviceScratch latent_scratch(int tokens) {
    o_.latent_tokens = tokens;
    const int64_t members = parts_.latent->workspace_bytes(spec_.latent_spec(), device_, latent_member(spec_, options_, o_));
    if (!spec_.absorbed) return latent_places(spec_, members, tokens);
    MlaDeviceScratch s;
    s.end = members;
    return s;
  }

  // The longest slices that there is room for. Where the device has the lengths, a step is one slice.
  void choose_latent() {
    const PlanLimits& limits = options_.limits;
    const int all = limits.max_num_tokens, queries = most_query_len(limits);
    const bool cuts = can_cut_queries(spec_.mask), whole = spec_.absorbed || (options_.on_device && !o_.may_expand);
    const int least = std::min(all, whole ? all : cuts ? kLeastTokens : std::max(kLeastTokens, queries));
    const int needed = whole || spec_.mask.tree ? least : cuts ? 1 : queries;
    int tokens = parts_.slice_tokens > 0 ? std::min(all, std::max(parts_.slice_tokens, needed)) : all;
    o_.latent = latent_scratch(tokens);
    // Attention may need more scratch for shorter slices, whose requests it cuts into more pieces: so lengths are tried.
    const int64_t each = latent_places(spec_, 0, 1 << 10).end >> 10, most = kMostScratch / each;  // bytes of a token
    while (o_.latent.end > kMostScratch && tokens > least) {
      const int64_t shorter = std::min<int64_t>(tokens - round_up(tokens / 16, kTokenUnit), most);
      tokens = int(std::max<int64_t>(shorter / kTokenUnit * kTokenUnit, least));
      o_.latent = latent_scratch(tokens);
    }
    o_.latent_slices = most_slices(all, tokens, queries);
  }

  MlaDeviceScratch round_scratch(const RoundShape& shape) const {
    int64_t members = 0;
    for (const AttentionSpec& round : round_specs(of_heads(spec_, shape.heads)))
      members = std::max(members, parts_.expanded->workspace_bytes(round, device_, round_member(options_, shape)));
    return round_places(spec_, members, shape);
  }

  // For requests whose keys fit one round, with all heads or a part of them. True: no request needs another shape.
  bool add_whole_shapes() {
    const PlanLimits& limits = options_.limits;
    const int all = spec_.num_heads, most_tokens = std::min(limits.max_num_tokens, 2 * kSliceTokens);
    if (spec_.sinks) return false;  // they join results
    for (int heads = all;; heads = (heads + 1) / 2) {
      RoundShape shape{.heads = heads, .tokens = most_tokens, .keys = kKeyUnit, .whole = true};
      shape.least_tokens = heads == all || heads >= kFewHeads ? 0 : kRowsOfFewHeads / heads;
      while (round_scratch(shape).end > kMostScratch / 3 && shape.tokens > kLeastSliceTokens) shape.tokens /= 2;
      if (shape.least_tokens > std::min(shape.tokens, most_query_len(limits))) break;
      const bool fits = grow_keys(shape, round_up(int64_t(limits.max_num_reqs) * limits.max_seq_len, kKeyUnit)) &&
                        round_scratch(shape).products < kMostScratch / 3;  // which attention's scratch is in front of
      if (fits && (o_.shapes.empty() || shape.keys > o_.shapes.back().keys)) put(shape);
      if (fits && shape.keys >= limits.max_seq_len) {
        if (shape.least_tokens == 0 && shape.tokens >= most_query_len(limits)) return true;
        break;
      }
      if (heads == 1) break;
    }
    return false;
  }

  // For requests of so many queries and, where there is no larger shape, more: with as many heads as there is room for.
  void add_shape(int tokens) {
    const PlanLimits& limits = options_.limits;
    const int all = spec_.num_heads, given = std::min(parts_.group_heads, all);
    RoundShape shape{.heads = 0, .tokens = std::min(tokens, limits.max_num_tokens), .keys = 0, .whole = false};
    shape.keys = parts_.chunk_keys > 0 ? parts_.chunk_keys : device_chunk_keys(spec_, limits);
    for (shape.heads = given > 0 ? given : all; round_scratch(shape).end > kMostScratch;) {
      if (shape.heads > std::min(all, kFewHeads / 2) || shape.tokens <= kLeastSliceTokens) {
        if (shape.heads == 1) break;
        shape.heads = (shape.heads + 1) / 2;
      } else {
        shape.tokens = std::max(shape.tokens / 2, kLeastSliceTokens), shape.heads = all;
      }
    }
    if (!o_.shapes.empty() && !o_.shapes.back().whole && shape.tokens <= o_.shapes.back().tokens) return;
    if (parts_.chunk_keys == 0) grow_keys(shape, round_up(limits.max_seq_len, kKeyUnit));
    put(shape);
  }

  // As many keys as there is room for; false: not even those that it has.
  bool grow_keys(RoundShape& shape, int64_t most) const {
    const int least = shape.keys;
    const int64_t room = kMostScratch - round_scratch(shape).end;
    if (room < 0) return false;
    shape.keys =
        int(std::clamp<int64_t>((least + room / key_bytes(shape.heads)) / kKeyUnit * kKeyUnit, least, std::max<int64_t>(most, least)));
    for (int64_t over; (over = round_scratch(shape).end - kMostScratch) > 0 && shape.keys > least;)
      shape.keys = int(std::max<int64_t>(shape.keys - round_up(over / key_bytes(shape.heads) + 1, kKeyUnit), least));
    return true;
  }

  void put(const RoundShape& shape) {
    o_.shapes.push_back(shape);
    o_.rounds.push_back(round_scratch(shape));
  }

  // Of an expanded key, and the latent that it is made of.
  int64_t key_bytes(int heads) const {
    return (int64_t(heads) * (spec_.qk_dim() + spec_.v_dim) + spec_.kv_lora_rank) * size_of(spec_.dtype);
  }

  const MlaSpec& spec_;
  const DeviceInfo& device_;
  const PlanOptions& options_;
  const MlaParts& parts_;
  MlaOutline o_;
};

PlanLimits limits_of_tokens(PlanLimits limits, int tokens) {
  if (limits.max_query_len > tokens) limits.max_query_len = tokens;
  limits.max_num_tokens = std::min(limits.max_num_tokens, tokens);
  return limits;
}

}  // namespace

size_t MlaOutline::shape_of(int queries, int keys) const {
  const auto holds = [&](const RoundShape& shape) {
    return queries >= shape.least_tokens && queries <= shape.tokens && (!shape.whole || keys <= shape.keys);
  };
  return size_t(std::find_if(shapes.begin(), shapes.end() - 1, holds) - shapes.begin());
}

MlaOutline outline(const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options, const MlaParts& parts) {
  return Maker(spec, device, options, parts).make();
}

PlanOptions latent_member(const MlaSpec& spec, const PlanOptions& options, const MlaOutline& of) {
  PlanOptions member = options;
  member.validate = false;  // the whole batch is checked before it is taken apart
  member.on_device = options.on_device && !of.may_expand;
  member.limits = limits_of_tokens(options.limits, of.latent_tokens);
  if (member.limits.max_num_tokens < most_query_len(options.limits)) member.limits.min_query_len = 0;  // what a cut leaves may be shorter
  if (!spec.absorbed) member.out_dtype = spec.dtype;
  return member;
}

PlanOptions round_member(const PlanOptions& options, const RoundShape& shape) {
  PlanOptions member = options;
  member.validate = member.on_device = false;
  member.out_dtype.reset();
  member.limits = limits_of_tokens(options.limits, shape.tokens);
  member.limits.max_num_reqs = std::min(member.limits.max_num_reqs, member.limits.max_num_tokens);
  member.limits.max_seq_len = std::min(member.limits.max_seq_len, shape.keys);
  member.limits.min_query_len = 0;
  return member;
}

MlaSpec of_heads(const MlaSpec& spec, int heads) {
  MlaSpec of = spec;
  of.num_heads = heads;
  return of;
}

int device_chunk_keys(const MlaSpec&, const PlanLimits& limits) {
  return int(std::min<int64_t>(kChunkKeys, round_up(int64_t(limits.max_num_reqs) * limits.max_seq_len, kKeyUnit)));
}

int most_query_len(const PlanLimits& limits) {
  return limits.max_query_len > 0 ? std::min(limits.max_query_len, limits.max_num_tokens) : limits.max_num_tokens;
}

}  // namespace imbrex::cuda
