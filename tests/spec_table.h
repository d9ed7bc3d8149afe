#pragma once
// What must be true of the table of spec fields of every family.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string_view>

#include "family/spec_fields.h"

namespace imbrex::test {

struct Anything {
  template <class T>
  operator T() const;
};

// Fields of an aggregate: how many values it can be made of.
template <class T, class... Values>
constexpr int num_fields() {
  if constexpr (requires { T{Values{}..., Anything{}}; })
    return num_fields<T, Values..., Anything>();
  else
    return int(sizeof...(Values));
}

// Expects that no two rows are of one field or have one name, key or option, and returns how many rows each part has.
template <class Spec>
std::map<std::string_view, int> rows_of_parts() {
  Spec spec;
  std::set<std::string_view> names, flags;
  std::set<std::pair<std::string_view, std::string_view>> keys;
  std::set<const void*> places;
  std::map<std::string_view, int> rows;
  for_each_field(spec, [&](const SpecField& field, auto& value) {
    ++rows[field.part];
    EXPECT_TRUE(places.insert(&value).second) << field.name;
    EXPECT_TRUE(names.insert(field.name).second) << field.name;
    EXPECT_TRUE(field.key.empty() || keys.insert({field.part, field.key}).second) << field.key;
    EXPECT_TRUE(*field.flag == 0 || flags.insert(field.flag).second) << field.flag;
    EXPECT_EQ(*field.flag == 0, *field.help == 0) << field.name;
  });
  return rows;
}

}  // namespace imbrex::test
