// The memory of one worker of the AMX kernels while it runs an item, and the sizes that the kernels work in.

namespace imbrex::cpu {
namespace {

constexpr int kRowBlock = 32;    // rows of a job: two row tiles
constexpr int kMaxRows = 512;    // rows of an item, unless one token's group is larger
constexpr int kNarrowRows = 16;  // items with so few rows (decode) use tiles with just these rows
constexpr int kMostHeads = 8;    // of which a narrow item takes its rows together
constexpr int kRing = 3;         // blocks in flight: PV of one, softmax of the next, QK of the one after
// A row keeps its reference, the logit that its exponentials are relative to, until they sum to more than this: bf16 and fp32 are equally
// precise at 2^20 and at 1, so the maximum is not computed for blocks that do not need a new reference.
constexpr float kLargeSum = 0x1p20f;

// The visible keys of 32 rows, known before any key is read.
struct RowBlock {
  int lo, hi;          // keys that some row sees
  int all_lo, all_hi;  // keys that every row sees
};

// 32 rows against one block of keys.
struct Job {
  int block;  // of rows
  int head;   // of keys and values
  int kb;
  int c0, c1;  // chunks of 32 keys that some row sees
  bool fresh;  // the first of these rows: they have no output yet
  bool full;   // every row sees all keys, and its logits are plain or only capped
  const BlockTiles* tiles;
  const Stage* stage;
};

// How a soft cap bends the raw scores of a row, in amx_softmax.inl.
struct alignas(32) CapCurve {  // does not straddle cache lines
  float c[4], bound;           // of the raw scores: factor to capped logits in log2 units, and largest x^2
};

// One worker's memory, cut from `scratch`. A row tile of scores is 8 tiles of 16 x 16 floats, one of outputs dim_tiles of them.
struct Scratch {
  char* q;        // [row blocks][2][steps] tiles of 16 rows x 32 dims
  float* out;     // [row blocks][2][dim_tiles][16][16]
  float* folded;  // likewise: of the splits before this one
  float* scores;  // [2][2][8][16][16]: this job's and the other's; probabilities replace them as bf16 in the even tiles
  float *max, *sum, *folded_max, *folded_sum;  // [rows], [rows, 16], [rows], [rows]
  float* scale;                                // [rows]: of the logits, log2(e) included
  CapCurve* curves;                            // [rows]: of the soft cap
  Row* rows;
  RowBlock* blocks;
  bool* fresh;  // [row blocks]: no job yet
  Stage stage[kRing];
  BlockTiles tiles[kRing];
};

// The tiles of an item: `rows` of each head in blocks of kRowBlock (each of several heads has blocks of its own), steps of 32 dims of a
// key, and tiles of 16 dims of the output.
struct TileCounts {
  int rows, row_blocks, steps, dim_tiles;
};

TileCounts tile_counts(const AttentionParams& a, int num_rows, int heads) {
  const int blocks = (num_rows + kRowBlock - 1) / kRowBlock * heads;
  return {num_rows, blocks, (a.k.dim + 31) / 32, (a.v.dim + 31) / 32 * 2};
}

long layout(char* base, const AttentionParams& a, int num_rows, int heads, Scratch* out) {
  const TileCounts n = tile_counts(a, num_rows, heads);
  const long rows = long(n.row_blocks) * kRowBlock, tile = 1024;
  long at = 0;
  auto take = [&](long bytes) {
    char* p = base ? base + at : nullptr;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  auto floats = [&](long count) { return reinterpret_cast<float*>(take(count * 4)); };
  Scratch s;
  s.scores = floats(2 * 2 * kGroups * 256);
  s.q = take(n.row_blocks * 2 * n.steps * tile);
  s.out = floats(n.row_blocks * 2L * n.dim_tiles * 256);
  s.max = floats(rows);
  s.sum = floats(rows * 16);
  s.scale = floats(rows);
  s.curves = reinterpret_cast<CapCurve*>(take(rows * long(sizeof(CapCurve))));
  s.rows = reinterpret_cast<Row*>(take(rows * long(sizeof(Row))));
  s.blocks = reinterpret_cast<RowBlock*>(take(n.row_blocks * long(sizeof(RowBlock))));
  s.fresh = reinterpret_cast<bool*>(take(n.row_blocks));
  const char* zero = take(n.steps * tile > kMaxDim * 4L ? n.steps * tile : kMaxDim * 4L);
  for (Stage& stage : s.stage) {
    stage.steps = n.steps;
    stage.dim_tiles = n.dim_tiles;
    stage.keys = take(kGroups * n.steps * tile);
    stage.values = take(kChunks * n.dim_tiles * tile);
    stage.zero = zero;
    stage.direct = a.packed && num_rows <= kNarrowRows;
    stage.as_rows = !a.packed && num_rows <= kNarrowRows;
  }
  s.folded = floats(n.row_blocks * 2L * n.dim_tiles * 256);
  s.folded_max = floats(rows);
  s.folded_sum = floats(rows);
  for (Stage& stage : s.stage) {
    stage.key_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
    stage.value_rows = reinterpret_cast<const char**>(take(kBlockKeys * 8));
    stage.key_compact = take(compact_bytes(a.k));
    stage.value_compact = take(compact_bytes(a.v));
  }
  if (out) *out = s;
  return at;
}

// Row i's 16 elements of column tile t are at tiles[...][t]: where it begins, in floats.
IMBREX_INLINE long row_offset(int row, int tiles) { return (row / 16) * (tiles * 256L) + row % 16 * 16; }

}  // namespace
}  // namespace imbrex::cpu
