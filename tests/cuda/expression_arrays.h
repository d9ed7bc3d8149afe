#pragma once
// What a plan gives kernels of the user's expressions.
#include <vector>

#include "cuda/attention/expressions.h"
#include "imbrex/attention.h"
#include "imbrex/batch.h"
#include "imbrex/schedule.h"

namespace imbrex::cuda {

struct ExpressionArrays {
  std::vector<ExpressionTensorData> mask_tensors;
  std::vector<char> mask_elements;

  // The list has to live as long as the kernel runs.
  ExpressionArrays(const AttentionSpec& spec, const Batch& batch, const AttentionInputs& in, const Schedule& list, AttentionParams& p) {
    set_score_tensors(spec, in.score_tensors, p);
    if (spec.mask_mod.empty()) return;
    mask_tensors.resize(spec.mask_mod.tensors().size());
    mask_elements.resize(size_t(mask_tensor_bytes(spec, batch.mask_tensors)));
    place_mask_tensors(spec, batch.mask_tensors, mask_elements.data(), mask_tensors.data());
    pack_mask_tensors(spec, batch.mask_tensors, mask_elements.data());
    p.mask_tensors = mask_tensors.data(), p.item_details = list.details.items.data(), p.stretches = list.details.stretches.data();
  }
};

}  // namespace imbrex::cuda
