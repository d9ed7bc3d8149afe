#pragma once
// Whole files, for every reader of a path: folders, pipes and devices are refused and not waited for.
#include <cstdint>
#include <string>
#include <string_view>

namespace imbrex {

struct ReadFileCodes {
  std::string_view open;  // it cannot be opened, or is no regular file
  std::string_view read;  // reading fails
  std::string_view size;  // it has more than max_bytes
};

// The bytes of a regular file; Error with one of the codes.
std::string read_file(const std::string& path, int64_t max_bytes, const ReadFileCodes& codes);

}  // namespace imbrex
