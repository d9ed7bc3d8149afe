#pragma once
// Numbers of cases: functions of a hash, the same on every machine, so that contents do not depend on the batch that they are in.
#include <cstdint>

namespace imbrex {

inline uint64_t splitmix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Sum of four uniforms, mean 0 and variance 1: near enough to a normal, and the same on every machine.
inline double normal(uint64_t hash) {
  const double sum = double(hash & 0xffff) + double((hash >> 16) & 0xffff) + double((hash >> 32) & 0xffff) + double(hash >> 48);
  return (sum / 65535.0 - 2.0) * 1.7320508075688772;
}

inline double uniform(uint64_t hash) { return double(hash >> 11) * 0x1p-53; }

}  // namespace imbrex
