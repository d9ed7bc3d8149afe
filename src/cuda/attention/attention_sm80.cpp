// Shapes of tiles for attention_sm80.cu, and the constants it is compiled with.
#include "cuda/attention/attention_sm80.h"

#include <algorithm>
#include <array>
#include <span>

#include "attention/kv_codec.h"
#include "attention/shared_keys.h"
#include "core/check.h"
#include "cuda/attention/attention_constants.h"
#include "cuda/attention/expressions.h"
#include "cuda/params.h"

namespace imbrex::cuda {
namespace {

struct SharedMemory {
  int of_block, of_multiprocessor;  // bytes; each block takes kReserved more than it asks for
};
constexpr int kReserved = 1024;
constexpr int kMostThreads = 384;  // on a multiprocessor, each with 168 registers or more

SharedMemory shared_memory_of(std::string_view arch) {
  switch (const int number = arch_number(arch) / 10; number) {
    case 80:
    case 87: return {163 << 10, 164 << 10};
    case 90:
    case 100:
    case 103: return {227 << 10, 228 << 10};
    default: return {99 << 10, 100 << 10};  // 86, 89, 120; the least of all that are known
  }
}

constexpr int rounded_up(int x, int to) { return (x + to - 1) / to * to; }
int row_bytes(int dim, int element) { return (rounded_up(dim, 16) * element / 16 | 1) * 16; }

// The spec with the type that tiles of keys in shared memory are made of: records are widened on the way in, to what holds their numbers.
AttentionSpec widened(AttentionSpec spec) {
  if (spec.kv_format == KvFormat::fp8_ds_mla) spec.kv_dtype = spec.q_dtype == DType::f32 ? DType::f32 : DType::bf16;
  return spec;
}

// The numbers of planes are those of attention_sm80_tiles.cuh.
int q_planes(const AttentionSpec& spec) { return spec.q_dtype == DType::f32 ? 3 : 1; }
int kv_planes(const AttentionSpec& spec) {
  if (spec.q_dtype != DType::f32) return 1;
  return spec.kv_dtype == DType::f32 ? 3 : spec.kv_dtype == DType::f16 ? 2 : 1;
}

// Whether the tile of keys has the values too: as many dims are read as those rows have.
bool values_are_there(const AttentionSpec& spec, const AttentionTiles& t) {
  return codec_of(spec).values_in_keys && rounded_up(spec.head_dim_v, 16 * t.dim_warps) <= rounded_up(spec.head_dim_qk, 16);
}

bool fits(const SharedMemory& memory, const AttentionSpec& spec, const AttentionTiles& tiles) {
  const int bytes = attention_sm80_smem_bytes(spec, tiles);
  return bytes <= memory.of_block && tiles.blocks * (bytes + kReserved) <= memory.of_multiprocessor;
}

// Bytes on their way are what decode is made of: several blocks with several tiles each, before either alone.
std::optional<AttentionTiles> decode_tiles(const SharedMemory& memory, const AttentionSpec& spec, int rows) {
  struct Depth {
    int blocks, stages;
  };
  constexpr Depth kDepths[] = {{3, 4}, {3, 3}, {2, 4}, {2, 3}, {2, 2}, {1, 4}, {1, 3}, {1, 2}, {1, 1}};
  // A warp holds the output of 32 rows x 128 dims or 16 x 256 in registers; planes of f32 take half of them.
  const bool exact = spec.q_dtype == DType::f32;
  const int warp_rows = spec.head_dim_v > 128 || exact ? 16 : std::min(rows, 32), row_warps = rows / warp_rows;
  const int dim_warps = (spec.head_dim_v > 256 ? 2 : 1) * (spec.head_dim_v > 128 && exact ? 2 : 1);
  const int most_blocks = rows > 16 || spec.head_dim_v > 128 || exact ? 2 : 3;  // that registers suffice for
  for (int key_warps = std::max(1, 4 / (dim_warps * row_warps)); key_warps > 0; key_warps /= 2)
    for (const Depth& d : kDepths) {
      const AttentionTiles tiles{rows, 16 * key_warps, row_warps, key_warps, dim_warps, d.stages, d.blocks};
      if (d.blocks <= most_blocks && d.blocks * tiles.threads() <= kMostThreads && fits(memory, spec, tiles)) return tiles;
    }
  return std::nullopt;
}

// 32 rows a warp while output and scores leave room in the registers, then 16. Whatever a logit needs besides one scale takes registers
// too, and so do widened bytes, positions that are given, and a mask_mod beside another mask: fewer keys at a time.
std::optional<AttentionTiles> prefill_tiles(const SharedMemory& memory, const AttentionSpec& spec) {
  // Each is {rows, keys, row_warps, key_warps, dim_warps, stages, blocks}; the first that fits shared memory is taken.
  static constexpr AttentionTiles kUpTo128[] = {
      {128, 64, 4, 1, 1, 2, 2}, {128, 32, 4, 1, 1, 2, 2}, {128, 32, 4, 1, 1, 2, 1}, {64, 32, 2, 1, 1, 2, 1}};
  static constexpr AttentionTiles kUpTo256[] = {
      {128, 64, 8, 1, 1, 2, 1}, {128, 32, 8, 1, 1, 2, 1}, {64, 32, 4, 1, 1, 2, 1}, {64, 16, 4, 1, 1, 2, 1}};
  static constexpr AttentionTiles kBeyond[] = {
      {64, 32, 4, 1, 2, 2, 1}, {64, 16, 4, 1, 2, 2, 1}, {32, 16, 2, 1, 2, 2, 1}, {16, 16, 1, 1, 2, 2, 1}, {16, 16, 1, 1, 2, 1, 1}};
  static constexpr AttentionTiles kF32[] = {
      {64, 16, 4, 1, 1, 2, 2}, {64, 16, 4, 1, 1, 2, 1}, {32, 16, 2, 1, 1, 2, 1}, {16, 16, 1, 1, 1, 2, 1}};
  static constexpr AttentionTiles kF32Beyond[] = {{32, 16, 2, 1, 2, 2, 1}, {16, 16, 1, 1, 2, 2, 1}, {16, 16, 1, 1, 2, 1, 1}};
  static constexpr AttentionTiles kF32Far[] = {{16, 16, 1, 1, 4, 2, 1}, {16, 16, 1, 1, 4, 1, 1}};
  std::span<const AttentionTiles> ladder = kUpTo128;
  if (spec.q_dtype == DType::f32) {
    if (spec.head_dim_v > 256) {
      ladder = kF32Far;
    } else if (spec.head_dim_v > 128) {
      ladder = kF32Beyond;
    } else {
      ladder = kF32;
    }
  } else if (spec.head_dim_v > 256) {
    ladder = kBeyond;
  } else if (spec.head_dim_v > 128) {
    ladder = kUpTo256;
  } else if (!has_plain_logits(spec) || (!spec.mask_mod.empty() && (spec.mask.causal || has_window(spec.mask))) || spec.mask.positions ||
             spec.mask.tree || spec.kv_dtype != spec.q_dtype || is_fp8(spec.kv_dtype)) {
    ladder = ladder.subspan(1);
  }
  for (const AttentionTiles& tiles : ladder)
    if (fits(memory, spec, tiles)) return tiles;
  return std::nullopt;
}

}  // namespace

namespace {

std::optional<AttentionTiles> tiles_of(const SharedMemory& memory, const AttentionSpec& spec, gpu::Regime regime, int rows) {
  if (regime == gpu::kPrefill) return prefill_tiles(memory, spec);
  const int wanted = std::max(rows, std::min(spec.group_size(), 64));
  for (int most = wanted <= 16 ? 16 : wanted <= 32 ? 32 : 64; most >= 16; most /= 2)
    if (const auto tiles = decode_tiles(memory, spec, most)) return tiles;
  return std::nullopt;
}

}  // namespace

std::optional<AttentionTiles> attention_sm80_tiles(std::string_view arch, const AttentionSpec& spec, gpu::Regime regime, int rows) {
  const SharedMemory memory = shared_memory_of(arch);
  // A latent has the tiles of a cache that stores both, and so its bits. What the values leave free holds more tiles at a time.
  AttentionSpec stored = widened(spec);
  if (codec_of(spec).values_in_keys) stored.kv_format = KvFormat::strided;
  std::optional<AttentionTiles> tiles = tiles_of(memory, stored, regime, rows);
  constexpr int kMostStages = 4;
  while (tiles && values_are_there(spec, *tiles) && tiles->stages < kMostStages) {
    AttentionTiles deeper = *tiles;
    ++deeper.stages;
    if (!fits(memory, spec, deeper)) break;
    tiles = deeper;
  }
  if (tiles) tiles->may_share = regime == gpu::kDecode && tiles->key_warps > 1 && shares_items(spec, tiles->rows);
  return tiles;
}

std::optional<AttentionTiles> attention_sm80_sharing_tiles(std::string_view arch, const AttentionSpec& spec) {
  const auto usual = attention_sm80_tiles(arch, spec, gpu::kDecode);
  if (!usual || usual->may_share) return usual;
  // Twice the warps for twice the rows: of each row they compute what those of the usual tile do.
  AttentionTiles larger = *usual;
  larger.rows *= 2, larger.item_rows *= 2, larger.row_warps *= 2, larger.blocks = 1;
  larger.may_share = larger.key_warps > 1 && larger.row_warps <= 2 && shares_items(spec, larger.rows);
  while (larger.stages > 1 && !fits(shared_memory_of(arch), spec, larger)) --larger.stages;
  return larger.may_share && fits(shared_memory_of(arch), spec, larger) ? std::optional(larger) : std::nullopt;
}

bool shares_items(const AttentionSpec& spec, int rows) {
  return spec.block_size > 0 && 2 * spec.group_size() <= rows && is_position_free(spec);
}

int attention_sm80_smem_bytes(const AttentionSpec& given, const AttentionTiles& t) {
  const AttentionSpec spec = widened(given);
  const int element = is_fp8(spec.kv_dtype) && spec.q_dtype != DType::f32 ? 1 : 2;
  const int v_dims = rounded_up(spec.head_dim_v, 16 * t.dim_warps);
  const int q = q_planes(spec) * t.rows * row_bytes(spec.head_dim_qk, 2);
  const int row = row_bytes(spec.head_dim_qk, element) + (values_are_there(spec, t) ? 0 : row_bytes(v_dims, element));
  const int stage = kv_planes(spec) * t.keys / t.key_warps * row;
  const int part = t.key_warps > 1 ? t.rows * (v_dims + 8) * 4 : 0;
  // Sizes of members of SharedStorage in attention_sm80.cu; tests compare the sum with the compiled kernel's.
  constexpr int kScale = 4, kRowTerms = 16;  // ItemSlot: two arrays of rows, and the item
  const int item = given.mask.tree ? 80 : 56;
  constexpr int kState = 8;  // state of a row and team
  constexpr int kTask = 8;   // next_task and ended
  const int slot = rounded_up(q + t.rows * (kScale + kRowTerms) + item, 16), state = t.key_warps * t.rows * kState;
  return rounded_up(slot + t.key_warps * std::max(t.stages * stage, part) + state + kTask, 16);
}

KernelKey attention_sm80_key(std::string_view arch, const AttentionSpec& spec, DType out, const AttentionTiles& t) {
  return {"attention_sm80.cu", std::string(arch),
          attention_constants(widened(spec), out,
                              {{"kTileRows", t.rows},
                               {"kItemRows", t.item_rows},
                               {"kTileKeys", t.keys},
                               {"kRowWarps", t.row_warps},
                               {"kKeyWarps", t.key_warps},
                               {"kDimWarps", t.dim_warps},
                               {"kStages", t.stages},
                               {"kBlocks", t.blocks}},
                              1, t.whole_items),
          expression_functions(spec)};
}

KernelKey sharing(KernelKey key) {
  std::ranges::find(key.config, std::string_view("kShares"), &Constant::name)->value = true;
  return key;
}

KernelKey merge_key(std::string_view arch, const AttentionSpec& spec, DType out) {
  return {"merge.cu",
          std::string(arch),
          {{"kHeadDimV", spec.head_dim_v},
           {"kOutType", int(out)},
           {"kGroup", spec.group_size()},
           {"kSinks", spec.score.sinks},
           {"kShortSums", false},
           {"kShares", false}}};
}

}  // namespace imbrex::cuda
