// Fuzzes the batch notation: any text is either refused with a code or survives a round trip.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "imbrex/error.h"
#include "serve/batch_grammar.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const auto items = imbrex::serve::parse_batch(text);
    if (imbrex::serve::parse_batch(imbrex::serve::to_string(items)) != items) abort();
  } catch (const imbrex::Error& error) {
    if (!error.code().starts_with("batch_grammar.")) abort();
  }
  return 0;
}
