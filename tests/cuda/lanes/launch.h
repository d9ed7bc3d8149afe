#pragma once
// The parameters of a library that runs a kernel's source on the host: the launch, and replacements for TMA's descriptors.

namespace imbrex::test {

struct TensorMap {
  const char* data = nullptr;
  int element_bytes = 0;
  long sizes[4] = {}, strides[4] = {};  // elements and bytes, innermost first
  int box[4] = {};                      // elements
};

struct Launch {             // none of it may change a bit of what a kernel computes
  int blocks = 3;           // thread blocks or clusters, one after the other
  bool late_copies = true;  // asynchronous work happens when it is waited for, instead of at once
  unsigned chance = 1;
  int starved = -1;  // warp of a cluster that hardly runs while others can
};

}  // namespace imbrex::test
