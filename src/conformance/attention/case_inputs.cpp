// See case_inputs.h. Contents come from a hash of (seed, tensor, request, position, head, dim), so that they do not depend on the batch.
#include "conformance/attention/case_inputs.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "conformance/case_random.h"
#include "core/float_types.h"
#include "imbrex/batch.h"

namespace imbrex {
namespace {

enum Sequence : uint64_t { kQ, kK, kV, kSinks, kHeadScales, kBias, kMask, kExpression };

// Rows of one request: row i has position `first + i`, or all have the first where they are to be equal.
void fill_rows(HostTensor& t, int64_t row, int count, int64_t first, uint64_t seed, double gain, bool equal = false) {
  const int64_t heads = t.sizes[1], dim = t.sizes[2];
  std::vector<double> values(size_t(dim), 0.);
  for (int i = 0; i < count; ++i)
    for (int64_t h = 0; h < heads; ++h) {
      const uint64_t key = splitmix(splitmix(seed + uint64_t(equal ? first : first + i)) + uint64_t(h));
      for (size_t d = 0; d < values.size(); ++d) values[d] = gain * normal(splitmix(key + d));
      t.set_row(((row + i) * heads + h) * dim, values);
    }
}

bool is_ramp(const Case& c) { return c.values == ValuePattern::rising || c.values == ValuePattern::falling; }

// What a pattern adds to the logit of key j, in steps of step_of(). The largest logits are near 0 where they can be: the bounds come
// from a computation that rounds logits to q_dtype, so that large ones would make them wide.
int level_of(const Case& c, const CaseRequest& r, int j) {
  switch (c.values) {
    case ValuePattern::rising: return j - (r.seq_len - 1);
    case ValuePattern::falling: return -j;
    case ValuePattern::spike: {
      const int border = (r.seq_len > 4097 ? 4096 : 128) - int(c.seed % 2);
      return j == r.seq_len - r.q_len - 3 ? 160 : j == border ? 40 : 0;
    }
    case ValuePattern::large: return j % 61 == 0 ? 8 * (j / 61 + 1) : -(j * 181 % 256);
    case ValuePattern::plain:
    case ValuePattern::constant: return 0;
  }
  return 0;
}

double step_of(const Case& c, const CaseRequest& r, int position, int q_head) {
  if (c.values == ValuePattern::large) return 32.0;
  if (!is_ramp(c)) return 1.0;
  const int first = int(first_visible_key(c.spec.mask, position));
  const int top =
      c.values == ValuePattern::rising ? r.seq_len - 1 - position : first;  // the key in sight with the highest level is at -top
  return std::min(0.125 * (1 << q_head % 4), 16.0 / std::max(1, top));
}

// The last dimension of q and k is given over to the pattern, whose share of a logit is then level times step.
void add_pattern(CaseInputs& in, const Case& c, const CaseRequest& r, int64_t token, int64_t key) {
  const int last = c.spec.head_dim_qk - 1;
  // Levels have to fit an fp8 cache.
  const double unit = (is_fp8(c.spec.kv_dtype) ? double(c.kv_scale) : 1.0) * (is_ramp(c) ? 0.125 : 1.0);
  for (int j = 0; j < r.seq_len; ++j)
    for (int64_t h = 0; h < c.spec.num_kv_heads; ++h)
      in.k.set(((key + j) * c.spec.num_kv_heads + h) * (last + 1) + last, level_of(c, r, j) * unit);
  for (int i = 0; i < r.q_len; ++i)
    for (int h = 0; h < c.spec.num_q_heads; ++h)
      in.q.set(((token + i) * c.spec.num_q_heads + h) * (last + 1) + last,
               step_of(c, r, r.seq_len - r.q_len + i, h) / (unit * double(c.spec.scale())));
}

// Batch::positions of query i.
int position_of(const Case& c, const CaseRequest& r, int i) {
  const int context = r.seq_len - r.q_len;
  switch (c.positions) {
    case PositionPattern::spans: return std::max(0, std::min(r.seq_len, (context + i) / kSpanTokens * kSpanTokens + kSpanTokens) - 1);
    case PositionPattern::tree: return std::max(0, context) + int(std::bit_width(unsigned(i + 1))) - 1;
    case PositionPattern::zigzag: return std::max(0, r.seq_len - 1 - i);
    default: return std::max(0, context + i);
  }
}

// The query that query i follows.
int parent_of(const Case& c, const CaseRequest& r, int i) {
  if (r.q_len > kMostTreeTokens || r.id % 5 == 4) return i - 1;
  switch (c.tree) {
    case TreePattern::binary: return (i + 1) / 2 - 1;
    case TreePattern::random: return int(splitmix(c.seed * 977 + uint64_t(r.id) * 131 + uint64_t(i)) % uint64_t(i + 1)) - 1;
    case TreePattern::wide: return i == 0 ? -1 : 0;
    case TreePattern::forest: return i % kForestTokens == 0 ? -1 : i - 1;
    default: return i - 1;
  }
}

// Whether the custom mask shows key j to query i.
bool custom_shows(const Case& c, const CaseRequest& r, int i, int j) {
  const int position = r.seq_len - r.q_len + i, context = r.seq_len - r.q_len;
  switch (c.custom) {
    case CustomPattern::none: return true;
    case CustomPattern::tree: {
      if (j < context) return true;
      int node = i;  // heap order: the parent of node n is (n - 1) / 2
      while (node > 0 && node > j - context) node = (node - 1) / 2;
      return node == j - context;
    }
    case CustomPattern::documents: return j / kDocumentTokens == position / kDocumentTokens;
    case CustomPattern::blind:
      if (position % 3 == 1) return false;
      [[fallthrough]];
    case CustomPattern::random:
      return j == position || splitmix(c.seed * 1000003 + uint64_t(r.id) * 10007 + uint64_t(position) * 131071 + uint64_t(j)) % 3 != 0;
  }
  return true;
}

HostTensor head_vector(const Case& c, Sequence sequence, double low, double high) {
  HostTensor t = HostTensor::make(DType::f32, {c.spec.num_q_heads});
  for (int h = 0; h < c.spec.num_q_heads; ++h) t.set(h, low + (high - low) * uniform(splitmix(splitmix(c.seed + sequence) + uint64_t(h))));
  return t;
}

}  // namespace

int64_t CaseInputs::position_of(const CaseRequest& r, int64_t first, int i) const {
  if (spec.mask.positions) return int64_t(positions.get(first + i));
  const int64_t context = int64_t(r.seq_len) - r.q_len;
  if (draft_parents.empty()) return context + i;
  int64_t depth = 0;
  for (int above = parent_of(first, i); above >= 0; above = parent_of(first, above)) ++depth;
  return context + depth;
}

int64_t CaseInputs::key_position_of(const CaseRequest& r, int64_t first, int64_t j) const {
  const int64_t context = int64_t(r.seq_len) - r.q_len;
  return draft_parents.empty() || j < context ? j : position_of(r, first, int(j - context));
}

std::vector<NamedTensor> CaseInputs::named_tensors() const {
  std::vector<NamedTensor> named;
  for (const auto& [name, tensor] : expression_tensors) named.push_back({name, tensor.view()});
  return named;
}

bool CaseInputs::tree_shows(const CaseRequest& r, int64_t first, int i, int64_t j) const {
  const int64_t context = int64_t(r.seq_len) - r.q_len;
  if (draft_parents.empty() || j < context) return true;
  while (i > j - context) i = parent_of(first, i);
  return i == j - context;
}

// By its type and rank: ints are of requests, and of their keys, where they rise as numbers of documents do; floats are of q heads, and of
// these, of query positions where there are three indices, and of keys.
static HostTensor expression_tensor(const Case& c, const ExpressionTensor& wanted) {
  int64_t longest = 1;
  for (const CaseRequest& r : c.requests) longest = std::max<int64_t>(longest, r.seq_len);
  const bool real = wanted.type == ExpressionType::real;
  std::vector<int64_t> sizes{real ? int64_t(c.spec.num_q_heads) : int64_t(c.requests.size()), longest};
  sizes.resize(size_t(wanted.rank), longest);
  HostTensor t = HostTensor::make(real ? DType::f32 : wanted.type == ExpressionType::integer ? DType::i32 : DType::u8, sizes);
  const int64_t keys = wanted.rank == 1 ? 1 : longest;
  for (int64_t i = 0; i < t.num_elements(); ++i) {
    const int64_t row = i / keys, key = i % keys;
    if (real) {
      t.set(i, normal(splitmix(splitmix(c.seed + kExpression) + uint64_t(i))));
    } else if (wanted.type == ExpressionType::boolean) {
      t.bytes[size_t(i)] = splitmix(c.seed + uint64_t(i)) % 3 != 0;
    } else {
      reinterpret_cast<int32_t*>(t.bytes.data())[i] =
          int32_t(wanted.rank == 1 ? c.requests[size_t(row)].seq_len / 3 : key / (kDocumentTokens / 10 + row));
    }
  }
  return t;
}

CaseInputs make_inputs(const Case& c) {
  const AttentionSpec& spec = c.spec;
  CaseInputs in;
  in.spec = spec;
  in.requests = c.requests;
  const DType type = spec.new_kv_dtypes().front();
  in.q = HostTensor::make(type, {c.num_tokens(), spec.num_q_heads, spec.head_dim_qk});
  in.k = HostTensor::make(type, {c.num_keys(), spec.num_kv_heads, spec.head_dim_qk});
  in.v = HostTensor::make(type, {c.num_keys(), spec.num_kv_heads, spec.head_dim_v});
  int64_t token = 0, key = 0;
  for (const CaseRequest& r : c.requests) {
    const uint64_t seed = splitmix(c.seed * 0x10001 + uint64_t(r.id));
    fill_rows(in.q, token, r.q_len, r.seq_len - r.q_len, splitmix(seed ^ kQ), c.q_gain);
    fill_rows(in.k, key, r.seq_len, 0, splitmix(seed ^ kK), 1.0, c.values == ValuePattern::constant);
    fill_rows(in.v, key, r.seq_len, 0, splitmix(seed ^ kV), 1.0, c.values == ValuePattern::constant);
    if (c.values != ValuePattern::plain) add_pattern(in, c, r, token, key);
    token += r.q_len;
    key += r.seq_len;
  }
  // A sink far above and far below the logits, so that a wrong one shows.
  if (spec.score.sinks) in.sinks = head_vector(c, kSinks, -4.0, 9.0);
  if (spec.score.head_scales) in.head_scales = head_vector(c, kHeadScales, 0.5, 2.0);
  if (spec.score.alibi) {
    in.alibi_slopes = HostTensor::make(DType::f32, {spec.num_q_heads});
    for (int h = 0; h < spec.num_q_heads; ++h) in.alibi_slopes.set(h, std::exp2(-8.0 * (h + 1) / spec.num_q_heads));
  }
  if (spec.score.relative_buckets > 0) {
    in.relative_bias = HostTensor::make(DType::f32, {spec.score.relative_buckets, spec.num_q_heads});
    for (int64_t i = 0; i < in.relative_bias.num_elements(); ++i)
      in.relative_bias.set(i, 2.0 * normal(splitmix(splitmix(c.seed + kBias * 77) + uint64_t(i))));
  }
  if (spec.mask.custom) {
    int64_t bytes = 0, at = 0;
    for (const CaseRequest& r : c.requests) bytes += int64_t(r.q_len) * r.seq_len;
    in.custom_mask = HostTensor::make(DType::u8, {bytes});
    for (const CaseRequest& r : c.requests)
      for (int i = 0; i < r.q_len; ++i)
        for (int j = 0; j < r.seq_len; ++j) in.custom_mask.bytes[size_t(at++)] = custom_shows(c, r, i, j);
  }
  if (spec.mask.positions) {
    std::vector<int32_t> positions;
    for (const CaseRequest& r : c.requests)
      for (int i = 0; i < r.q_len; ++i) positions.push_back(position_of(c, r, i));
    in.positions = tensor_of(positions);
  }
  if (spec.mask.tree) {
    std::vector<int32_t> parents;
    for (const CaseRequest& r : c.requests)
      for (int i = 0; i < r.q_len; ++i) parents.push_back(parent_of(c, r, i));
    in.draft_parents = tensor_of(parents);
  }
  for (const Expression* e : {&spec.score_mod, &spec.mask_mod})
    for (const ExpressionTensor& wanted : e->empty() ? std::span<const ExpressionTensor>() : e->tensors())
      if (std::ranges::find(in.expression_tensors, wanted.name, &NamedHostTensor::name) == in.expression_tensors.end())
        in.expression_tensors.push_back({wanted.name, expression_tensor(c, wanted)});
  if (is_fp8(spec.kv_dtype) && !codec_of(spec).scales_inside) {
    const int count = c.scale_per_head ? spec.num_kv_heads : 1;
    in.k_scale = HostTensor::make(DType::f32, {count});
    in.v_scale = HostTensor::make(DType::f32, {count});
    for (int h = 0; h < count; ++h) {
      in.k_scale.set(h, double(c.kv_scale) * (1.0 + h / 4.0));
      in.v_scale.set(h, double(c.kv_scale) * std::max(1.5 - h / 8.0, 0.125));
    }
  }
  if (c.rope_factor != 1.f) {
    in.k_rope_scale = in.k_scale;
    for (int64_t h = 0; h < in.k_scale.num_elements(); ++h) in.k_rope_scale.set(h, in.k_scale.get(h) * double(c.rope_factor));
  }
  if (codec_of(spec).values_in_keys) in.v = first_elements(in.k, spec.head_dim_v), in.v_scale = in.k_scale;
  if (spec.q_dtype == DType::fp8_e4m3) {
    in.q_scale = HostTensor::make(DType::f32, {c.scale_per_head ? spec.num_kv_heads : 1});
    for (int64_t h = 0; h < in.q_scale.num_elements(); ++h) in.q_scale.set(h, 0.75 * (1.0 + double(h) / 4.0));
    in.q = as_cached(in.q, spec.q_dtype, in.q_scale);
  }
  return in;
}

static HostTensor part_of_rows(const HostTensor& t, int64_t begin, int64_t end) {
  HostTensor part = HostTensor::make(t.dtype, {t.sizes[0], t.sizes[1], end - begin});
  const int64_t size = size_of(t.dtype), from = t.sizes[2] * size, to = (end - begin) * size;
  for (int64_t row = 0; row < t.sizes[0] * t.sizes[1]; ++row)
    std::copy_n(t.bytes.begin() + row * from + begin * size, to, part.bytes.begin() + row * to);
  return part;
}
HostTensor first_elements(const HostTensor& t, int dim) { return part_of_rows(t, 0, dim); }
HostTensor last_elements(const HostTensor& t, int dim) { return part_of_rows(t, t.sizes[2] - dim, t.sizes[2]); }

HostTensor as_read(const CaseInputs& in, KvPart part) {
  AttentionSpec spec = in.spec;
  spec.block_size = std::max(spec.block_size, 1);
  const KvCodec& codec = codec_of(spec);
  const KvPart written = codec.values_in_keys ? KvPart::k : part;
  const HostTensor &from = written == KvPart::k ? in.k : in.v, &shape = part == KvPart::k ? in.k : in.v;
  const KvAllocation memory(spec, 1, 1);
  const KvCache cache = with_scales(in, spec, memory.layer(0));
  HostTensor read = HostTensor::make(DType::f32, shape.sizes);
  const int64_t heads = shape.sizes[1], dim = shape.sizes[2];
  std::vector<double> row(static_cast<size_t>(dim));
  for (int64_t i = 0; i < shape.sizes[0]; ++i)
    for (int h = 0; h < heads; ++h) {
      const KvPlace place{.block = 0, .offset = 0, .head = h};
      codec.encode(spec, cache, written, place, {from.bytes.data(), from.dtype, (i * heads + h) * from.sizes[2], 1});
      codec.decode(spec, cache, part, place, row.data());
      for (int64_t d = 0; d < dim; ++d) read.set((i * heads + h) * dim + d, row[size_t(d)]);
    }
  return read;
}

KvCache with_scales(const CaseInputs& in, const AttentionSpec& spec, KvCache cache) {
  if (!in.k_scale.empty()) cache.k_scale = in.k_scale.view();
  if (!in.v_scale.empty() && !codec_of(spec).values_in_keys) cache.v_scale = in.v_scale.view();
  if (codec_of(spec).layout(spec, KvPart::k_rope)) cache.k_rope_scale = in.k_rope_scale.empty() ? cache.k_scale : in.k_rope_scale.view();
  return cache;
}

float scale_of_head(const HostTensor& t, const HostTensor& scale, int64_t head) {
  return scale.empty() ? 1.f : float(scale.get(head * scale.sizes[0] / t.sizes[1]));
}

HostTensor as_cached(const HostTensor& t, DType dtype, const HostTensor& scale) {
  if (t.dtype == dtype) return t;
  HostTensor cached = HostTensor::make(dtype, t.sizes);
  const int64_t heads = t.sizes[1], dim = t.sizes[2];
  for (int64_t i = 0; i < t.num_elements(); ++i)
    store_from_float(cached.bytes.data(), dtype, i, float(t.get(i)) / scale_of_head(t, scale, i / dim % heads));
  return cached;
}

}  // namespace imbrex
