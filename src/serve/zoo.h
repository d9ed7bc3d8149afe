#pragma once
// Layers of models in the steps that engines run, and which of these cells are slower than their neighbours: cliffs.
// Used by `imbrex bench --zoo`.
#include <span>
#include <string>
#include <vector>

#include "serve/bench.h"

namespace imbrex::serve {

struct ZooCell {
  std::string kind;   // of step: decode, ragged, verify, extend, chunk, mixed, prefill
  std::string layer;  // "32-8/d128/window4096"
  AttentionSpec spec;
  std::vector<BenchRequest> requests;
  BenchLaunch launch = BenchLaunch::eager;

  std::string name() const;   // "decode/32-8/d128/bf16/p16/16q1s4k", as scripts/gpu_zoo.py has it
  std::string group() const;  // cells of one group are compared with each other: "decode fp8_e4m3"
};

// The cells of bench/zoo.json: layers of published models, whole and shared out over GPUs, each in some steps, page sizes and cache types.
std::vector<ZooCell> published_cells();

// The axes that the cells of given layers take turns at.
struct ZooAxes {
  std::vector<int> pages{16, 1, 64, 128};
  std::vector<DType> kv_dtypes;  // empty: the layer's own, and every third time fp8_e4m3
};
// Every step for each of the layers, whole and shared out over 2, 4 and 8 GPUs; layers without a cache have prefill alone.
std::vector<ZooCell> cells_of(std::span<const AttentionSpec> layers, const ZooAxes& = {});

// The cell with fewer requests, then with shorter ones, until one call reads at most so many bytes of keys and has at most so many FLOPs.
ZooCell fitted(ZooCell cell, double max_bytes, double max_flops);

struct ZooResult {
  std::string name, group, backend;
  BenchResult bench;    // median_s 0: it did not run, see `problem`
  Share share;          // of the nearer ceiling, with what a call costs that has nothing to do
  double beside = 0;    // the share by the median share of the group; see judge()
  std::string problem;  // why it did not run, or the output is wrong
};

inline constexpr double kCliff = 0.5;  // of what the group's median is

// Sets `beside` of every cell that ran. Returns the cliffs, the worst first.
std::vector<const ZooResult*> judge_zoo(std::span<ZooResult>);

}  // namespace imbrex::serve
