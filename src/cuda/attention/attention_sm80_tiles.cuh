#pragma once
// The layout of queries, keys and values in the shared memory of attention_sm80.cu, and their loads: through the block table, converted
// where the matrix unit cannot multiply their type. attention_sm90_decode.cu loads its queries with this file too.
//
// A row has an odd number of 16-byte pieces. So eight rows put their pieces of one number into eight different bank groups, whatever
// the head dimension, and the address of a fragment is one register plus a constant.
#include "attention_item.cuh"
#include "eight.cuh"

namespace imbrex::cuda {

// --- types

// The types of operands. f16 holds every fp8 number and every f16 one; bf16 queries are scaled to its range, each row by a power of two.
// f32 queries are a sum of three bf16 numbers, and so are f32 keys and values; f16 is a sum of two.
constexpr bool kSmallKv = kKvType == kE4m3 || kKvType == kE5m2, kExact = kQType == kF32;
constexpr int kProductType = kExact ? kBf16 : kSmallKv || kKvType == kF16 ? kF16 : kQType;
constexpr bool kRopeScaled =
    kRopeApart && kSmallKv;  // queries of the rope part are multiplied by what its scale is times that of the latent
constexpr bool kPowerScaled = kProductType == kF16 && (kQType == kBf16 || kRopeScaled);
constexpr int kQPlanes = kExact ? 3 : 1, kKvPlanes = !kExact ? 1 : kKvType == kF32 ? 3 : kKvType == kF16 ? 2 : 1;
constexpr bool kBytes = kSmallKv && !kExact;                              // fp8 lies in shared memory as it is, and is widened in registers
constexpr bool kDirect = !kDsMla && (kBytes || kKvType == kProductType);  // no conversion on the way in

// --- shapes

constexpr int rounded_up(int x, int to) { return (x + to - 1) / to * to; }
constexpr int kStoredBytes = kBytes ? 1 : 2;
constexpr int kPieceDims = 16 / kStoredBytes;
constexpr int kQkDims = rounded_up(kHeadDimQk, 16), kVDims = rounded_up(kHeadDimV, 16 * kDimWarps);  // with zeros at the end
constexpr int kKPieces = kQkDims / kPieceDims, kVPieces = kVDims / kPieceDims;
constexpr int row_bytes(int pieces) { return (pieces | 1) * 16; }

constexpr int kTeams = kKeyWarps;  // a team of warps has a part of each tile's keys: it loads them, and waits for no other team
constexpr int kTeamWarps = kRowWarps * kDimWarps, kThreads = 32 * kTeams * kTeamWarps;
constexpr int kTeamKeys = kTileKeys / kTeams;
constexpr int kQRowBytes = row_bytes(kQkDims / 8), kQPlaneBytes = kTileRows * kQRowBytes;
// Values that are a part of the keys are read from the tile of keys: what follows them in a row lands in dims that nobody stores.
constexpr bool kValuesAreThere = kValuesInKeys && kVDims <= kQkDims;
constexpr int kKRowBytes = row_bytes(kKPieces), kVRowBytes = kValuesAreThere ? kKRowBytes : row_bytes(kVPieces);
constexpr int kKPlaneBytes = kTeamKeys * kKRowBytes, kVPlaneBytes = kTeamKeys * kVRowBytes;
constexpr int kVBegin = kValuesAreThere ? 0 : kKvPlanes * kKPlaneBytes;  // in a stage
constexpr int kStageBytes = kKvPlanes * (kKPlaneBytes + (kValuesAreThere ? 0 : kVPlaneBytes));

// An item as the warps that compute it read it from shared memory.
struct ItemSlot {
  float q_scale[kTileRows];   // what a row of queries was divided by
  RowTerms terms[kTileRows];  // where rows differ in them
  Item item;                  // for what needs it seldom: registers are short
};

// A layout of keys and values in shared memory: where the rows and 16-byte pieces of a warp's fragments lie. This one is padded.
struct PaddedRows {
  static constexpr int kKRow = kKRowBytes, kVRow = kVRowBytes;  // bytes from row to row
  DEVICE static u32 lane(int row, int piece, int row_bytes) { return row * row_bytes + piece * 16; }
  // `pair` pieces of 16 bytes further on.
  DEVICE static u32 at(u32 lane, int pair) { return lane + pair * 32; }
};

static_assert(kHeadDimQk % 8 == 0 && kHeadDimV % 8 == 0 && kTeamKeys % 16 == 0 && kTileRows % (16 * kRowWarps) == 0);

DEVICE void team_sync(int team) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else if constexpr (kTeams == 1) {
    __syncthreads();
  } else {
    named_barrier_sync(1 + team, 32 * kTeamWarps);
  }
}

