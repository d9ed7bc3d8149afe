#pragma once
// The user's expressions in kernels that are host code: from a launch's parameters alone.
#include <optional>

#include "cuda/params.h"
#include "imbrex/bound_expression.h"
#include "imbrex/spec.h"

namespace imbrex::cuda::fake {

class HostExpressions {
 public:
  HostExpressions() = default;
  HostExpressions(const AttentionSpec&, const AttentionParams&);

  double score(double logit, int request, int head, int position, int key) const;
  // Whether mask_mod shows a key of an item to a query of this head, and the item's stretches have it. A stretch that says that nothing is
  // hidden, and one that leaves a key out, must be right.
  bool shows(const WorkItem&, int request, int head, int position, int key) const;

 private:
  ExpressionVariables place(int request, int head, int position, int key) const;
  AttentionParams p_{};
  std::optional<BoundExpression> score_, mask_;
};

}  // namespace imbrex::cuda::fake
