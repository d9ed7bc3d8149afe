#pragma once
// The tensors of one case, in host memory: made from the table's seeds or read from a case file; run and judged by conformance.h.
#include <vector>

#include "attention/kv_codec.h"
#include "conformance/attention/cases.h"
#include "conformance/host_tensor.h"

namespace imbrex {

struct NamedHostTensor {
  std::string name;
  HostTensor tensor;
};

struct CaseInputs {
  AttentionSpec spec;
  std::vector<CaseRequest> requests;
  HostTensor q;  // [T, num_q_heads, head_dim_qk], q_dtype
  // [S, num_kv_heads, head_dim_qk or head_dim_v], kv_dtype or one of new_kv_dtypes(): all keys of request 0, then of request 1, ... Where
  // the spec's values are a part of the keys, v and v_scale are what a cache that stores both would have.
  HostTensor k, v;
  HostTensor sinks, alibi_slopes, head_scales;      // f32 [num_q_heads], where the spec has them
  HostTensor relative_bias;                         // f32 [relative_buckets, num_q_heads]
  HostTensor custom_mask;                           // u8 [sum of q_len * seq_len]
  HostTensor positions;                             // i32 [T]
  HostTensor draft_parents;                         // i32 [T], under a tree; empty: chains
  std::vector<NamedHostTensor> expression_tensors;  // those that score_mod and mask_mod read
  HostTensor q_scale, k_scale, v_scale;             // f32 [1] or [num_kv_heads], fp8 queries and fp8 caches only
  HostTensor k_rope_scale;                          // latent_rope, where k_scale is given; empty: k_scale

  int num_tokens() const { return int(q.sizes[0]); }
  // Of query number i of a request whose first query is row `first` of q.
  int64_t position_of(const CaseRequest& r, int64_t first, int i) const;
  // Of key number j of the request.
  int64_t key_position_of(const CaseRequest& r, int64_t first, int64_t j) const;
  // Whether a tree, where there is one, shows the key to the query: it is in front of all queries, or an ancestor's, or the query's own.
  bool tree_shows(const CaseRequest& r, int64_t first, int i, int64_t j) const;
  // What score_mod and mask_mod are bound to: views of expression_tensors.
  std::vector<NamedTensor> named_tensors() const;
  // The query that query number i follows; -1: none.
  int parent_of(int64_t first, int i) const { return draft_parents.empty() ? i - 1 : int(draft_parents.get(first + i)); }
};

// Makes the inputs of a case: the same bits on every machine.
CaseInputs make_inputs(const Case&);

// Of each row the first `dim` elements: the values of a latent.
HostTensor first_elements(const HostTensor&, int dim);
HostTensor last_elements(const HostTensor&, int dim);

// k or v as the cache holds it: in kv_dtype, divided by the scale where it is fp8. Or q, in q_dtype.
HostTensor as_cached(const HostTensor&, DType, const HostTensor& scale);
// Keys (KvPart::k) or values as numbers, f32: what a cache of the spec's format gives back of them.
HostTensor as_read(const CaseInputs&, KvPart);
// A cache with the scales of the inputs that the format takes; they are views of the inputs.
KvCache with_scales(const CaseInputs&, const AttentionSpec&, KvCache);
// The scale of a tensor's head.
float scale_of_head(const HostTensor& t, const HostTensor& scale, int64_t head);

}  // namespace imbrex
