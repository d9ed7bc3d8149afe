#pragma once
// Kernels and their sizes, as JSON and in lines, for `select` and `bench`.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "imbrex/family.h"

namespace imbrex::cli {

inline nlohmann::ordered_json to_json(const std::vector<KernelChoice>& choices) {
  auto list = nlohmann::ordered_json::array();
  for (const KernelChoice& choice : choices) {
    nlohmann::ordered_json j{{"requests", choice.requests}, {"least_queries", choice.least_queries}};
    if (choice.most_queries < INT32_MAX) j["most_queries"] = choice.most_queries;
    j["kernel"] = choice.kernel;
    j["sizes"] = nlohmann::ordered_json::object();
    for (const KernelChoice::Size& size : choice.sizes) j["sizes"][size.name] = size.value;
    list.push_back(std::move(j));
  }
  return list;
}

inline std::string lines_of(const std::vector<KernelChoice>& choices) {
  std::string text;
  for (const KernelChoice& choice : choices) text += fmt::format("  {}\n", choice.str());
  return text;
}

}  // namespace imbrex::cli
