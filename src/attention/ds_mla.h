#pragma once
// The record of KvFormat::fp8_ds_mla, and the rule by which its writers choose scales. Plain numbers and no headers: kernels of every
// device read this file too, so that all of them write the same bytes.

namespace imbrex {

constexpr int kDsMlaLatent = 512;  // elements of e4m3, one byte each, from the record's first byte on
constexpr int kDsMlaRope = 64;     // elements of bf16, behind the scales
constexpr int kDsMlaGroup = 128;   // elements of the latent that share a scale
constexpr int kDsMlaGroups = kDsMlaLatent / kDsMlaGroup;
constexpr int kDsMlaScalesAt = kDsMlaLatent, kDsMlaRopeAt = kDsMlaScalesAt + 4 * kDsMlaGroups;  // bytes; a scale is an f32
constexpr int kDsMlaBytes = kDsMlaRopeAt + 2 * kDsMlaRope;
static_assert(kDsMlaBytes == 656);

// Of an f32, as its bits: the magnitude, whose bits are in the order of the numbers; 0 for infinities and NaN, which decide no scale.
static inline unsigned ds_mla_magnitude(unsigned bits) {
  const unsigned magnitude = bits & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

// The scale of a group whose largest such magnitude this is, as the bits of an f32: the smallest power of two by which it is at most 448,
// the largest e4m3 number, and 2^-126 at least. Adding 0x1fffff carries into the exponent where the significand is above that of 448.
static inline unsigned ds_mla_scale(unsigned largest) {
  const unsigned exponent = (largest + 0x1fffffu) >> 23;
  return (exponent > 9u ? exponent - 8u : 1u) << 23;
}

// 1 / scale, exactly, as bits.
static inline unsigned ds_mla_reciprocal(unsigned scale) { return (254u << 23) - scale; }

}  // namespace imbrex
