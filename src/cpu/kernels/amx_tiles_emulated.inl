// Tile verbs in memory, for machines without AMX: same macros and, up to the order inside one product, same arithmetic.
// They are calls and nothing is unrolled: the pipeline with a product in each of its places takes the compiler two minutes.

namespace imbrex::cpu {
namespace {

struct TileFile {
  alignas(64) float tile[8][256];
  int rows[8];
};
thread_local TileFile tiles;

inline void tiles_shape(int rows) {
  for (int t = 0; t < 8; ++t) {
    tiles.rows[t] = t < 6 && t != 1 && t != 3 ? rows : 16;
    for (float& x : tiles.tile[t]) x = 0.f;
  }
}
inline void tiles_release() {
  for (int& rows : tiles.rows) rows = 0;
}
[[gnu::noinline]] void tile_zero(int t) {
  for (int i = 0; i < 16 * tiles.rows[t]; ++i) tiles.tile[t][i] = 0.f;
}
[[gnu::noinline]] void tile_load(int t, const char* p, long pitch) {
  for (int r = 0; r < tiles.rows[t]; ++r) __builtin_memcpy(tiles.tile[t] + 16 * r, p + r * pitch, 64);
}
[[gnu::noinline]] void tile_store(int t, void* p) { __builtin_memcpy(p, tiles.tile[t], 64ul * tiles.rows[t]); }
[[maybe_unused, gnu::noinline]] void tile_store_rows(int t, void* p, long pitch) {
  for (int r = 0; r < tiles.rows[t]; ++r) __builtin_memcpy(static_cast<char*>(p) + r * pitch, tiles.tile[t] + 16 * r, 64);
}

// TDPBF16PS: even and odd halves of the pairs are summed separately over the tile, then joined, then added; subnormals count as zero
// on the unit, which is not emulated.
[[gnu::noinline]] void tile_dot(int c, int a, int b) {
  for (int m = 0; m < tiles.rows[c]; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < tiles.rows[b]; ++k) {
      const __m512i right = _mm512_castps_si512(_mm512_load_ps(tiles.tile[b] + 16 * k));
      unsigned pair;
      __builtin_memcpy(&pair, tiles.tile[a] + 16 * m + k, 4);
      const __m512i high = _mm512_set1_epi32(int(0xffff0000));
      even = _mm512_fmadd_ps(_mm512_set1_ps(as_float(pair << 16)), _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), even);
      odd = _mm512_fmadd_ps(_mm512_set1_ps(as_float(pair & 0xffff0000u)), _mm512_castsi512_ps(_mm512_and_si512(right, high)), odd);
    }
    float* to = tiles.tile[c] + 16 * m;
    _mm512_store_ps(to, _mm512_add_ps(_mm512_load_ps(to), _mm512_add_ps(even, odd)));
  }
}

}  // namespace
}  // namespace imbrex::cpu

#define TILE_ZERO(t) tile_zero(t)
#define TILE_LOAD(t, p) tile_load(t, (const char*)(p), 64)
#define TILE_LOAD_ROWS(t, p, pitch) tile_load(t, (const char*)(p), pitch)
#define TILE_STREAM(t, p) TILE_LOAD(t, p)
#define TILE_STREAM_ROWS(t, p, pitch) tile_load(t, (const char*)(p), pitch)
#define TILE_STORE(t, p) tile_store(t, p)
#define TILE_STORE_ROWS(t, p, pitch) tile_store_rows(t, p, pitch)
#define TILE_DOT(c, a, b) tile_dot(c, a, b)
#define TILE_GAP() static_cast<void>(0)
#define TILE_FENCE() asm volatile("" ::: "memory")
