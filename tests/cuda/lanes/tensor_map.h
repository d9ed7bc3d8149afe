#pragma once
// What stands in for TMA's descriptor where kernel texts run on the host.

namespace imbrex::test {

struct TensorMap {
  const char* data = nullptr;
  int element_bytes = 0;
  long sizes[4] = {}, strides[4] = {};  // elements and bytes, innermost first
  int box[4] = {};                      // elements
};

}  // namespace imbrex::test
