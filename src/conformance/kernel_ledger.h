#pragma once
// The ledger of `imbrex compile`: GPU kernels that compiled without a problem, and what they take. A line is a fact about a text and a
// compiler, whatever else is in the file: lines of two branches may stand side by side, in any order, and twice.
#include <map>
#include <span>
#include <string>
#include <vector>

#include "family/precompile.h"

namespace imbrex {

// The architecture of records of what runs on the host (tests/cuda/lanes), which have no entries.
constexpr const char* kHostArch = "host";

class KernelLedger {
 public:
  // A file that is not there is an empty ledger. Error kernel_ledger for one that cannot be read, or a line that is no record.
  explicit KernelLedger(const std::string& path);

  // What the kernel of that content takes, as names, registers and shared memory; null where it has no record.
  const std::vector<PrecompiledEntry>* find(const std::string& content) const;
  // The share of the records that this is in: a number below kShares.
  static constexpr int kShares = 20;
  static int share(const std::string& content);

  // Records of the architectures become those of the kernels that have no problem, and only those.
  void renew(std::span<const std::string> archs, std::span<const PrecompiledKernel>);
  // Sorted by architecture and file.
  std::string str() const;

 private:
  struct Record {
    std::string arch, file;
    std::vector<PrecompiledEntry> entries;
  };
  std::map<std::string, Record> records_;  // by content
};

// "attention_sm90:168:221184" of each entry point: its registers, and its bytes of shared memory.
std::string ledger_text(std::span<const PrecompiledEntry>);

}  // namespace imbrex
