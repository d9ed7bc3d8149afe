// Tile verbs on the AMX unit. Tile numbers must be literals, hence macros. A tile has 64-byte rows; `tiles_shape` sets how many rows
// tiles 0 to 5 have (accumulators and left operands), but for 1 and 3, which with 6 and 7 (right operands) always have 16.
#include <immintrin.h>

namespace imbrex::cpu {
namespace {

struct __attribute__((packed)) TileConfig {
  unsigned char palette, start_row, reserved[14];
  unsigned short row_bytes[16];
  unsigned char rows[16];
};

inline void tiles_shape(int rows) {
  TileConfig c;
  __builtin_memset(&c, 0, sizeof c);
  c.palette = 1;
  for (int t = 0; t < 8; ++t) {
    c.row_bytes[t] = 64;
    c.rows[t] = t < 6 && t != 1 && t != 3 ? (unsigned char)rows : 16;
  }
  asm volatile("" : : "r"(&c) : "memory");  // the intrinsic does not tell the compiler that it reads all of it
  _tile_loadconfig(&c);
}
inline void tiles_release() { _tile_release(); }

}  // namespace
}  // namespace imbrex::cpu

#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p) _tile_loadd(t, (const void*)(p), 64)
#define TILE_LOAD_ROWS(t, p, pitch) _tile_loadd(t, (const void*)(p), pitch)           // whose rows are `pitch` bytes apart
#define TILE_STREAM(t, p) _tile_stream_loadd(t, (const void*)(p), 64)                 // for data that will not be used again soon
#define TILE_STREAM_ROWS(t, p, pitch) _tile_stream_loadd(t, (const void*)(p), pitch)  // whose rows are `pitch` bytes apart
#define TILE_STORE(t, p) _tile_stored(t, (void*)(p), 64)
#define TILE_STORE_ROWS(t, p, pitch) _tile_stored(t, (void*)(p), pitch)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)  // c += a * b, pairs of bf16
// Behind each tile operation of a loop. While the core's other thread works, tile operations with fewer than about six operations between
// them wait for one another: a product with its load takes 28 ns then, and 18 with this behind both (docs/kernels/cpu_amx.md).
#define TILE_GAP() asm volatile("nop; nop; nop; nop; nop; nop")
// The intrinsics do not tell the compiler that they read and write memory.
#define TILE_FENCE() asm volatile("" ::: "memory")
