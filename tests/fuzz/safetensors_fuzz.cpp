// Fuzzes the readers of .safetensors and of case files of all families: any bytes are either refused with a code or survive a round trip.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <variant>

#include "conformance/case_file.h"
#include "imbrex/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace imbrex;
  try {
    const Safetensors file = parse_safetensors({reinterpret_cast<const char*>(data), size});
    const Safetensors again = parse_safetensors(write_safetensors(file));
    if (again.tensors.size() != file.tensors.size() || again.metadata != file.metadata) abort();
    const AnyCaseFile any = parse_any_case(file);
    const AnyCaseFile read = parse_any_case(std::visit([](const auto& c) { return to_safetensors(c); }, any));
    if (read.index() != any.index()) abort();
  } catch (const Error& error) {
    const std::string_view code = error.code();
    if (!code.starts_with("safetensors.") && !code.starts_with("case_file.") && !code.starts_with("spec.") &&
        !code.starts_with("short_conv.") && !code.starts_with("mla.") && !code.starts_with("recurrent.") && code != "dtype.unknown")
      abort();
  }
  return 0;
}
