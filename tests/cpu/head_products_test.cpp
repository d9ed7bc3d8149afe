// Products with a weight of each head, on every instruction set of this machine, beside the same sums in double precision.
#include "mla/products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "conformance/case_random.h"
#include "conformance/host_tensor.h"
#include "imbrex/device.h"
#include "imbrex/parallel.h"

namespace imbrex {

std::unique_ptr<HeadProducts> cpu_head_products(CpuIsa, const ParallelFor&);  // cpu/head_products.cpp

namespace test {
namespace {

HostTensor random_tensor(DType dtype, std::vector<int64_t> sizes, uint64_t seed) {
  HostTensor t = HostTensor::make(dtype, std::move(sizes));
  for (int64_t i = 0; i < t.num_elements(); ++i) t.set(i, normal(splitmix(splitmix(seed) + uint64_t(i))));
  return t;
}

std::vector<CpuIsa> isas() {
  std::vector<CpuIsa> found;
  for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx})
    if (isa <= probe_cpu().isa || (isa == CpuIsa::amx_emulated && probe_cpu().isa == CpuIsa::avx512_bf16)) found.push_back(isa);
  return found;
}

struct ProductShape {
  int rows, heads, k, n;
};
constexpr ProductShape kProductShapes[] = {{1, 3, 8, 8},    {3, 2, 24, 40},   {4, 1, 40, 16},  {5, 2, 64, 136}, {9, 2, 128, 24},
                                           {65, 1, 72, 32}, {70, 1, 136, 24}, {5, 1, 512, 40}, {1, 1, 576, 264}};

// Expects sums as near as floats come, and one rounding.
void expect_products(const HostTensor& from, const HostTensor& weight, bool by_columns, const HostTensor& to, const ProductShape& s) {
  for (int t = 0; t < s.rows; ++t)
    for (int h = 0; h < s.heads; ++h)
      for (int n = 0; n < s.n; ++n) {
        double sum = 0, magnitude = 0;
        for (int k = 0; k < s.k; ++k) {
          const int64_t at = by_columns ? (int64_t(h) * s.k + k) * s.n + n : (int64_t(h) * s.n + n) * s.k + k;
          const double term = from.get((int64_t(t) * s.heads + h) * s.k + k) * weight.get(at);
          sum += term, magnitude += std::abs(term);
        }
        const double rounding = to.dtype == DType::f32 ? 0x1p-24 : to.dtype == DType::f16 ? 0x1p-11 : 0x1p-8;
        ASSERT_NEAR(to.get((int64_t(t) * s.heads + h) * s.n + n), sum, magnitude * 0x1p-20 + std::abs(sum) * rounding + 1e-7)
            << "row " << t << " head " << h << " column " << n << " of k " << s.k;
      }
}

TEST(HeadProducts, AreSumsOfProducts) {
  int with_pairs = 0;
  for (const CpuIsa isa : isas()) {
    const auto products = cpu_head_products(isa, {});
    for (const ProductShape& s : kProductShapes)
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
        for (const DType result : {dtype, DType::f32}) {
          SCOPED_TRACE(std::string(to_string(isa)) + " " + to_string(dtype) + " to " + to_string(result));
          HostTensor to = HostTensor::make(result, {s.rows, s.heads, s.n});
          const HostTensor rows = random_tensor(dtype, {s.rows, s.heads, s.k}, 1), columns = random_tensor(dtype, {s.heads, s.k, s.n}, 2);
          products->by_columns(rows.view(), columns.view(), to.view());
          expect_products(rows, columns, true, to, s);
          const HostTensor weight = random_tensor(dtype, {s.heads, s.n, s.k}, 3),
                           floats = random_tensor(DType::f32, {s.rows, s.heads, s.k}, 4);
          products->by_rows(floats.view(), weight.view(), to.view());
          expect_products(floats, weight, false, to, s);
          if (dtype != DType::bf16 || products->row_type(dtype) != DType::bf16) continue;
          products->by_rows(rows.view(), weight.view(), to.view());
          expect_products(rows, weight, false, to, s);
          ++with_pairs;
        }
    EXPECT_EQ(products->row_type(DType::f16), DType::f32);
  }
  EXPECT_EQ(with_pairs > 0, probe_cpu().isa >= CpuIsa::avx512_bf16);
}

// A result depends on its own row and column, whatever else a call has and however many threads there are.
TEST(HeadProducts, ARowsBitsAreItsOwn) {
  const ProductShape s{70, 2, 136, 264};
  ThreadPool pool(3);
  for (const CpuIsa isa : isas()) {
    const auto alone = cpu_head_products(isa, {}), together = cpu_head_products(isa, pool.parallel_for());
    const HostTensor columns = random_tensor(DType::bf16, {s.heads, s.k, s.n}, 2),
                     weight = random_tensor(DType::bf16, {s.heads, s.n, s.k}, 3);
    for (const DType type : {DType::f32, alone->row_type(DType::bf16)}) {
      const HostTensor rows = random_tensor(type, {s.rows, s.heads, s.k}, 1);
      for (const bool by_columns : {false, true}) {
        HostTensor all = HostTensor::make(DType::f32, {s.rows, s.heads, s.n}), one = HostTensor::make(DType::f32, {1, s.heads, s.n});
        by_columns ? together->by_columns(rows.view(), columns.view(), all.view())
                   : together->by_rows(rows.view(), weight.view(), all.view());
        for (const int t : {0, 3, 7, 64, 69}) {
          const TensorView row = rows.view().slice(0, t, t + 1);
          by_columns ? alone->by_columns(row, columns.view(), one.view()) : alone->by_rows(row, weight.view(), one.view());
          EXPECT_EQ(std::memcmp(one.bytes.data(), all.bytes.data() + size_t(t) * one.bytes.size(), one.bytes.size()), 0)
              << to_string(isa) << (by_columns ? " by columns" : " by rows of ") << to_string(type) << " row " << t;
        }
      }
    }
  }
}

}  // namespace
}  // namespace test
}  // namespace imbrex
