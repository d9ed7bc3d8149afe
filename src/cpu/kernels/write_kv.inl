// Writes new keys and values into the cache, converted. Every kernel file includes this after convert.inl, so that there is a copy for each
// set of compiler flags. An fp8 element e stands for e * scale, so numbers are divided by the scale before they are rounded.

namespace imbrex::cpu {
namespace {

// The index of the element in a row and column of a packed tile; docs/kv-formats.md has the picture. A byte format interleaves two rows, so
// that the even and the odd bytes of a line are a row each when they are widened.
template <long size>
inline long tile_cell(int row, int column) {
  return size == 1 ? row / 2 * 64L + column * 2 + row % 2 : (row * 32L + column) * size;
}

// Writes a row's pairs of dims to one token's column of the key tiles of a block.
template <long size>
inline void pack_key(const char* row, int padded, int offset, char* block) {
  char* tile = block + offset / 16 * (padded * 16L * size);
  for (int d = 0; d < padded; d += 32, tile += 512 * size) {
    for (int i = 0; i < 32; ++i) __builtin_memcpy(tile + tile_cell<size>(i / 2, offset % 16 * 2 + i % 2), row + (d + i) * size, size);
  }
}
// Writes a row's elements to one token's half of a pair row in each value tile. A block whose size is 16 modulo 32 ends with half a group:
// tiles of 8 rows instead of 16.
template <long size>
inline void pack_value(const char* row, int padded, int offset, bool tail, char* block) {
  const long tile_bytes = (tail ? 256 : 512) * size;
  char* tile = block + offset / 32 * (padded * 32L * size);
  for (int d = 0; d < padded; d += 16, tile += tile_bytes) {
    for (int i = 0; i < 16; ++i) __builtin_memcpy(tile + tile_cell<size>(offset % 32 / 2, i * 2 + offset % 2), row + (d + i) * size, size);
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

// A new latent and its rope part as a record of fp8_ds_mla, in one pass.
inline void write_ds_mla(const char* src, long stride, int type, char* record) {
  float row[kMaxDim];
  load_row(src, stride, type, kDsMlaLatent + kDsMlaRope, row);
  for (int g = 0; g < kDsMlaGroups; ++g) {
    float* const x = row + g * kDsMlaGroup;
    u32 largest = 0;
    for (int d = 0; d < kDsMlaGroup; ++d) {
      const u32 magnitude = ds_mla_magnitude(as_bits(x[d]));
      largest = magnitude > largest ? magnitude : largest;
    }
    const u32 scale = ds_mla_scale(largest);
    const float factor = as_float(ds_mla_reciprocal(scale));
    for (int d = 0; d < kDsMlaGroup; ++d) x[d] *= factor;
    store_row(record + g * kDsMlaGroup, 1, kE4m3, kDsMlaGroup, x);
    __builtin_memcpy(record + kDsMlaScalesAt + g * 4, &scale, 4);
  }
  u16 rope[kDsMlaRope];  // a record may begin anywhere
  store_row(reinterpret_cast<char*>(rope), 2, kBf16, kDsMlaRope, row + kDsMlaLatent);
  __builtin_memcpy(record + kDsMlaRopeAt, rope, sizeof rope);
}

void write_kv(const WriteKvParams& w, int token_begin, int token_end) {
  for (int t = token_begin; t < token_end; ++t) {
    const long long slot = w.slots[t * w.slot_stride];
    if (slot < 0) continue;
    const int block = int(slot / w.block_size), offset = int(slot % w.block_size);
    if (w.ds_mla) {
      char* const record = const_cast<char*>(w.k.data) + block * w.k.block_stride + offset * w.k.token_stride;
      write_ds_mla(w.src_k + t * w.k_token_stride, w.k_dim_stride, w.src_type, record);
      continue;
    }
    for (int h = 0; h < w.num_kv_heads; ++h) {
      write_side(w.k, w.src_k + t * w.k_token_stride + h * w.k_head_stride, w.k_dim_stride, w.src_type, w.block_size, w.packed, false, h,
                 block, offset);
      if (w.src_v == nullptr) continue;
      write_side(w.v, w.src_v + t * w.v_token_stride + h * w.v_head_stride, w.v_dim_stride, w.src_type, w.block_size, w.packed, true, h,
                 block, offset);
    }
  }
}

}  // namespace
}  // namespace imbrex::cpu
