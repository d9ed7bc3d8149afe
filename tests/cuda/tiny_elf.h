#pragma once
// A small ELF file with constants, as cubins have them: for tests that need no compiler.
#include <elf.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace imbrex::cuda::test {

inline std::string tiny_elf(const std::vector<std::pair<std::string, unsigned>>& constants) {
  std::string strings(1, '\0'), data, symbols(sizeof(Elf64_Sym), '\0');
  for (const auto& [name, value] : constants) {
    Elf64_Sym symbol{};
    symbol.st_name = Elf64_Word(strings.size());
    symbol.st_shndx = 3;
    symbol.st_value = data.size();
    symbol.st_size = sizeof value;
    symbols.append(reinterpret_cast<const char*>(&symbol), sizeof symbol);
    data.append(reinterpret_cast<const char*>(&value), sizeof value);
    strings += name + '\0';
  }
  Elf64_Ehdr header{};
  std::memcpy(header.e_ident, ELFMAG, SELFMAG);
  Elf64_Shdr sections[4]{};
  std::string file(sizeof header, '\0');
  const auto add = [&](Elf64_Shdr& section, unsigned type, const std::string& bytes) {
    section.sh_type = type;
    section.sh_offset = file.size();
    section.sh_size = bytes.size();
    file += bytes;
  };
  add(sections[1], SHT_STRTAB, strings);
  add(sections[2], SHT_SYMTAB, symbols);
  add(sections[3], SHT_PROGBITS, data);
  sections[2].sh_link = 1;
  header.e_shoff = file.size();
  header.e_shnum = 4;
  file.append(reinterpret_cast<const char*>(sections), sizeof sections);
  std::memcpy(file.data(), &header, sizeof header);
  return file;
}

}  // namespace imbrex::cuda::test
