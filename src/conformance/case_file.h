#pragma once
// Case files of any family: the metadata says which, see docs/case-files.md. Read and run by `imbrex verify`.
#include <string>
#include <variant>

#include "conformance/attention/case_file.h"
#include "conformance/mla/case_file.h"
#include "conformance/recurrent/case_file.h"
#include "conformance/short_conv/case_file.h"

namespace imbrex {

using AnyCaseFile = std::variant<CaseFile, ShortConvCaseFile, MlaCaseFile, RecurrentCaseFile>;

// Error case_file.family for one that there is not, otherwise what the family's own reader throws.
AnyCaseFile parse_any_case(const Safetensors&);
AnyCaseFile load_any_case(const std::string& path);

}  // namespace imbrex
