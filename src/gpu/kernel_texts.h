#pragma once
// The texts of kernels that a library contains, for a compiler that is called when a kernel is first needed.
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/embedded_text.h"
#include "gpu/hash.h"
#include "gpu/kernel_key.h"

namespace imbrex::gpu {

class KernelTexts {
 public:
  // `config`: the text in whose place each kernel has its own constants. `suffix`: of kernel files, ".cu"; others are included by them.
  KernelTexts(std::span<const EmbeddedText> texts, std::string_view config, std::string_view suffix);

  std::string_view text_of(const KernelKey&) const;  // Error cuda.source

  // The name of a file for the compiled kernel, of everything that makes it what it is: "write_kv-sm_90a-<128-bit hash>".
  std::string file_name(const KernelKey&, std::string_view config, std::span<const std::string> options) const;

  // Of what the compiler reads for the key and of nothing else, as 32 hex digits: its text and the headers that these include, without
  // lines that are comments, and the config, the options, and which compiler it is. A file_name() changes with every text.
  std::string content_hash(const KernelKey&, std::string_view config, std::span<const std::string> options,
                           std::string_view compiler) const;

  // All texts, with `config` in its place, for compilers that take headers as memory. `config` has to live as long as these are used.
  struct Headers {
    std::vector<const char*> texts, names;
  };
  Headers headers(const std::string& config) const;

  // Writes all texts to a folder, where a profiler finds the lines that a kernel was compiled from, and `text` as that of the key. Returns
  // the path of the latter. Error cuda.dump.
  std::filesystem::path write_to(const std::filesystem::path& folder, const KernelKey&, std::string_view text,
                                 std::string_view config) const;

 private:
  std::span<const EmbeddedText> texts_;
  std::string_view config_, suffix_;
  Hash128 hash_;  // of all but the config
};

}  // namespace imbrex::gpu
