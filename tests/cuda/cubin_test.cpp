// What a compiled kernel tells: ptxas' log, and constants in the ELF file, whole or broken.
#include "cuda/driver/cubin.h"

#include <gtest/gtest.h>

#include "cuda/needs.h"
#include "cuda/tiny_elf.h"

namespace imbrex::cuda {
namespace {

constexpr const char* kLog = R"(a.cu(10): warning #177-D: variable "unused" was declared but never referenced
ptxas warning : Value of threads per SM for entry bar is out of range. .minnctapersm will be ignored
ptxas info    : 4 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources
ptxas info    : Compiling entry function 'bar' for 'sm_80'
ptxas info    : Function properties for bar
ptxas         .     776 bytes stack frame, 768 bytes spill stores, 764 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 776 bytes cumulative stack size, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'foo' for 'sm_80'
ptxas info    : Function properties for foo
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 254 registers, used 1 barriers, 256 bytes smem, 364 bytes cmem[0]
)";

TEST(Cubin, TheLogIsRead) {
  const CompiledKernel kernel{.binary = test::tiny_elf({{"smem_bytes", 70000}, {"foo_smem_bytes", 12}}), .log = kLog};
  const auto entries = entry_reports(kernel);
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].name, "bar");
  EXPECT_EQ(entries[0].registers, 32);
  EXPECT_EQ(entries[0].stack_bytes, 776);
  EXPECT_EQ(entries[0].spill_store_bytes, 768);
  EXPECT_EQ(entries[0].spill_load_bytes, 764);
  EXPECT_EQ(entries[0].static_smem_bytes, 0);
  EXPECT_EQ(entries[0].dynamic_smem_bytes, 70000);
  EXPECT_EQ(entries[1].name, "foo");
  EXPECT_EQ(entries[1].registers, 254);
  EXPECT_EQ(entries[1].stack_bytes, 0);
  EXPECT_EQ(entries[1].static_smem_bytes, 256);
  EXPECT_EQ(entries[1].dynamic_smem_bytes, 12);  // its own number is stronger than that of the file

  const auto problems = strict_problems(kernel);
  ASSERT_EQ(problems.size(), 5u);  // spills and stack of bar, and the first, second and fourth line
  EXPECT_NE(problems[0].find("768 bytes of spill stores"), std::string::npos);
  EXPECT_NE(problems[1].find("776 bytes of local memory"), std::string::npos);
  EXPECT_NE(problems[4].find("C7510"), std::string::npos);
}

TEST(Cubin, ALogWithoutComplaintsHasNoProblems) {
  std::string log(kLog);
  log = log.substr(log.find("ptxas info    : Compiling entry function 'foo'"));
  EXPECT_EQ(strict_problems({.binary = {}, .log = log}), std::vector<std::string>{});
  EXPECT_EQ(entry_reports({.binary = {}, .log = ""}).size(), 0u);
  EXPECT_EQ(entry_reports({.binary = {}, .log = "ptxas info    : Used 3 registers"}).size(), 0u);
}

TEST(Cubin, ConstantsAreFoundByName) {
  const std::string elf = test::tiny_elf({{"smem_bytes_of_another", 1}, {"smem_bytes", 4096}, {"smem", 2}});
  EXPECT_EQ(cubin_constant(elf, "smem_bytes"), 4096u);
  EXPECT_EQ(cubin_constant(elf, "smem"), 2u);
  EXPECT_EQ(cubin_constant(elf, "smem_"), std::nullopt);
  EXPECT_EQ(dynamic_smem_bytes(elf, "entry"), 4096u);
  EXPECT_EQ(dynamic_smem_bytes(test::tiny_elf({}), "entry"), 0u);
}

TEST(Cubin, ABrokenFileHasNoConstants) {
  const std::string elf = test::tiny_elf({{"smem_bytes", 4096}});
  for (size_t size = 0; size < elf.size(); ++size) EXPECT_EQ(cubin_constant(elf.substr(0, size), "smem_bytes"), std::nullopt) << size;
  // Any byte may be anything: an answer or none, but no access outside of the file (the sanitizers look).
  for (size_t at = 0; at < elf.size(); ++at)
    for (const int value : {0x00, 0x7f, 0xff}) {
      std::string broken = elf;
      broken[at] = char(value);
      cubin_constant(broken, "smem_bytes");
    }
}

TEST(Cubin, StrictFindsSpillsAndStack) {
  NEEDS_NVRTC();
  const CompiledKernel spills = compile_text({"spills.cu", "sm_80", {}}, R"(
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float a[200];
#pragma unroll
  for (int i = 0; i < 200; i++) a[i] = x[i * 17];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 200; i++) x[i] = a[199 - i];
})");
  ASSERT_EQ(entry_reports(spills).size(), 1u);
  EXPECT_GT(entry_reports(spills)[0].spill_store_bytes, 0);
  EXPECT_EQ(strict_problems(spills).size(), 2u);
  const CompiledKernel stack = compile_text({"stack.cu", "sm_90a", {}}, R"(
extern "C" __global__ void stack(float* x, int n) {
  float a[300];
  for (int i = 0; i < 300; i++) a[i] = x[i * n];
  x[0] = a[n];
})");
  EXPECT_GE(entry_reports(stack).at(0).stack_bytes, 1200);
  EXPECT_FALSE(strict_problems(stack).empty());
}

TEST(Cubin, StrictFindsSerialisedMatrixProducts) {
  NEEDS_NVRTC();
  // The accumulator is read between two products that have not been waited for.
  const CompiledKernel kernel = compile_text({"serial.cu", "sm_90a", {}}, R"(
#include "async.cuh"
namespace imbrex::cuda {
extern "C" __global__ void serial(float* out, int n) {
  __shared__ alignas(1024) char tile[8192];
  float d[4] = {};
  const u64 a = wgmma_descriptor(shared_address(tile), 16, 1024, 1);
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(a));
    out[i] = d[0];
  }
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = d[1] + d[2] + d[3];
}
})");
  const auto problems = strict_problems(kernel);
  ASSERT_FALSE(problems.empty()) << kernel.log;
  EXPECT_NE(problems[0].find("(C75"), std::string::npos) << problems[0];
}

}  // namespace
}  // namespace imbrex::cuda
