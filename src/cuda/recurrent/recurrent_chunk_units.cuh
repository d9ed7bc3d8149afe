#pragma once
// Which chunks a thread block of recurrent_chunks.cu and of recurrent_chunks_sm90.cu takes one after the other, and where in shared memory
// what is copied of them lies.
#include "recurrent_chunks_parts.cuh"

namespace imbrex::cuda {

constexpr int kTileValues = kRecurrentTileValues, kTiles = kDimV / kTileValues;  // values of a thread block; blocks of a head
// With kEnds only states at ends of segments are computed, and what segments do to a state, for which a head has so many blocks more: what
// a unit vector becomes, as a value that no token changes, is a row of that; without the delta rule one of ones is enough.
constexpr int kMoreTiles = kDelta ? kDimK / kTileValues : 1, kUnits = kTiles + (kEnds ? kMoreTiles : 0);
static_assert(kTileValues == 64 && kDimV % kTileValues == 0);

// Of shared memory, what a chunk takes. Matrices begin where the swizzle of 128 bytes does. Where wgmma reads them, neither queries nor P
// have a place when nobody asks for outputs.
constexpr bool kHasQueries = !(kEnds && kPadded);
struct Stage {
  static constexpr int keys = kChunk * kDimK * kSize, values = kChunk * kTileValues * kSize, q_at = keys,
                       written_at = q_at + (kHasQueries ? keys : 0), v_at = written_at + (kChannelGate ? keys : 0), t_at = v_at + values,
                       p_at = t_at + (kDelta ? TOrder::padded_bytes : 0), numbers_at = p_at + (kHasQueries ? POrder::padded_bytes : 0),
                       decays_at = numbers_at + int(sizeof(ChunkNumbers)), barriers_at = decays_at + (kChannelGate ? kDimK * 4 : 0),
                       unit_at = barriers_at + 48, bytes = recurrent_stage_bytes(kDimK, kDelta, kChannelGate, kPadded, kEnds);
  // What bytes are rounded up by has room for two mbarriers more, and a unit.
  static_assert(unit_at % 16 == 0 && (kPadded ? unit_at + 64 : barriers_at) <= bytes);
  u32 at;
  DEVICE u32 k() const { return at; }
  DEVICE u32 q() const { return at + q_at; }
  DEVICE u32 written() const { return kChannelGate ? at + written_at : k(); }  // keys as they are written
  DEVICE u32 v() const { return at + v_at; }
  DEVICE u32 t() const { return at + t_at; }
  DEVICE u32 p() const { return at + p_at; }
  // mbarriers of recurrent_chunks_sm90.cu.
  DEVICE u32 full() const { return at + barriers_at; }
  DEVICE u32 front_empty() const { return at + barriers_at + 8; }
  DEVICE u32 rest_empty() const { return at + barriers_at + 16; }
  DEVICE u32 placed() const { return at + barriers_at + 24; }
  // Of the first place: whether a block's next unit is there, and whether it has been read.
  DEVICE u32 found() const { return at + barriers_at + 32; }
  DEVICE u32 taken() const { return at + barriers_at + 40; }
};
extern __shared__ __align__(1024) char memory[];
DEVICE char* block_memory() { return memory; }

DEVICE Stage stage_at(int place) { return {shared_address(block_memory()) + u32(place * Stage::bytes)}; }
DEVICE const ChunkNumbers& numbers_at(int place) {
  return *reinterpret_cast<const ChunkNumbers*>(block_memory() + place * Stage::bytes + Stage::numbers_at);
}

// What the state is multiplied by over the chunk, of each channel.
DEVICE const float* decays_at(int place) {
  return reinterpret_cast<const float*>(block_memory() + place * Stage::bytes + Stage::decays_at);
}

DEVICE int chunks_in(const RecurrentItem& item) { return (item.end - item.begin + kChunk - 1) / kChunk; }
DEVICE int segments_in(const RecurrentParams& p, const RecurrentItem& item) {
  const int chunks = max(chunks_in(item), 1), each = segment_chunks(p, chunks);
  return (chunks + each - 1) / each;
}
// Where the rows of a head in a segment's place begin.
DEVICE float* segment_place(const RecurrentParams& p, int first_chunk, int head) {
  return p.segments + (i64(first_chunk / p.least_segment) * p.num_v_heads + head) * recurrent_segment_rows(kDimK, kDimV, kDelta) * kDimK;
}

// Calls take(index) for the next of a thread block's units that takes it, the last time for all lanes; false: no more of them do. A warp
// looks at 32 at a time: of a batch with many requests few may have any.
template <class Take>
DEVICE bool find_unit(u32& index, u32 units, const Take& take) {
  for (; index < units; index += 32 * gridDim.x) {
    const u32 mine = index + u32(lane_id()) * gridDim.x;
    const u32 found = __ballot_sync(kFullWarp, mine < units && take(mine));
    if (found == 0) continue;
    index += u32(lowest_bit(found)) * gridDim.x;
    take(index);
    return true;
  }
  return false;
}

// A head of a request and kTileValues of its values, with those of its chunks that are in a segment and in the round; in the order in which
// a thread block takes them.
struct Unit {
  u32 index;
  RecurrentItem item;
  int head, first_value, first_chunk;  // the number of the request's first chunk
  int segment;
  int begin, end;  // tokens in the round

  DEVICE explicit Unit(const RecurrentParams& p) : index(blockIdx.x) { find(p); }
  DEVICE bool is_there() const { return begin < end; }
  DEVICE void next(const RecurrentParams& p) { index += gridDim.x, find(p); }
  DEVICE bool is_last() const { return end == item.end; }
  DEVICE bool is_transition() const { return kEnds && first_value >= kDimV; }
  DEVICE int chunk_at(int token) const { return first_chunk + (token - item.begin) / kChunk; }

 private:
  DEVICE void find(const RecurrentParams& p) {
    const u32 units = u32(num_requests(p)) * u32(p.num_v_heads * kUnits * p.most_segments);
    if (!find_unit(index, units, [&](u32 i) { return take(p, i); })) begin = end = 0;
  }
  DEVICE bool take(const RecurrentParams& p, u32 index) {
    const u32 of_segment = u32(p.num_v_heads * kUnits), each = of_segment * u32(p.most_segments);
    const int request = int(index / each), number = int(index % of_segment);
    item = chunks_of(p, request);
    first_chunk = first_chunk_of(p, request);
    segment = int(index % each / of_segment);
    head = number / kUnits, first_value = number % kUnits * kTileValues;
    const int tokens = segment_chunks(p, chunks_in(item)) * kChunk, first = item.begin + segment * tokens;
    begin = max(first, item.begin + max(p.first_chunk - first_chunk, 0) * kChunk);
    end = min(min(item.end, first + tokens), item.begin + max(p.end_chunk - first_chunk, 0) * kChunk);
    if (kEnds && (end == item.end || (segment == 0 && is_transition()))) end = begin;
    return begin < end;
  }
};

// The next chunk to be copied to shared memory.
struct ChunkCursor {
  Unit unit;
  int begin;

  DEVICE explicit ChunkCursor(const RecurrentParams& p) : unit(p), begin(unit.begin) {}
  DEVICE bool is_there() const { return unit.is_there(); }
  DEVICE int key_head(const RecurrentParams& p) const { return unit.head / p.group; }
  DEVICE const char* weights(const RecurrentParams& p) const { return weights_at(p, unit.chunk_at(begin), unit.head); }
  DEVICE void next(const RecurrentParams& p) {
    begin += kChunk;
    if (begin >= unit.end) unit.next(p), begin = unit.begin;
  }
};

}  // namespace imbrex::cuda
