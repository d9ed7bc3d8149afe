// See layer_kind.h.
#include "serve/layer_kind.h"

namespace imbrex::serve {

LayerKind::LayerKind(const ModelSpec::Kind& kind, const KindSetup& setup)
    : spec_(kind.spec), group_(setup.model.layers[size_t(kind.layers.front())].cache_group), stream_(setup.stream) {
  report_.spec = to_string(kind.spec);
  report_.family = family_name(kind.spec);
  report_.group = setup.model.cache_groups[size_t(group_)].name;
  for (const int layer : kind.layers) report_.layers.push_back(setup.model.layers[size_t(layer)].number);
}

void LayerKind::update(const Batch& batch, bool decode) {
  decode_ = decode;
  plan_now().update(batch, stream());
}

ReplayKind LayerKind::report() const {
  ReplayKind report = report_;
  report.plan = plan_now().str();
  report.bits_follow_steps = step_tokens() != 1;
  return report;
}

}  // namespace imbrex::serve
