#pragma once
// A table of text cells, printed for terminals, Markdown and CSV. Used by the reports and the subcommands.
#include <string>
#include <vector>

namespace imbrex::serve {

struct Table {
  std::vector<std::string> header;             // a name that begins with '>' is right-aligned (the '>' is not printed)
  std::vector<std::vector<std::string>> rows;  // short rows are filled with empty cells

  std::string text() const;      // aligned columns, a rule under the header
  std::string markdown() const;  // '|' in cells is escaped
  std::string csv() const;       // RFC 4180
};

std::string format_bytes(double bytes);      // "1.5 GiB"
std::string format_seconds(double seconds);  // "1.25 ms"
std::string format_count(double count);      // "12.3 k"

}  // namespace imbrex::serve
