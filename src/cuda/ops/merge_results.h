#pragma once
// Partial results in the memory of a GPU joined by their log-sum-exps.
#include <memory>
#include <span>
#include <string_view>

#include "cuda/driver/module.h"
#include "imbrex/merge.h"

namespace imbrex::cuda {

KernelKey merge_results_key(std::string_view arch);

class MergeResults final : public PartialMerger {
 public:
  MergeResults(const std::shared_ptr<const Context>&, std::string_view arch);
  void merge(std::span<const PartialResult>, const TensorView& out, const TensorView& lse, Stream) const override;

 private:
  Device device_;
  std::shared_ptr<const Context> context_;
  std::shared_ptr<const Module> module_;
  Kernel eights_, elements_;  // of rows in pieces of eight neighbours, and of any rows
};

}  // namespace imbrex::cuda
