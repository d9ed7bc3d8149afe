#pragma once
// What each of the two ways to compute a request of MLA costs: in latent space, or with expanded keys and values.
#include <cstdint>
#include <string>

#include "imbrex/mla.h"

namespace imbrex {

// Operations (a multiply-add is two) of all heads.
struct MlaOperations {
  double product;                     // with kv_b_proj: of a query and its output, or of a key that is expanded
  double latent_pair, expanded_pair;  // of a query and a key that it sees
};
MlaOperations operations_of(const MlaSpec&);

// Speeds of one core of a CPU, or of a whole GPU, in operations (a multiply-add is two) and bytes a second. Only their ratios matter.
struct MlaRates {
  double products;   // of the products of queries and outputs with kv_b_proj
  double expansion;  // of the products of latents with it
  double latent;     // of attention in latent space, where all heads share a key
  double expanded;   // of attention to expanded keys
  double bytes;      // of memory: expanded keys are written and read again
  double round = 0;  // seconds that expanded keys take beside all that, however few they are: launches on a GPU
};

struct MlaCost {
  double latent = 0, expanded = 0;  // seconds of one core, or GPU
  bool expand() const { return expanded < latent; }
  std::string str() const;  // "2.1 ms in latent space, 0.9 ms expanded"
};

// The keys that some query of a request sees by its mask, the custom mask and given positions apart.
struct KeySpan {
  int64_t begin = 0, end = 0;
};
KeySpan seen_keys(const Mask&, int64_t q_len, int64_t seq_len);

// Of a request with q_len queries and seq_len keys, by itself: it depends on nothing else in the batch.
MlaCost cost_of(const MlaSpec&, const MlaRates&, int64_t q_len, int64_t seq_len);

}  // namespace imbrex
