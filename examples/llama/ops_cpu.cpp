// Ops on the host. The product of matrices is plain blocking and vectors of the compiler, and takes the threads of imbrex; every element is
// summed in an order that depends on its row and column alone, so that a request's bits do not depend on what is batched with it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "check.h"
#include "floats.h"
#include "ops.h"

namespace llama {
namespace {

using imbrex::DType;
using imbrex::ParallelFor;
using imbrex::TensorView;

// Calls f with a null pointer of the tensor's element type.
template <class F>
void with_type(const TensorView& x, F&& f) {
  if (x.dtype == DType::f32) return f(static_cast<float*>(nullptr));
  if (x.dtype == DType::bf16) return f(static_cast<BFloat16*>(nullptr));
  fail("expected f32 or bf16, got ", imbrex::to_string(x.dtype));
}

// body(begin, end) over parts of [0, count), in units of `step`, side by side.
template <class Body>
void parallel(const ParallelFor& threads, int64_t count, int64_t step, Body&& body) {
  const int64_t steps = (count + step - 1) / step;
  const auto part = [&](int worker) {
    const int64_t begin = steps * worker / threads.num_workers * step, end = steps * (worker + 1) / threads.num_workers * step;
    if (begin < count) body(begin, std::min(end, count));
  };
  if (threads.invoke == nullptr) return part(0);
  threads.invoke(
      threads.context, threads.num_workers, [](void* argument, int worker) { (*static_cast<decltype(part)*>(argument))(worker); },
      const_cast<void*>(static_cast<const void*>(&part)));
}

constexpr int kLanes = 8;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using Halves = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

#define LLAMA_INLINE inline __attribute__((always_inline))

LLAMA_INLINE void load(const float* from, Floats& to) { std::memcpy(&to, from, sizeof to); }
LLAMA_INLINE void load(const BFloat16* from, Floats& to) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Words words = __builtin_convertvector(halves, Words) << 16;
  std::memcpy(&to, &words, sizeof to);
}

// sums[row, column] += x[row] . w[column] over `depth` elements, for tiles of rows and columns.
template <int rows, int columns, class T>
LLAMA_INLINE void multiply_tile(const float* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t depth, float* sums,
                                int64_t stride) {
  Floats parts[rows][columns] = {};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    Floats a[rows], b;
    for (int r = 0; r < rows; ++r) load(x + r * x_stride + k, a[r]);
    for (int c = 0; c < columns; ++c) {
      load(w + c * w_stride + k, b);
      for (int r = 0; r < rows; ++r) parts[r][c] += a[r] * b;
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) {
      const Floats& p = parts[r][c];
      float sum = ((p[0] + p[4]) + (p[2] + p[6])) + ((p[1] + p[5]) + (p[3] + p[7]));
      for (int64_t rest = k; rest < depth; ++rest) sum += x[r * x_stride + rest] * to_float(w[c * w_stride + rest]);
      sums[r * stride + c] += sum;
    }
  }
}

constexpr int kRows = 4, kColumns = 8;            // that are worked on together
constexpr int64_t kBlockRows = 64, kDepth = 512;  // of x that stay in a cache: 128 KiB

