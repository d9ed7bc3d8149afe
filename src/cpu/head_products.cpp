// HeadProducts on CPUs: tiles of rows and columns of all heads, spread over the threads.
#include <algorithm>
#include <atomic>
#include <memory>

#include "core/cpu_features.h"
#include "core/run_parallel.h"
#include "core/tensor_layout.h"
#include "cpu/head_products_params.h"
#include "imbrex/device.h"
#include "mla/products.h"

namespace imbrex {
namespace cpu {

extern const HeadProductKernels head_products_generic, head_products_avx2, head_products_avx512, head_products_avx512_bf16,
    head_products_amx_emulated, head_products_amx;

namespace {

constexpr int64_t kSerialWork = 1 << 16;  // multiply-adds below which waking other threads costs more than they save

class CpuHeadProducts final : public HeadProducts {
 public:
  CpuHeadProducts(const HeadProductKernels& kernels, const ParallelFor& threads) : kernels_(kernels), threads_(threads) {}

  void by_columns(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace&) const override {
    const bool pairs = from.dtype == DType::bf16 && row_type(weight.dtype) == DType::bf16;
    run(pairs ? kernels_.by_columns_bf16 : kernels_.by_columns, from, weight, to);
  }
  void by_rows(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace&) const override {
    run(from.dtype == DType::bf16 ? kernels_.by_rows_bf16 : kernels_.by_rows, from, weight, to);
  }
  DType row_type(DType weight) const override {
    return weight == DType::bf16 && kernels_.by_rows_bf16 != nullptr ? DType::bf16 : DType::f32;
  }

 private:
  void run(decltype(HeadProductKernels::by_rows) kernel, const TensorView& from, const TensorView& weight, const TensorView& to) const {
    const HeadProductParams params{.from = from.as<const char>(),
                                   .weight = weight.as<const char>(),
                                   .to = to.as<char>(),
                                   .from_row = byte_stride(from, 0),
                                   .from_head = byte_stride(from, 1),
                                   .weight_head = byte_stride(weight, 0),
                                   .weight_row = byte_stride(weight, 1),
                                   .to_row = byte_stride(to, 0),
                                   .to_head = byte_stride(to, 1),
                                   .from_type = int(from.dtype),
                                   .weight_type = int(weight.dtype),
                                   .to_type = int(to.dtype),
                                   .k = int(from.size(2))};
    const int64_t rows = to.size(0), heads = to.size(1), columns = to.size(2);
    const int64_t row_blocks = (rows + kProductRows - 1) / kProductRows, column_blocks = (columns + kProductColumns - 1) / kProductColumns;
    const int64_t tasks = row_blocks * heads * column_blocks;
    std::atomic<int64_t> next{0};
    const auto work = [&](int) {
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
        const int head = int(task / column_blocks % heads), n = int(task % column_blocks) * kProductColumns;
        const int row = int(task / column_blocks / heads) * kProductRows;
        kernel(params, head, row, int(std::min<int64_t>(row + kProductRows, rows)), n,
               int(std::min<int64_t>(n + kProductColumns, columns)));
      }
      if (kernels_.leave != nullptr) kernels_.leave();
    };
    run_parallel(rows * heads * columns * params.k < kSerialWork ? ParallelFor{} : threads_, work);
  }

  const HeadProductKernels& kernels_;
  ParallelFor threads_;
};

}  // namespace
}  // namespace cpu

// For mla/registry.cpp.
std::unique_ptr<HeadProducts> cpu_head_products(CpuIsa isa, const ParallelFor& threads) {
  if constexpr (kX86) {
    if (isa >= CpuIsa::amx) return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_amx, threads);
    if (isa >= CpuIsa::amx_emulated) return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_amx_emulated, threads);
    if (isa >= CpuIsa::avx512_bf16) return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_avx512_bf16, threads);
    if (isa >= CpuIsa::avx512) return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_avx512, threads);
    if (isa >= CpuIsa::avx2) return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_avx2, threads);
  }
  return std::make_unique<cpu::CpuHeadProducts>(cpu::head_products_generic, threads);
}

}  // namespace imbrex
