#pragma once
// Rows from anywhere in an array on the device into rows that lie one after the other.
#include <array>
#include <memory>
#include <string_view>

#include "cuda/driver/module.h"
#include "imbrex/tensor.h"

namespace imbrex::cuda {

KernelKey gather_key(std::string_view arch);

class Gather {
 public:
  Gather(const std::shared_ptr<const Context>&, std::string_view arch);
  // DeviceStream::gather, with tensors that are as it wants them. The context must be current.
  void run(const TensorView& from, const TensorView& offsets, const TensorView& to, CUstream) const;

 private:
  std::shared_ptr<const Module> module_;
  std::array<Kernel, 3> kernels_;  // elements of 1, 2 and 4 bytes
};

}  // namespace imbrex::cuda
