// See json_gate.h.
#include "core/json_gate.h"

#include <nlohmann/json.hpp>
#include <set>
#include <vector>

namespace imbrex {

using nlohmann::json;

json parse_json(std::string_view text, int max_depth) {
  std::vector<std::set<std::string>> keys;  // one for every open object or array
  const auto gate = [&](int, json::parse_event_t event, json& parsed) {
    switch (event) {
      case json::parse_event_t::object_start:
      case json::parse_event_t::array_start:
        if (keys.size() >= size_t(max_depth)) throw JsonProblem{JsonProblem::depth, 0, {}};
        keys.emplace_back();
        break;
      case json::parse_event_t::object_end:
      case json::parse_event_t::array_end: keys.pop_back(); break;
      case json::parse_event_t::key: {
        const auto& name = parsed.get_ref<const std::string&>();
        if (!keys.back().insert(name).second) throw JsonProblem{JsonProblem::duplicate, 0, name};
        break;
      }
      case json::parse_event_t::value: break;
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), gate);
  } catch (const json::parse_error& error) {
    throw JsonProblem{JsonProblem::syntax, error.byte, {}};
  } catch (const json::exception&) {
    throw JsonProblem{JsonProblem::number, 0, {}};
  }
}

}  // namespace imbrex
