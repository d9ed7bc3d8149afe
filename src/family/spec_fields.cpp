// See spec_fields.h.
#include "family/spec_fields.h"

#include <fmt/format.h>

namespace imbrex {

std::string number_text(const SpecField& field, double value) { return fmt::format("{}={:.6g}", field.member, value); }

}  // namespace imbrex
