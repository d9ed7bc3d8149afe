#pragma once
// The steps between the parts of a plan of latent attention on NVIDIA GPUs: latents out of the cache, rows of heads from one place to
// another, results of rounds into outputs. Host side of gather_latents.cu, copy_rows.cu and add_parts.cu.
#include <memory>
#include <string_view>
#include <vector>

#include "cuda/driver/module.h"
#include "cuda/mla_params.h"
#include "imbrex/merge.h"
#include "imbrex/mla.h"

namespace imbrex::cuda {

KernelKey gather_latents_key(std::string_view arch, const MlaSpec&);
KernelKey copy_rows_key(std::string_view arch);
KernelKey add_parts_key(std::string_view arch);
// Those of a plan, its attention apart; gather and addition only where requests may be computed with expanded keys.
std::vector<KernelKey> mla_kernels(std::string_view arch, const MlaSpec&, bool may_expand);

// Ranges of a step in device memory.
template <class Range>
struct RangeList {
  const Range* ranges = nullptr;  // null: row i of the list is token i of the batch
  int count = 0;
};

class MlaSteps {
 public:
  // The context must be current, also where a step is launched.
  MlaSteps(const std::shared_ptr<const Context>&, std::string_view arch, const MlaSpec&, bool may_expand);

  // Which of two tensors [rows, heads, dim] of one type has a row for each token of the batch, and the other one for each row of the list.
  enum class Tokens { from, to };
  // Copies num_rows rows; where the device knows the step's lengths, none beyond its tokens (CopyRowsParams). Innermost strides are 1; a
  // tensor without elements is left alone.
  void copy_rows(const TensorView& from, const TensorView& to, Tokens, const RangeList<TokenRows>&, int num_rows, const LengthsThere&,
                 CUstream) const;

  // The keys of a round: of the requests of the batch whose block ids are at `block_ids`, from the places that `block_starts` has, i32
  // [requests + 1] on the device, or KeyRows::first_block where it is null.
  struct RoundKeys {
    RangeList<KeyRows> list;
    int num_keys;
    const int *block_ids, *block_starts;
  };
  // Reads latents into `latents` [keys, 1, kv_lora_rank] and rope parts into the ends of rows of `k` [keys, heads of a round, qk_dim], both
  // in scratch.
  void gather(const KvCache&, const RoundKeys&, const TensorView& latents, const TensorView& k, CUstream) const;

  // Adds the parts of a round's rows to `sum`, whose rows are tokens of its slice, or writes them out where they are the last ones. All
  // have the heads of the round.
  void add(const PartialResult& part, const PartialResult& sum, const RangeList<TokenRows>&, int num_rows, const TensorView& sinks,
           const TensorView& out, const TensorView& lse, CUstream) const;

 private:
  MlaSpec spec_;
  std::vector<std::shared_ptr<const Module>> modules_;
  Kernel copy_16_, copy_2_, gather_aligned_, gather_unaligned_, add_;
};

}  // namespace imbrex::cuda
