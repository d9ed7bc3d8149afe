#pragma once
// vLLM's notation for a batch: "2q2k,32q1s1k" is two requests of 2048 queries and 32 of one query over 1024 keys. Used by `imbrex bench`.
#include <string>
#include <string_view>
#include <vector>

namespace imbrex::serve {

struct BatchItem {
  int count = 1;
  int q_len = 0;
  int seq_len = 0;  // keys, the queries included
  friend bool operator==(const BatchItem&, const BatchItem&) = default;
};

// Items `(<count>?)q<length>(k?)(s<length>(k?))?` joined by '_' or ','; k is 1024; without s the keys are the queries.
// Error batch_grammar.* naming the position: syntax, count (1 to 65536), length (1 to 16777216), order (fewer keys than queries),
// size (more than 65536 requests or 2^31 - 1 tokens in all).
std::vector<BatchItem> parse_batch(std::string_view text);
std::string to_string(const std::vector<BatchItem>&);  // shortest form, joined by ','

}  // namespace imbrex::serve
