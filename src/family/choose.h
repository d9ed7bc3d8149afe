#pragma once
// The part of select() that does not depend on the family's types: which backend of a list runs a spec, by order or because it is forced,
// and the text that says so.
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "imbrex/family.h"

namespace imbrex {

struct Contender {
  const BasicBackend* backend;
  const std::vector<Reason>* reasons;  // against the spec; empty: it could run it
};

struct Choice {
  const BasicBackend* backend = nullptr;  // null: nothing runs it
  std::string rule;
  bool only_slow = false;  // nothing but `slow` runs it, or nothing at all
};

// `slow`: the reference of the family of that name. Error select.forced.
Choice choose(std::span<const Contender>, const BasicBackend& slow, std::string_view family, const SelectOptions&);

bool same_name(std::string_view, std::string_view);  // without case
// The name of the family other than `family` that has a backend of this name; empty: no family has.
std::string_view other_family_with(std::string_view backend, std::string_view family);

std::string selection_table(const BasicBackend* chosen, std::string_view rule, std::span<const Contender>,
                            std::span<const std::string> proposals);

}  // namespace imbrex
