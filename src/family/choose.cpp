// See choose.h.
#include "family/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/check.h"
#include "core/env.h"

namespace imbrex {
namespace {

// The name of the backend that is forced, and where that name comes from.
struct Demand {
  std::string name;  // empty: nobody
  std::string by;    // "forced", "forced for decode", "forced by IMBREX_BACKEND"
};

Demand find_demand(const SelectOptions& options) {
  if (options.phase == Phase::prefill && !options.forced_prefill.empty()) return {options.forced_prefill, "forced for prefill"};
  if (options.phase == Phase::decode && !options.forced_decode.empty()) return {options.forced_decode, "forced for decode"};
  if (!options.forced.empty()) return {options.forced, "forced"};
  if (const auto name = env::get(env::kBackend)) return {*name, "forced by IMBREX_BACKEND"};
  return {};
}

std::string list_reasons(const std::vector<Reason>& reasons) {
  std::string text;
  for (const Reason& reason : reasons) text += (text.empty() ? "" : "; ") + reason.str();
  return text;
}

std::string list_backends(std::span<const Contender> candidates) {
  std::string text;
  for (const Contender& candidate : candidates) text += fmt::format("{}{}", text.empty() ? "" : ", ", candidate.backend->name());
  return text;
}

const Contender* find_candidate(std::span<const Contender> candidates, std::string_view name) {
  const auto it =
      std::find_if(candidates.begin(), candidates.end(), [&](const Contender& c) { return same_name(c.backend->name(), name); });
  return it == candidates.end() ? nullptr : &*it;
}

// The family other than `family` that knows this name of a backend or of an alias; empty: there is none, or `family` knows the name too.
std::string_view other_family_of(std::string_view name, std::string_view family, std::span<const Contender> candidates) {
  if (find_candidate(candidates, name) != nullptr) return {};
  std::string_view other = other_family_with(name, family);
  for (const BackendAlias& alias : backend_aliases()) {
    if (!same_name(alias.name, name)) continue;
    if (alias.family == family) return {};
    if (other.empty()) other = alias.family;
  }
  return other;
}

// The backend that was asked for, by its name or by an alias of other engines; sets the rule.
const BasicBackend* forced_backend(const Demand& demand, std::span<const Contender> candidates, std::string_view family,
                                   std::string& rule) {
  if (const Contender* candidate = find_candidate(candidates, demand.name)) {
    check(candidate->reasons->empty(), "select.forced", "{} cannot run this ({}): {}", candidate->backend->name(), demand.by,
          list_reasons(*candidate->reasons));
    rule = demand.by;
    return candidate->backend;
  }
  std::string refusals;
  bool known = false;
  for (const BackendAlias& alias : backend_aliases()) {
    if (!same_name(alias.name, demand.name) || (!alias.family.empty() && alias.family != family)) continue;
    known = true;
    for (const std::string_view name : alias.backends) {
      const Contender* candidate = find_candidate(candidates, name);
      if (candidate && candidate->reasons->empty()) {
        rule = fmt::format("{}: {} of {} is served by it", demand.by, alias.name, alias.origin);
        return candidate->backend;
      }
      refusals += fmt::format("\n  {}: {}", name, candidate ? list_reasons(*candidate->reasons) : "not in this program");
    }
    if (alias.backends.empty()) refusals += fmt::format("\n  {} of {}: {}", alias.name, alias.origin, alias.note);
  }
  check(known, "select.forced", "no backend or alias is named \"{}\" ({}); the family {} has: {}", demand.name, demand.by, family,
        list_backends(candidates));
  fail("select.forced", "nothing that serves \"{}\" can run this ({}):{}", demand.name, demand.by, refusals);
}

}  // namespace

std::string Reason::str() const { return fmt::format("{}: wanted {}, got {}", code, wanted, actual); }

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::any: return "any";
    case Phase::prefill: return "prefill";
    case Phase::decode: return "decode";
  }
  return "?";
}

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

Choice choose(std::span<const Contender> contenders, const BasicBackend& slow, std::string_view family, const SelectOptions& options) {
  Choice choice{.backend = nullptr, .rule = {}, .only_slow = true};
  int runs = 0;
  for (const Contender& contender : contenders) {
    if (!contender.reasons->empty()) continue;
    ++runs;
    choice.only_slow = choice.only_slow && contender.backend == &slow;
    if (!choice.backend) choice.backend = contender.backend;
  }
  if (runs == 0) {
    choice.rule = "nothing runs it";
  } else if (choice.only_slow) {
    choice.rule = "only the reference runs it: correct but slow";
  } else {
    choice.rule = runs == 1 ? "the only one that runs it" : fmt::format("first of {} that run it", runs);
  }
  const Demand demand = find_demand(options);
  if (demand.name.empty()) return choice;
  if (const std::string_view other = other_family_of(demand.name, family, contenders); !other.empty()) {
    choice.rule += fmt::format("; {}, {}, is of the family {}", demand.name, demand.by, other);
    return choice;
  }
  choice.backend = forced_backend(demand, contenders, family, choice.rule);
  if (choice.backend == &slow && !choice.only_slow) choice.rule += "; the reference is correct but slow";
  return choice;
}

std::string selection_table(const BasicBackend* chosen, std::string_view rule, std::span<const Contender> contenders,
                            std::span<const std::string> proposals) {
  size_t width = 0;
  for (const Contender& contender : contenders) width = std::max(width, contender.backend->name().size());
  std::string text = fmt::format("{} ({})\n", chosen ? chosen->name() : "no backend", rule);
  for (const auto& [backend, reasons] : contenders) {
    const char* verdict = backend == chosen ? "chosen" : reasons->empty() ? "could run" : "refuses";
    text += fmt::format("  {:<{}}  {:<9}  {}\n", backend->name(), width, verdict, backend->description());
    for (const Reason& reason : *reasons) text += fmt::format("  {:<{}}    - {}\n", "", width, reason.str());
  }
  for (const std::string& proposal : proposals) text += fmt::format("  would run with {}\n", proposal);
  return text;
}

}  // namespace imbrex
