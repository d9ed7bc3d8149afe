#pragma once
// Which specialisation of attention_sm80.cu runs a layer: tiles by architecture, spec and regime. Pure functions.
#include <optional>
#include <string_view>

#include "cuda/driver/jit.h"
#include "gpu/cut.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

struct AttentionTiles {
  int rows, keys;                       // of a tile
  int row_warps, key_warps, dim_warps;  // that share them and the output's dims
  int stages;                           // tiles of keys and values in shared memory
  int blocks;                           // thread blocks a multiprocessor is to hold
  int item_rows = rows;                 // (query token, q head) of an item at most, unless a token has more
  bool whole_items = false;             // whether a split that begins an item computes all of it, and the others nothing
  bool may_share = false;               // whether an item may have query tokens of several requests: shares_items()
  int threads() const { return 32 * row_warps * key_warps * dim_warps; }
  friend bool operator==(const AttentionTiles&, const AttentionTiles&) = default;
};

// Tiles of decode and verify have few rows: warps share out the keys, and the memory sets the pace. In those of prefill they share out the
// rows. Few are 16, 32 or 64: as many as `rows` and the group need, or fewer where these do not fit (the kernel takes a larger group in
// parts). nullopt: nothing fits the shared memory of the architecture.
std::optional<AttentionTiles> attention_sm80_tiles(std::string_view arch, const AttentionSpec&, gpu::Regime, int rows = 1);

// Whether items of decode with tiles of so many rows may have query tokens of several requests, which read the same blocks: those of a
// layer where an item is the same for queries at any positions, and two tokens fit.
bool shares_items(const AttentionSpec&, int rows);
// Tiles of decode for such items: those of all others, or larger ones with the same bits where a token has too many q heads. nullopt: there
// are none.
std::optional<AttentionTiles> attention_sm80_sharing_tiles(std::string_view arch, const AttentionSpec&);

// Shared memory of a thread block, bytes.
int attention_sm80_smem_bytes(const AttentionSpec&, const AttentionTiles&);

KernelKey attention_sm80_key(std::string_view arch, const AttentionSpec&, DType out, const AttentionTiles&);
// merge.cu, for partial results of any attention kernel.
KernelKey merge_key(std::string_view arch, const AttentionSpec&, DType out);

}  // namespace imbrex::cuda
