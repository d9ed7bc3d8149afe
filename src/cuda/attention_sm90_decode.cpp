// See attention_sm90_decode.h.
#include "cuda/attention_sm90_decode.h"

#include <algorithm>

#include "cuda/tensor_map.h"

namespace imbrex::cuda {
namespace {

constexpr int kTileKeys = 64, kKeyWarps = 4;
constexpr int kSharedMemory = 227 << 10;                 // of a thread block alone on a multiprocessor
constexpr int kSharedMemoryOfTwo = (228 / 2 - 1) << 10;  // of each of two

int lines(int dims, DType t) { return (dims * int(size_of(t)) + kTensorMapLine - 1) / kTensorMapLine; }

bool runs(std::string_view arch, const AttentionSpec& spec) {
  const int page = spec.block_size;
  return arch.starts_with("sm_90") && spec.q_dtype != DType::f32 &&
         (spec.kv_dtype == spec.q_dtype || spec.kv_dtype == DType::f16 || is_fp8(spec.kv_dtype)) && spec.kv_format == KvFormat::strided &&
         spec.head_dim_qk <= 256 && spec.head_dim_v <= 256 && (page == 0 || page % kTileKeys == 0 || (page >= 8 && kTileKeys % page == 0));
}

}  // namespace

std::optional<AttentionTiles> attention_sm90_decode_tiles(std::string_view arch, const AttentionSpec& spec, int rows) {
  if (!runs(arch, spec) || rows > 32 || spec.group_size() > rows) return std::nullopt;
  // As in the kernel: stages of keys and values that have room for parts of the rows, two slots of queries, and some small things.
  const int row_warps = rows / 16;
  const int stage = row_warps * (is_fp8(spec.kv_dtype) ? 2 : 1) * kTileKeys * kTensorMapLine *
                    (lines(spec.head_dim_qk, spec.kv_dtype) + lines(spec.head_dim_v, spec.kv_dtype));
  const int q_row = ((spec.head_dim_qk + 15) / 16 * 2 | 1) * 16, slots = 2 * (rows * (q_row + 20 + 8 * kKeyWarps) + 64), rest = 1024;
  for (int blocks = rows > 16 ? 1 : 2; blocks > 0; --blocks) {
    const int stages = ((blocks == 2 ? kSharedMemoryOfTwo : kSharedMemory) - slots - rest) / stage;
    if (stages >= (blocks == 2 ? 3 : 2)) return AttentionTiles{rows, kTileKeys, row_warps, kKeyWarps, 1, std::min(stages, 6), blocks};
  }
  return std::nullopt;
}

unsigned attention_sm90_decode_threads(const AttentionTiles& tiles) { return unsigned(tiles.threads()) + 64; }

KernelKey attention_sm90_decode_key(std::string_view arch, const AttentionSpec& spec, DType out, const AttentionTiles& tiles) {
  KernelKey key = attention_sm80_key(arch, spec, out, tiles);
  key.path = "attention_sm90_decode.cu";
  return key;
}

bool attention_sm90_decode_maps(const AttentionSpec&, const TensorView&, const KvCache& kv, AttentionMaps& maps) {
  return encode_kv_map(maps.k, kv.k, kTileKeys) && encode_kv_map(maps.v, kv.v, kTileKeys);
}

}  // namespace imbrex::cuda
