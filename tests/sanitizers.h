#pragma once
// Which sanitizer a test is built with, and whether an emulator runs it, for tests that do less there or ask for something.

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define IMBREX_ASAN
#endif
#endif

namespace imbrex::test {

#ifdef IMBREX_ASAN
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// Set by tests/CMakeLists.txt where the compiler is for another machine.
#ifdef IMBREX_EMULATED
inline constexpr bool kEmulated = true;
#else
inline constexpr bool kEmulated = false;
#endif

}  // namespace imbrex::test
