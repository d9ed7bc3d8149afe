#pragma once
// Counter-based hashing: everything synthetic in a replay (token identities, q, k, v, samples) is a function of numbers, never a stream.
#include <cstdint>

namespace imbrex::serve {

// 64-bit finaliser (Stafford's variant 13 of MurmurHash3's): every input bit reaches every output bit.
constexpr uint64_t mix_bits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Depends on the order of its arguments.
template <class... Rest>
constexpr uint64_t hash_numbers(uint64_t first, Rest... rest) {
  uint64_t h = mix_bits(first + 0x9e3779b97f4a7c15u);
  ((h = mix_bits((h ^ uint64_t(rest)) + 0x9e3779b97f4a7c15u)), ...);
  return h;
}

}  // namespace imbrex::serve
