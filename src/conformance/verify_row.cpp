// See verify_row.h.
#include "conformance/verify_row.h"

namespace imbrex {

std::string joined(const std::vector<Reason>& reasons) {
  std::string text;
  for (const Reason& reason : reasons) text += (text.empty() ? "" : "; ") + reason.str();
  return text;
}

}  // namespace imbrex
