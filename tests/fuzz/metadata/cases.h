#pragma once
// Numbered cases: the same number makes the same case again, whatever ran before it.
#include <functional>

#include "imbrex/imbrex.h"

namespace imbrex::test {

// Runs cases 0 to `count` - 1; without AddressSanitizer, which sees more, the first third of them. IMBREX_METADATA_CASES is another count;
// IMBREX_METADATA_CASE the number of the only case, or of the first of so many, and what happens in it is printed. A case that crashes, or
// hangs for a minute, says its number before the program ends.
void for_each_case(int count, const std::function<void(int number, bool verbose)>& run);

// Checks that a failure has a code and a text.
void expect_explained(imbrex_status, const char* call);

}  // namespace imbrex::test
