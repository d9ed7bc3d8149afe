// A table of text cells, printed for terminals, Markdown and CSV. Used by the reports and the subcommands.
#include "serve/table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace imbrex::serve {
namespace {

struct Column {
  std::string name;
  bool right;
  size_t width;
};

// Characters, not bytes: "µs" takes two columns.
size_t display_width(const std::string& text) {
  return size_t(std::count_if(text.begin(), text.end(), [](unsigned char c) { return (c & 0xc0) != 0x80; }));
}

std::string cell(const std::vector<std::string>& row, size_t index) { return index < row.size() ? row[index] : std::string(); }

std::vector<Column> columns_of(const Table& table) {
  std::vector<Column> columns;
  for (size_t i = 0; i < table.header.size(); ++i) {
    const std::string& name = table.header[i];
    const bool right = name.starts_with('>');
    Column column{right ? name.substr(1) : name, right, 0};
    column.width = display_width(column.name);
    for (const auto& row : table.rows) column.width = std::max(column.width, display_width(cell(row, i)));
    columns.push_back(column);
  }
  return columns;
}

std::string padded(const std::string& text, const Column& column) {
  const std::string space(column.width - std::min(column.width, display_width(text)), ' ');
  return column.right ? space + text : text + space;
}

std::string escaped(const std::string& text, char special, const char* replacement) {
  std::string result;
  for (const char c : text) {
    if (c == special) {
      result += replacement;
    } else {
      result += c;
    }
  }
  return result;
}

std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  return '"' + escaped(text, '"', "\"\"") + '"';
}

std::string with_unit(double value, const char* unit) {
  const int digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, digits, unit);
}

}  // namespace

std::string Table::text() const {
  const auto columns = columns_of(*this);
  std::string out;
  const auto line = [&](const auto& cell_at) {
    std::string text;
    for (size_t i = 0; i < columns.size(); ++i) text += (i ? "  " : "") + padded(cell_at(i), columns[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + '\n';
  };
  line([&](size_t i) { return columns[i].name; });
  line([&](size_t i) { return std::string(columns[i].width, '-'); });
  for (const auto& row : rows) {
    line([&](size_t i) { return cell(row, i); });
  }
  return out;
}

std::string Table::markdown() const {
  const auto columns = columns_of(*this);
  std::string out = "|", rule = "|";
  for (const Column& column : columns) {
    out += fmt::format(" {} |", escaped(column.name, '|', "\\|"));
    rule += column.right ? "---:|" : "---|";
  }
  out += '\n' + rule + '\n';
  for (const auto& row : rows) {
    out += '|';
    for (size_t i = 0; i < columns.size(); ++i) out += fmt::format(" {} |", escaped(cell(row, i), '|', "\\|"));
    out += '\n';
  }
  return out;
}

std::string Table::csv() const {
  const auto columns = columns_of(*this);
  std::string out;
  for (size_t i = 0; i < columns.size(); ++i) out += (i ? "," : "") + csv_cell(columns[i].name);
  out += '\n';
  for (const auto& row : rows) {
    for (size_t i = 0; i < columns.size(); ++i) out += (i ? "," : "") + csv_cell(cell(row, i));
    out += '\n';
  }
  return out;
}

std::string format_bytes(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (std::abs(bytes) >= 1024 && unit < 4) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : with_unit(bytes, kUnits[unit]);
}

std::string format_seconds(double seconds) {
  if (seconds <= 0) return "0 s";
  if (seconds < 1e-6) return with_unit(seconds * 1e9, "ns");
  if (seconds < 1e-3) return with_unit(seconds * 1e6, "µs");
  if (seconds < 1) return with_unit(seconds * 1e3, "ms");
  if (seconds < 600) return with_unit(seconds, "s");
  return with_unit(seconds / 60, "min");
}

std::string format_count(double count) {
  if (std::abs(count) < 10000) return fmt::format("{:.0f}", count);
  if (std::abs(count) < 1e6) return with_unit(count / 1e3, "k");
  if (std::abs(count) < 1e9) return with_unit(count / 1e6, "M");
  return with_unit(count / 1e9, "G");
}

}  // namespace imbrex::serve