// --- conversion of eight elements to one piece of 16 bytes for each plane; plane i holds what the planes before it leave over

template <int type, int planes>
DEVICE void store_planes(u32 to, int plane_bytes, const Eight<type>& e) {
  if constexpr (planes == 1 && type == kProductType) {
    store_shared(to, uint4{e.words[0], e.words[1], e.words[2], e.words[3]});
  } else {
    float x[8];
    to_floats<type>(e, x);
#pragma unroll
    for (int plane = 0; plane < planes; ++plane) {
      const Eight<kProductType> rounded = from_floats<kProductType>(x);
      store_shared(to + plane * plane_bytes, uint4{rounded.words[0], rounded.words[1], rounded.words[2], rounded.words[3]});
      float high[8];
      to_floats<kProductType>(rounded, high);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] -= high[i];
    }
  }
}

// --- keys and values

// Whether rows can be copied 16 bytes at a time.
template <int dim>
DEVICE bool is_wide(const KvSide& side) {
  constexpr int size = kDsMla ? 1 : element_bytes(kKvType);
  const u64 all = reinterpret_cast<u64>(side.data) | u64(side.block_stride) | u64(side.token_stride) | u64(side.head_stride);
  return dim * size % 16 == 0 && side.dim_stride == size && (all & 15) == 0;
}

// Of all that an item reads of the cache. Records are bytes, of which each piece of eight elements is aligned if the record is.
DEVICE bool is_wide(const AttentionParams& p) {
  if constexpr (kRopeApart) return is_wide<kHeadDimV>(p.k) && is_wide<kHeadDimQk - kHeadDimV>(p.v);
  if constexpr (kDsMla) return is_wide<kDsMlaBytes>(p.k);
  return is_wide<kHeadDimQk>(p.k) && is_wide<kHeadDimV>(p.v);
}

constexpr int power_of_two_in(int x) { return x % 2 == 0 && x > 0 ? 2 * power_of_two_in(x / 2) : 1; }
constexpr int power_of_two_from(int x) { return x <= 1 ? 1 : 2 * power_of_two_from((x + 1) / 2); }
constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Neighbouring lanes that copy a row together: as many as divide both sides' pieces, unless that makes poor use of a sector.
constexpr int kEvenLanes = smaller(16, smaller(power_of_two_in(kKPieces), power_of_two_in(kVPieces)));
constexpr int kRowLanes = kEvenLanes >= 4 ? kEvenLanes : smaller(8, power_of_two_from(larger(kKPieces, kVPieces)));
constexpr int kPassRowsOfWarp = 32 / kRowLanes, kPassRows = kPassRowsOfWarp * kTeamWarps;
constexpr int kPasses = (kTeamKeys + kPassRows - 1) / kPassRows;
static_assert(kPasses * kPassRowsOfWarp <= 32, "a lane looks up the block of one row");

constexpr bool kOneBlock = kBlockSize > 0 && kBlockSize % kTeamKeys == 0;  // all keys of a team's tile are in one block

// A team's copies of its keys and values of an item, tile after tile. The block of each row is looked up one tile ahead.
class KvLoader {
 public:
  DEVICE KvLoader(const AttentionParams& p, bool wide) : p_(p), wide_(wide) {}

  // Looks up the blocks of the tile whose keys of this team begin at `begin`. Called early, so that the load does not wait for the table.
  DEVICE void look_up(const Item& item, int begin) {
    if constexpr (kBlockSize > 0) {
      const int thread = thread_of_team(), lane = thread % 32, warp = thread / 32;
      const int row = kOneBlock ? 0 : lane / kPassRowsOfWarp * kPassRows + warp * kPassRowsOfWarp + lane % kPassRowsOfWarp;
      block_ = __ldg(block_id_of(p_, item.first_block, within(item, begin + row)));
    }
  }

  // Loads a tile. Rows of keys that no row of queries sees become zero, and their memory is not read.
  DEVICE void load(const Item& item, int begin, u32 stage) const {
    if (kDirect && wide_) {
      copy(item, begin, stage);
    } else {
      convert(item, begin, stage);
    }
  }

 private:
  DEVICE static int thread_of_team() { return computed_here(int(threadIdx.x)) % (32 * kTeamWarps); }
  DEVICE static int within(const Item& item, int key) { return max(item.lo, min(key, item.hi - 1)); }
  DEVICE static bool is_valid(const Item& item, int key) { return u32(key - item.lo) < u32(item.hi - item.lo); }