// sums[rows, columns] += x[rows, depth] w[columns, depth]^T. A tile has 8 vectors of sums: 4 x 2 of them, or 1 x 8 for rows left over, as
// in decode.
template <class T>
LLAMA_INLINE void multiply(const float* x, int64_t x_stride, int64_t rows, const T* w, int64_t w_stride, int64_t columns, int64_t depth,
                           float* sums) {
  const auto tile = [&](auto tile_rows, auto tile_columns, int64_t r, int64_t c) __attribute__((always_inline)) {
    multiply_tile<tile_rows, tile_columns>(x + r * x_stride, x_stride, w + c * w_stride, w_stride, depth, sums + r * columns + c, columns);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  int64_t c = 0;
  for (; c + kColumns <= columns; c += kColumns) {
    int64_t r = 0;
    for (; r + kRows <= rows; r += kRows)
      for (int64_t pair = c; pair < c + kColumns; pair += two) tile(std::integral_constant<int, kRows>(), two, r, pair);
    for (; r < rows; ++r) tile(one, std::integral_constant<int, kColumns>(), r, c);
  }
  for (; c < columns; ++c)
    for (int64_t r = 0; r < rows; ++r) tile(one, one, r, c);
}

// One copy for each kind of x86 CPU, chosen when the program starts.
#if defined(__x86_64__)
#define LLAMA_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define LLAMA_CLONES
#endif

LLAMA_CLONES void multiply_f32(const float* x, int64_t x_stride, int64_t rows, const float* w, int64_t w_stride, int64_t columns,
                               int64_t depth, float* sums) {
  multiply(x, x_stride, rows, w, w_stride, columns, depth, sums);
}
LLAMA_CLONES void multiply_bf16(const float* x, int64_t x_stride, int64_t rows, const BFloat16* w, int64_t w_stride, int64_t columns,
                                int64_t depth, float* sums) {
  multiply(x, x_stride, rows, w, w_stride, columns, depth, sums);
}

class CpuOps final : public Ops {
 public:
  explicit CpuOps(const ParallelFor& threads) : threads_(threads) {}

  void linear(const TensorView& x, const Linear& linear, const TensorView& y) override {
    const int64_t rows = x.size(0), in = linear.weight.view.size(1), out = linear.weight.view.size(0);
    const float* wide = widened(x);
    with_type(linear.weight.view, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      const auto* weight = linear.weight.view.as<const T>();
      const auto* bias = linear.bias.view.as<const T>();
      parallel(threads_, out, kColumns, [&](int64_t begin, int64_t end) {
        std::vector<float> sums;
        for (int64_t row = 0; row < rows; row += kBlockRows) {
          const int64_t height = std::min(kBlockRows, rows - row);
          sums.assign(size_t(height * (end - begin)), 0.f);
          for (int64_t k = 0; k < in; k += kDepth) {
            const float* const a = wide + row * in + k;
            const T* const b = weight + begin * in + k;
            const int64_t depth = std::min(kDepth, in - k);
            if constexpr (std::is_same_v<T, float>) {
              multiply_f32(a, in, height, b, in, end - begin, depth, sums.data());
            } else {
              multiply_bf16(a, in, height, b, in, end - begin, depth, sums.data());
            }
          }
          with_type(y, [&](auto* to) {
            for (int64_t r = 0; r < height; ++r) {
              to = y.as<std::remove_pointer_t<decltype(to)>>() + (row + r) * out;
              const float* const from = sums.data() + r * (end - begin) - begin;
              for (int64_t c = begin; c < end; ++c) from_float(from[c] + (bias != nullptr ? to_float(bias[c]) : 0.f), to[c]);
            }
          });
        }
      });
    });
  }

  void rms_norm(const TensorView& x, const TensorView& weight, float eps, const TensorView& y) override {
    const int64_t width = weight.size(0);
    with_type(x, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      parallel(threads_, x.num_elements() / width, 1, [&](int64_t begin, int64_t end) {
        const auto* const scale = weight.as<const T>();
        for (int64_t row = begin; row < end; ++row) {
          const T* const from = x.as<const T>() + row * width;
          T* const to = y.as<T>() + row * width;
          float sum = 0;
          for (int64_t i = 0; i < width; ++i) sum += to_float(from[i]) * to_float(from[i]);
          const float factor = 1.f / std::sqrt(sum / float(width) + eps);
          for (int64_t i = 0; i < width; ++i) from_float(to_float(from[i]) * factor * to_float(scale[i]), to[i]);
        }
      });
    });
  }

  void rope(const TensorView& x, const TensorView& rotation) override {
    const int64_t heads = x.size(1), dim = x.size(2), half = rotation.size(2);
    with_type(x, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      parallel(threads_, x.size(0), 1, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin * heads; row < end * heads; ++row) {
          T* const low = x.as<T>() + (row + 1) * dim - 2 * half;
          T* const high = low + half;
          const float* const cosine = rotation.as<const float>() + row / heads * 2 * half;
          const float* const sine = cosine + half;
          for (int64_t i = 0; i < half; ++i) {
            const float a = to_float(low[i]), b = to_float(high[i]);
            from_float(a * cosine[i] - b * sine[i], low[i]);
            from_float(b * cosine[i] + a * sine[i], high[i]);
          }
        }
      });
    });
  }

  void silu_mul(const TensorView& gate, const TensorView& up) override {
    combine(gate, up, [](float g, float u) { return g / (1.f + std::exp(-g)) * u; });
  }
  void add(const TensorView& x, const TensorView& y) override {
    combine(x, y, [](float a, float b) { return a + b; });
  }

  void add_rows(const TensorView& x, const TensorView& rows, const TensorView& weights, const TensorView& y) override {
    const int64_t width = x.size(1);
    with_type(x, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      parallel(threads_, rows.size(0), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          T* const to = x.as<T>() + rows.as<const int32_t>()[i] * width;
          const T* const from = y.as<const T>() + i * width;
          const float weight = weights.as<const float>()[i];
          for (int64_t k = 0; k < width; ++k) from_float(to_float(to[k]) + weight * to_float(from[k]), to[k]);
        }
      });
    });
  }

 private:
  template <class F>
  void combine(const TensorView& x, const TensorView& y, F f) {
    with_type(x, [&](auto* type) {
      using T = std::remove_pointer_t<decltype(type)>;
      parallel(threads_, x.num_elements(), 1024, [&](int64_t begin, int64_t end) {
        T* const to = x.as<T>();
        const T* const from = y.as<const T>();
        for (int64_t i = begin; i < end; ++i) from_float(f(to_float(to[i]), to_float(from[i])), to[i]);
      });
    });
  }

  const float* widened(const TensorView& x) {
    if (x.dtype == DType::f32) return x.as<const float>();
    wide_.resize(size_t(x.num_elements()));
    parallel(threads_, x.num_elements(), 1024, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) wide_[size_t(i)] = to_float(x.as<const BFloat16>()[i]);
    });
    return wide_.data();
  }

  ParallelFor threads_;
  std::vector<float> wide_;
};

}  // namespace

std::unique_ptr<Ops> make_cpu_ops(const ParallelFor& threads) { return std::make_unique<CpuOps>(threads); }

}  // namespace llama
