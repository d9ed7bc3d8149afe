#pragma once
// What a KvFormat is: one row of a table, which is all that the rest of the library knows of it. Checks, allocations, copies and sizes
// follow from `layout`; the reference writes and reads any format by `encode` and `decode`. Only kernels that are made for a format know
// more. docs/kv-formats.md has a section for each, and says how to add one.
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "imbrex/kv_cache.h"

namespace imbrex {

// The tensors of a KvCache, in the order in which an allocation holds them.
enum class KvPart : uint8_t { k, v, k_scale, v_scale };
inline constexpr std::array kKvParts = {KvPart::k, KvPart::v, KvPart::k_scale, KvPart::v_scale};

// What one of them is like. Strides are the caller's, but for those of `x`.
struct KvLayout {
  DType dtype = DType::u8;
  // A letter each: b(lock), t(oken in a block), h(ead), d(im); r(ow) of keys without blocks; and x, bytes or numbers in one piece.
  std::string_view dims;
  std::array<int64_t, TensorView::kMaxRank> sizes{};  // of b and r: 1, since the cache says how many there are
  std::string_view piece;                             // what `x` is of: "a head's block"
  int64_t bytes() const;                              // of one block, or of one row. Error kv_cache.size.overflow
};

// Where a token's record lies.
struct KvPlace {
  int64_t block = 0;  // without blocks: the row
  int64_t offset = 0;
  int head = 0;
};

// A new row of keys or values: head_dim_qk or head_dim_v elements, `stride` of them from one to the next.
struct KvRow {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t first = 0, stride = 1;  // elements
};

struct KvCodec {
  const char* name;
  const char* description;  // one line
  // Every element of k and v is one of kv_dtype, where the strides of its tensor say: what is enough for kernels that take base pointers
  // and strides. An fp8 element e stands for e * scale.
  bool strided;
  // Values are the first head_dim_v elements of the key's record: v is empty, and is not written.
  bool values_in_keys;
  bool ragged;     // keys without blocks (block_size 0) can be in this format
  int block_unit;  // other block sizes are multiples of it
  // What a replay says when it takes this format unasked, because a backend other than the reference runs it; null: it has to be asked.
  const char* preferred;
  // Errors spec.*, about kv_dtype, block_size and head dimensions.
  void (*check)(const AttentionSpec&);
  // Of a k_scale or v_scale, those that are stored with the tokens alone: nothing is said of scales that the caller gives for each head.
  std::optional<KvLayout> (*layout)(const AttentionSpec&, KvPart);
  // One record, of keys (KvPart::k) or values (KvPart::v). The row is in kv_dtype, whose bits are kept, or in one of new_kv_dtypes().
  void (*encode)(const AttentionSpec&, const KvCache&, KvPart, KvPlace, const KvRow&);
  // The numbers that a record stands for: head_dim_qk or head_dim_v of them.
  void (*decode)(const AttentionSpec&, const KvCache&, KvPart, KvPlace, double* row);
};

extern const KvCodec kStridedCodec, kAmxPackedCodec, kLatentCodec;

bool is_kv_format(KvFormat);
const KvCodec& codec_of(KvFormat);  // Error spec.kv_format
inline const KvCodec& codec_of(const AttentionSpec& spec) { return codec_of(spec.kv_format); }
std::span<const KvFormat> kv_formats();                    // all of them, in the order of their numbers
std::string kv_format_names();                             // "strided, amx_packed or latent"
std::optional<KvFormat> find_kv_format(std::string_view);  // by name
// One more row, whose number it returns. `codec` must live as long as the process; call it before a spec has the number, and not while
// others look into the table. Error kv_codec.full.
KvFormat add_kv_codec(const KvCodec& codec);

// Whether the spec could have this format and block size, everything else as it is.
bool fits(AttentionSpec, KvFormat, int block_size);
// The smallest block size from `least` on that the format has; 0 stays 0.
int block_size_in(KvFormat, int least);

// Bytes of a block in all tensors that hold tokens; without blocks, of a row. Error kv_cache.size.overflow.
int64_t block_bytes(const AttentionSpec&);

const TensorView& part_of(const KvCache&, KvPart);
TensorView& part_of(KvCache&, KvPart);
// The cache with views of values and their scale where they are a part of the keys, else as it is: what strides alone describe.
KvCache with_values(const AttentionSpec&, const KvCache&);

// What a scale says of a head, of those that the caller gives: 1 where there is none.
float scale_of_head(const TensorView& scales, DType, int head);
// Errors spec.kv_dtype: the types that elements have where a format keeps them as they are.
void check_element_type(const AttentionSpec&);

}  // namespace imbrex
