// vLLM's notation for a batch, "2q2k,32q1s1k". Used by `imbrex bench`.
#include "serve/batch_grammar.h"

#include <fmt/format.h>

#include <limits>

#include "core/check.h"

namespace imbrex::serve {
namespace {

constexpr int64_t kMaxCount = 65536, kMaxLength = 16777216;

struct Cursor {
  std::string_view text;
  size_t at = 0;

  bool take(char c) {
    if (at >= text.size() || text[at] != c) return false;
    ++at;
    return true;
  }
  bool at_digit() const { return at < text.size() && text[at] >= '0' && text[at] <= '9'; }

  // Digits, saturated far above every limit.
  int64_t number() {
    expect(at_digit(), "a number");
    int64_t value = 0;
    while (at_digit()) value = std::min<int64_t>(value * 10 + (text[at++] - '0'), int64_t(1) << 40);
    return value;
  }
  int length() {
    const size_t begin = at;
    int64_t value = number();
    if (take('k')) value *= 1024;
    check(value >= 1 && value <= kMaxLength, "batch_grammar.length", "a length from 1 to {} at column {} of \"{}\", got {}", kMaxLength,
          begin + 1, text, text.substr(begin, at - begin));
    return int(value);
  }
  void expect(bool ok, const char* wanted) const {
    check(ok, "batch_grammar.syntax", "{} at column {} of \"{}\", got {}", wanted, at + 1, text,
          at < text.size() ? fmt::format("\"{}\"", text.substr(at, 1)) : "the end");
  }
};

std::string length_text(int length) { return length % 1024 == 0 ? fmt::format("{}k", length / 1024) : fmt::format("{}", length); }

}  // namespace

std::vector<BatchItem> parse_batch(std::string_view text) {
  std::vector<BatchItem> items;
  Cursor cursor{text};
  int64_t requests = 0, tokens = 0;
  do {
    BatchItem item;
    const size_t begin = cursor.at;
    if (cursor.at_digit()) {
      const int64_t count = cursor.number();
      check(count >= 1 && count <= kMaxCount, "batch_grammar.count", "a count from 1 to {} at column {} of \"{}\", got {}", kMaxCount,
            begin + 1, text, text.substr(begin, cursor.at - begin));
      item.count = int(count);
    }
    cursor.expect(cursor.take('q'), "\"q\"");
    item.q_len = item.seq_len = cursor.length();
    if (cursor.take('s')) item.seq_len = cursor.length();
    check(item.seq_len >= item.q_len, "batch_grammar.order", "at least as many keys as queries in item \"{}\", got {} and {}",
          text.substr(begin, cursor.at - begin), item.seq_len, item.q_len);
    requests += item.count;
    tokens += int64_t(item.count) * item.seq_len;
    check(requests <= kMaxCount && tokens <= std::numeric_limits<int32_t>::max(), "batch_grammar.size",
          "at most {} requests and {} keys in all, got {} and {}", kMaxCount, std::numeric_limits<int32_t>::max(), requests, tokens);
    items.push_back(item);
  } while (cursor.take('_') || cursor.take(','));
  cursor.expect(cursor.at == text.size(), "\"_\", \",\" or the end");
  return items;
}

std::string to_string(const std::vector<BatchItem>& items) {
  std::string text;
  for (const BatchItem& item : items) {
    if (!text.empty()) text += ',';
    if (item.count != 1) text += fmt::format("{}", item.count);
    text += "q" + length_text(item.q_len);
    if (item.seq_len != item.q_len) text += "s" + length_text(item.seq_len);
  }
  return text;
}

}  // namespace imbrex::serve
