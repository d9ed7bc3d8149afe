// Attention to latents in tile products.

namespace imbrex::cpu {
namespace {

struct LatentProducts : LatentTiles {
  static constexpr bool kAnyPitch = true;
  static constexpr int kBlocks = 2;  // whose values are added at once: outputs come from L2 and return there once for as many

  static void enter() { tiles_shape(16); }
  static int fetch_steps(const LatentScratch& s, int begin, bool last) {
    const int pairs = (s.num_tiles + 1) / 2, chunks = s.chunks->count;
    const int units = s.num_tiles == 1 ? (chunks - begin + 1) / 2 : pairs * (chunks - begin);
    return units * s.steps + (last ? chunks * (s.num_tiles == 1 ? s.v / 64 : pairs * (s.v / 32)) : 0);
  }
  // With one tile of rows memory is the limit: software prefetches take the line buffers of L1, those that the processor adds to them do
  // not.
  static int fetch_every(const LatentScratch& s) { return s.num_tiles == 1 ? 256 : 64; }

  static IMBREX_INLINE vi bf16_of(int type, const char* row, int d) {
    switch (type) {
      case kBf16: return load_bf16<kBf16>(row, d, d + 32);
      case kE4m3: return load_bf16<kE4m3>(row, d, d + 32);
      default: return load_bf16<kE5m2>(row, d, d + 32);
    }
  }

  static void weigh(const LatentScratch& s, int begin, LatentFetch& fetch) { LatentWeights::weigh(s, begin, fetch); }
  static void add_values(const LatentScratch& s, LatentFetch& fetch) { LatentValues::add_values(s, fetch); }
};

}  // namespace
}  // namespace imbrex::cpu
