#pragma once
// A row of the table of `imbrex verify`: one backend and a case file, of any family.
#include <string>
#include <vector>

#include "conformance/error_stats.h"
#include "imbrex/plan.h"

namespace imbrex {

// One backend run over a case in one way, or why it cannot.
struct VerifyRow {
  std::string backend, variant;  // "cpu_amx", "page 16 csr lbthd"
  std::string refused;           // the reasons; the rest is then unset
  ErrorStats error, bound;       // of the outputs, and what is allowed
  std::string failure;           // what is wrong; empty: it passed
  bool pass() const { return refused.empty() && failure.empty(); }
};

std::string joined(const std::vector<Reason>&);  // "; " between them

}  // namespace imbrex
