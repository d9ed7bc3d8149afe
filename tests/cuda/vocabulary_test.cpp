// Every word of ptx.cuh, async.cuh and convert.cuh compiles, without a warning, for each architecture that has it.
#include <gtest/gtest.h>

#include <string>

#include "cuda/driver/cubin.h"
#include "cuda/driver/jit.h"
#include "cuda/needs.h"

namespace imbrex::cuda {
namespace {

constexpr const char* kCommon = R"(
#include "async.cuh"
#include "convert.cuh"
namespace imbrex::cuda {
extern "C" __device__ const unsigned smem_bytes = 4096;
extern "C" __global__ void words(const char* in, float* out, int n) {
  extern __shared__ char shared[];
  griddep_wait();
  griddep_launch();
  const u32 to = shared_address(shared) + 16 * lane_id();
  copy_async<16>(to, in, n > 1);
  copy_async<8>(to + 512, in);
  copy_async<4>(to + 1024, in, n > 2);
  copy_async_commit();
  copy_async_wait<0>();
  named_barrier_arrive(1, 256);
  named_barrier_sync(1, 256);
  store_shared(to, uint4{u32(n), 2, 3, 4}), store_shared(to + 8, uint2{u32(computed_here(n)), 6});
  u32 a[4], b[2], c[4], e[2];
  load_matrix(a, to), load_matrix(b, to), load_matrix_transposed(c, to), load_matrix_transposed(e, to);
  float d[4] = {1, 2, 3, 4};
  mma_bf16(d, a, b[0], b[1]);
  mma_f16(d, c, e[0], e[1]);
  const uint4 once = load_once_16(in);
  const uint2 half = load_once_8(in + 16);
  float s = sum_over(d[0]) + max_over<4>(d[1]) + exp2_approx(d[2]) + log2_approx(d[3]) + reciprocal_approx(d[1]);
  s += shuffle(d[2], 3) + float(shuffle(once.x, 1) + u32(shuffle(n, 2))) + infinity() + float(warp_id()) + float(half.x);
  if (any_lane(s > 1)) s += 1;
  if (n < 0) trap();
  const float2 p = unpack_bf16(pack_bf16(d[0], d[1])), q = unpack_f16(pack_f16(d[2], d[3]));
  const u32 eight = pack_e4m3(p.x, p.y) | pack_e5m2(q.x, q.y) << 16;
  const float2 r = unpack_e4m3(eight, 0), t = unpack_e5m2(eight, 1);
  out[threadIdx.x] = s + r.x + r.y + t.x + t.y;
}
}  // namespace imbrex::cuda
)";

constexpr const char* kHopper = R"(
#include "async.cuh"
namespace imbrex::cuda {
extern "C" __global__ void __launch_bounds__(256) words(const __grid_constant__ TensorMap map, float* out) {
  __shared__ alignas(1024) char tile[16384];
  __shared__ u64 barriers[2];
  const u32 to = shared_address(tile), full = shared_address(&barriers[0]), empty = shared_address(&barriers[1]);
  if (threadIdx.x == 0) {
    tma_prefetch_map(map);
    mbarrier_init(full, 1), mbarrier_init(empty, 128);
    mbarrier_fence_init();
  }
  __syncthreads();
  cluster_sync();
  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(full, 8192);
      tma_load(to, map, full, l2_first_out(), 0, 0, 0);
      tma_load(to, map, full, l2_normal(), 0, 0, 0, 0);
    }
    mbarrier_wait(empty, 0);
  } else {
    mbarrier_wait(full, 0);
    async_proxy_fence();
    mbarrier_arrive(empty);
    out[threadIdx.x] = 1;
  }
}
}  // namespace imbrex::cuda
)";

constexpr const char* kExactly90 = R"(
#include "async.cuh"
namespace imbrex::cuda {
extern "C" __global__ void __launch_bounds__(384, 1) words(float* out) {
  __shared__ alignas(1024) char tile[8192];
  if (threadIdx.x < 128) {
    registers_shrink<24>();
  } else {
    registers_grow<240>();
    float d[4] = {};
    const u64 a = wgmma_descriptor(shared_address(tile), 16, 1024, 1);
    for (float& x : d) wgmma_pin(x);
    wgmma_fence();
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(a));
    wgmma_commit();
    wgmma_wait<0>();
    out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
  }
}
}  // namespace imbrex::cuda
)";

void expect_clean(const char* arch, const char* text) {
  const KernelKey key{"words.cu", arch, {}};
  const CompiledKernel kernel = compile_text(key, text);
  EXPECT_EQ(strict_problems(kernel), std::vector<std::string>{}) << key.str();
  ASSERT_EQ(entry_reports(kernel).size(), 1u) << kernel.log;
  EXPECT_EQ(entry_reports(kernel)[0].name, "words");
  EXPECT_GT(entry_reports(kernel)[0].registers, 0);
}

TEST(Vocabulary, CommonWords) {
  NEEDS_NVRTC();
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"}) expect_clean(arch, kCommon);
}

TEST(Vocabulary, BarriersAndTma) {
  NEEDS_NVRTC();
  for (const char* arch : {"sm_90", "sm_90a", "sm_100a"}) expect_clean(arch, kHopper);
  // ptxas 13.0 gives every kernel with a TMA load of a tensor 8 bytes of stack there.
  EXPECT_EQ(entry_reports(compile_text({"words.cu", "sm_120", {}}, kHopper)).size(), 1u);
}

TEST(Vocabulary, RegistersAndWgmma) {
  NEEDS_NVRTC();
  expect_clean("sm_90a", kExactly90);
}

}  // namespace
}  // namespace imbrex::cuda
