#pragma once
// Sums of which 20 bits are kept: of a float all but the last 12 bits of its mantissa. Nodes of the tree of pieces in
// attention_sm90_latent.cu are so: at the end of a piece they go to memory and come back, while no product is computed. Whoever folds such
// a node, from memory or in registers, shortens it by the same rule, so that results have the same bits.
#include "convert.cuh"
#include "ptx.cuh"

namespace imbrex::cuda {

// What is cut off is half of the last bit on average, which is this part of a number whose mantissa may be any.
constexpr float kShortMean = 1.f + 0.72f / 4096.f;

// What comes back: a byte that is not there is the one above it.
DEVICE float shortened(float x) {
  const u32 bits = bits_of(x) & 0xfffff000u;
  return float_of(pick_bytes(bits, bits, 0x3211));
}

// The same where it is asked for, without a branch for each number.
struct Shortening {
  u32 kept, copied;  // bits; of the lowest byte, from the one above it
  float mean;        // that sums are multiplied by too

  DEVICE explicit Shortening(bool shortens)
      : kept(shortens ? 0xfffff000u : ~0u), copied(shortens ? 0xffu : 0u), mean(shortens ? kShortMean : 1.f) {}
  DEVICE float operator()(float x) const {
    const u32 bits = bits_of(x) & kept;
    return float_of(bits | (bits >> 8 & copied));
  }
};

// Eight numbers: two bytes of each, and a word with four bits more of each.
constexpr u32 kHighNibbles = 0xf0f0f0f0u;

DEVICE uint4 upper_bytes(const float4& a, const float4& b) {
  return {upper_halves(a.x, a.y), upper_halves(a.z, a.w), upper_halves(b.x, b.y), upper_halves(b.z, b.w)};
}
DEVICE u32 nibbles_below(const float4& a, const float4& b) {
  const auto second_bytes = [](const float4& x) {
    return pick_bytes(pick_bytes(bits_of(x.x), bits_of(x.y), 0x51), pick_bytes(bits_of(x.z), bits_of(x.w), 0x51), 0x5410);
  };
  return (second_bytes(a) & kHighNibbles) | (second_bytes(b) >> 4 & ~kHighNibbles);
}

// The first four of the eight, from their words and nibbles_below(); the others have `nibbles << 4`.
DEVICE float4 four_of(u32 low, u32 high, u32 nibbles) {
  const u32 below = nibbles & kHighNibbles;
  return {float_of(pick_bytes(low, below, 0x1044)), float_of(pick_bytes(low, below, 0x3255)), float_of(pick_bytes(high, below, 0x1066)),
          float_of(pick_bytes(high, below, 0x3277))};
}

}  // namespace imbrex::cuda
