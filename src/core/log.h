#pragma once
// Lines on stderr for people, about things that are worth knowing but are no errors. IMBREX_LOG says how much: off, warning (the default)
// or info.
#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace imbrex {

enum class LogLevel { off, warning, info };

LogLevel log_level();                                   // of IMBREX_LOG, read anew; Error env.log when it names none
void write_log_line(LogLevel level, std::string_view);  // "imbrex: TEXT" in one piece, when IMBREX_LOG asks for the level

// Logs a line about something that costs time or hides a fault, although results are right.
template <class... Args>
void log_warning(fmt::format_string<Args...> text, Args&&... args) {
  write_log_line(LogLevel::warning, fmt::format(text, std::forward<Args>(args)...));
}

// Logs a line about a choice: one for each plan and each kernel, none for what happens in every step.
template <class... Args>
void log_info(fmt::format_string<Args...> text, Args&&... args) {
  if (log_level() >= LogLevel::info) write_log_line(LogLevel::info, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace imbrex
