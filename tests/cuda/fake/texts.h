#pragma once
// Launches on the fake driver that run kernels' texts, compiled for the host (tests/cuda/lanes).
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fake/fake_driver.h"
#ifdef IMBREX_LANES
#include "cuda/lanes/library.h"
#endif

namespace imbrex::cuda::fake {

// Whether kernels compute: builds with sanitizers have no libraries of kernels for the host.
inline bool has_texts() {
#ifdef IMBREX_LANES
  return true;
#else
  return false;
#endif
}

#ifdef IMBREX_LANES
// A parameter that is a map of a tensor of 16-bit elements.
inline imbrex::test::TensorMap map_of(const std::vector<unsigned char>& parameter) {
  TensorMap from;
  std::memcpy(&from, parameter.data(), sizeof from);
  imbrex::test::TensorMap map{.data = from.data, .element_bytes = 2};
  for (size_t i = 0; i < 4; ++i) map.sizes[i] = i < from.rank ? long(from.sizes[i]) : 1, map.box[i] = i < from.rank ? int(from.box[i]) : 1;
  for (size_t i = 0; i + 1 < from.rank && i < 3; ++i) map.strides[i + 1] = long(from.strides[i]);
  map.strides[0] = map.element_bytes;
  return map;
}

// Asynchronous work happens late in every other launch, and warps take turns in another order in each, where in a cluster one of them
// hardly runs.
inline void run_text(const std::string& library, const Launch& launch, unsigned blocks) {
  static std::map<std::string, imbrex::test::Library> libraries;
  static unsigned chance = 0;
  if (!libraries.contains(library)) libraries[library] = imbrex::test::open_library(library);
  imbrex::test::TensorMap maps[4];
  for (size_t i = 1; i < launch.all_params.size() && i <= std::size(maps); ++i) maps[i - 1] = map_of(launch.all_params[i]);
  const unsigned warps = launch.threads / 32 * launch.cluster;
  libraries[library].run(launch.all_params.at(0).data(), maps,
                         {.blocks = int(blocks),
                          .late_copies = chance % 2 == 0,
                          .chance = chance,
                          .starved = launch.cluster > 1 ? int(chance / 2 % warps) : -1});
  ++chance;
}
#endif

// Launches run the text of the library that `library_of` names, until state().on_launch is another one.
inline void run_texts([[maybe_unused]] std::function<std::string(const Launch&)> library_of) {
#ifdef IMBREX_LANES
  state().on_launch = [library_of = std::move(library_of)](const Launch& launch) {
    run_text(library_of(launch), launch, launch.grid_x / launch.cluster);
  };
#endif
}

// Whether layers with states of all kinds have such launches.
inline bool is_of_all_layers(const Launch& launch) { return launch.entry == "plan_state_batch" || launch.entry == "zero_padding"; }

inline void forget_texts() { state().on_launch = nullptr, state().param_sizes.clear(), state().launches.clear(); }

}  // namespace imbrex::cuda::fake
