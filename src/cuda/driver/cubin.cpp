// Reads the log of ptxas and the symbol table of a cubin.
#include "cuda/driver/cubin.h"

#include <elf.h>
#include <fmt/format.h>

#include <charconv>
#include <cstring>
#include <limits>

namespace imbrex::cuda {
namespace {

std::string_view next_line(std::string_view& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  const std::string_view line = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return line;
}

// The number in front of `unit`: 776 in "776 bytes stack frame, ..." for " bytes stack frame"; 0 when it is not there.
int number_before(std::string_view line, std::string_view unit) {
  const size_t end = line.find(unit);
  if (end == std::string_view::npos) return 0;
  size_t begin = end;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

// Sums of a log stay numbers, whatever stands in it.
void add(int& sum, int more) {
  if (__builtin_add_overflow(sum, more, &sum)) sum = std::numeric_limits<int>::max();
}

std::string_view quoted(std::string_view line) {
  const size_t begin = line.find('\'');
  if (begin == std::string_view::npos) return {};
  const size_t end = line.find('\'', begin + 1);
  return end == std::string_view::npos ? std::string_view{} : line.substr(begin + 1, end - begin - 1);
}

// A struct at an offset; false when it would reach past the end.
template <class T>
bool read_at(std::string_view bytes, uint64_t offset, T& value) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof value) return false;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return true;
}

bool section_at(std::string_view elf, const Elf64_Ehdr& header, uint64_t index, Elf64_Shdr& section) {
  return index < header.e_shnum && read_at(elf, header.e_shoff + index * sizeof section, section);
}

bool is_string_at(std::string_view elf, uint64_t offset, std::string_view text) {
  return offset <= elf.size() && elf.size() - offset > text.size() && elf.substr(offset, text.size()) == text &&
         elf[offset + text.size()] == '\0';
}

}  // namespace

std::vector<EntryReport> entry_reports(const CompiledKernel& kernel) {
  std::vector<EntryReport> entries;
  for (std::string_view rest = kernel.log; !rest.empty();) {
    const std::string_view line = next_line(rest);
    if (!line.starts_with("ptxas")) continue;
    if (line.find("Compiling entry function") != std::string_view::npos) {
      entries.push_back({.name = std::string(quoted(line))});
      entries.back().dynamic_smem_bytes = int(dynamic_smem_bytes(kernel.binary, entries.back().name));
    } else if (!entries.empty() && line.find("bytes stack frame") != std::string_view::npos) {
      // A function that was not inlined reports itself below the entry: its frame counts too.
      EntryReport& entry = entries.back();
      add(entry.stack_bytes, number_before(line, " bytes stack frame"));
      add(entry.spill_store_bytes, number_before(line, " bytes spill stores"));
      add(entry.spill_load_bytes, number_before(line, " bytes spill loads"));
    } else if (!entries.empty() && line.find("Used ") != std::string_view::npos) {
      entries.back().registers = number_before(line, " registers");
      entries.back().static_smem_bytes = number_before(line, " bytes smem");
    }
  }
  return entries;
}

std::vector<std::string> strict_problems(const CompiledKernel& kernel) {
  std::vector<std::string> problems;
  for (const EntryReport& entry : entry_reports(kernel)) {
    if (entry.spill_store_bytes > 0 || entry.spill_load_bytes > 0) {
      problems.push_back(
          fmt::format("{}: {} bytes of spill stores and {} of spill loads", entry.name, entry.spill_store_bytes, entry.spill_load_bytes));
    }
    if (entry.stack_bytes > 0) problems.push_back(fmt::format("{}: {} bytes of local memory (stack)", entry.name, entry.stack_bytes));
  }
  for (std::string_view rest = kernel.log; !rest.empty();) {
    const std::string_view line = next_line(rest);
    const bool remark = line.starts_with("ptxas") && line.find("(C7") != std::string_view::npos;
    const bool warning =
        line.starts_with("ptxas warning") || line.find("): warning ") != std::string_view::npos || line.starts_with("nvrtc: warning");
    if (remark || warning) problems.emplace_back(line);
  }
  return problems;
}

std::optional<unsigned> cubin_constant(std::string_view cubin, std::string_view name) {
  Elf64_Ehdr header;
  if (!read_at(cubin, 0, header) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return std::nullopt;
  Elf64_Shdr symbols, strings, section;
  for (uint64_t i = 0; section_at(cubin, header, i, symbols); ++i) {
    if (symbols.sh_type != SHT_SYMTAB || !section_at(cubin, header, symbols.sh_link, strings)) continue;
    Elf64_Sym symbol;
    for (uint64_t at = 0; at + sizeof symbol <= symbols.sh_size && read_at(cubin, symbols.sh_offset + at, symbol); at += sizeof symbol) {
      unsigned value = 0;
      if (symbol.st_size == sizeof value && is_string_at(cubin, strings.sh_offset + symbol.st_name, name) &&
          section_at(cubin, header, symbol.st_shndx, section) && section.sh_type == SHT_PROGBITS &&
          read_at(cubin, section.sh_offset + symbol.st_value, value))
        return value;
    }
  }
  return std::nullopt;
}

unsigned dynamic_smem_bytes(std::string_view cubin, std::string_view entry) {
  if (const auto own = cubin_constant(cubin, fmt::format("{}_smem_bytes", entry))) return *own;
  return cubin_constant(cubin, "smem_bytes").value_or(0);
}

}  // namespace imbrex::cuda
