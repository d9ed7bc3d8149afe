#pragma once
// Memory of which some bytes are a request's and the others hold poison: what every family of layers is run among.
#include <string>
#include <vector>

#include "conformance/host_tensor.h"

namespace imbrex {

// The contents of every byte that no request owns: free pages and slots, page tails, padding rows, gaps between rows, outputs before the
// run.
enum class Poison : uint8_t { zero, nan, ones };  // ones: 0xff bytes, another NaN in every float type
const char* to_string(Poison);

// A quiet NaN of the type in each element, or one byte everywhere.
void fill_poison(char* bytes, size_t count, DType, Poison);
int32_t poison_index(Poison);  // of a block, a slot or a row that must not be looked at

// How far rows lie apart.
enum class Gaps : uint8_t {
  none,     // contiguous
  aligned,  // rows at multiples of 16 bytes, if their length is one
  odd       // the rows after the first are aligned to their elements alone
};
const char* to_string(Gaps);

// [rows, heads, dim] with gaps between rows and heads. All of it holds poison at first.
struct SpreadTensor {
  std::vector<char> bytes;
  TensorView view;

  SpreadTensor(const SpreadTensor&) = delete;
  SpreadTensor(DType, int64_t rows, int64_t heads, int64_t dim, Poison, Gaps = Gaps::aligned);
  char* at(int64_t row, int64_t head) { return bytes.data() + (row * view.stride(0) + head * view.stride(1)) * size_of(view.dtype); }
  const char* at(int64_t row, int64_t head) const { return const_cast<SpreadTensor*>(this)->at(row, head); }
  void copy_row(int64_t row, const HostTensor& source, int64_t source_row);  // source: [any, heads, dim]
  void poison_row(int64_t row, int64_t head, Poison);
};

// When the rows that are the batch's have been given back to poison, nothing else may be left: the first byte that is, in words; else
// empty.
std::string foreign_write(const char* what, const SpreadTensor&, Poison, int64_t tokens);

}  // namespace imbrex
