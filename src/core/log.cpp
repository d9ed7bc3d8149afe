// See log.h.
#include "core/log.h"

#include <cstdio>
#include <string>

#include "core/check.h"
#include "core/env.h"

namespace imbrex {

LogLevel log_level() {
  const std::string name = env::get(env::kLog).value_or("warning");
  constexpr std::pair<std::string_view, LogLevel> kLevels[] = {
      {"off", LogLevel::off}, {"warning", LogLevel::warning}, {"info", LogLevel::info}};
  for (const auto& [text, level] : kLevels)
    if (name == text) return level;
  fail("env.log", "expected off, warning or info in {}, got \"{}\"", env::kLog, name);
}

void write_log_line(LogLevel level, std::string_view text) {
  if (log_level() < level) return;
  const std::string line = fmt::format("imbrex: {}\n", text);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace imbrex
