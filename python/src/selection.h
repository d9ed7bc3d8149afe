#pragma once
// select() of a family's specs, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "imbrex/family.h"
#include "one_of.h"

namespace imbrex::python {

namespace nb = nanobind;

template <class Family>
void bind_selection_of(nb::module_& m, const char* name) {
  nb::class_<SelectionOf<Family>>(m, name,
                                  "Which backend runs a spec on a device, and why. str() is the table that `imbrex select` prints.")
      .def_prop_ro(
          "backend",
          [](const SelectionOf<Family>& s) { return s.backend == nullptr ? std::nullopt : std::optional<std::string>(s.backend->name()); },
          "Its name; None when nothing runs the spec.")
      .def_ro("rule", &SelectionOf<Family>::rule, "\"first of 2 that run it\"")
      .def_prop_ro(
          "candidates",
          [](const SelectionOf<Family>& s) {
            std::vector<std::pair<std::string, std::vector<Reason>>> all;
            for (const CandidateOf<Family>& c : s.candidates) all.emplace_back(c.backend->name(), c.reasons);
            return all;
          },
          "Every backend in order of preference, with its reasons against the spec; none: it could run it.")
      .def_ro("proposals", &SelectionOf<Family>::proposals, "Changes of the spec after which something runs it.")
      .def("__str__", &SelectionOf<Family>::str);
  m.def(
      "select",
      [](const typename Family::Spec& spec, const DeviceInfo& device, const std::string& forced, const std::string& forced_prefill,
         const std::string& forced_decode, const std::string& phase) {
        return select<Family>(spec, device,
                              {.forced = forced,
                               .forced_prefill = forced_prefill,
                               .forced_decode = forced_decode,
                               .phase = one_of(phase, {Phase::any, Phase::prefill, Phase::decode}, "phase")});
      },
      nb::arg("spec"), nb::arg("device"), nb::kw_only(), nb::arg("forced") = "", nb::arg("forced_prefill") = "",
      nb::arg("forced_decode") = "", nb::arg("phase") = "any");
}

}  // namespace imbrex::python
