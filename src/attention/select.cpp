// select(): which backend runs a spec on a device, by order or by force, with every reason. Used by models, programs and engines.
#include "imbrex/select.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "attention/proposals.h"
#include "attention/reference.h"
#include "core/check.h"
#include "core/env.h"

namespace imbrex {
namespace {

bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

// Who asked for a backend, and under which name.
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

std::string list_backends(const std::vector<Candidate>& candidates) {
  std::string text;
  for (const Candidate& candidate : candidates) text += fmt::format("{}{}", text.empty() ? "" : ", ", candidate.backend->name());
  return text;
}

const Candidate* find_candidate(const std::vector<Candidate>& candidates, std::string_view name) {
  const auto it =
      std::find_if(candidates.begin(), candidates.end(), [&](const Candidate& c) { return same_name(c.backend->name(), name); });
  return it == candidates.end() ? nullptr : &*it;
}

// The backend that was asked for, by its name or by an alias of other engines; sets the rule.
const Backend* forced_backend(const Demand& demand, const std::vector<Candidate>& candidates, std::string& rule) {
  if (const Candidate* candidate = find_candidate(candidates, demand.name)) {
    check(candidate->reasons.empty(), "select.forced", "{} cannot run this ({}): {}", candidate->backend->name(), demand.by,
          list_reasons(candidate->reasons));
    rule = demand.by;
    return candidate->backend;
  }
  std::string refusals;
  bool known = false;
  for (const BackendAlias& alias : backend_aliases()) {
    if (!same_name(alias.name, demand.name)) continue;
    known = true;
    for (const std::string_view name : alias.backends) {
      const Candidate* candidate = find_candidate(candidates, name);
      if (candidate && candidate->reasons.empty()) {
        rule = fmt::format("{}: {} of {} is served by it", demand.by, alias.name, alias.origin);
        return candidate->backend;
      }
      refusals += fmt::format("\n  {}: {}", name, candidate ? list_reasons(candidate->reasons) : "not in this program");
    }
    if (alias.backends.empty()) refusals += fmt::format("\n  {} of {}: {}", alias.name, alias.origin, alias.note);
  }
  check(known, "select.forced", "no backend or alias is named \"{}\" ({}); there are: {}", demand.name, demand.by,
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

Selection select(const AttentionSpec& spec, const DeviceInfo& device, const SelectOptions& options) {
  Selection selection;
  for (const Backend* backend : backends()) selection.candidates.push_back({backend, backend->unsupported(spec, device)});

  const Backend* slow = &reference_backend();
  int runs = 0;
  bool only_slow = true;
  for (const Candidate& candidate : selection.candidates) {
    if (!candidate.reasons.empty()) continue;
    ++runs;
    only_slow = only_slow && candidate.backend == slow;
    if (!selection.backend) selection.backend = candidate.backend;
  }
  if (runs == 0) {
    selection.rule = "nothing runs it";
  } else if (only_slow) {
    selection.rule = "only the reference runs it: correct but slow";
  } else {
    selection.rule = runs == 1 ? "the only one that runs it" : fmt::format("first of {} that run it", runs);
  }

  if (const Demand demand = find_demand(options); !demand.name.empty()) {
    selection.backend = forced_backend(demand, selection.candidates, selection.rule);
    if (selection.backend == slow && !only_slow) selection.rule += "; the reference is correct but slow";
  }
  if (only_slow) {
    selection.proposals = propose(spec, device, selection.candidates, slow);
    if (device.device.type != DeviceType::cpu) {
      static const DeviceInfo cpu = probe_cpu();
      std::string names;
      for (const Candidate& candidate : selection.candidates) {
        if (candidate.backend == slow || !candidate.backend->unsupported(spec, cpu).empty()) continue;
        names += fmt::format("{}{}", names.empty() ? "" : ", ", candidate.backend->name());
      }
      if (!names.empty()) selection.proposals.push_back("device cpu: " + names);
    }
  }
  return selection;
}

std::string Selection::str() const {
  size_t width = 0;
  for (const Candidate& candidate : candidates) width = std::max(width, candidate.backend->name().size());
  std::string text = fmt::format("{} ({})\n", backend ? backend->name() : "no backend", rule);
  for (const Candidate& candidate : candidates) {
    const bool chosen = candidate.backend == backend;
    const char* verdict = chosen ? "chosen" : candidate.reasons.empty() ? "could run" : "refuses";
    text += fmt::format("  {:<{}}  {:<9}  {}\n", candidate.backend->name(), width, verdict, candidate.backend->description());
    for (const Reason& reason : candidate.reasons) text += fmt::format("  {:<{}}    - {}\n", "", width, reason.str());
  }
  for (const std::string& proposal : proposals) text += fmt::format("  would run with {}\n", proposal);
  return text;
}

}  // namespace imbrex
