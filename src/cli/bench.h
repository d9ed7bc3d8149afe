#pragma once
// What `imbrex bench` was asked for, with and without --zoo.
#include <string>
#include <vector>

#include "cli/spec_options.h"
#include "serve/bench.h"

namespace imbrex::cli {

struct BenchArguments {
  SpecOptions spec;
  serve::BenchOptions bench;
  std::vector<std::string> batches;
  std::string device = "cpu", backends, cases, only, format = "table";
  int threads = 0;
  double min_time = 0.3, max_time = 10, noise = 1;
  double seconds = 0;  // of the zoo; 0: as long as it takes
  bool json = false, no_ceilings = false, no_check = false, zoo = false, list = false;
  bool page_given = false, kv_dtype_given = false, time_given = false;  // options that the zoo varies by itself
};

// Layers of models in the steps that engines run, and the slowest of them.
int run_zoo(const BenchArguments&, const DeviceInfo&);

}  // namespace imbrex::cli
