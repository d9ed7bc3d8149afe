#pragma once
// The options of `imbrex bench`, with and without --zoo.
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/spec_options.h"
#include "serve/batch_grammar.h"
#include "serve/bench.h"

namespace imbrex::cli {

struct BenchArguments {
  std::string family = "attention";
  SpecOptions spec;
  ShortConvSpec short_conv{.dim = 2048};
  serve::BenchOptions bench;
  std::vector<std::string> batches;
  std::string device = "cpu", backends, cases, only, format = "table";
  int threads = 0;
  double min_time = 0.3, max_time = 10, noise = 1;
  double seconds = 0;  // of the zoo; 0: as long as it takes
  bool json = false, verbose = false, no_ceilings = false, no_check = false, zoo = false, list = false;
  bool page_given = false, kv_dtype_given = false, time_given = false;  // options that the zoo varies by itself
};

// Prefill, chunked prefill, decode of few and of many requests, and a mix.
std::vector<std::string> batches_of(const BenchArguments&);
std::vector<serve::BenchRequest> requests_of(const std::vector<serve::BatchItem>&);
// The table in the format that was asked for, or the array; the exit code. `notes` are printed below a table.
int print_bench(const BenchArguments&, const DeviceInfo&, int num_threads, const serve::Table&, const nlohmann::ordered_json&,
                std::string_view notes);

// Layers of models in the steps that engines run, and the slowest of them.
int run_zoo(const BenchArguments&, const DeviceInfo&);
// --family short_conv
int run_short_conv_bench(const BenchArguments&, const DeviceInfo&, const ParallelFor& threads);

}  // namespace imbrex::cli
