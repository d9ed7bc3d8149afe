#pragma once
// The table of kernels that tells one CUDA backend for softmax attention from another.
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "cuda/driver/jit.h"
#include "gpu/cut.h"
#include "imbrex/kv_cache.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

using gpu::CutPolicy;
using gpu::kNumRegimes;
using gpu::kRegimes;
using gpu::Regime;
using gpu::Tile;
using enum gpu::Regime;

struct AttentionMaps;  // attention_sm90.h
using MakeMaps = bool(const AttentionSpec&, const TensorView& q, const KvCache&, AttentionMaps&);

// The kernel of a regime, and how it is launched.
struct RegimeKernel {
  const char* entry = nullptr;
  Tile tile;                 // rows 0: it does not run them
  unsigned threads = 0;      // of a thread block
  unsigned cluster = 1;      // thread blocks that take a task together
  int row_blocks = 1;        // tasks, of a kv head, that an item of `tile` may be
  int64_t most_tasks = 0;    // of a launch; 0: any number
  int64_t run_sums = 0;      // floats of a thread block, of which a multiprocessor gets one then: AttentionParams::run_sums
  int mask_teams = 0;        // warpgroups for each of which a custom mask is packed (attention_sm90_mask.cuh); 0: it reads bytes
  bool short_sums = false;   // merges shorten sums so far: short_sums.cuh
  MakeMaps* maps = nullptr;  // of the maps that the entry takes behind AttentionParams; null: it takes none
  // Whether the kernel merges the pieces of an item itself, or leaves no partial results.
  bool joins_pieces = false;
};

constexpr size_t kFewTasksTables = 2;  // of one backend, at most

// The kernels of one backend, in which its plans differ from those of others.
struct AttentionKernels {
  const char* backend;  // "cuda_sm80"
  RegimeKernel (*kernel)(std::string_view arch, const AttentionSpec&, Regime);
  KernelKey (*attention)(std::string_view arch, const AttentionSpec&, Regime, DType out);
  KernelKey (*merge)(std::string_view arch, const AttentionSpec&, DType out);  // entry `merge`, launched with kMergeThreads
  // Other tables that run items which were cut for the tiles of this one: for tensors without maps, over flat keys (flat_kv.h), and in
  // launches of few tasks, those for the fewest last, with the same bits. Null: no regime takes maps; keys are never made flat; all
  // launches are of one kernel.
  const AttentionKernels *without_maps = nullptr, *flat = nullptr;
  std::array<const AttentionKernels*, kFewTasksTables> few_tasks{};
  // Of decode alone: kernels that take items which several requests share beside all others, with the same bits and as many rows as two
  // tokens have or more. Null, or no entry: there are none.
  const AttentionKernels* sharing = nullptr;
  bool (*reads_format)(KvFormat) = nullptr;  // whether the kernels read a format that is not strided; null: none
};

// Whether the kernels read the format of a spec's cache.
bool reads(const AttentionKernels&, const AttentionSpec&);

// The variant of a kernel that takes items which several requests share: AttentionParams::shared_tokens.
KernelKey sharing(KernelKey);

extern const AttentionKernels kernels_sm80, kernels_sm90;  // backend.cpp

constexpr size_t kMostOutputs = 3;  // types, of one spec

enum class Extent : uint8_t {
  all,     // every kernel that a plan may load
  sample,  // those that differ in more than the type they store
  usual    // of these, those that run unless a tensor lies in an unusual way
};

// The kernels of a plan for the spec; none for a spec that the kernels do not run.
std::vector<KernelKey> plan_kernels(const AttentionKernels&, std::string_view arch, const AttentionSpec&, Extent = Extent::all);

}  // namespace imbrex::cuda
