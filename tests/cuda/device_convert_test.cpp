// The conversions of convert.cuh on a GPU against core/float_types.h: every code, and floats around everything that rounds.
#include <cmath>

#include "core/float_types.h"
#include "cuda/driver/jit.h"
#include "cuda/gpu.h"

namespace imbrex::cuda {
namespace {

constexpr const char* kText = R"(
#include "convert.cuh"
namespace imbrex::cuda {
// Converts f32: out[i] is given bf16, f16, e4m3, e5m2, and both fp8 again without the instruction.
extern "C" __global__ void narrow(const float* in, u32* out, int n) {
  const int i = int(blockIdx.x * blockDim.x + threadIdx.x) * 2;
  if (i >= n) return;
  const u32 words[6] = {pack_bf16(in[i], in[i + 1]), pack_f16(in[i], in[i + 1]),          pack_e4m3(in[i], in[i + 1]),
                        pack_e5m2(in[i], in[i + 1]), pack_e4m3_by_bits(in[i], in[i + 1]), pack_e5m2_by_bits(in[i], in[i + 1])};
  for (int w = 0; w < 6; ++w) out[i / 2 * 6 + w] = words[w];
}
// Converts every byte, in each place b of a word: e4m3 and e5m2 become f32, through f16.
extern "C" __global__ void widen(float2* out) {
  const u32 code = threadIdx.x;
  for (int b = 0; b < 4; ++b) {
    const u32 four = code << 8 * b;
    const u32 halves[3] = {e4m3_to_f16(four, b / 2), e4m3_to_f16_by_bits(four, b / 2), e5m2_to_f16(four, b / 2)};
    for (int k = 0; k < 3; ++k) out[(code * 4 + b) * 3 + k] = unpack_f16(halves[k]);
  }
}
// Converts every 16-bit code, in both places of a word.
extern "C" __global__ void widen16(float2* out) {
  const u32 code = blockIdx.x * blockDim.x + threadIdx.x, pair = code | (code ^ 0x8000u) << 16;
  out[2 * code] = unpack_f16(pair);
  out[2 * code + 1] = unpack_bf16(pair);
}
}  // namespace imbrex::cuda
)";

class DeviceConvert : public test::Gpu {
 protected:
  // Loaded by hand: the text is not one of the embedded ones.
  CUfunction function(const char* name) {
    const DriverApi& cu = need_driver();
    if (library == nullptr) {
      compiled = compile_text({"convert_test.cu", arch_of(device), {}}, kText);
      check_cuda(cu.cuLibraryLoadData(&library, compiled.binary.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "load");
    }
    CUkernel kernel = nullptr;
    CUfunction result = nullptr;
    check_cuda(cu.cuLibraryGetKernel(&kernel, library, name), "find {}", name);
    check_cuda(cu.cuKernelGetFunction(&result, kernel), "find {}", name);
    return result;
  }
  void TearDown() override {
    if (library) need_driver().cuLibraryUnload(library);
  }
  void launch(const char* name, unsigned blocks, unsigned threads, std::vector<void*> params) {
    check_cuda(need_driver().cuLaunchKernel(function(name), blocks, 1, 1, threads, 1, 1, 0, stream.get(), params.data(), nullptr),
               "launch");
  }
  CompiledKernel compiled;
  CUlibrary library = nullptr;
};

struct FloatPair {
  float x, y;
};

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

// Two codes of a type are equal, or both NaN.
bool same_code(DType type, uint32_t a, uint32_t b) {
  return a == b || (std::isnan(load_as_float(&a, type, 0)) && std::isnan(load_as_float(&b, type, 0)));
}

TEST_F(DeviceConvert, EveryNarrowCodeWidens) {
  DeviceBuffer out(context, 256 * 4 * 3 * sizeof(FloatPair));
  CUdeviceptr address = out.address();
  launch("widen", 1, 256, {&address});
  const auto pairs = download<FloatPair>(out);
  for (uint32_t code = 0; code < 256; ++code) {
    const float e4m3 = fp8_e4m3_to_float(uint8_t(code)), e5m2 = fp8_e5m2_to_float(uint8_t(code));
    const float expected[3] = {e4m3, e4m3, e5m2};
    for (int b = 0; b < 4; ++b)
      for (int k = 0; k < 3; ++k) {
        const FloatPair pair = pairs[(code * 4 + b) * 3 + k];
        EXPECT_TRUE(same(b % 2 == 0 ? pair.x : pair.y, expected[k])) << "code " << code << " byte " << b << " way " << k;
        EXPECT_EQ(b % 2 == 0 ? pair.y : pair.x, 0.f);
      }
  }
}

TEST_F(DeviceConvert, EverySixteenBitCodeWidens) {
  DeviceBuffer out(context, 65536 * 2 * sizeof(FloatPair));
  CUdeviceptr address = out.address();
  launch("widen16", 256, 256, {&address});
  const auto pairs = download<FloatPair>(out);
  for (uint32_t code = 0; code < 65536; ++code) {
    EXPECT_TRUE(same(pairs[2 * code].x, f16_to_float(uint16_t(code)))) << code;
    EXPECT_TRUE(same(pairs[2 * code].y, f16_to_float(uint16_t(code ^ 0x8000)))) << code;
    EXPECT_TRUE(same(pairs[2 * code + 1].x, bf16_to_float(uint16_t(code)))) << code;
    EXPECT_TRUE(same(pairs[2 * code + 1].y, bf16_to_float(uint16_t(code ^ 0x8000)))) << code;
  }
}

TEST_F(DeviceConvert, FloatsAreRoundedAndSaturated) {
  // Every value that a narrow type has, the middle to the next one, and the floats beside these; then a grid over all exponents.
  std::vector<float> in;
  const auto around = [&](uint32_t bits) {
    for (const uint32_t b : {bits - 1, bits, bits + 1})
      in.push_back(std::bit_cast<float>(b)), in.push_back(std::bit_cast<float>(b ^ 0x80000000u));
  };
  for (uint32_t code = 0; code < 128; ++code)
    for (const float x : {fp8_e4m3_to_float(uint8_t(code)), fp8_e5m2_to_float(uint8_t(code))}) {
      const uint32_t bits = std::bit_cast<uint32_t>(x);
      around(bits), around(bits + (1u << 19)), around(bits + (1u << 20));
      around(std::bit_cast<uint32_t>(x + 0x1p-10f)), around(std::bit_cast<uint32_t>(x + 0x1p-17f));
    }
  for (uint32_t high = 0; high < 0x8000; high += 3)
    for (const uint32_t low : {0u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u})
      in.push_back(std::bit_cast<float>(high << 16 | low));
  if (in.size() % 2 == 1) in.push_back(0);

  const DeviceBuffer source = upload(in), out(context, in.size() / 2 * 6 * 4);
  CUdeviceptr from = source.address(), to = out.address();
  int n = int(in.size());
  launch("narrow", unsigned(n / 2 + 127) / 128, 128, {&from, &to, &n});
  const auto words = download<uint32_t>(out);
  constexpr DType kTypes[6] = {DType::bf16, DType::f16, DType::fp8_e4m3, DType::fp8_e5m2, DType::fp8_e4m3, DType::fp8_e5m2};
  int wrong = 0;
  for (int i = 0; i < n; ++i)
    for (int w = 0; w < 6; ++w) {
      const int bits = int(size_of(kTypes[w])) * 8;
      const uint32_t got = words[i / 2 * 6 + w] >> (i % 2 * bits) & ((1u << bits) - 1);
      uint32_t expected = 0;
      store_from_float(&expected, kTypes[w], 0, in[i]);
      if (!same_code(kTypes[w], got, expected) && ++wrong < 20)
        ADD_FAILURE() << in[i] << " (" << std::bit_cast<uint32_t>(in[i]) << ") to " << to_string(kTypes[w]) << " way " << w << ": " << got
                      << ", expected " << expected;
    }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace imbrex::cuda
