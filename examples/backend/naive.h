#pragma once
// What the files of this plug-in share.
#include <string>

#include <imbrex/imbrex.h>

namespace naive {

inline thread_local std::string problem;

inline imbrex_status fail(imbrex_status status, const char* text) {
  problem = text;
  return status;
}
inline const char* why(void*) { return problem.c_str(); }

inline void refuse(const imbrex_reasons* reasons, bool bad, const char* code, const char* wanted, int actual) {
  if (bad) reasons->add(reasons->context, code, wanted, std::to_string(actual).c_str());
}

imbrex_status register_attention(const imbrex_host*);   // naive.cpp
imbrex_status register_short_conv(const imbrex_host*);  // naive_short_conv.cpp

}  // namespace naive
