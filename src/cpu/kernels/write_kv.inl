// New keys and values into the cache, converted; included by every kernel file after convert.inl, so that each set of flags has one.
// An fp8 element e stands for e * scale, so values are divided by the scale before they are rounded.

namespace imbrex::cpu {
namespace {

constexpr int kMaxDim = 576;

// Where element d of token `offset` (within a block) of one head lies in the packed format; docs/kv-formats.md has the picture.
inline long packed_k_offset(int offset, int d, int padded_dim, long size) {
  const int steps = padded_dim / 32;
  return (((offset / 16 * steps + d / 32) * 16L + d % 32 / 2) * 32 + offset % 16 * 2 + d % 2) * size;
}
inline long packed_v_offset(int offset, int d, int padded_dim, long size) {
  return ((offset / 32 * long(padded_dim / 16) + d / 16) * 512 + offset % 32 / 2 * 32 + d % 16 * 2 + offset % 2) * size;
}
// A block whose size is 16 modulo 32 ends with half a group of values: 8 rows instead of 16.
inline long packed_v_tail_offset(int offset, int d, int padded_dim, long size) {
  const int group = offset / 32 * 32;
  return (long(group) * padded_dim + d / 16 * 256L + (offset - group) / 2 * 32 + d % 16 * 2 + offset % 2) * size;
}

// A row's pairs of dims, `size` bytes an element, to one token's column of the key tiles.
template <long size>
inline void pack_key(const char* row, int padded, int offset, char* block) {
  char* to = block + packed_k_offset(offset, 0, padded, size);
  for (int d = 0; d < padded; d += 2) __builtin_memcpy(to + d / 2 * 32 * size, row + d * size, 2 * size);
}
// A row's elements to one token's half of a pair row in each value tile.
template <long size>
inline void pack_value(const char* row, int padded, int offset, bool tail, char* block) {
  char* to = block + (tail ? packed_v_tail_offset(offset, 0, padded, size) : packed_v_offset(offset, 0, padded, size));
  const long tile = (tail ? 256 : 512) * size;
  for (int d = 0; d < padded; d += 16, to += tile) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(to + 2 * i * size, row + (d + i) * size, size);
  }
}

inline void write_side(const KvSide& side, const char* src, long src_dim_stride, int src_type, int block_size, bool packed, bool values,
                       int head, int block, int offset) {
  const float scale = side.scales ? side.scales[head * side.scale_stride] : 1.f;
  char* base = const_cast<char*>(side.data) + block * side.block_stride + head * side.head_stride;
  const long size = element_size(side.type);
  const bool copy = src_type == side.type && src_dim_stride == size;  // values that are quantised already are not scaled again
  float row[kMaxDim];
  if (!copy) {
    load_row(src, src_dim_stride, src_type, side.dim, row);
    if (scale != 1.f && src_type != side.type)
      for (int d = 0; d < side.dim; ++d) row[d] /= scale;
  }
  if (!packed) {
    char* to = base + offset * side.token_stride;
    if (copy && side.dim_stride == size) {
      __builtin_memcpy(to, src, side.dim * size);
    } else {
      if (copy) load_row(src, src_dim_stride, src_type, side.dim, row);
      store_row(to, side.dim_stride, side.type, side.dim, row);
    }
    return;
  }
  char stored[4 * (kMaxDim + 32)];
  const int padded = (side.dim + 31) / 32 * 32;
  if (copy) {
    __builtin_memcpy(stored, src, side.dim * size);
  } else {
    store_row(stored, size, side.type, side.dim, row);
  }
  __builtin_memset(stored + side.dim * size, 0, (padded - side.dim) * size);
  const bool tail = values && offset / 32 * 32 + 32 > (block_size + 15) / 16 * 16;
  if (size == 2) {
    values ? pack_value<2>(stored, padded, offset, tail, base) : pack_key<2>(stored, padded, offset, base);
  } else {
    values ? pack_value<1>(stored, padded, offset, tail, base) : pack_key<1>(stored, padded, offset, base);
  }
}

void write_kv(const WriteKvParams& w, int token_begin, int token_end) {
  for (int t = token_begin; t < token_end; ++t) {
    const long long slot = w.slots[t * w.slot_stride];
    if (slot < 0) continue;
    const int block = int(slot / w.block_size), offset = int(slot % w.block_size);
    for (int h = 0; h < w.num_kv_heads; ++h) {
      write_side(w.k, w.src_k + t * w.k_token_stride + h * w.k_head_stride, w.k_dim_stride, w.src_type, w.block_size, w.packed, false, h,
                 block, offset);
      write_side(w.v, w.src_v + t * w.v_token_stride + h * w.v_head_stride, w.v_dim_stride, w.src_type, w.block_size, w.packed, true, h,
                 block, offset);
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu
