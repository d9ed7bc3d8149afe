// How AMX decode (amx_decode.inl) prefetches keys and values.

namespace imbrex::cpu {
namespace {

// Prefetches are issued in portions, between the products of decode: all at once they would fill the core's line buffers, and the loads of
// the computation would wait behind them. Keys and values are prefetched by turns.
class Fetch {
 public:
  // How far ahead, in groups of keys or in dim tiles.
  static constexpr int kRowsAhead = 2, kTilesAhead = 3;

  // Sets the rows of a strided cache that a group of keys has.
  void rows(const AttentionParams& a, const Stage& s, int g) {
    keys_.begin(a.k.dim * element_size(a.k.type)), values_.begin(a.v.dim * element_size(a.v.type));
    for (int i = 16 * g; i < 16 * g + 16; ++i) keys_.add(s.key_rows[i]), values_.add(s.value_rows[i]);
  }
  // Sets the rows of several heads: those of each token in turn, in the order of memory.
  void tokens(const AttentionParams& a, const WorkItem& item, int kv_head, int heads, Visible tokens, Visible seen) {
    keys_.begin(a.k.dim * element_size(a.k.type)), values_.begin(a.v.dim * element_size(a.v.type));
    const int end = tokens.hi < seen.hi ? tokens.hi : seen.hi;
    for (int key = tokens.lo > seen.lo ? tokens.lo : seen.lo; key < end; ++key) {
      const char *k = kv_row(a, a.k, item.table, kv_head, key), *v = kv_row(a, a.v, item.table, kv_head, key);
      for (int h = 0; h < heads; ++h) keys_.add(k + h * a.k.head_stride), values_.add(v + h * a.v.head_stride);
    }
  }
  // Sets the tiles of a packed cache: those of a group of keys, and a dim tile of the values of chunks [c0, c1).
  void packed_keys(const AttentionParams& a, const BlockTiles& b, int g, int steps) {
    keys_.begin(32L * steps * element_size(a.k.type));
    for (int i = 0; i < 16; ++i) keys_.add(b.keys[g] + i * keys_.bytes);
  }
  void packed_values(const AttentionParams& a, const BlockTiles& b, int t, int c0, int c1) {
    values_.begin(128L * element_size(a.v.type));
    for (int i = 4 * c0; i < 4 * c1; ++i) {
      const char* const tile = b.values[i / 4] ? b.values[i / 4] + t * 1024 + i % 4 / 2 * 512 : b.halves[i / 2] + t * b.pitch[i / 2];
      values_.add(tile + i % 2 * values_.bytes);
    }
  }

  // Prefetches a portion of keys and one of values, so many times.
  IMBREX_INLINE void some(int pieces) {
    for (; pieces > 0; --pieces) keys_.fetch_one(), values_.fetch_one();
  }

 private:
  struct Pieces {
    const char* at[16];
    int count = 0, next = 0;
    long bytes = 0;
    void begin(long of_each) { count = next = 0, bytes = of_each; }
    void add(const char* from) {
      if (count < 16) at[count++] = from;
    }
    IMBREX_INLINE void fetch_one() {
      if (next == count) return;
      const char* from = at[next++];
      for (const char* const end = from + bytes; from < end; from += 64) _mm_prefetch(from, _MM_HINT_T1);
    }
  };
  Pieces keys_, values_;
};

}  // namespace
}  // namespace imbrex::cpu
