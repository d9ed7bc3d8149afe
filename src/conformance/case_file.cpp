// See case_file.h.
#include "conformance/case_file.h"

#include "conformance/case_fields.h"
#include "core/check.h"

namespace imbrex {

AnyCaseFile parse_any_case(const Safetensors& file) {
  const std::string family = family_of(case_metadata(file));
  if (family == "attention") return parse_case(file);
  if (family == "short_conv") return parse_short_conv_case(file);
  if (family == "mla") return parse_mla_case(file);
  if (family == "recurrent") return parse_recurrent_case(file);
  fail("case_file.family", "expected attention, short_conv, mla or recurrent, got {}", family.substr(0, 64));
}

AnyCaseFile load_any_case(const std::string& path) { return parse_any_case(load_safetensors(path)); }

}  // namespace imbrex
