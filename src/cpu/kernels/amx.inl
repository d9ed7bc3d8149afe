// The AMX kernels, written in tile verbs; included by amx.cpp (hardware) and amx_emulated.cpp (tiles in memory, for tests).
//
// Roofline: 32 rows x 128 keys x 128 dims take 128 tile products of 16 cycles each; meanwhile the vector unit can retire 16 operations
// a product, about what the softmax of the block needs. So one loop over the 32 rows issues a slice of products, then the softmax of
// one row: the products of the block before (PV) and of the block after (QK) run in the shadow of this block's exponentials.
// Rows are all q heads of a kv head for some tokens, so K and V tiles are read from L1 or L2 for many rows (docs/kernels/cpu_amx.md).
#include "cpu/params.h"
// clang-format off
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/rows.inl"
#include "cpu/kernels/row_parts.inl"
#include "cpu/kernels/write_kv.inl"
#include "cpu/kernels/avx512_math.inl"
#include "cpu/kernels/avx512_rows.inl"
#ifdef IMBREX_AMX_EMULATED
#include "cpu/kernels/amx_tiles_emulated.inl"
#else
#include "cpu/kernels/amx_tiles_hardware.inl"
#endif
#include "cpu/kernels/amx_stage.inl"
#include "cpu/kernels/amx_scratch.inl"
#include "cpu/kernels/amx_softmax.inl"
#include "cpu/kernels/amx_jobs.inl"
#include "cpu/kernels/amx_fetch.inl"
#include "cpu/kernels/amx_decode.inl"
#include "cpu/kernels/interleave.inl"
#include "cpu/kernels/latent.inl"
#include "cpu/kernels/latent_softmax.inl"
#include "cpu/kernels/amx_latent_weights.inl"
#include "cpu/kernels/amx_latent_values.inl"
#include "cpu/kernels/amx_latent.inl"
// clang-format on

namespace imbrex::cpu {
namespace {

void pack_queries(const AttentionParams& a, const Scratch& s, const TileCounts& n) {
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    const Row& row = s.rows[i];
    const char* from = a.q + row.token * a.q_token_stride + row.head * a.q_head_stride;
    alignas(64) char scaled[2 * kMaxQueryDim];
    if (a.row_parts.second_factors) {
      float query[kMaxQueryDim];
      load_query(a, from, row.head / a.group, query);
      store_row(scaled, 2, kBf16, a.k.dim, query);
      from = scaled;
    }
    char* to = s.q + (i / 16) * (n.steps * 1024L) + i % 16 * 64;
    for (int k = 0; k < n.steps; ++k) _mm512_store_si512(to + k * 1024, load_bf16<kBf16>(from, 32 * k, a.k.dim));
  }
}

// Packs the queries of an item of few rows as right operands, for keys that are left operands.
void turn_queries(const Scratch& s, const TileCounts& n) {
  for (int b = 0; b < n.row_blocks; ++b)
    for (int k = 0; k < n.steps; ++k) turn_tile(s.q + (2L * b * n.steps + k) * 1024);
}

void clear(const Scratch& s, const TileCounts& n) {
  for (int b = 0; b < n.row_blocks; ++b) s.fresh[b] = true;
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    s.max[i] = kEmptyMax;
    _mm512_store_ps(s.sum + 16 * i, _mm512_setzero_ps());
  }
}

// Copies row i's output from its column tiles to a contiguous row.
IMBREX_INLINE void gather_out(const Scratch& s, const TileCounts& n, int i, float* row) {
  const float* tiles = s.out + row_offset(i, n.dim_tiles);
  const __mmask16 any = s.fresh[i / kRowBlock] ? 0 : 0xffff;
  for (int t = 0; t < n.dim_tiles; ++t) _mm512_storeu_ps(row + 16 * t, _mm512_maskz_load_ps(any, tiles + 256 * t));
}

// The keys that rows see, of each block of rows.
void describe_blocks(const Scratch& s, const TileCounts& n, int kv_end) {
  for (int i = 0; i < n.row_blocks * kRowBlock; ++i) {
    const Row& row = s.rows[i];
    RowBlock& b = s.blocks[i / kRowBlock];
    if (i % kRowBlock == 0) b = {row.lo, row.hi, row.lo, row.hi};
    if (row.lo < row.hi && row.lo < b.lo) b.lo = row.lo;
    if (row.hi > b.hi) b.hi = row.hi;
    if (row.lo > b.all_lo) b.all_lo = row.lo;
    if (row.hi < b.all_hi) b.all_hi = row.hi;
  }
  for (int b = 0; b < n.row_blocks; ++b) {
    if (s.blocks[b].hi > kv_end) s.blocks[b].hi = kv_end;
  }
}

// The loop that fits the shape: compile-time trip counts for head dims 64, 128 and 256.
template <Logits logits>
void run_list(JobList& list, bool narrow) {
  const int steps = list.n.steps, dims = list.n.dim_tiles / 2;
  if (narrow) {
    run_narrow<logits>(list);
  } else if (steps == 4 && dims == 4) {
    run_jobs<4, 4, logits>(list);
#ifndef IMBREX_FEW_SHAPES
  } else if (steps == 2 && dims == 2) {
    run_jobs<2, 2, logits>(list);
  } else if (steps == 8 && dims == 8) {
    run_jobs<8, 8, logits>(list);
#endif
  } else {
    run_jobs<0, 0, logits>(list);
  }
}

