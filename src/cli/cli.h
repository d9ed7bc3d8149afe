#pragma once
// What the subcommands share: their registration in the program, exit codes, and helpers for values and output.
#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/table.h"

namespace imbrex::cli {

// Stable; documented in `imbrex --help`.
inline constexpr int kOk = 0;
inline constexpr int kCheckFailed = 1;  // something was checked and is wrong
inline constexpr int kUsage = 2;        // bad arguments or bad input files
inline constexpr int kUnsupported = 3;  // understood, but nothing here can do it

// Set by the subcommand that was given; main calls it after parsing. Returns the exit code.
using Action = std::function<int()>;

// The program's arguments as they were typed; set by main.
std::string& command_line();

// One a file: adds a subcommand to the program.
void add_info(CLI::App&, Action&);
void add_compile(CLI::App&, Action&);
void add_select(CLI::App&, Action&);
void add_trace(CLI::App&, Action&);
void add_run(CLI::App&, Action&);
void add_bench(CLI::App&, Action&);
void add_verify(CLI::App&, Action&);
void add_mask(CLI::App&, Action&);
void add_completion(CLI::App&, Action&);

// "2GiB", "512MiB", "1.5G", "1000000" -> bytes. Error cli.size.
int64_t parse_size(std::string_view text);
// "1%", "0.01" -> 0.01, from 0 to 1. Error cli.fraction.
double parse_fraction(std::string_view text);
std::vector<std::string> split(std::string_view text, std::string_view separators);
// The whole file. Error cli.file.
void write_file(const std::string& path, std::string_view text);

// Output format of a table: "table", "markdown", "csv".
std::string print_as(const serve::Table&, const std::string& format);

}  // namespace imbrex::cli
