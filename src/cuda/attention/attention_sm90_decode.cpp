// See attention_sm90_decode.h.
#include "cuda/attention/attention_sm90_decode.h"

#include <algorithm>

#include "attention/kv_codec.h"
#include "cuda/driver/tensor_map.h"
#include "imbrex/work.h"

namespace imbrex::cuda {
namespace {

constexpr int kKeyWarps = 4;

int bytes_of_row(const AttentionSpec& spec, int dims) {
  const int width = attention_sm90_decode_width(spec, dims), bytes = dims * int(size_of(spec.kv_dtype));
  return (bytes + width - 1) / width * width;
}
// 16 of them, or 32 in bytes, are one warp's.
int tile_keys(const AttentionSpec& spec) { return is_fp8(spec.kv_dtype) ? 128 : 64; }

bool runs(std::string_view arch, const AttentionSpec& spec) {
  constexpr int kMostMaskedDims = 192;  // registers are short
  if (spec.mask.custom && std::max(spec.head_dim_qk, spec.head_dim_v) > kMostMaskedDims) return false;
  return arch.starts_with("sm_90") && spec.q_dtype != DType::f32 &&
         (spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::f16 || is_fp8(spec.kv_dtype)) && codec_of(spec).strided &&
         spec.head_dim_qk <= 256 && spec.head_dim_v <= 256 && !spec.mask.positions &&
         !(spec.mask.tree && has_window(spec.mask));  // for lack of registers
}

int row_bytes(int elements) { return (elements * 2 / 16 | 1) * 16; }

}  // namespace

int attention_sm90_decode_width(const AttentionSpec& spec, int dims) {
  // A row of its own width is followed by another row, so it has to have whole fragments: 16 dims, or 32 of bytes.
  constexpr int kHalfLine = kTensorMapLine / 2, kFragment = 32;  // bytes
  const int bytes = dims * int(size_of(spec.kv_dtype));
  const bool boxes = !has_small_pages(spec) && bytes % kFragment == 0;
  return bytes == kHalfLine || (boxes && bytes % kTensorMapLine != 0) ? bytes : kTensorMapLine;
}

std::optional<AttentionTiles> attention_sm90_decode_tiles(std::string_view arch, const AttentionSpec& spec, int rows) {
  if (!runs(arch, spec) || rows > 32 || spec.group_size() > rows) return std::nullopt;
  if (spec.mask.tree && rows > 16 && std::max(spec.head_dim_qk, spec.head_dim_v) > 128) return std::nullopt;  // for lack of registers
  // The shared memory of the kernel: stages of keys and values; queries, weights, and small arrays.
  const int keys = tile_keys(spec), q_slots = rows > 16 && std::max(spec.head_dim_qk, spec.head_dim_v) > 128 ? 2 : 1;
  const int stage = keys * (bytes_of_row(spec, spec.head_dim_qk) + bytes_of_row(spec, spec.head_dim_v));
  constexpr int kSlots = 4, kRowState = 4 * 16 + kSlots * 20, kRest = 1024;
  const int rest = rows * (q_slots * row_bytes((spec.head_dim_qk + 15) / 16 * 16) + 2 * row_bytes(keys) + kRowState) + kRest;
  for (int crews = rows > 16 ? 1 : 2; crews > 0; --crews) {
    const int stages = (kSm90SharedMemory / crews / kSm90SharedUnit * kSm90SharedUnit - rest) / stage;
    if (stages < (crews == 2 ? 3 : 2)) continue;
    AttentionTiles tiles{rows, keys, rows / 16, kKeyWarps, 1, std::min(stages, 6), crews};
    tiles.may_share = shares_items(spec, rows) && (rows <= 16 || !shares_items(spec, 16));
    return tiles;
  }
  return std::nullopt;
}

std::optional<AttentionTiles> attention_sm90_decode_sharing_tiles(std::string_view arch, const AttentionSpec& spec) {
  for (const int rows : {16, 32})
    if (const auto tiles = attention_sm90_decode_tiles(arch, spec, rows); tiles && tiles->may_share) return tiles;
  return std::nullopt;
}

int attention_sm90_decode_most_in_run(const AttentionSpec& spec, const AttentionTiles& tiles) {
  return tiles.rows > 16 && spec.head_dim_v > 128 ? kMostInRun / kPiecesTogether : kMostInRun;
}

unsigned attention_sm90_decode_threads(const AttentionTiles& tiles) { return unsigned(tiles.blocks * (tiles.threads() + 64)); }

KernelKey attention_sm90_decode_key(std::string_view arch, const AttentionSpec& spec, DType out, const AttentionTiles& tiles, bool maps) {
  KernelKey key = attention_sm80_key(arch, spec, out, tiles);
  key.path = "attention_sm90_decode.cu";
  key.config.push_back({"kMaps", maps});
  key.config.push_back({"kKWidth", attention_sm90_decode_width(spec, spec.head_dim_qk)});
  key.config.push_back({"kVWidth", attention_sm90_decode_width(spec, spec.head_dim_v)});
  return key;
}

bool attention_sm90_decode_maps(const AttentionSpec& spec, const TensorView&, const KvCache& kv, AttentionMaps& maps) {
  if (has_small_pages(spec)) return has_aligned_rows(kv.k) && has_aligned_rows(kv.v);
  return encode_kv_map(maps.k, kv.k, tile_keys(spec), attention_sm90_decode_width(spec, spec.head_dim_qk)) &&
         encode_kv_map(maps.v, kv.v, tile_keys(spec), attention_sm90_decode_width(spec, spec.head_dim_v));
}

}  // namespace imbrex::cuda