bool attention(const AttentionParams& a, const WorkItem& item, int kv_head, NextTask next, char* memory) {
  if (shares_latents(a)) return attend_latent_heads<LatentProducts>(a, item, kv_head, next, memory);
  const int num_rows = (item.q_end - item.q_begin) * a.group, heads = a.heads_together;
  const TileCounts n = tile_counts(a, num_rows, heads);
  Scratch s;
  layout(memory, a, num_rows, heads, &s);
  const int blocks_each = n.row_blocks / heads, all_rows = n.row_blocks * kRowBlock;
  // Calls visit(i) for each row. The rows of each head are followed by padding.
  const auto for_rows = [&](auto visit) {
    for (int h = 0; h < heads; ++h)
      for (int r = 0; r < num_rows; ++r) visit(h * blocks_each * kRowBlock + r);
  };
  for (int h = 0; h < heads; ++h) fill_rows(a, item, kv_head + h, s.rows + h * blocks_each * kRowBlock);
  const Visible keys = item_keys(a, item, s.rows, num_rows);
  const bool capped = a.soft_cap > 0.f;
  bool regular = !a.alibi_slopes && !a.bias_by_distance && !a.modify_scores && !a.custom_mask;
  for (int i = 0; i < all_rows; ++i) {
    const int first = i / (blocks_each * kRowBlock) * (blocks_each * kRowBlock);  // of the head
    if (i - first >= num_rows) s.rows[i] = s.rows[first + num_rows - 1];  // padding does what the last row does, so that it needs no mask
    const Row& row = s.rows[i];
    s.scale[i] = row.scale * kLog2e;
    if (capped) s.curves[i] = i - first < a.group ? cap_curve(row.scale, a.soft_cap) : s.curves[i - a.group];
    regular = regular && (capped || row.scale > 0.f);
  }
  describe_blocks(s, n, item.kv_end);
  const bool narrow = num_rows <= kNarrowRows;
  tiles_shape(narrow ? num_rows : 16);
  char* zero = const_cast<char*>(s.stage[0].zero);
  const long zero_bytes = n.steps * 1024L > kMaxDim * 4L ? n.steps * 1024L : kMaxDim * 4L;
  for (long i = 0; i < zero_bytes; i += 64) _mm512_store_si512(zero + i, _mm512_setzero_si512());
  pack_queries(a, s, n);
  if (s.stage[0].as_rows) turn_queries(s, n);
  clear(s, n);

  float row_out[kMaxDim + 32];
  bool folded = false;
  KeyBlocks block(a, item), before = block;
  while (!block.done()) {
    const int begin = block.key();
    const long split_end = (begin / a.split_keys + 1L) * a.split_keys;
    const int end = split_end < block.end() && item.partial < 0 ? int(split_end) : block.end();
    if (block.begins()) {
      show(a, item, s.rows, all_rows, block);
      describe_blocks(s, n, item.kv_end);
    }
    if (block.leaves_split(before) && item.partial < 0) {
      for_rows([&](int i) {
        float* into = s.folded + long(i) * n.dim_tiles * 16;
        if (!folded) {
          s.folded_max[i] = kEmptyMax;
          s.folded_sum[i] = 0.f;
          for (int t = 0; t < n.dim_tiles; ++t) _mm512_storeu_ps(into + 16 * t, _mm512_setzero_ps());
        }
        gather_out(s, n, i, row_out);
        fold(into, s.folded_max + i, s.folded_sum + i, row_out, s.max[i], _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i)), a.v.dim);
      });
      clear(s, n);
      folded = true;
    }
    JobList list{.a = a,
                 .item = item,
                 .s = s,
                 .n = n,
                 .kv_head = kv_head,
                 .heads = heads,
                 .keys = keys,
                 .regular = regular,
                 .masked = any_custom(s.rows, all_rows),
                 .stage_later = narrow,
                 .kb = begin,
                 .end = end,
                 .tiles = s.tiles};
    if (capped) {
      run_list<kCapped>(list, narrow);
    } else {
      run_list<kPlain>(list, narrow);
    }
    before = block;
    block.skip_to(end);
  }
  bool finite = true;
  for_rows([&](int i) {
    gather_out(s, n, i, row_out);
    const float* out = row_out;
    float max = s.max[i], sum = _mm512_reduce_add_ps(_mm512_load_ps(s.sum + 16 * i));
    if (folded) {
      float* into = s.folded + long(i) * n.dim_tiles * 16;
      fold(into, s.folded_max + i, s.folded_sum + i, row_out, max, sum, a.v.dim);
      out = into, max = s.folded_max[i], sum = s.folded_sum[i];
    }
    finite &= finish_row(a, item, s.rows[i], out, max, sum);
  });
  return finite;
}

long scratch_bytes(const AttentionParams& a, int max_rows) {
  const auto larger = [](long x, long y) { return x > y ? x : y; };
  const long wide = layout(nullptr, a, max_rows, 1, nullptr), narrow = layout(nullptr, a, kNarrowRows, kMostHeads, nullptr);
  return larger(larger(wide, narrow), latent_bytes<LatentProducts>(a, max_rows));
}

void enter() {}
void leave() { tiles_release(); }

}  // namespace
}  // namespace imbrex::cpu