  // The address of row `pass * kPassRows + first_row` of the team's keys (or values).
  DEVICE const char* place(const Item& item, const KvSide& side, const char* head, int begin, int pass, int first_row, int block) const {
    const int step = pass * kPassRows;
    if constexpr (kBlockSize == 0) return head + ragged_offset(side, item.first_block, within(item, begin + step + first_row));
    return head + offset_of_row(side, u32(block), row_in_tile<kTeamKeys, kPassRows>(begin, step, first_row));
  }

  DEVICE int block_of(int pass) const {
    return kBlockSize == 0 || kOneBlock ? block_ : shuffle(block_, pass * kPassRowsOfWarp + lane_id() / kRowLanes);
  }

  DEVICE void copy(const Item& item, int begin, u32 stage) const {
    if constexpr (kRopeApart) {
      copy_parts(item, begin, stage);
      return;
    }
    const int thread = thread_of_team(), first_row = thread / kRowLanes, piece = thread % kRowLanes;
    const char *k = p_.k.data + item.kv_head * p_.k.head_stride + piece * 16, *v = p_.v.data + item.kv_head * p_.v.head_stride + piece * 16;
    const char *k_row = place(item, p_.k, k, begin, 0, first_row, block_), *v_row = place(item, p_.v, v, begin, 0, first_row, block_);
    const u32 k_to = stage + first_row * kKRowBytes + piece * 16;
    const u32 v_to = stage + kVBegin + first_row * kVRowBytes + piece * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if constexpr (!kOneBlock) {
        const int block = block_of(pass);
        k_row = place(item, p_.k, k, begin, pass, first_row, block), v_row = place(item, p_.v, v, begin, pass, first_row, block);
      }
      const int row = pass * kPassRows + first_row;
      if (kPasses * kPassRows == kTeamKeys || row < kTeamKeys) {
        copy_row<kHeadDimQk, kKPieces>(k_row, piece, k_to + pass * kPassRows * kKRowBytes, is_valid(item, begin + row));
        if constexpr (!kValuesAreThere)
          copy_row<kHeadDimV, kVPieces>(v_row, piece, v_to + pass * kPassRows * kVRowBytes, is_valid(item, begin + row));
      }
      if constexpr (kOneBlock) k_row += kPassRows * p_.k.token_stride, v_row += kPassRows * p_.v.token_stride;
    }
  }

  // The copy of rows of which k has the first kHeadDimV dims, those of the value, and v the others.
  DEVICE void copy_parts(const Item& item, int begin, u32 stage) const {
    const int thread = thread_of_team(), first_row = thread / kRowLanes, piece = thread % kRowLanes;
    const char *k = p_.k.data + item.kv_head * p_.k.head_stride, *rope = p_.v.data + item.kv_head * p_.v.head_stride;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kPassRows + first_row, block = block_of(pass);
      if (kPasses * kPassRows != kTeamKeys && row >= kTeamKeys) continue;
      const bool valid = is_valid(item, begin + row);
      const char *first = place(item, p_.k, k, begin, pass, first_row, block),
                 *behind = place(item, p_.v, rope, begin, pass, first_row, block);
      const u32 to = stage + row * kKRowBytes + piece * 16;
#pragma unroll
      for (int i = 0; i < kKPieces; i += kRowLanes) {
        const int d = (i + piece) * kPieceDims;
        const char* const from = d < kHeadDimV ? first + d * kStoredBytes : behind + (d - kHeadDimV) * kStoredBytes;
        const bool inside = d < kHeadDimQk;
        if (kKPieces % kRowLanes == 0 || i + piece < kKPieces) copy_async<16>(to + i * 16, inside ? from : first, valid && inside);
      }
      if constexpr (!kValuesAreThere) {
        copy_row<kHeadDimV, kVPieces>(first + piece * 16, piece, stage + kVBegin + row * kVRowBytes + piece * 16, valid);
      }
    }
  }

  template <int dim, int pieces>
  DEVICE void copy_row(const char* from, int piece, u32 to, bool valid) const {
#pragma unroll
    for (int i = 0; i < pieces; i += kRowLanes) {
      const bool inside = pieces * kPieceDims == dim || (i + piece) * kPieceDims < dim;
      if (pieces % kRowLanes == 0 || i + piece < pieces) copy_async<16>(to + i * 16, inside ? from + i * 16 : from, valid && inside);
    }
  }

  DEVICE void convert(const Item& item, int begin, u32 stage) const {
    const int thread = thread_of_team(), first_row = thread / kRowLanes;
    const char *k = p_.k.data + item.kv_head * p_.k.head_stride, *v = p_.v.data + item.kv_head * p_.v.head_stride;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kPassRows + first_row, block = block_of(pass);
      if (row >= kTeamKeys) continue;
      const char* behind = nullptr;  // the rest of the row, where it lies apart
      if constexpr (kRopeApart) behind = place(item, p_.v, v, begin, pass, first_row, block);
      convert_row<kHeadDimQk, kKPieces>(p_.k, place(item, p_.k, k, begin, pass, first_row, block), behind, thread % kRowLanes,
                                        stage + row * kKRowBytes, kKPlaneBytes, is_valid(item, begin + row));
      if constexpr (!kValuesAreThere) {
        const KvSide& side = kRopeApart ? p_.k : p_.v;
        convert_row<kHeadDimV, kVPieces>(side, place(item, side, kRopeApart ? k : v, begin, pass, first_row, block), nullptr,
                                         thread % kRowLanes, stage + kVBegin + row * kVRowBytes, kVPlaneBytes, is_valid(item, begin + row));
      }
    }
  }

  // Eight elements of a row from d on.
  DEVICE Eight<kKvType> load_elements(const KvSide& side, const char* from, const char* behind, int d) const {
    if constexpr (kDsMla) return load_record(from, d);
    if constexpr (kRopeApart) {
      if (d >= kHeadDimV) return load_at(p_.v, behind, d - kHeadDimV);
    }
    return load_at(side, from, d);
  }
  DEVICE Eight<kKvType> load_at(const KvSide& side, const char* from, int d) const {
    return wide_ ? load_eight<kKvType, true>(from + d * element_bytes(kKvType), side.dim_stride)
                 : load_eight<kKvType, false>(from + d * side.dim_stride, side.dim_stride);
  }

  // Of a record of fp8_ds_mla, widened to kKvType, which holds what it stands for.
  DEVICE Eight<kKvType> load_record(const char* record, int d) const {
    float x[8];
    if (d < kDsMlaLatent) {
      const Eight<kE4m3> e = wide_ ? load_eight<kE4m3, true>(record + d, 1) : load_eight<kE4m3, false>(record + d, 1);
      to_floats<kE4m3>(e, x);
      const float scale = load_scale(record + kDsMlaScalesAt + d / kDsMlaGroup * 4);
#pragma unroll
      for (float& value : x) value *= scale;
    } else {
      const char* const from = record + kDsMlaRopeAt + (d - kDsMlaLatent) * 2;
      to_floats<kBf16>(wide_ ? load_eight<kBf16, true>(from, 2) : load_eight<kBf16, false>(from, 2), x);
    }
    return from_floats<kKvType>(x);
  }
  DEVICE float load_scale(const char* from) const {
    if (wide_) return *reinterpret_cast<const float*>(from);
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= u32(*reinterpret_cast<const u8*>(from + i)) << 8 * i;
    return float_of(bits);
  }

  template <int dim, int pieces>
  DEVICE void convert_row(const KvSide& side, const char* from, const char* behind, int first_piece, u32 to, int plane_bytes,
                          bool valid) const {
#pragma unroll 1
    for (int piece = first_piece; piece < pieces; piece += kRowLanes) {
      Eight<kKvType> e[kPieceDims / 8];
#pragma unroll
      for (int i = 0; i < kPieceDims / 8; ++i) {
        const int d = piece * kPieceDims + 8 * i;
        if (valid && d < dim) {
          e[i] = load_elements(side, from, behind, d);
        } else {
#pragma unroll
          for (u32& word : e[i].words) word = 0;
        }
      }
      if constexpr (kBytes) {
        store_shared(to + piece * 16, uint4{e[0].words[0], e[0].words[1], e[1].words[0], e[1].words[1]});
      } else {
        store_planes<kKvType, kKvPlanes>(to + piece * 16, plane_bytes, e[0]);
      }
    }
  }

  const AttentionParams& p_;
  const bool wide_;
  int block_ = 0;
};

