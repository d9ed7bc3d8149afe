// Fuzzes the reader of compiled kernels, which come from files: any bytes have some constants and reports, or none.
#include <cstdint>
#include <string_view>

#include "cuda/driver/cubin.h"
#include "imbrex/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace imbrex::cuda;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t half = bytes.find("\n\n");  // an ELF file, and then perhaps a compiler's log
  const std::string_view cubin = bytes.substr(0, half), log = half < size ? bytes.substr(half + 2) : bytes;
  try {
    cubin_constant(cubin, "smem_bytes");
    dynamic_smem_bytes(cubin, "attention");
    const CompiledKernel kernel{.binary = std::string(cubin), .log = std::string(log)};
    entry_reports(kernel);
    strict_problems(kernel);
  } catch (const imbrex::Error&) {
  }
  return 0;
}
