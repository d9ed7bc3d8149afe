#pragma once
// Writes an array of f32 in NumPy's .npy format; used by main.cpp for logits.
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

namespace llama {

inline void write_npy(const std::string& path, const std::vector<float>& values, int64_t columns) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(int64_t(values.size()) / columns) + ", " +
                       std::to_string(columns) + "), }";
  header.resize((10 + header.size() + 1 + 63) / 64 * 64 - 11, ' ');  // the data begins at a multiple of 64
  header += '\n';
  std::ofstream file(path, std::ios::binary);
  file << "\x93NUMPY" << '\1' << '\0' << char(header.size() & 0xff) << char(header.size() >> 8) << header;
  file.write(reinterpret_cast<const char*>(values.data()), std::streamsize(values.size() * sizeof(float)));
  check(bool(file.flush()), "cannot write ", path);
}

}  // namespace llama
