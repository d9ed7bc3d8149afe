#pragma once
// The table of cache formats: a KvCodec describes one KvFormat, and the rest of the library knows nothing else of it. Checks, allocations,
// copies and sizes follow from `layout`; the reference backend writes and reads every format by `encode` and `decode`. Only kernels that
// are written for one format know more. docs/kv-formats.md describes each format, and how to add one.
#include <array>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "imbrex/kv_cache.h"

namespace imbrex {

// The tensors of a KvCache, in the order in which an allocation holds them.
enum class KvPart : uint8_t { k, v, k_scale, v_scale, k_rope };
inline constexpr std::array kKvParts = {KvPart::k, KvPart::v, KvPart::k_scale, KvPart::v_scale, KvPart::k_rope};
const char* to_string(KvPart);

// The dtype, dimensions and sizes of one of these tensors. Strides are the caller's choice, except that an `x` has stride 1.
struct KvLayout {
  DType dtype = DType::u8;
  // A letter for each dimension: b(lock), t(oken in a block), h(ead), d(im); r(ow), where keys are in no blocks; x, bytes in one piece.
  std::string_view dims;
  std::array<int64_t, TensorView::kMaxRank> sizes{};  // that of b and r is 1, since each cache says how many it has
  std::string_view piece;                             // what the bytes of an `x` hold, for messages: "a head's block"
  int64_t bytes() const;                              // bytes of one block or row. Error kv_cache.size.overflow
};

// The place of one token's record of one kv head.
struct KvPlace {
  int64_t block = 0;   // where keys are in no blocks: the row
  int64_t offset = 0;  // of the token in the block
  int head = 0;
};

// A new row of head_dim_qk or head_dim_v elements: the first is element `first` of `data`, each next one is `stride` elements further.
struct KvRow {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t first = 0, stride = 1;
};

struct KvCodec {
  const char* name;
  // Whether every element of k and v has kv_dtype and lies where the strides of its tensor say. Kernels that take base pointers and strides
  // can read such a cache. An fp8 element e stands for e * scale.
  bool strided;
  // Whether a value is the first head_dim_v elements of its key. The tensor v is then empty, and write_kv() is given no values.
  bool values_in_keys;
  // Whether a record has its own scales, which the writer chooses: the caller gives none, and new elements always are converted.
  bool scales_inside;
  bool ragged;     // whether keys can be in no blocks (block_size 0)
  int block_unit;  // every other block_size is a multiple of it
  // The reason why a replay takes this format unasked, where a backend other than the reference runs it; null: a replay has to be asked.
  const char* preferred;
  // Throws Error spec.* for a kv_dtype, block_size or head dimensions that the format cannot have.
  void (*check)(const AttentionSpec&);
  // Describes a tensor that holds tokens, and returns nothing for any other: k_scale and v_scale hold tokens only in formats that store
  // scales with them. Scales that the caller gives, one for all or one a head, are in no format.
  std::optional<KvLayout> (*layout)(const AttentionSpec&, KvPart);
  // Writes one record of keys (KvPart::k, of which k_rope is a part) or of values (KvPart::v). Elements of kv_dtype keep their bits; those
  // of one of new_kv_dtypes() are converted.
  void (*encode)(const AttentionSpec&, const KvCache&, KvPart, KvPlace, const KvRow&);
  // Reads one record: the head_dim_qk or head_dim_v numbers that it stands for.
  void (*decode)(const AttentionSpec&, const KvCache&, KvPart, KvPlace, double* row);
};

extern const KvCodec kStridedCodec, kAmxPackedCodec, kLatentCodec, kDsMlaCodec, kLatentRopeCodec;

bool is_kv_format(KvFormat);
const KvCodec& codec_of(KvFormat);  // Error spec.kv_format
inline const KvCodec& codec_of(const AttentionSpec& spec) { return codec_of(spec.kv_format); }
std::span<const KvFormat> kv_formats();                    // all of them, in the order of their numbers
std::string kv_format_names();                             // "strided, amx_packed or latent"
std::optional<KvFormat> find_kv_format(std::string_view);  // by name
// Adds a row to the table and returns the number of its format. `codec` must live as long as the process. No other thread may use the
// table meanwhile. Error kv_codec.full.
KvFormat add_kv_codec(const KvCodec& codec);

// Whether the spec would be valid with this format and block size.
bool fits(AttentionSpec, KvFormat, int block_size);
// The smallest block size of the format that is `least` or more; 0 stays 0.
int block_size_in(KvFormat, int least);

// Bytes of a block (where there are none: of a row) in all tensors that hold tokens. Error kv_cache.size.overflow.
int64_t block_bytes(const AttentionSpec&);

const TensorView& part_of(const KvCache&, KvPart);
TensorView& part_of(KvCache&, KvPart);
// Adds views of the values and of their scale to a cache whose values are a part of the keys; returns any other cache as it is.
KvCache with_values(const AttentionSpec&, const KvCache&);

// The number that a head's fp8 elements are multiplied by, from scales that the caller gave (one for all or one a head); 1 where none is.
float scale_of_head(const TensorView& scales, DType, int head);
// Throws Error spec.kv_dtype unless kv_dtype is one of the types that a format can hold as they are.
void check_element_type(const AttentionSpec&);

}  // namespace imbrex
