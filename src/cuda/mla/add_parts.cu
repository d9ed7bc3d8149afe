// Partial results of a round join those of the rounds before it, by their log-sum-exps, and the last ones become outputs; launched by
// cuda/mla/steps.cpp. A token's parts come in the order of its keys, one a round, so that a sum needs no more memory than one result.
//
// A warp takes a row of a head. Memory: a part is read once, a sum at most read once and written once.
#include "convert.cuh"
#include "cuda/params.h"
#include "mla_rows.cuh"

namespace imbrex::cuda {

DEVICE void store_output(const AddPartsParams& p, char* to, int d, float x) {
  if (p.out_type == kF32) {
    reinterpret_cast<float*>(to)[d] = x;
  } else {
    reinterpret_cast<u16*>(to)[d] = u16(p.out_type == kBf16 ? pack_bf16(x, 0.f) : pack_f16(x, 0.f));
  }
}

DEVICE bool is_empty(float lse) { return lse == -infinity(); }

// The shares of two results of their joint one. A NaN in either makes both NaN.
struct Joined {
  float lse, before, now;
};
DEVICE Joined join(float before, float now) {
  if (is_empty(now)) return {before, 1.f, 0.f};
  if (is_empty(before)) return {now, 0.f, 1.f};
  const float highest = before > now ? before : now, a = expf(before - highest), b = expf(now - highest), sum = a + b;
  return {highest + logf(sum), a / sum, b / sum};
}

DEVICE void add_row(const AddPartsParams& p, int row, int head) {
  const TokenRows range = p.ranges[range_of(p.ranges, p.num_ranges, row)];
  const long token = range.token + row - range.row, of_part = long(row) * p.num_heads + head;
  const long of_sum = long(range.sum + row - range.row) * p.num_heads + head;
  const int lane = lane_id();
  const float* const part = p.part + of_part * p.dim;
  float* const sum = p.sum + of_sum * p.dim;
  Joined joined{p.part_lse[of_part], 0.f, is_empty(p.part_lse[of_part]) ? 0.f : 1.f};
  if (!range.first) joined = join(p.sum_lse[of_sum], p.part_lse[of_part]);
  __syncwarp();                    // all lanes have read sum_lse
  const auto value = [&](int d) {  // what weighs nothing may be anything
    const float old = joined.before != 0.f ? joined.before * sum[d] : 0.f;
    return joined.now != 0.f ? old + joined.now * part[d] : old;
  };
  if (!range.last) {
    for (int d = lane; d < p.dim; d += 32) sum[d] = value(d);
    if (lane == 0) p.sum_lse[of_sum] = joined.lse;
    return;
  }
  if (is_empty(joined.lse)) joined.before = joined.now = 0.f;
  float share = 1.f, lse = joined.lse;
  if (p.sinks != nullptr && !is_empty(lse)) {
    const Joined with_sink = join(lse, p.sinks[head * p.sink_stride]);
    share = with_sink.before, lse = with_sink.lse;
  }
  char* const out = p.out + token * p.out_token + head * p.out_head;
  for (int d = lane; d < p.dim; d += 32) store_output(p, out, d, share * value(d));
  if (lane == 0 && p.lse != nullptr) p.lse[token * p.lse_token + head * p.lse_head] = lse;
}

extern "C" __global__ void __launch_bounds__(kMlaThreads) add_parts(const __grid_constant__ AddPartsParams p) {
  griddep_wait();
  constexpr int kWarps = kMlaThreads / 32;
  const long all = long(p.num_rows) * p.num_heads;
  for (long i = long(blockIdx.x) * kWarps + threadIdx.x / 32; i < all; i += long(gridDim.x) * kWarps)
    add_row(p, int(i / p.num_heads), int(i % p.num_heads));
}

}  // namespace imbrex::cuda
