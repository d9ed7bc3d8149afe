#pragma once
// What the machine can do at best, measured in about two seconds: the yardstick of `imbrex info --measure`, bench and the run report.
#include "imbrex/device.h"

namespace imbrex::serve {

struct Ceilings {
  int num_threads = 0;
  double dram_read = 0;  // bytes/s, all threads, a buffer far larger than the caches, on huge pages
  double l3_read = 0;    // bytes/s, a buffer larger than L2 and smaller than L3
  double fma = 0;        // FLOP/s of f32 fused multiply-adds in the widest vectors
  double amx = 0;        // FLOP/s of bf16 tile products; 0 without AMX
  double flops_for(bool uses_tiles) const { return uses_tiles && amx > 0 ? amx : fma; }
};

// `seconds` is for all measurements together; the best of several short repetitions counts. Error ceilings.memory when the
// buffer cannot be had.
Ceilings measure_ceilings(const DeviceInfo& cpu, int num_threads, double seconds = 2);

}  // namespace imbrex::serve
