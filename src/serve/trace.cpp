// Reads request traces in four public or plain formats (see trace.h), with an exact place for every complaint.
#include "serve/trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"
#include "core/json_gate.h"
#include "core/read_file.h"

namespace imbrex::serve {

namespace {

constexpr int kMaxJsonDepth = 64;  // of a line
constexpr std::string_view kAzureHeader = "TIMESTAMP,ContextTokens,GeneratedTokens";
constexpr std::string_view kPlainHeader = "arrival,input,output";

// The user's text, cut to the length of a message and without control characters.
std::string excerpt(std::string_view text) {
  constexpr size_t kLongest = 48;
  std::string out = "'";
  for (const char c : text.substr(0, kLongest)) out += c >= ' ' && c != '\x7f' ? c : '?';
  return out + (text.size() > kLongest ? "...'" : "'");
}

struct Parser {
  Parser(std::string_view file_name, const TraceLimits& the_limits) : name(file_name), limits(the_limits) {}

  std::string_view name;
  const TraceLimits& limits;
  Trace trace;
  int64_t line_number = 0;
  std::string_view line;
  std::optional<int64_t> azure_start;  // ticks of the first row

  template <class... Args>
  [[noreturn]] void fail_at(size_t column, std::string_view code, fmt::format_string<Args...> text, Args&&... args) const {
    fail(code, "{}:{}:{}: {}", name, line_number, column + 1, fmt::format(text, std::forward<Args>(args)...));
  }
  size_t column_of(std::string_view part) const { return size_t(part.data() - line.data()); }

  void add(TraceRequest&& request, size_t arrival_column) {
    if (!trace.requests.empty() && request.arrival_s < trace.requests.back().arrival_s) {
      fail_at(arrival_column, "trace.arrival.order", "arrivals must not decrease: expected at least {} s, got {} s",
              trace.requests.back().arrival_s, request.arrival_s);
    }
    if (int64_t(trace.requests.size()) >= limits.max_requests) {
      fail_at(0, "trace.limit.requests", "expected at most {} requests", limits.max_requests);
    }
    trace.requests.push_back(std::move(request));
  }

  int length(int64_t value, size_t column, std::string_view what) const {
    if (value < 1 || value > limits.max_tokens) {
      fail_at(column, "trace.length.range", "{} must be in [1, {}], got {}", what, limits.max_tokens, value);
    }
    return int(value);
  }

  double seconds(double value, size_t column, std::string_view what) const {
    if (!std::isfinite(value) || value < 0) fail_at(column, "trace.arrival.range", "{} must be finite and >= 0, got {}", what, value);
    return value;
  }

  // --- CSV ---

  void split(std::string_view (&fields)[3]) const {
    size_t begin = 0;
    for (size_t i = 0; i < 3; ++i) {
      const size_t comma = line.find(',', begin);
      if ((comma == std::string_view::npos) != (i == 2)) {
        fail_at(i == 2 ? comma : line.size(), "trace.csv.columns", "expected 3 columns, got {}",
                1 + std::count(line.begin(), line.end(), ','));
      }
      fields[i] = line.substr(begin, comma == std::string_view::npos ? comma : comma - begin);
      begin = comma + 1;
    }
  }

  template <class T>
  T number(std::string_view text, std::string_view what, std::string_view wanted) const {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size()) {
      fail_at(column_of(text), "trace.csv.number", "{} must be {}, got {}", what, wanted, excerpt(text));
    }
    return value;
  }

