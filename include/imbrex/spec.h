#pragma once
// What one softmax-attention layer computes. Fixed for the life of a model; with the device, all that selection looks at.
#include <cstdint>
#include <span>
#include <string>

#include "imbrex/expression.h"
#include "imbrex/tensor.h"

namespace imbrex {

// Where a layer stands in its model. The mask says what a query sees; the kind says where keys come from.
enum class AttentionKind : uint8_t {
  decoder,         // keys: this request's cached tokens, the last q_len of them are the queries
  encoder,         // encoder of an encoder-decoder model: no cache, bidirectional
  encoder_only,    // BERT and embedding models: no cache, bidirectional
  encoder_decoder  // cross attention: keys are the encoder's tokens, queries are not among them
};
const char* to_string(AttentionKind);

// Which keys a query sees. The query at index i of a request with q_len queries and seq_len keys has position
// p = seq_len - q_len + i (bottom-right alignment), or the one that the batch gives it; a key has its index j as position. A key is seen if
// all parts allow it.
struct Mask {
  bool causal = true;      // j <= p
  int window_left = -1;    // j >= p - window_left;  -1: no limit. "A window of W keys" is window_left = W - 1
  int window_right = -1;   // j <= p + window_right; -1: no limit
  int chunk = 0;           // floor(p / chunk) - floor(j / chunk) is 0 (Llama 4), or at most chunk_lookback; 0: off
  int chunk_lookback = 0;  // with chunk: how many chunks before the query's own are seen too (vLLM: chunk_lookback)
  bool custom = false;     // Batch::custom_mask has a byte for every (query, key); zero hides the key
  bool positions = false;  // Batch::positions has p for every query: spans of an image, branches of a tree, chunks in zigzag
  // The queries of a request are the nodes of a tree, or of several, that Batch::draft_parents gives: drafts that one step verifies. A
  // query sees the keys in front of the queries and, of the queries' keys, its own and those of its ancestors. Position of a query, and of
  // its key, is the number of keys in front of the queries plus its depth: windows, chunks and position biases go by that, and not by the
  // index.
  bool tree = false;
  std::string str() const;  // "causal window 128"
  friend bool operator==(const Mask&, const Mask&) = default;
};

// What happens to a logit between q.k and the softmax, in this order:
//   scale, head scale, soft cap, position bias (ALiBi or T5), mask. A sink then joins the denominator only.
struct ScoreMod {
  float scale = 0.f;                    // multiplies q.k; 0 means 1 / sqrt(head_dim_qk)
  bool head_scales = false;             // Inputs::head_scales multiplies the scaled logit (a temperature per q head)
  float soft_cap = 0.f;                 // logit = cap * tanh(logit / cap); 0: off
  bool alibi = false;                   // logit += AttentionInputs::alibi_slopes[head] * (j - p)
  bool alibi_sqrt = false;              // with alibi: -sqrt(p - j) in place of j - p, and 0 for keys after the query (Step1)
  int relative_buckets = 0;             // T5: logit += Inputs::relative_bias[bucket(j - p), head]; 0: off
  int relative_max_distance = 0;        // T5: distances from here on share the last bucket
  bool relative_bidirectional = false;  // T5 encoders: half of the buckets are for keys after the query
  bool sinks = false;                   // Inputs::sinks[head] is one more logit, with value 0 (gpt-oss)
  std::string str() const;
  friend bool operator==(const ScoreMod&, const ScoreMod&) = default;
};

// How keys and values lie in memory. Strided formats are described by their strides alone; the others have one writer and
// one reader each, see docs/kv-formats.md.
enum class KvFormat : uint8_t {
  strided,     // any strides, any block_size >= 1; or no blocks at all (block_size 0: ragged k and v, no cache)
  amx_packed,  // tiles of 32 tokens in the order the AMX tile unit reads; bf16 and fp8; block_size a multiple of 16
  latent,      // keys as strided has them; a value is the first head_dim_v elements of its key, stored once
  fp8_ds_mla,  // DeepSeek's records of 656 bytes: 512 e4m3 with 4 scales, which are the value too, and 64 bf16
  latent_rope  // as latent, with the elements behind the value, those with a position, in a tensor of their own
};
const char* to_string(KvFormat);

struct AttentionSpec {
  static constexpr int kMaxHeadDim = 576;  // of DeepSeek's latent keys: 512 and 64 with a position

  AttentionKind kind = AttentionKind::decoder;
  int num_q_heads = 0;
  int num_kv_heads = 0;          // divides num_q_heads
  int head_dim_qk = 0;           // a multiple of 8, at most kMaxHeadDim
  int head_dim_v = 0;            // a multiple of 8, at most kMaxHeadDim
  DType q_dtype = DType::bf16;   // f32, bf16, f16; fp8_e4m3 where kv_dtype is too: quantised by the caller, see Inputs::q_scale
  DType kv_dtype = DType::bf16;  // f32, bf16, f16, fp8_e4m3, fp8_e5m2
  KvFormat kv_format = KvFormat::strided;
  int block_size = 16;  // tokens in a block (page); 0: ragged k and v
  Mask mask;
  ScoreMod score;
  // The user's own (docs/expressions.md). A logit becomes the value of the first, a float expression, after all that `score` says but the
  // sinks. The second, a bool expression without the score, hides keys besides those that `mask` hides. Empty: none. Tensors that they read
  // come with AttentionInputs::score_tensors and with Batch::mask_tensors.
  Expression score_mod, mask_mod;

  int group_size() const { return num_q_heads / num_kv_heads; }
  float scale() const;  // score.scale, or 1 / sqrt(head_dim_qk) where that is 0
  // The types that an output may have, the usual one first: q_dtype or f32; where queries are fp8: bf16, f16 or f32.
  std::span<const DType> out_dtypes() const;
  // The types of new keys and values that write_kv() converts: q_dtype; where queries are fp8: bf16 or f16.
  std::span<const DType> new_kv_dtypes() const;
  int64_t kv_bytes_per_token() const;  // that a token takes in the cache, of a spec that validate() takes
  void validate() const;               // Error spec.* for a spec that no backend could ever run
  std::string str() const;             // "decoder q32/kv8 d128 bf16 kv=fp8_e4m3 block16 causal"
  friend bool operator==(const AttentionSpec&, const AttentionSpec&) = default;
};

}  // namespace imbrex
