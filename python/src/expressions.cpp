// See expressions.h.
#include "expressions.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <string>

#include "imbrex/bound_expression.h"
#include "tensors.h"

namespace imbrex::python {
namespace {

// Of each tile of queries, a byte for each tile of keys: 0 where it is empty, 2 where it is full, 1 otherwise.
nb::bytes mask_tiles(const std::string& mask_mod, const NamedArrays& tensors, int batch, int head, int q_len, int kv_len, int tile_q,
                     int tile_kv) {
  const std::vector<NamedTensor> views = named_views(tensors);
  const BoundExpression mask(parse_expression(mask_mod), views);
  const BlockMask blocks = block_mask(mask, {batch, head, q_len, kv_len, tile_q, tile_kv});
  const size_t columns = size_t((int64_t(kv_len) + tile_kv - 1) / tile_kv), rows = blocks.first_stretch.size() - 1;
  std::string tiles(rows * columns, '\0');
  for (size_t row = 0; row < rows; ++row)
    for (int s = blocks.first_stretch[row]; s < blocks.first_stretch[row + 1]; ++s)
      for (int64_t kv = blocks.stretches[size_t(s)].begin; kv < blocks.stretches[size_t(s)].end; kv += tile_kv)
        tiles[row * columns + size_t(kv / tile_kv)] = blocks.stretches[size_t(s)].shown ? '\2' : '\1';
  return nb::bytes(tiles.data(), tiles.size());
}

}  // namespace

void bind_expressions(nb::module_& m) {
  m.def(
      "mask_tiles", mask_tiles, nb::arg("mask_mod"), nb::arg("tensors"), nb::kw_only(), nb::arg("batch"), nb::arg("head"), nb::arg("q_len"),
      nb::arg("kv_len"), nb::arg("tile_q"), nb::arg("tile_kv"),
      "Of each tile of queries, a byte for each tile of keys: 0 where mask_mod hides all of it, 2 where it shows all of it, 1 otherwise.");
}

}  // namespace imbrex::python