  // Ticks of 100 ns since 1970 of "2023-11-16 18:17:03.9799600", optionally followed by Z or +00:00.
  int64_t azure_ticks(std::string_view text) const {
    const auto bad = [&](size_t at, std::string_view wanted) {
      fail_at(column_of(text) + at, "trace.azure.timestamp", "expected a time like 2023-11-16 18:17:03.9799600 ({}), got {}", wanted,
              excerpt(text));
    };
    const auto digits = [&](size_t at, size_t count, int low, int high, std::string_view what) {
      int value = 0;
      for (size_t i = at; i < at + count; ++i) {
        if (i >= text.size() || text[i] < '0' || text[i] > '9') bad(i, what);
        value = value * 10 + (text[i] - '0');
      }
      if (value < low || value > high) bad(at, what);
      return int64_t(value);
    };
    const auto literal = [&](size_t at, char c) {
      if (at >= text.size() || (text[at] != c && !(c == ' ' && text[at] == 'T'))) bad(at, "separators - : and blank");
    };
    const int64_t year = digits(0, 4, 1970, 2999, "year 1970 to 2999");
    literal(4, '-');
    const int64_t month = digits(5, 2, 1, 12, "month 01 to 12");
    literal(7, '-');
    constexpr int kDays[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    const bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    const int64_t day = digits(8, 2, 1, kDays[month - 1] + (leap && month == 2 ? 1 : 0), "day of the month");
    literal(10, ' ');
    const int64_t hour = digits(11, 2, 0, 23, "hour 00 to 23");
    literal(13, ':');
    const int64_t minute = digits(14, 2, 0, 59, "minute 00 to 59");
    literal(16, ':');
    const int64_t second = digits(17, 2, 0, 60, "second 00 to 60");
    size_t at = 19;
    int64_t ticks = 0;
    if (at < text.size() && text[at] == '.') {
      int64_t unit = 10'000'000;
      for (++at; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
        if (unit == 1) bad(at, "at most 7 fractional digits");
        unit /= 10;
        ticks += unit * (text[at] - '0');
      }
      if (text[at - 1] == '.') bad(at, "digits after the point");
    }
    const std::string_view zone = text.substr(at);
    if (!zone.empty() && zone != "Z" && zone != "+00:00") bad(at, "no zone, Z or +00:00");

    // Days since 1970-01-01 of the proleptic Gregorian calendar, with years that begin in March.
    const int64_t y = month <= 2 ? year - 1 : year;
    const int64_t day_of_year = (153 * (month > 2 ? month - 3 : month + 9) + 2) / 5 + day - 1;
    const int64_t days = y * 365 + y / 4 - y / 100 + y / 400 + day_of_year - 719468;
    return (((days * 24 + hour) * 60 + minute) * 60 + second) * 10'000'000 + ticks;
  }

  void csv_row(bool azure) {
    std::string_view fields[3];
    split(fields);
    TraceRequest request;
    if (azure) {
      const int64_t ticks = azure_ticks(fields[0]);
      if (!azure_start) azure_start = ticks;
      if (ticks < *azure_start) {
        fail_at(0, "trace.arrival.order", "arrivals must not decrease: {} is before the first row", excerpt(fields[0]));
      }
      request.arrival_s = double(ticks - *azure_start) * 1e-7;
    } else {
      request.arrival_s = seconds(number<double>(fields[0], "arrival", "a number of seconds"), 0, "arrival");
    }
    const std::string_view input = azure ? "ContextTokens" : "input", output = azure ? "GeneratedTokens" : "output";
    request.input_length = length(number<int64_t>(fields[1], input, "a whole number"), column_of(fields[1]), input);
    request.output_length = length(number<int64_t>(fields[2], output, "a whole number"), column_of(fields[2]), output);
    add(std::move(request), 0);
  }

  // --- JSON lines ---

  nlohmann::json parse_line() const {
    try {
      nlohmann::json row = parse_json(line, kMaxJsonDepth);
      if (!row.is_object()) fail_at(0, "trace.json.object", "expected one JSON object a line, got {}", excerpt(line));
      return row;
    } catch (const JsonProblem& p) {
      if (p.kind == JsonProblem::duplicate)
        fail_at(column_of_field(p.name), "trace.json.duplicate", "the field {} is there twice", excerpt(p.name));
      if (p.kind == JsonProblem::depth) fail_at(0, "trace.json.depth", "expected at most {} levels, got {}", kMaxJsonDepth, excerpt(line));
      if (p.kind == JsonProblem::number) fail_at(0, "trace.json.number", "expected numbers that fit a double, got {}", excerpt(line));
      const size_t column = std::min(p.byte > 0 ? p.byte - 1 : 0, line.size());
      fail_at(column, "trace.json.syntax", "expected JSON, got {}",
              column < line.size() ? excerpt(line.substr(column)) : "the end of the line");
    }
  }

  // The column where a field's value begins. The JSON library keeps no positions; the first occurrence of the quoted name is near enough.
  size_t column_of_field(std::string_view key) const {
    const size_t at = line.find(fmt::format("\"{}\"", key));
    if (at == std::string_view::npos) return 0;
    const size_t value = line.find_first_not_of(" \t:", at + key.size() + 2);
    return value == std::string_view::npos ? at : value;
  }

  const nlohmann::json& field(const nlohmann::json& row, const char* key) const {
    const auto it = row.find(key);
    if (it == row.end()) fail_at(0, "trace.json.missing", "expected a field \"{}\" in {}", key, excerpt(line));
    return *it;
  }

  int json_length(const nlohmann::json& row, const char* key) const {
    const nlohmann::json& value = field(row, key);
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<uint64_t>() > uint64_t(INT64_MAX))) {
      fail_at(column_of_field(key), "trace.json.type", "{} must be a whole number, got {}", key,
              excerpt(line.substr(column_of_field(key))));
    }
    return length(value.get<int64_t>(), column_of_field(key), key);
  }

