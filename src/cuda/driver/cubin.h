#pragma once
// Reads a compiled kernel: resources and warnings from the compiler's log, constants from the ELF file. Needs no GPU.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/driver/jit.h"

namespace imbrex::cuda {

struct EntryReport {  // one __global__ function
  std::string name;
  int registers = 0;                                                 // of a thread
  int stack_bytes = 0, spill_store_bytes = 0, spill_load_bytes = 0;  // local memory of a thread
  int static_smem_bytes = 0;                                         // of a block
  int dynamic_smem_bytes = 0;                                        // of a block, see dynamic_smem_bytes()
};
std::vector<EntryReport> entry_reports(const CompiledKernel&);

// The faults that `imbrex compile --strict` refuses, a line for each; empty: there are none. They are spills, local memory, warnings of the
// compiler, and the remarks by which ptxas says that it serialises wgmma (C7508, C7510, C7519, ...).
std::vector<std::string> strict_problems(const CompiledKernel&);

// The value of `extern "C" __device__ const unsigned name = ...;`, read from the file; nullopt when there is none.
std::optional<unsigned> cubin_constant(std::string_view cubin, std::string_view name);

// Dynamic shared memory that an entry asks for: ENTRY_smem_bytes, else smem_bytes of its file, else 0. The kernel file owns the number.
unsigned dynamic_smem_bytes(std::string_view cubin, std::string_view entry);

}  // namespace imbrex::cuda
