#pragma once
// What selection and planning may know about a device. Probed, or described by a string for hardware that is absent.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/tensor.h"

namespace imbrex {

using Stream = void*;  // a CUstream on CUDA, what a plug-in's device makes there, unused on CPU

// Instruction sets that a CPU kernel file exists for; each includes the ones before it.
// `avx512_bf16` is AVX-512 with products of bf16 pairs and with VBMI. `amx_emulated` runs the AMX kernels on AVX-512 with tiles in memory:
// for tests on machines without AMX, never selected.
enum class CpuIsa : uint8_t { generic, avx2, avx512, avx512_bf16, amx_emulated, amx };
const char* to_string(CpuIsa);

struct DeviceInfo {
  Device device;
  std::string name;              // "Intel(R) Xeon(R) Processor", "NVIDIA H200"
  bool present = true;           // false: only described; selection answers for it, plans do not exist for it (backend.device_absent)
  CpuIsa isa = CpuIsa::generic;  // CPU: the best set this process may use (IMBREX_CPU_ISA lowers it)
  int sm = 0;                    // CUDA: 90 for compute capability 9.0
  int num_workers = 1;           // threads (CPU), multiprocessors (CUDA), what a plug-in's device has
  int64_t l2_bytes = 0;          // CPU: of one core; CUDA: of the chip
  int64_t l3_bytes = 0;          // CPU only: of the caches that this process's cores belong to
  int64_t memory_bytes = 0;
  double peak_flops = 0;        // CUDA: FLOP/s of dense bf16 products with f32 sums, by the data sheet; 0: not known
  double peak_bytes_per_s = 0;  // CUDA: of its memory, by the data sheet; 0: not known
  int max_smem_bytes = 0;       // CUDA: opt-in shared memory of a thread block
  std::string isa_note;         // CPU: why a better set is not used ("amx: amx-tile not in cpuid"), on aarch64 what the CPU has; or empty
  std::string str() const;
};

DeviceInfo probe_cpu();  // this machine; asks the system for permission to use the tiles of AMX, where it has them

// The GPUs that the NVIDIA driver has; none, and the reason in `why`, without one. No context is made.
std::vector<DeviceInfo> probe_cuda(std::string* why = nullptr);

// "cpu", "cuda:1" or "cuda" (cuda:0) of this machine, "toy:0" of a plug-in, Error device.absent with the reason when there is no such
// device; or a description: "h200", "b200", "a100", "h100", "rtx5090", "l40s", or a list of CPU properties, "avx512,32 threads", "amx,64
// threads". Error device.unknown naming what exists.
DeviceInfo describe_device(std::string_view text);

}  // namespace imbrex
