#pragma once
// The user's expressions of a layer as kernels have them: their text, and where their tensors lie.
#include <span>
#include <string>

#include "cuda/driver/jit.h"
#include "cuda/params.h"
#include "expression/score_parts.h"
#include "imbrex/bound_expression.h"
#include "imbrex/plan.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

inline bool has_expressions(const AttentionSpec& spec) { return !spec.score_mod.empty() || !spec.mask_mod.empty(); }

// Whether a layer's score_mod is an operations::AffineScore, which kernels compute once for a row and tile.
bool is_affine_score(const AttentionSpec&);

// KernelKey::functions of kernels that include attention_expression.cuh; empty for a spec without expressions.
std::string expression_functions(const AttentionSpec&);

// What attention_sm90_score.cuh computes of a layer's score_mod once for a key, or for a row, of each tile: a KernelKey's constants and the
// text behind its other functions. Nothing of an operations::AffineScore.
ScoreParts score_parts_of(const AttentionSpec&);
void add_score_parts(const AttentionSpec&, KernelKey&);

// Tensors on the device, which check_run() has looked at: AttentionParams::score_tensors.
void set_score_tensors(const AttentionSpec&, std::span<const NamedTensor>, AttentionParams&);

// Tensors of mask_mod are copied, one after the other. The bytes that a plan has room for, and those that a step's tensors take.
int64_t mask_tensor_room(const AttentionSpec&, const PlanLimits&);
int64_t mask_tensor_bytes(const AttentionSpec&, std::span<const NamedTensor>);
// What a kernel reads of each, with the elements at `device`, and these elements.
void place_mask_tensors(const AttentionSpec&, std::span<const NamedTensor>, const char* device, ExpressionTensorData* places);
void pack_mask_tensors(const AttentionSpec&, std::span<const NamedTensor>, char* elements);

}  // namespace imbrex::cuda
