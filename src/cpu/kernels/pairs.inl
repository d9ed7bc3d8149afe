// Pairs of vectors: as many channels as two vectors of floats have, which are a line of the cache in 16-bit types with AVX-512. How
// channels are distributed among the two depends on the type; numbers of all types that meet in a sum are loaded as pairs of one type.
// Included after vectors.inl.

namespace imbrex::cpu {
namespace {

constexpr int kPairLanes = 2 * kLanes;

struct Pair {
  Floats a, b;
};

// 16-bit codes of a pair, as they lie in memory, and back: bf16 has channels 0, 2, .. in `a`, which takes an operation for each vector, f16
// the first half of the channels.
template <int type>
inline Pair pair_of(Words codes) {
  if constexpr (type == kBf16) {
    return {(Floats)(codes << 16), (Floats)(codes & 0xffff0000u)};
  } else {
    Halves halves[2];
    __builtin_memcpy(halves, &codes, sizeof codes);
    return {from_halves<type>(halves[0]), from_halves<type>(halves[1])};
  }
}
template <int type>
inline Words codes_of(const Pair& x) {
  if constexpr (type == kBf16) {
    return rounded_to_bf16(x.a) >> 16 | (rounded_to_bf16(x.b) & 0xffff0000u);
  } else {
    const Halves halves[2] = {to_halves<type>(x.a), to_halves<type>(x.b)};
    Words codes;
    __builtin_memcpy(&codes, halves, sizeof codes);
    return codes;
  }
}

// The first n channels of a pair, zero behind them.
template <int type>
inline Pair load_pair(const char* p, int n) {
  if constexpr (type == kF32) {
    Floats both[2] = {};
    n == kPairLanes ? __builtin_memcpy(both, p, sizeof both) : __builtin_memcpy(both, p, 4ul * n);
    return {both[0], both[1]};
  } else {
    Words codes = {};
    n == kPairLanes ? __builtin_memcpy(&codes, p, sizeof codes) : __builtin_memcpy(&codes, p, 2ul * n);
    return pair_of<type>(codes);
  }
}
template <int type>
inline void store_pair(const Pair& x, int n, char* p) {
  if constexpr (type == kF32) {
    const Floats both[2] = {x.a, x.b};
    n == kPairLanes ? __builtin_memcpy(p, both, sizeof both) : __builtin_memcpy(p, both, 4ul * n);
  } else {
    const Words codes = codes_of<type>(x);
    n == kPairLanes ? __builtin_memcpy(p, &codes, sizeof codes) : __builtin_memcpy(p, &codes, 2ul * n);
  }
}

// Past the caches, where `p` is aligned as a vector of the instruction set is: lines are not read before they are written. Other threads
// see what was stored after end_stream().
inline void stream_vector(Words x, char* p) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)x);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)x);
#else
  __builtin_memcpy(p, &x, sizeof x);
#endif
}
template <int type>
inline void stream_pair(const Pair& x, char* p) {
  if constexpr (type == kF32) {
    stream_vector((Words)x.a, p), stream_vector((Words)x.b, p + sizeof(Words));
  } else {
    stream_vector(codes_of<type>(x), p);
  }
}
inline void end_stream() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace imbrex::cpu
