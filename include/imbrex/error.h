#pragma once
// The one exception type of the library, thrown at the API edge for broken contracts and failed machines.
// "This backend cannot run that spec" is never an exception: it is data, see `Reason` in backend.h.
#include <stdexcept>
#include <string>
#include <string_view>

namespace imbrex {

// `code()` is stable across releases ("batch.seq_len.negative") and listed in docs/errors.md; the text may change.
// The text shows the expected and the actual value. It never contains addresses.
class Error : public std::runtime_error {
 public:
  Error(std::string_view code, const std::string& message) : std::runtime_error(message), code_(code) {}
  const std::string& code() const { return code_; }

 private:
  std::string code_;
};

}  // namespace imbrex
