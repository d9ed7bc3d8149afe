#pragma once
// Reads tensors from safetensors files, one or a folder of shards; used by weights.cpp. Nothing in a file is trusted.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "imbrex/tensor.h"

namespace llama {

struct StoredTensor {
  std::string dtype;  // as the file spells it: "BF16"
  std::vector<int64_t> sizes;
  int64_t begin = 0, bytes = 0;  // in the file
};

// One file. The header is checked as a whole: types, shapes and offsets agree, and tensors cover the data without overlap or hole.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path&);
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  std::vector<char> read(const StoredTensor&);

 private:
  std::filesystem::path path_;
  std::ifstream stream_;
  std::map<std::string, StoredTensor> tensors_;
};

// model.safetensors of a folder, or the shards that its model.safetensors.index.json names.
class Checkpoint {
 public:
  explicit Checkpoint(const std::filesystem::path& folder);
  bool has(const std::string& name) const { return shards_.contains(name); }
  // How the tensor is stored: one of the three types that read() takes.
  imbrex::DType dtype(const std::string& name) const;
  // The tensor, row-major, converted to f32 or bf16. It must have these sizes and be F32, F16 or BF16.
  std::vector<char> read(const std::string& name, const std::vector<int64_t>& sizes, imbrex::DType as);
  void skip(const std::string& name) { left_.erase(name); }    // not needed, on purpose
  const std::set<std::string>& left() const { return left_; }  // neither read nor skipped

 private:
  const StoredTensor& stored(const std::string& name) const;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, SafetensorsFile*> shards_;
  std::set<std::string> left_;
};

}  // namespace llama
