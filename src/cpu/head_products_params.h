#pragma once
// The parameters of CPU kernels of products with a weight of each head: plain structs, strides in bytes. Filled by cpu/head_products.cpp.
#include "cpu/params.h"

namespace imbrex::cpu {

constexpr int kProductMaxK = 576;     // length of a sum
constexpr int kProductRows = 64;      // rows of a call at most
constexpr int kProductColumns = 128;  // columns of a call at most

struct HeadProductParams {
  const char *from, *weight;
  char* to;
  long from_row, from_head, weight_head, weight_row, to_row, to_head;
  int from_type, weight_type, to_type;  // ElementType, one of the first three
  int k;
};

// Rows [row_begin, row_end) and columns [n_begin, n_end) of one head's product. weight_row is the distance between sums' terms in
// `by_columns`, between columns of the result in `by_rows`, which takes rows of f32. The last two take rows and a weight of bf16; null
// where the instruction set has no products of pairs of them. `leave` is called by a worker behind its last product, null: nothing to do.
struct HeadProductKernels {
  const char* isa;
  void (*by_columns)(const HeadProductParams&, int head, int row_begin, int row_end, int n_begin, int n_end);
  void (*by_rows)(const HeadProductParams&, int head, int row_begin, int row_end, int n_begin, int n_end);
  void (*by_columns_bf16)(const HeadProductParams&, int head, int row_begin, int row_end, int n_begin, int n_end);
  void (*by_rows_bf16)(const HeadProductParams&, int head, int row_begin, int row_end, int n_begin, int n_end);
  void (*leave)();
};

}  // namespace imbrex::cpu