  double json_seconds(const nlohmann::json& row, const char* key, double unit) const {
    const nlohmann::json& value = field(row, key);
    if (!value.is_number()) {
      fail_at(column_of_field(key), "trace.json.type", "{} must be a number, got {}", key, excerpt(line.substr(column_of_field(key))));
    }
    return seconds(value.get<double>(), column_of_field(key), key) * unit;
  }

  void json_row(bool mooncake) {
    const nlohmann::json row = parse_line();
    TraceRequest request;
    request.arrival_s = mooncake ? json_seconds(row, "timestamp", 1e-3) : json_seconds(row, "arrival", 1);
    request.input_length = json_length(row, mooncake ? "input_length" : "input");
    request.output_length = json_length(row, mooncake ? "output_length" : "output");
    if (mooncake) {
      const nlohmann::json& ids = field(row, "hash_ids");
      const size_t column = column_of_field("hash_ids");
      if (!ids.is_array()) fail_at(column, "trace.json.type", "hash_ids must be a list, got {}", excerpt(line.substr(column)));
      const size_t expected = (size_t(request.input_length) + kMooncakeBlock - 1) / kMooncakeBlock;
      if (ids.size() != expected) {
        fail_at(column, "trace.hash_ids.count", "{} input tokens have {} blocks of {}: expected that many hash_ids, got {}",
                request.input_length, expected, kMooncakeBlock, ids.size());
      }
      request.prefix_ids.reserve(ids.size());
      for (const nlohmann::json& id : ids) {
        if (!id.is_number_unsigned()) {
          fail_at(column, "trace.hash_ids.type", "hash_ids must be whole numbers >= 0, got {}", excerpt(line.substr(column)));
        }
        request.prefix_ids.push_back(id.get<uint64_t>());
      }
    }
    add(std::move(request), column_of_field(mooncake ? "timestamp" : "arrival"));
  }

  // --- The file ---

  void detect_format() {
    if (line == kAzureHeader) {
      trace.format = "azure";
    } else if (line == kPlainHeader) {
      trace.format = "csv";
    } else if (line.starts_with('{')) {
      const nlohmann::json row = parse_line();
      if (row.contains("timestamp")) {
        trace.format = "mooncake";
        trace.prefix_block = kMooncakeBlock;
      } else if (row.contains("arrival")) {
        trace.format = "jsonl";
      } else {
        fail_at(0, "trace.format.json", "expected a field \"timestamp\" (Mooncake) or \"arrival\", got {}", excerpt(line));
      }
    } else {
      fail_at(0, "trace.format.unknown", "expected a JSON object or the header {} or {}, got {}", kAzureHeader, kPlainHeader,
              excerpt(line));
    }
  }

