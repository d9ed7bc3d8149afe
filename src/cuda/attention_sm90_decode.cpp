// See attention_sm90_decode.h.
#include "cuda/attention_sm90_decode.h"

#include <algorithm>

#include "cuda/tensor_map.h"
#include "imbrex/work.h"

namespace imbrex::cuda {
namespace {

constexpr int kKeyWarps = 4;

int lines(int dims, DType t) { return (dims * int(size_of(t)) + kTensorMapLine - 1) / kTensorMapLine; }
// 16 of them, or 32 in bytes, are one warp's.
int tile_keys(const AttentionSpec& spec) { return is_fp8(spec.kv_dtype) ? 128 : 64; }

bool runs(std::string_view arch, const AttentionSpec& spec) {
  return arch.starts_with("sm_90") && spec.q_dtype != DType::f32 &&
         (spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::f16 || is_fp8(spec.kv_dtype)) && spec.kv_format == KvFormat::strided &&
         spec.head_dim_qk <= 256 && spec.head_dim_v <= 256;
}

int row_bytes(int elements) { return (elements * 2 / 16 | 1) * 16; }

}  // namespace

std::optional<AttentionTiles> attention_sm90_decode_tiles(std::string_view arch, const AttentionSpec& spec, int rows) {
  if (!runs(arch, spec) || rows > 32 || spec.group_size() > rows) return std::nullopt;
  // As in the kernel: stages of keys and values; queries, weights, and what is small.
  const int keys = tile_keys(spec), q_slots = rows > 16 && std::max(spec.head_dim_qk, spec.head_dim_v) > 128 ? 2 : 1;
  const int stage = keys * kTensorMapLine * (lines(spec.head_dim_qk, spec.kv_dtype) + lines(spec.head_dim_v, spec.kv_dtype));
  constexpr int kSlots = 4, kRowState = 4 * 16 + kSlots * 20, kRest = 1024;
  const int rest = rows * (q_slots * row_bytes((spec.head_dim_qk + 15) / 16 * 16) + 2 * row_bytes(keys) + kRowState) + kRest;
  for (int crews = rows > 16 ? 1 : 2; crews > 0; --crews) {
    const int stages = (kSm90SharedMemory / crews / kSm90SharedUnit * kSm90SharedUnit - rest) / stage;
    if (stages >= (crews == 2 ? 3 : 2)) return AttentionTiles{rows, keys, rows / 16, kKeyWarps, 1, std::min(stages, 6), crews};
  }
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
  return key;
}

bool attention_sm90_decode_maps(const AttentionSpec& spec, const TensorView&, const KvCache& kv, AttentionMaps& maps) {
  if (has_small_pages(spec)) return has_aligned_rows(kv.k) && has_aligned_rows(kv.v);
  return encode_kv_map(maps.k, kv.k, tile_keys(spec)) && encode_kv_map(maps.v, kv.v, tile_keys(spec));
}

}  // namespace imbrex::cuda
