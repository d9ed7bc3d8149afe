// Questions about all families at once. No other file of this folder knows which families there are.
#include "family/choose.h"
#include "imbrex/layer_spec.h"

namespace imbrex {

std::string_view other_family_with(std::string_view backend, std::string_view family) {
  std::string_view found;
  for_each_family([&]<class Family>(std::type_identity<Family>) {
    if (!found.empty() || Family::name == family) return;
    for (const BackendOf<Family>* one : backends<Family>())
      if (same_name(one->name(), backend)) found = Family::name;
  });
  return found;
}

}  // namespace imbrex