// --- queries

// Loads the queries of an item into shared memory with `threads` threads, missing rows as zeros, before the next commit of copies.
template <int threads>
class QLoader {
 public:
  DEVICE static void load(const AttentionParams& p, const Item& item, u32 to, float* q_scale) {
    const bool wide = ((reinterpret_cast<u64>(p.q) | u64(p.q_token_stride) | u64(p.q_head_stride)) & 15) == 0;
    const int thread = computed_here(int(threadIdx.x)) % threads;
    if (!kExact && !kBytes && kQType == kProductType && wide) {
#pragma unroll 4
      for (int i = thread; i < kTileRows * kPieces; i += threads) {
        const int row = i / kPieces, piece = i % kPieces;
        const bool valid = row < item.num_rows && piece * 8 < kHeadDimQk;
        copy_async<16>(to + row * kQRowBytes + piece * 16, valid ? row_of(p, item, row) + piece * 16 : p.q, valid);
      }
    } else if (wide) {
      convert<true>(p, item, thread, to, q_scale);
    } else {
      convert<false>(p, item, thread, to, q_scale);
    }
  }

 private:
  static constexpr int kPieces = kQkDims / 8, kLanes = smaller(32, power_of_two_from(kPieces));
  static constexpr int kLanePieces = (kPieces + kLanes - 1) / kLanes;

