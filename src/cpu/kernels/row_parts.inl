// Rows of keys that lie in two places, put together for kernels that read rows in one piece, whatever types and scales the places have.

namespace imbrex::cpu {
namespace {

// The numbers that a row stands for, but for the scales of the caller.
inline void load_parts(const RowParts& p, const char* first, const char* second, float* out) {
  load_row(first, p.first_stride, p.first_type, p.first, out);
  for (int d = 0; p.group > 0 && d < p.first; d += p.group) {
    float scale;
    __builtin_memcpy(&scale, first + p.scales_at + d / p.group * 4, 4);
    for (int i = d; i < d + p.group; ++i) out[i] *= scale;
  }
  u16 elements[kMaxDim];
  if (p.group > 0) {  // of a record, which may begin anywhere
    __builtin_memcpy(elements, second, p.second * element_size(p.second_type));
    second = reinterpret_cast<const char*>(elements);
  }
  load_row(second, p.second_stride, p.second_type, p.second, out + p.first);
}

// Makes rows of elements of k.type in `buffer`. In: the places of first and second elements. Out: keys and values.
inline void join_parts(const AttentionParams& a, int count, const char* zero, const char** k, const char** v, char* buffer) {
  const RowParts& p = a.row_parts;
  const long size = element_size(a.k.type), first_bytes = p.first * size, second_bytes = p.second * size;
  const bool as_they_are =
      p.group == 0 && p.first_type == a.k.type && p.second_type == a.k.type && p.first_stride == size && p.second_stride == size;
  for (int j = 0; j < count; ++j) {
    if (k[j] != zero) {
      char* const second = buffer + first_bytes;
      if (as_they_are) {
        __builtin_memcpy(buffer, k[j], first_bytes);
        __builtin_memcpy(second, v[j], second_bytes);
      } else {
        float row[kMaxDim];
        load_parts(p, k[j], v[j], row);
        store_row(buffer, size, a.k.type, p.first + p.second, row);
      }
      if (p.twice) __builtin_memcpy(second + second_bytes, second, second_bytes);
      k[j] = buffer;
      buffer += a.k.dim * size;
    }
    v[j] = k[j];
  }
}

// Makes rows what kernels read: elements of a.k.type and a.v.type that are neighbours. Rows that are not so are copied to the buffers, of
// compact_bytes() each.
inline void settle_rows(const AttentionParams& a, const char* zero, const char** k, const char** v, char* k_buffer, char* v_buffer) {
  if (a.row_parts.first > 0) {
    join_parts(a, kBlockKeys, zero, k, v, k_buffer);
  } else {
    compact_rows(a.k, kBlockKeys, zero, k, k_buffer);
    compact_rows(a.v, kBlockKeys, zero, v, v_buffer);
  }
}

constexpr int kMaxQueryDim = 2 * kMaxDim;

// A query as floats: of a.k.dim elements.
inline void load_query(const AttentionParams& a, const char* from, int kv_head, float* out) {
  const RowParts& p = a.row_parts;
  const int end = p.first > 0 ? p.first + p.second : a.k.dim;
  load_row(from, element_size(a.q_type), a.q_type, end, out);
  if (!p.second_factors) return;
  for (int d = p.first; d < end; ++d) {
    const float x = out[d] * p.second_factors[kv_head], rounded = p.twice ? from_bf16(to_bf16(x)) : x;
    out[d] = rounded;
    if (p.twice) out[d + p.second] = x - rounded;
  }
}

}  // namespace
}  // namespace imbrex::cpu
