#pragma once
// Request traces (arrival, input and output lengths, shared prefixes): what `imbrex run` replays and `imbrex trace` looks at.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace imbrex::serve {

// Tokens of a prompt that see each other whatever their order, as those of an image do in models such as Gemma 3.
struct TokenSpan {
  int begin = 0, end = 0;
  friend bool operator==(const TokenSpan&, const TokenSpan&) = default;
};

struct TraceRequest {
  double arrival_s = 0;              // seconds after the first request of the trace, or after its own zero; never decreasing
  int input_length = 0;              // tokens, >= 1
  int output_length = 0;             // tokens, >= 1
  std::vector<uint64_t> prefix_ids;  // one per Trace::prefix_block input tokens, the last one partly used; equal leading ids: shared prefix
  int system_tokens = 0;             // of the prompt's first tokens, which all requests have in common; prefix ids are of those behind them
  std::vector<TokenSpan> images;     // in order, within the prompt
};

struct Trace {
  std::string source;    // the file's name, for messages and reports
  std::string format;    // "mooncake", "azure", "csv", "jsonl"
  int prefix_block = 0;  // input tokens per prefix id: 512 for Mooncake, 0: the format has none
  std::vector<TraceRequest> requests;
};

struct TraceLimits {
  int64_t max_bytes = int64_t(4) << 30;  // of the file
  int64_t max_line_bytes = int64_t(1) << 24;
  int64_t max_requests = 50'000'000;
  int64_t max_tokens = 16'777'216;  // input or output of one request
};

// Tells the format from the first line:
//   Mooncake JSONL  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one per 512 input tokens]}
//   plain JSONL     {"arrival": seconds, "input": n, "output": n}
//   Azure CSV       TIMESTAMP,ContextTokens,GeneratedTokens     with times like 2023-11-16 18:17:03.9799600
//   plain CSV       arrival,input,output                        with arrival in seconds
// LF or CRLF, with or without a newline at the end; empty lines are skipped; unknown JSON fields are ignored.
// Error trace.* naming file, line and column (1-based, in bytes), with the expected and the actual text.
Trace parse_trace(std::string_view text, std::string_view name, const TraceLimits& = {});
Trace read_trace(const std::string& path, const TraceLimits& = {});  // Error trace.file.* when it cannot be read

constexpr int kMooncakeBlock = 512;

// The same requests with a part of their tokens, rounded up: inputs, outputs and the blocks of prefixes are divided by the factor, so that
// requests share what they shared; the source says so. Error trace.shrink for a factor that is not 1 or more, or that does not divide the
// block.
void shrink(Trace&, int factor);

// The same requests with so many tokens in front of each prompt, the same ones for all; the source says so. Error trace.system_prompt
void add_system_prompt(Trace&, int tokens);

// The same requests with images: of each `every` tokens of a prompt behind its system prompt the last `tokens` are one. The source says so.
// Error trace.images for numbers below 1, or images longer than what they are in.
void add_images(Trace&, int every, int tokens);
bool has_images(const Trace&);
// The image that a token is of; null: it is of none.
const TokenSpan* image_at(const TraceRequest&, int position);
// The position of the last token of the prompt that a token sees: its own, or that of its image's last one.
int last_seen(const TraceRequest&, int position);

}  // namespace imbrex::serve
