// Reads and writes lines such as "sm_90a attention_sm90.cu 0123456789abcdef0123456789abcdef attention_sm90:168:221184".
#include "conformance/kernel_ledger.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <sstream>

#include "core/check.h"
#include "core/read_file.h"

namespace imbrex {
namespace {

constexpr const char* kHead =
    "# Kernels that compiled without spills, local memory and warnings: architecture, file, hash of text and compiler, and of each entry\n"
    "# its registers and shared memory. Of the architecture host, variants of kernels whose texts passed their tests there.\n"
    "# Made by `.ci/run record`; docs/cuda.md has the rest.\n";

bool is_content(std::string_view text) { return text.size() == 32 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }

// False for what is no number of at least 0.
bool read_number(std::string_view text, int& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number >= 0;
}

// "ENTRY:REGISTERS:BYTES"
bool read_entry(std::string_view text, PrecompiledEntry& entry) {
  const size_t first = text.find(':'), second = text.find(':', first + 1);
  if (first == std::string_view::npos || second == std::string_view::npos) return false;
  entry.name = text.substr(0, first);
  return read_number(text.substr(first + 1, second - first - 1), entry.registers) && read_number(text.substr(second + 1), entry.smem_bytes);
}

}  // namespace

KernelLedger::KernelLedger(const std::string& path) {
  if (!std::filesystem::exists(path)) return;
  std::istringstream text(read_file(path, 16 << 20, {"kernel_ledger", "kernel_ledger", "kernel_ledger"}));
  for (std::string line; std::getline(text, line);) {
    if (line.empty() || line.starts_with('#')) continue;
    std::istringstream words(line);
    std::string content, entry;
    Record record;
    bool right = bool(words >> record.arch >> record.file >> content) && is_content(content);
    while (right && words >> entry) right = read_entry(entry, record.entries.emplace_back());
    check(right, "kernel_ledger", "{}: expected a line \"sm_90a NAME.cu HASH ENTRY:REGISTERS:BYTES\", got \"{}\"", path, line);
    records_[content] = std::move(record);
  }
}

const std::vector<PrecompiledEntry>* KernelLedger::find(const std::string& content) const {
  const auto found = records_.find(content);
  return found == records_.end() ? nullptr : &found->second.entries;
}

int KernelLedger::share(const std::string& content) {
  uint64_t value = 0;
  std::from_chars(content.data(), content.data() + std::min<size_t>(content.size(), 15), value, 16);
  return int(value % kShares);
}

void KernelLedger::renew(std::span<const std::string> archs, std::span<const PrecompiledKernel> kernels) {
  std::map<std::string, Record> fresh;
  for (const PrecompiledKernel& k : kernels)
    if (k.error.empty() && k.problems.empty()) fresh[k.content] = {k.arch, k.file, k.entries};
  for (auto& [content, record] : records_)
    if (std::find(archs.begin(), archs.end(), record.arch) == archs.end()) fresh.emplace(content, std::move(record));
  records_ = std::move(fresh);
}

std::string KernelLedger::str() const {
  std::vector<std::string> lines;
  for (const auto& [content, record] : records_)
    lines.push_back(
        fmt::format("{} {} {}{}{}\n", record.arch, record.file, content, record.entries.empty() ? "" : " ", ledger_text(record.entries)));
  std::sort(lines.begin(), lines.end());
  return fmt::format("{}{}", kHead, fmt::join(lines, ""));
}

std::string ledger_text(std::span<const PrecompiledEntry> entries) {
  std::string text;
  for (const PrecompiledEntry& e : entries) text += fmt::format("{}{}:{}:{}", text.empty() ? "" : " ", e.name, e.registers, e.smem_bytes);
  return text;
}

}  // namespace imbrex
