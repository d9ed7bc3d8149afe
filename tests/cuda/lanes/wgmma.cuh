#pragma once
// Stands in for src/cuda/kernels/wgmma.cuh where kernel texts run on the host: products of a warpgroup by the tables of the PTX ISA, each
// lane its own part of them.
#include <type_traits>

#include "async.cuh"
#include "cuda/lanes/widen.h"
#include "cuda/params.h"

namespace imbrex::cuda {

// A matrix in shared memory as its descriptor has it: lines of any number of bytes, in columns as wide as the swizzle.
struct SharedMatrix {
  u32 start, leading, stride, width;
  explicit SharedMatrix(u64 descriptor)
      : start(u32(descriptor & 0x3fff) << 4),
        leading(u32(descriptor >> 16 & 0x3fff) << 4),
        stride(u32(descriptor >> 32 & 0x3fff) << 4),
        width(256u >> (descriptor >> 62)) {
    if (width == 256) lanes::fail("a matrix without a swizzle");
  }
  template <class T>
  T at(int line, u32 byte) const {
    const int log_width = std::countr_zero(width);  // it is a power of two
    const u32 address = start + (byte >> log_width) * leading + u32(line) / 8 * stride + u32(line) % 8 * width + byte % (1u << log_width);
    T x;
    std::memcpy(&x, lanes::shared_at(swizzled(address, width), sizeof x), sizeof x);
    return x;
  }
};

// d[64 x n] += a[64 x 32 bytes] * b[32 bytes x n]. With g = lane / 4 and t = lane % 4, a lane of warp w holds of d and of a in registers
//   d_i: row 16 w + g for i % 4 < 2, else + 8; column 8 (i / 4) + 2 t + i % 2
//   a_i: row 16 w + g for even i, else + 8; bytes 16 (i / 2) + 4 t and the next three
template <int n, class Format>
struct WarpgroupProduct {
  using T = typename Format::Code;
  static constexpr int kDepth = 32 / sizeof(T);
  struct Rows {  // the two that a lane has of a
    T of[2][kDepth];
  };

  template <bool b_rows = false, bool a_rows = false>
  static void shared(float (&d)[n / 2], u64 a, u64 b, int add) {
    __syncwarp();
    multiply_later([&d, a = SharedMatrix(a), b = SharedMatrix(b), add] {
      Rows rows;
      for (int h = 0; h < 2; ++h) {
        const int row = warp_id() % 4 * 16 + lane_id() / 4 + 8 * h;
        for (int k = 0; k < kDepth; ++k) rows.of[h][k] = a_rows ? a.at<T>(k, u32(row) * sizeof(T)) : a.at<T>(row, k * sizeof(T));
      }
      multiply<b_rows>(d, rows, b, add);
    });
  }
  template <bool b_rows>
  static void registers(float (&d)[n / 2], const u32 (&a)[4], u64 b, int add) {
    struct Words {
      u32 of[4];
    };
    const Rows rows = lanes::meet(kMultiply, Words{{a[0], a[1], a[2], a[3]}}, [quad = lane_id() / 4 * 4](const Words* all) {
      u32 words[2][8];
      for (int t = 0; t < 4; ++t)
        for (int i = 0; i < 4; ++i) words[i % 2][i / 2 * 4 + t] = all[quad + t].of[i];
      return std::bit_cast<Rows>(words);
    });
    multiply_later([&d, rows, b = SharedMatrix(b), add] { multiply<b_rows>(d, rows, b, add); });
  }

 private:
  using Terms = lanes::Floats<kDepth>;

  template <bool b_rows>
  static void multiply(float (&d)[n / 2], const Rows& a, const SharedMatrix& b, int add) {
    Terms rows[2], terms;
    for (int h = 0; h < 2; ++h) lanes::widen<Format, kDepth>(a.of[h], rows[h]);
    const int t = lane_id() % 4;
    for (int i = 0; i < n / 2; i += 4) {
      const int column = i / 4 * 8 + t * 2;  // and the next one
      T columns[2][kDepth];
      if constexpr (b_rows) {
        for (int k = 0; k < kDepth; ++k) {
          const auto pair = b.at<std::array<T, 2>>(k, u32(column) * sizeof(T));
          columns[0][k] = pair[0], columns[1][k] = pair[1];
        }
      } else {
        for (int c = 0; c < 4; ++c) {  // halves of columns, 16 bytes that no swizzle parts
          const auto half = b.at<std::array<T, kDepth / 2>>(column + c / 2, u32(c % 2) * 16);
          std::copy(half.begin(), half.end(), columns[c / 2] + c % 2 * kDepth / 2);
        }
      }
      for (int c = 0; c < 2; ++c) {
        lanes::widen<Format, kDepth>(columns[c], terms);
        for (int h = 0; h < 2; ++h) {
          const float sum = lanes::sum_of<kDepth>(rows[h] * terms);
          d[i + c + 2 * h] = (add != 0 ? d[i + c + 2 * h] : 0.f) + sum;
        }
      }
    }
  }
};

template <int n, int type = kQType>
using Wgmma =
    WarpgroupProduct<n, std::conditional_t<type == kE4m3, lanes::E4m3, std::conditional_t<type == kBf16, lanes::Bf16, lanes::F16>>>;

}  // namespace imbrex::cuda
