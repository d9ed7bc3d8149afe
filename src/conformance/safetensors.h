#pragma once
// Reader and writer of .safetensors files (https://github.com/huggingface/safetensors, "Format"), for case files. Safe on hostile input.
#include <map>
#include <string>
#include <string_view>

#include "conformance/host_tensor.h"

namespace imbrex {

struct Safetensors {
  std::map<std::string, HostTensor> tensors;
  std::map<std::string, std::string> metadata;  // "__metadata__"
};

// Error safetensors.*, one code for each broken rule. Checks what the format promises: a header of at most 100 MB, unique names,
// data that the tensors cover exactly, in 64 bits. F32, F16, BF16, F8_E4M3, F8_E5M2, U8, I32 and I64, at most 5 dimensions.
Safetensors parse_safetensors(std::string_view bytes);
Safetensors load_safetensors(const std::string& path);

std::string write_safetensors(const Safetensors&);  // the same tensors give the same bytes
void save_safetensors(const Safetensors&, const std::string& path);

}  // namespace imbrex
