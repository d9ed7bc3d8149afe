#pragma once
// Ceilings: the highest rates of a device, which `imbrex info --measure`, bench and the run report compare with. Those of a CPU are
// measured in about two seconds; those of a GPU are from its data sheet.
#include <string_view>

#include "imbrex/device.h"

namespace imbrex::serve {

struct Ceilings {
  int num_threads = 0;   // that measured; 0: by the data sheet
  double dram_read = 0;  // bytes/s, all threads, a buffer far larger than the caches, on huge pages
  double l3_read = 0;    // bytes/s, a buffer larger than L2 and smaller than L3
  double fma = 0;        // FLOP/s of f32 fused multiply-adds in the widest vectors
  double pairs = 0;      // FLOP/s of bf16 products in pairs (AVX512_BF16); 0 without them
  double amx = 0;        // FLOP/s of bf16 tile products; 0 without AMX
  double tensor = 0;     // GPU: FLOP/s of dense bf16 products; the fields of CPUs are 0 then, but for dram_read
  // The ceiling of arithmetic for attention by a backend of this name ("cpu_amx", or two of them by phase) with queries of this type. Where
  // queries and keys are multiplied in pairs of bf16, values are not.
  double flops_for(std::string_view backend, std::string_view q_dtype) const;
};

// `seconds` is for all measurements together; the best of several short repetitions counts. Error ceilings.memory when the
// buffer cannot be had.
Ceilings measure_ceilings(const DeviceInfo& cpu, int num_threads, double seconds = 2);
// The ceilings of a device: measured on a CPU, DeviceInfo's peaks for a GPU.
Ceilings ceilings_of(const DeviceInfo&, int num_threads, double seconds = 2);

}  // namespace imbrex::serve