  DEVICE static const char* row_of(const AttentionParams& p, const Item& item, int row) {
    return p.q + query_token(p, item, row) * p.q_token_stride + item.head_of(row) * p.q_head_stride;
  }

  template <bool wide>
  DEVICE static void convert(const AttentionParams& p, const Item& item, int thread, u32 to, float* q_scale) {
    constexpr int size = element_bytes(kQType);
    const int lane = thread % kLanes;
    [[maybe_unused]] const float rope = kRopeScaled ? kv_scale(p.v, item.kv_head) / kv_scale(p.k, item.kv_head) : 1.f;
#pragma unroll 2
    for (int row = thread / kLanes; row < kTileRows; row += threads / kLanes) {
      Eight<kQType> e[kLanePieces];
      float top = 0;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        const int d = (lane + i * kLanes) * 8;
        if (row < item.num_rows && d < kHeadDimQk) {
          e[i] = load_eight<kQType, wide>(row_of(p, item, row) + d * size, size);
        } else {
#pragma unroll
          for (u32& word : e[i].words) word = 0;
        }
        if constexpr (kPowerScaled) top = fmaxf(top, largest(e[i]) * (kRopeScaled && d >= kHeadDimV ? rope : 1.f));
      }
      float factor = 1.f;
      if constexpr (kPowerScaled) {
        // The row is scaled so that its largest element is in [2^14, 2^15): elements that f16 cannot hold are then below 2^-39 of it.
        // Infinities and NaN do not change.
        const int exponent = int(bits_of(max_over<kLanes>(top)) >> 23);
        if (exponent > 40 && exponent < 255) factor = float_of(u32(127 + 14 + 127 - exponent) << 23);
        if (lane == 0) q_scale[row] = float_of(u32(254 << 23) - bits_of(factor));  // 1 / factor
      }
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        const int piece = lane + i * kLanes;
        if (piece < kPieces) store(to + row * kQRowBytes, piece, e[i], factor, kRopeScaled && piece * 8 >= kHeadDimV ? rope : 1.f);
      }
    }
  }

  DEVICE static float largest(const Eight<kQType>& e) {
    float x[8], top = 0;
    to_floats<kQType>(e, x);
#pragma unroll
    for (float value : x) top = fmaxf(top, fabsf(value));
    return top;
  }

  DEVICE static void store(u32 row, int piece, const Eight<kQType>& e, float factor, [[maybe_unused]] float rope) {
    if constexpr (kBytes) {
      // Dims are written in the order in which a lane has them in a fragment of bytes: 4t, 4t + 1 where a fragment of 16-bit elements has
      // 2t and 2t + 1, and 4t + 2, 4t + 3 where it has 2t + 8 and 2t + 9.
      float x[8];
      to_floats<kQType>(e, x);
#pragma unroll
      for (float& value : x) value = kRopeScaled ? value * rope * factor : value * factor;
      const Eight<kF16> f = from_floats<kF16>(x);
      const u32 to = row + piece / 2 * 32 + piece % 2 * 8;
      store_shared(to, uint2{f.words[0], f.words[2]});
      store_shared(to + 16, uint2{f.words[1], f.words[3]});
    } else if constexpr (kPowerScaled) {
      float x[8];
      to_floats<kQType>(e, x);
#pragma unroll
      for (float& value : x) value *= factor;
      const Eight<kF16> f = from_floats<kF16>(x);
      store_shared(row + piece * 16, uint4{f.words[0], f.words[1], f.words[2], f.words[3]});
    } else if constexpr (kRopeScaled) {
      float x[8];
      to_floats<kQType>(e, x);
#pragma unroll
      for (float& value : x) value *= rope;
      store_planes<kF32, kQPlanes>(row + piece * 16, kQPlaneBytes, from_floats<kF32>(x));
    } else {
      store_planes<kQType, kQPlanes>(row + piece * 16, kQPlaneBytes, e);
    }
  }
};

}  // namespace imbrex::cuda
