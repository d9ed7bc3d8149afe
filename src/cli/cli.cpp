// Parsing and files that the subcommands share: lists, sizes, fractions.
#include "cli/cli.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <fstream>

#include "core/check.h"
#include "core/text.h"

namespace imbrex::cli {

std::string& command_line() {
  static std::string text;
  return text;
}

int64_t parse_size(std::string_view text) {
  const std::string lower = to_lower(trim(text));
  double value = 0;
  const auto [rest, error] = std::from_chars(lower.data(), lower.data() + lower.size(), value);
  std::string_view unit(rest, size_t(lower.data() + lower.size() - rest));
  const char* kUnits = "kmgt";
  double factor = 1;
  if (!unit.empty()) {
    const char* found = std::char_traits<char>::find(kUnits, 4, unit[0]);
    if (found) {
      factor = std::pow(1024.0, double(found - kUnits + 1));
      unit.remove_prefix(1);
      if (unit.starts_with("i")) unit.remove_prefix(1);
    }
    if (unit == "b") unit = {};
  }
  const double bytes = value * factor;
  check(error == std::errc() && unit.empty() && bytes >= 0 && bytes < 9e18, "cli.size", "a size such as 2GiB or 512MiB, got \"{}\"", text);
  return int64_t(bytes);
}

double parse_fraction(std::string_view text) {
  std::string_view number = trim(text);
  const bool percent = number.ends_with('%');
  if (percent) number.remove_suffix(1);
  double value = 0;
  const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (percent) value /= 100;
  check(error == std::errc() && rest == number.data() + number.size() && value >= 0 && value <= 1, "cli.fraction",
        "a share such as 1% or 0.01, from 0 to 1, got \"{}\"", text);
  return value;
}

std::vector<std::string> split(std::string_view text, std::string_view separators) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of(separators), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

void write_file(const std::string& path, std::string_view text) {
  std::ofstream file(path, std::ios::binary);
  file.write(text.data(), std::streamsize(text.size()));
  file.close();
  check(bool(file), "cli.file", "cannot write {}", path);
}

std::string print_as(const serve::Table& table, const std::string& format) {
  return format == "markdown" ? table.markdown() : format == "csv" ? table.csv() : table.text();
}

}  // namespace imbrex::cli
