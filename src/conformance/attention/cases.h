#pragma once
// The one table of attention cases: the conformance test runs every backend over it, the bench times it.
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/spec.h"

namespace imbrex {

// Which bytes of Batch::custom_mask are set.
enum class CustomPattern : uint8_t {
  none,
  random,    // two of three keys, the query itself always
  tree,      // the context, and of this step's tokens the ancestors in a binary tree (speculative decoding)
  blind,     // random, and every third query sees nothing
  documents  // of kDocumentTokens each, one after the other in the request: keys of the query's own
};

constexpr int kDocumentTokens = 300;

// Batch::positions of a request's queries.
enum class PositionPattern : uint8_t {
  none,
  spans,  // of kSpanTokens, all of which see to the end of their span: the tokens of an image
  tree,   // by depth in a binary tree of the step's tokens: siblings have one position
  zigzag  // from the last one to the first
};

constexpr int kSpanTokens = 12;

// Batch::draft_parents of a request's queries, where these are no more than kMostTreeTokens; of others, and of every fifth request, a
// chain.
enum class TreePattern : uint8_t {
  none,
  binary,  // in the order of a heap: two tokens follow each
  random,  // any token in front of it, or none
  wide,    // one token, and all others behind it
  forest   // chains of kForestTokens tokens side by side, each behind the context
};

constexpr int kForestTokens = 3;

// How the logits of a row go along its keys; whatever follows from the order of an online softmax hides behind `plain` ones.
enum class ValuePattern : uint8_t {
  plain,    // no trend
  rising,   // by 1/8 to 1 a key: every block of keys has a new maximum, which earlier output must be rescaled to
  falling,  // likewise: what comes after the first block vanishes, but must not disturb
  spike,    // a key at a border of blocks is 40 above the rest, a late one 160: a float cannot hold its exponential
  large,    // -8192 to 2048 and more: one key has all the weight, and an exponential of anything but a difference overflows
  constant  // all keys of a request are equal and all values: the output is that value
};

struct CaseRequest {
  int q_len = 0;
  int seq_len = 0;  // keys, this step's tokens included; {0, 0} is a padded request
  int id = 0;       // seeds the contents: the same id and position give the same numbers in any batch

  friend bool operator==(const CaseRequest&, const CaseRequest&) = default;
};

struct Case {
  std::string name;    // letters, digits, underscores; "page_b32_csr_lbthd"
  AttentionSpec spec;  // strided, or latent where values are a part of the keys, or the one format that holds it; block_size 0: ragged keys
  std::vector<CaseRequest> requests;
  bool csr = false;              // kv_indptr and kv_indices instead of a dense table
  std::string order = "lbhtd";   // of the cache, see KvAllocation
  int padding_tokens = 0;        // rows of q, k, v and out after the batch's tokens
  DType out_dtype = DType::f32;  // one of spec.out_dtypes()
  float q_gain = 1.f;            // standard deviation of q: above 1 the softmax is peaked
  float kv_scale = 0.02f;        // fp8 caches: k_scale and v_scale of head 0
  bool scale_per_head = false;   // fp8 caches: head h has kv_scale * (1 + h / 4)
  float rope_factor = 1.f;       // fp8 caches of latent_rope: k_rope_scale is k_scale times that
  CustomPattern custom = CustomPattern::none;
  bool packed_mask = false;  // with a bit for each query and key
  PositionPattern positions = PositionPattern::none;
  TreePattern tree = TreePattern::none;
  ValuePattern values = ValuePattern::plain;
  uint64_t seed = 1;

  int num_tokens() const;
  int num_keys() const;
  int64_t work() const;  // multiply-adds, hidden keys included

  friend bool operator==(const Case&, const Case&) = default;
};

// At least 500, made by composing axes: shape, length, dtype, mask, page, score, long, mixed, verify, value, prefill, latent, position,
// tree, expression, packed, variant (first part of the name).
std::span<const Case> cases();
const Case* find_case(std::string_view name);  // nullptr when there is none

}  // namespace imbrex
