#pragma once
// The families of layers that a model can have: what a layer computes is a spec of one of them.
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include "imbrex/attention.h"
#include "imbrex/mla.h"
#include "imbrex/recurrent.h"
#include "imbrex/short_conv.h"

namespace imbrex {

// The spec of a layer of any family, for std::visit(). This is the list of families: select() uses it to find that a backend's name belongs
// to another family.
using LayerSpec = std::variant<AttentionSpec, ShortConvSpec, MlaSpec, RecurrentSpec>;

// The family that a spec is of: select<FamilyOf<decltype(spec)>>(spec, device) in a visitor.
template <class Spec>
struct FamilyOfSpec;
template <>
struct FamilyOfSpec<AttentionSpec> {
  using type = AttentionFamily;
};
template <>
struct FamilyOfSpec<ShortConvSpec> {
  using type = ShortConvFamily;
};
template <>
struct FamilyOfSpec<MlaSpec> {
  using type = MlaFamily;
};
template <>
struct FamilyOfSpec<RecurrentSpec> {
  using type = RecurrentFamily;
};
template <class Spec>
using FamilyOf = typename FamilyOfSpec<std::remove_cvref_t<Spec>>::type;

// Calls visit(std::type_identity<Family>()) for each family, in the order of the list.
template <class Visit>
void for_each_family(Visit&& visit) {
  [&]<class... Specs>(std::type_identity<std::variant<Specs...>>) {
    (visit(std::type_identity<FamilyOf<Specs>>()), ...);
  }(std::type_identity<LayerSpec>());
}

inline std::string_view family_name(const LayerSpec& layer) {  // "attention", "short_conv"
  return std::visit([](const auto& spec) { return FamilyOf<decltype(spec)>::name; }, layer);
}
inline std::string to_string(const LayerSpec& layer) {  // str() of the spec
  return std::visit([](const auto& spec) { return spec.str(); }, layer);
}

}  // namespace imbrex
