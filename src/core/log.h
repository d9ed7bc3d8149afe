#pragma once
// Lines on stderr for people: what is worth knowing and no error. IMBREX_LOG says how much: off, warning (the default) or info.
#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace imbrex {

enum class LogLevel { off, warning, info };

LogLevel log_level();                                   // of IMBREX_LOG, read anew; Error env.log when it names none
void write_log_line(LogLevel level, std::string_view);  // "imbrex: TEXT" in one piece, when IMBREX_LOG asks for the level

// What costs time or hides something, though the result is right.
template <class... Args>
void log_warning(fmt::format_string<Args...> text, Args&&... args) {
  write_log_line(LogLevel::warning, fmt::format(text, std::forward<Args>(args)...));
}

// What was chosen: a line for each plan and each kernel. Not for what happens in every step.
template <class... Args>
void log_info(fmt::format_string<Args...> text, Args&&... args) {
  if (log_level() >= LogLevel::info) write_log_line(LogLevel::info, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace imbrex
