// See host_expressions.h.
#include "cuda/fake/host_expressions.h"

#include <cstdlib>
#include <vector>

namespace imbrex::cuda::fake {
namespace {

DType dtype_of(ExpressionType type) {
  if (type == ExpressionType::real) return DType::f32;
  return type == ExpressionType::integer ? DType::i32 : DType::u8;
}

BoundExpression bind(const Expression& expression, const ExpressionTensorData* place) {
  std::vector<NamedTensor> tensors;
  for (const ExpressionTensor& t : expression.tensors()) {
    NamedTensor& named = tensors.emplace_back();
    named.name = t.name;
    named.tensor.data = const_cast<void*>(place->data);
    named.tensor.dtype = dtype_of(t.type);
    named.tensor.rank = t.rank;
    for (int d = 0; d < t.rank; ++d) named.tensor.sizes[d] = place->sizes[d], named.tensor.strides[d] = place->strides[d];
    ++place;
  }
  return {expression, tensors};
}

}  // namespace

HostExpressions::HostExpressions(const AttentionSpec& spec, const AttentionParams& p) : p_(p) {
  if (!spec.score_mod.empty()) score_ = bind(spec.score_mod, p_.score_tensors);
  if (!spec.mask_mod.empty()) mask_ = bind(spec.mask_mod, p_.mask_tensors);
}

ExpressionVariables HostExpressions::place(int request, int head, int position, int key) const {
  return {.batch = request,
          .head = head,
          .q = position,
          .kv = key,
          .q_len = p_.query_start[request + 1] - p_.query_start[request],
          .kv_len = p_.seq_lens[request]};
}

double HostExpressions::score(double logit, int request, int head, int position, int key) const {
  if (!score_) return logit;
  ExpressionVariables at = place(request, head, position, key);
  at.score = float(logit);
  return double(score_->evaluate(at).real());
}

bool HostExpressions::shows(const WorkItem& item, int request, int head, int position, int key) const {
  if (!mask_) return true;
  const bool shown = mask_->evaluate(place(request, head, position, key)).boolean();
  if (item.piece >= 0) return shown;
  const ItemDetails& details = p_.item_details[~item.piece];
  for (int i = 0; i < details.num_stretches; ++i) {
    const KeyStretch& stretch = p_.stretches[details.first_stretch + i];
    if (key < stretch.begin || key >= stretch.end) continue;
    if (stretch.shown == 1 && !shown) std::abort();
    return shown;
  }
  if (shown) std::abort();
  return false;
}

}  // namespace imbrex::cuda::fake
