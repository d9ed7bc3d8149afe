#pragma once
// Which sanitizer a test is built with, for tests that do less there or ask it for something.

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

}  // namespace imbrex::test
