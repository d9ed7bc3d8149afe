#pragma once
// FNV-1a with 128 bits: names of cached kernels, and the check that a file is what was written.
#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace imbrex::gpu {

// A hash of 128 bits. Every add() also adds the length, so that ("ab", "c") and ("a", "bc") differ.
class Hash128 {
 public:
  Hash128& add(std::string_view bytes) {
    for (const char c : bytes) step(uint8_t(c));
    for (uint64_t size = bytes.size(), i = 0; i < 8; ++i) step(uint8_t(size >> (8 * i)));
    return *this;
  }
  uint64_t high() const { return uint64_t(state_ >> 64); }
  uint64_t low() const { return uint64_t(state_); }
  std::string hex() const { return fmt::format("{:016x}{:016x}", high(), low()); }

 private:
  __extension__ using Word = unsigned __int128;
  void step(uint8_t byte) { state_ = (state_ ^ byte) * kPrime; }
  static constexpr Word kPrime = (Word(1) << 88) + 0x13b;
  Word state_ = (Word(0x6c62272e07bb0142u) << 64) + 0x62b821756295c58du;
};

}  // namespace imbrex::gpu
