#pragma once
// A layer's keys and values as CPU kernels see them: from the caller's views, whatever the format.
#include <vector>

#include "attention/kv_codec.h"
#include "cpu/params.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cpu {

class KvSides {
 public:
  // `widened` is Kernels::widened. The format must be one that the kernels read.
  KvSides(const AttentionSpec&, int widened);

  // Sets k, v, row_parts and packed to what a spec says of them, at the largest that read() makes of it.
  void describe(AttentionParams&) const;
  // Also sets where they lie, and their scales, which lie on the host. Not thread-safe.
  void read(const KvCache&, AttentionParams&);
  // Sets where new rows go and, once src_k, src_v and their strides are those of the caller's k and v, where its parts come from.
  void write(const KvCache&, WriteKvParams&) const;

 private:
  KvSide side(const TensorView&, const TensorView& scale, int dim) const;

  AttentionSpec spec_;
  int widened_;
  std::string_view dims_;              // of the format's keys: KvLayout::dims
  std::vector<float> second_factors_;  // RowParts::second_factors
};

}  // namespace imbrex::cpu
