// Outputs of latents in tile products: left operands are weights, right ones values, whose pairs of keys are interleaved meanwhile, a part
// behind each tile operation.

namespace imbrex::cpu {
namespace {

struct LatentValues {
  // Interleaves pairs of 32 keys and so many dims: right operands, whose pairs of dims are in the order of row_of().
  template <int dims>
  struct Pair {
    const char* const* rows;
    long at;  // bytes from a row's begin
    char* tiles;
    template <int part>
    IMBREX_INLINE void run() {
      IMBREX_UNROLL(2)
      for (int i = 2 * part; i < 2 * part + 2; ++i) {
        IMBREX_UNROLL(2)
        for (int d = 0; d < dims; d += 32) {
          const vi a = _mm512_loadu_si512(rows[2 * i] + at + 2 * d), b = _mm512_loadu_si512(rows[2 * i + 1] + at + 2 * d);
          _mm512_store_si512(tiles + 64 * (d + i), _mm512_unpacklo_epi16(a, b));
          _mm512_store_si512(tiles + 64 * (d + i) + 1024, _mm512_unpackhi_epi16(a, b));
        }
      }
    }
    void end() {}
    void run_all() { run<0>(), run<1>(), run<2>(), run<3>(), run<4>(), run<5>(), run<6>(), run<7>(); }
  };

  // Values of the chunks that wait, as right operands in a ring in L1: those of all chunks and some dims, then those of the next dims. A
  // place has 32 keys and `dims` dims.
  template <int dims>
  struct Values {
    const LatentScratch& s;
    const int places;
    int chunk = 0, place = 0;  // what is made next
    long d = 0;
    bool left() const { return d < s.v; }
    char* at(int place) const { return s.values + place * (dims * 64L); }
    int after(int place) const { return place + 1 == places ? 0 : place + 1; }
    Pair<dims> make() {
      const LatentChunks& all = *s.chunks;
      const Pair<dims> work{all.chunk[chunk].rows, 2 * d, at(place)};
      if (++chunk == all.count) chunk = 0, d += dims;
      place = after(place);
      return work;
    }
  };

  // A step of 32 keys: outputs of one or two tiles of rows and 32 dims, or of one and 64. What is read only once is not to push values out
  // of L1.
  template <int tiles, int dims, class Work>
  static IMBREX_INLINE void add_step(const char* weights, const char* weights1, const char* values, Work&& work) {
    TILE_STREAM(4, weights);
    work.template run<0>();
    TILE_LOAD(6, values);
    work.template run<1>();
    TILE_DOT(0, 4, 6);
    work.template run<2>();
    TILE_LOAD(7, values + 1024);
    work.template run<3>();
    TILE_DOT(1, 4, 7);
    work.template run<4>();
    if (tiles == 2) {
      TILE_STREAM(5, weights1);
      work.template run<5>();
      TILE_DOT(2, 5, 6);
      work.template run<6>();
      TILE_DOT(3, 5, 7);
    } else if (dims == 64) {
      TILE_LOAD(5, values + 2048);
      work.template run<5>();
      TILE_DOT(2, 4, 5);
      work.template run<6>();
      TILE_LOAD(6, values + 3072);
      TILE_GAP();
      TILE_DOT(3, 4, 6);
    } else {
      work.template run<5>();
      work.template run<6>();
    }
    work.template run<7>();
  }

  // Outputs of these tiles of rows and dims from d on, whose values are from `place` on. Those of later dims are made meanwhile, where
  // `make`.
  template <int tiles, int dims>
  static void add_tiles(const LatentScratch& s, int t, long d, Values<dims>& values, int place, bool make, LatentFetch& fetch) {
    constexpr bool all = tiles * dims == 64;  // four tiles of outputs, not two
    const long tile_floats = long(kLatentRows) * s.v, tile_weights = s.most_chunks * 1024L;
    float *const out = s.out + t * tile_floats + d * 16, *const out2 = tiles == 2 ? out + tile_floats : out + 512;
    const char *const weights = s.weights + t * tile_weights, *const weights1 = weights + tile_weights;
    TILE_FENCE();
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    if (!s.tiles[t].fresh) {
      TILE_STREAM(0, out);
      TILE_GAP();
      TILE_STREAM(1, out + 256);
      TILE_GAP();
    }
    if (all && !s.tiles[t + tiles - 1].fresh) {
      TILE_STREAM(2, out2);
      TILE_GAP();
      TILE_STREAM(3, out2 + 256);
      TILE_GAP();
    }
    const int chunks = s.chunks->count;
    LatentFetch mine = fetch;  // in registers
    for (int c = 0; c < chunks; ++c, place = values.after(place)) {
      if (make && values.left())
        add_step<tiles, dims>(weights + c * 1024L, weights1 + c * 1024L, values.at(place), values.make());
      else
        add_step<tiles, dims>(weights + c * 1024L, weights1 + c * 1024L, values.at(place), LatentNothing{});
      mine.step();
    }
    fetch = mine;
    TILE_STORE(0, out);
    TILE_GAP();
    TILE_STORE(1, out + 256);
    if (all) {
      TILE_GAP();
      TILE_STORE(2, out2);
      TILE_GAP();
      TILE_STORE(3, out2 + 256);
    }
    TILE_FENCE();
  }

  // One or two tiles use each tile of values once. It is made two steps ahead, since tile loads are not served from the store buffer.
  template <int tiles>
  static void add_values_to_few(const LatentScratch& s, LatentFetch& fetch) {
    constexpr int dims = 64 / tiles;
    Values<dims> values{s, 4};
    for (int i = 0; i < 2 && values.left(); ++i) values.make().run_all();
    int place = 0;
    for (long d = 0; d < s.v; d += dims, place = (place + s.chunks->count) % values.places)
      add_tiles<tiles, dims>(s, 0, d, values, place, true, fetch);
  }

  // More tiles share them. The last two make those of the next dims in the places of what they have used, so that they stay in L1.
  static void add_values_to_many(const LatentScratch& s, LatentFetch& fetch) {
    const int count = s.chunks->count;
    Values<32> values{s, count + 2};
    for (int c = 0; c < count; ++c) values.make().run_all();
    const int first = s.num_tiles % 2;
    int last = s.num_tiles - 2;
    while (last > first && !tiles_see_any(s, last, 2)) last -= 2;
    int place = 0;
    for (long d = 0; d < s.v; d += 32, place = (place + count) % values.places) {
      if (first == 1 && tiles_see_any(s, 0, 1)) add_tiles<1, 32>(s, 0, d, values, place, false, fetch);
      for (int t = first; t <= last; t += 2)
        if (t == last || tiles_see_any(s, t, 2)) add_tiles<2, 32>(s, t, d, values, place, t == last, fetch);
    }
  }

  static void add_values(const LatentScratch& s, LatentFetch& fetch) {
    if (!tiles_see_any(s, 0, s.num_tiles)) return;
    if (s.num_tiles == 1)
      add_values_to_few<1>(s, fetch);
    else if (s.num_tiles == 2)
      add_values_to_few<2>(s, fetch);
    else
      add_values_to_many(s, fetch);
    for (int t = 0; t < s.num_tiles; ++t)
      if (tiles_see_any(s, t, 1)) s.tiles[t].fresh = false;
  }
};

}  // namespace
}  // namespace imbrex::cpu
