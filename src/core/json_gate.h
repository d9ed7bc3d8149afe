#pragma once
// Parses all JSON that comes from outside, more strictly than the library's parser does.
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace imbrex {

// Why a text was refused. Readers put it into words and codes of their own.
struct JsonProblem {
  enum Kind { syntax, number, depth, duplicate } kind;
  size_t byte = 0;   // syntax: where the error is, from 1
  std::string name;  // duplicate: the key that an object has twice
};

// Throws JsonProblem for a text that is not JSON, a number that does not fit a double, more than `max_depth` objects and arrays inside each
// other (the parser has no limit), and an object that has a key twice (the parser keeps the last one).
nlohmann::json parse_json(std::string_view text, int max_depth);

}  // namespace imbrex