  void parse(std::string_view text) {
    if (text.starts_with("\xef\xbb\xbf")) text.remove_prefix(3);  // byte order mark
    while (!text.empty()) {
      const size_t newline = text.find('\n');
      line = text.substr(0, newline);
      text.remove_prefix(newline == std::string_view::npos ? text.size() : newline + 1);
      ++line_number;
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (int64_t(line.size()) > limits.max_line_bytes) {
        fail_at(0, "trace.limit.line", "expected at most {} bytes a line, got {}", limits.max_line_bytes, line.size());
      }
      if (line.find_first_not_of(" \t") == std::string_view::npos) continue;
      if (trace.format.empty()) {
        detect_format();
        if (trace.format == "azure" || trace.format == "csv") continue;  // that was the header
      }
      if (trace.format == "azure" || trace.format == "csv") {
        csv_row(trace.format == "azure");
      } else {
        json_row(trace.format == "mooncake");
      }
    }
    check(!trace.requests.empty(), "trace.empty", "{}: expected at least one request, got none", name);
  }
};

}  // namespace

Trace parse_trace(std::string_view text, std::string_view name, const TraceLimits& limits) {
  check(int64_t(text.size()) <= limits.max_bytes, "trace.limit.bytes", "{}: expected at most {} bytes, got {}", name, limits.max_bytes,
        text.size());
  Parser parser(name, limits);
  parser.trace.source = name;
  parser.parse(text);
  return std::move(parser.trace);
}

void shrink(Trace& trace, int factor) {
  check(factor >= 1 && trace.prefix_block % factor == 0, "trace.shrink",
        "expected a factor that divides the {} tokens of a prefix id, got {}", trace.prefix_block, factor);
  const auto part = [factor](int tokens) { return (tokens - 1) / factor + 1; };
  for (TraceRequest& r : trace.requests) r.input_length = part(r.input_length), r.output_length = part(r.output_length);
  trace.prefix_block /= factor;
  if (factor > 1) trace.source += fmt::format(" with lengths divided by {}", factor);
}

void add_system_prompt(Trace& trace, int tokens) {
  constexpr int kMost = 1 << 24;
  check(tokens >= 0 && tokens <= kMost, "trace.system_prompt", "expected 0 to {} tokens, got {}", kMost, tokens);
  for (TraceRequest& r : trace.requests) r.input_length += tokens, r.system_tokens += tokens;
  if (tokens > 0) trace.source += fmt::format(" behind a system prompt of {} tokens", tokens);
}

void add_images(Trace& trace, int every, int tokens) {
  check(every >= 1 && tokens >= 1 && tokens <= every, "trace.images", "expected images of 1 to {} tokens in every {}, got {}", every, every,
        tokens);
  for (TraceRequest& r : trace.requests) {
    for (int64_t end = int64_t(r.system_tokens) + every; end <= r.input_length; end += every)
      r.images.push_back({int(end) - tokens, int(end)});
  }
  trace.source += fmt::format(" with an image of {} tokens in every {}", tokens, every);
}

bool has_images(const Trace& trace) {
  return std::ranges::any_of(trace.requests, [](const auto& r) { return !r.images.empty(); });
}

const TokenSpan* image_at(const TraceRequest& request, int position) {
  const auto next = std::ranges::upper_bound(request.images, position, {}, &TokenSpan::begin);
  return next != request.images.begin() && position < std::prev(next)->end ? &*std::prev(next) : nullptr;
}

int last_seen(const TraceRequest& request, int position) {
  const TokenSpan* const image = image_at(request, position);
  return image != nullptr ? image->end - 1 : position;
}

Trace read_trace(const std::string& path, const TraceLimits& limits) {
  std::error_code error;
  check(!std::filesystem::is_directory(path, error), "trace.file.directory", "{}: expected a file, got a directory", path);
  const std::string text = read_file(path, limits.max_bytes, {"trace.file.open", "trace.file.read", "trace.limit.bytes"});
  return parse_trace(text, path, limits);
}

}  // namespace imbrex::serve
