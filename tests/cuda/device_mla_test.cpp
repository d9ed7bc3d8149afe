// Latent attention on a GPU: rows of products have the same bits whatever other rows there are; steps whose lengths are on the device have
// those of steps from the host; and how fast plans and products are. What plans compute is tested with the cases of every backend
// (tests/conformance).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>

#include "core/float_types.h"
#include "cuda/driver/cublaslt.h"
#include "cuda/gpu.h"
#include "cuda/mla/head_products.h"
#include "imbrex/device_stream.h"
#include "imbrex/select.h"
#include "mla/backend.h"

namespace imbrex::cuda {
namespace {

class DeviceMla : public test::Gpu {
 protected:
  void SetUp() override {
    Gpu::SetUp();
    std::string why;
    if (!IsSkipped() && cublaslt(&why) == nullptr) GTEST_SKIP() << why;
    if (!IsSkipped()) s = open_stream(device);
  }
  void TearDown() override { s.reset(); }

  DeviceTensor random_tensor(DType dtype, std::initializer_list<int64_t> sizes, float scale = 1) {
    DeviceTensor t = s->tensor(dtype, sizes);
    std::vector<char> values(size_t(t.view.num_elements() * size_of(dtype)));
    const size_t drawn = std::min(values.size(), size_t(1) << 20);  // and then the same again, shifted
    for (int64_t i = 0; i < int64_t(drawn) / size_of(dtype); ++i) store_from_float(values.data(), dtype, i, scale * normal_(random_));
    for (size_t i = drawn; i < values.size(); ++i) values[i] = values[i - drawn];
    s->upload(t.view.data, values.data(), int64_t(values.size()));
    s->synchronize();
    return t;
  }
  std::vector<char> bytes_of(const TensorView& contiguous) {
    std::vector<char> bytes(size_t(contiguous.num_elements() * size_of(contiguous.dtype)));
    s->download(bytes.data(), contiguous.data, int64_t(bytes.size()));
    s->synchronize();
    return bytes;
  }

  std::unique_ptr<DeviceStream> s;

 private:
  std::mt19937 random_{5};
  std::normal_distribution<float> normal_;
};

TEST_F(DeviceMla, ARowOfProductsHasBitsOfItsOwn) {
  const std::shared_ptr<void> workspace = s->allocate(kProductWorkspaceBytes);
  const ProductPlace place{.stream = s->get(), .workspace = workspace.get()};
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (const int heads : {1, 16, 128}) {
      const MlaSpec spec{.num_heads = heads, .dtype = dtype, .kv_dtype = dtype};
      const auto products = cublaslt_products(context, spec, {});
      const DeviceTensor kv_b = random_tensor(dtype, {heads, 256, 512}, 0.05f);
      constexpr int kRows = 300;
      const DeviceTensor q = random_tensor(dtype, {kRows, heads, 128}), latent = random_tensor(dtype, {kRows, heads, 512});
      const DeviceTensor absorbed = s->tensor(dtype, {kRows, heads, 512}), out = s->tensor(dtype, {kRows, heads, 128});
      const auto run = [&](int first, int count) {
        products->by_columns(q.view.slice(0, first, first + count), kv_b.view.slice(1, 0, 128),
                             absorbed.view.slice(0, first, first + count), place);
        products->by_rows(latent.view.slice(0, first, first + count), kv_b.view.slice(1, 128, 256), out.view.slice(0, first, first + count),
                          place);
      };
      run(0, kRows);
      const std::vector<char> all_absorbed = bytes_of(absorbed.view), all_out = bytes_of(out.view);
      for (const int count : {1, 2, 7, 64, 129}) {
        s->fill(absorbed.view.data, 0, int64_t(all_absorbed.size())), s->fill(out.view.data, 0, int64_t(all_out.size()));
        for (int first = 0; first < kRows; first += count) run(first, std::min(count, kRows - first));
        EXPECT_TRUE(bytes_of(absorbed.view) == all_absorbed) << to_string(dtype) << " " << heads << " heads, " << count << " rows";
        EXPECT_TRUE(bytes_of(out.view) == all_out) << to_string(dtype) << " " << heads << " heads, " << count << " rows";
      }
    }
}

// Decode and verify, eager and by a graph that holds the update too: the same bits from lengths on the device, and a request beyond the
// limits is left out.
TEST_F(DeviceMla, LengthsOnTheDeviceGiveTheSameBits) {
  constexpr int kReqs = 5, kBlocks = 64, kMostKeys = 1000;
  for (const int heads : {16, 128})
    for (const int q_len : {1, 4}) {
      const MlaSpec spec{.num_heads = heads, .block_size = 64};
      const BackendOf<MlaFamily>& backend = *select<MlaFamily>(spec, device).backend;
      const int tokens = kReqs * q_len;
      PlanOptions options{.limits = {.max_num_reqs = kReqs, .max_num_tokens = tokens, .max_seq_len = kMostKeys, .max_query_len = q_len}};
      const auto from_host = backend.plan(spec, device, options);
      options.on_device = true;
      const auto p = backend.plan(spec, device, options);
      const DeviceTensor q = random_tensor(DType::bf16, {tokens, heads, 192}), kv_b = random_tensor(DType::bf16, {heads, 256, 512}, 0.05f);
      const DeviceTensor cache = random_tensor(DType::bf16, {kBlocks, 64, 1, 576}), out = s->tensor(DType::bf16, {tokens, heads, 128});
      std::vector<int32_t> starts, lens{700, 64, 999, 5, 130}, table;
      for (int r = 0; r <= kReqs; ++r) starts.push_back(r * q_len);
      for (int i = 0; i < kReqs * 16; ++i) table.push_back((i * 7 + 3) % kBlocks);
      const auto list = [](std::vector<int32_t>& v, std::initializer_list<int64_t> sizes) {
        return TensorView::contiguous(v.data(), DType::i32, sizes);
      };
      const DeviceTensor there_starts = s->copy_of(list(starts, {kReqs + 1})), there_lens = s->copy_of(list(lens, {kReqs}));
      const DeviceTensor there_table = s->copy_of(list(table, {kReqs, 16}));
      const auto results = [&](const auto& step) {
        s->fill(out.view.data, 0x33, out.view.num_elements() * 2);
        step();
        return bytes_of(out.view);
      };
      const auto run = [&](const MlaPlan& plan) {
        plan.run({.q = q.view, .kv_b = kv_b.view, .kv = {.k = cache.view}, .sinks = {}}, {.out = out.view, .lse = {}}, s->get());
      };
      const auto wanted = [&] {
        Batch batch;
        batch.query_start_loc = starts, batch.seq_lens = lens, batch.block_table = list(table, {kReqs, 16});
        return results([&] { from_host->update(batch, s->get()), run(*from_host); });
      };
      const auto step = [&] {
        p->update_on_device({.query_start_loc = there_starts.view, .seq_lens = there_lens.view, .block_table = there_table.view}, s->get());
        run(*p);
      };
      EXPECT_TRUE(results(step) == wanted()) << heads << " heads, " << q_len << " queries";
      const DeviceGraph graph = s->capture(step);
      for (int& len : lens) len = std::min(kMostKeys, len + 201);
      s->upload(there_lens.view.data, lens.data(), kReqs * 4);
      std::vector<char> expected = wanted();
      EXPECT_TRUE(results([&] { s->replay(graph); }) == expected) << heads << " heads, " << q_len << " queries, graph";
      EXPECT_TRUE(p->device_problems(s->get()).empty());
      lens[1] = kMostKeys + 1;
      s->upload(there_lens.view.data, lens.data(), kReqs * 4);
      const int64_t row = int64_t(q_len) * heads * 128 * 2;
      std::fill(expected.begin() + row, expected.begin() + 2 * row, char(0x33));
      EXPECT_TRUE(results([&] { s->replay(graph); }) == expected) << heads << " heads, " << q_len << " queries, one left out";
      const std::vector<Reason> problems = p->device_problems(s->get());
      ASSERT_EQ(problems.size(), 1u);
      EXPECT_EQ(problems[0].code, "batch.seq_len.limit");
    }
}

// --- speed: build/tests/cuda_tests --gtest_also_run_disabled_tests --gtest_filter='DeviceMlaSpeed.*'

class DeviceMlaSpeed : public DeviceMla {
 protected:
  // Seconds of a call, the best of some rounds.
  template <class Call>
  double seconds(const Call& call) {
    constexpr int kCalls = 5;
    double best = 1e30;
    for (int i = 0; i < 4; ++i) {
      s->mark(0);
      for (int j = 0; j < kCalls; ++j) call();
      s->mark(1);
      if (i > 0) best = std::min(best, s->seconds(0, 1) / kCalls);
    }
    return best;
  }
};

// A request in latent space beside the same one with expanded keys, and what the cost model thinks of it.
TEST_F(DeviceMlaSpeed, DISABLED_Ways) {
  const auto* const backend = dynamic_cast<const MlaCompositeBackend*>(select<MlaFamily>(MlaSpec{.num_heads = 16}, device).backend);
  ASSERT_NE(backend, nullptr);
  std::printf("%s, %s\n", device.str().c_str(), std::string(backend->name()).c_str());
  for (const int heads : {16, 128}) {
    const MlaSpec spec{.num_heads = heads, .block_size = 64};
    std::printf("%s: ms, TFLOP/s of attention alone if products took nothing; estimates\n", spec.str().c_str());
    std::printf("  %6s %7s | %9s %9s | %9s %9s | %s\n", "q", "keys", "latent", "expanded", "TF latent", "TF exp.", "estimates");
    for (const int seq_len : {2048, 8192, 32768, 131072})
      for (const int q_len : {1, 16, 64, 128, 256, 512, 2048}) {
        if (q_len > seq_len || (heads == 128 && int64_t(q_len) * seq_len > int64_t(1) << 27)) continue;
        const int blocks = (seq_len + 63) / 64;
        const DeviceTensor q = random_tensor(DType::bf16, {q_len, heads, 192}), kv_b = random_tensor(DType::bf16, {heads, 256, 512}, 0.05f);
        const DeviceTensor cache = random_tensor(DType::bf16, {blocks, 64, 1, 576}), out = s->tensor(DType::bf16, {q_len, heads, 128});
        std::vector<int32_t> starts{0, q_len}, lens{seq_len}, table;
        for (int b = 0; b < blocks; ++b) table.push_back((b * 7 + 3) % blocks);
        Batch batch;
        batch.query_start_loc = starts, batch.seq_lens = lens;
        batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, blocks});
        const PlanOptions options{.limits = {.max_num_reqs = 256, .max_num_tokens = 8192, .max_seq_len = 131072}, .out_dtype = DType::bf16};
        double ms[2];
        for (const bool expand : {false, true}) {
          MlaParts parts = backend->parts(spec, device, options);
          parts.expand = expand;
          const auto plan = make_mla_plan(spec, device, options, std::move(parts));
          plan->update(batch, s->get());
          ms[expand] =
              1e3 * seconds([&] {
                plan->run({.q = q.view, .kv_b = kv_b.view, .kv = {.k = cache.view}, .sinks = {}}, {.out = out.view, .lse = {}}, s->get());
              });
        }
        const double pairs = double(q_len) * seq_len - double(q_len) * (q_len - 1) / 2;
        const auto rate = [&](bool expand) { return pairs * 2 * heads * (expand ? 320 : 1088) / ms[expand] * 1e-9; };
        const MlaCost cost = cost_of(spec, backend->parts(spec, device, options).rates, q_len, seq_len);
        std::printf("  %6d %7d | %9.3f %9.3f | %9.0f %9.0f | %s%s\n", q_len, seq_len, ms[0], ms[1], rate(false), rate(true),
                    cost.str().c_str(), cost.expand() == (ms[1] < ms[0]) ? "" : "  WRONG");
      }
  }
}

// The products alone: of queries and outputs for so many tokens, of latents for so many keys.
TEST_F(DeviceMlaSpeed, DISABLED_Products) {
  const std::shared_ptr<void> workspace = s->allocate(kProductWorkspaceBytes);
  const ProductPlace place{.stream = s->get(), .workspace = workspace.get()};
  for (const int heads : {16, 128}) {
    const MlaSpec spec{.num_heads = heads};
    const auto products = cublaslt_products(context, spec, {});
    const DeviceTensor kv_b = random_tensor(DType::bf16, {heads, 256, 512}, 0.05f);
    std::printf("%d heads, us and TFLOP/s: W_UK of queries; W_UV of outputs; both of keys\n", heads);
    for (const int rows : {1, 8, 32, 64, 128, 256, 1024, 4096}) {
      const DeviceTensor q = random_tensor(DType::bf16, {rows, heads, 192}), latent = random_tensor(DType::bf16, {rows, heads, 576});
      const DeviceTensor out = s->tensor(DType::bf16, {rows, heads, 128}), k = s->tensor(DType::bf16, {rows, heads, 192});
      const double flops = 2. * rows * heads * 128 * 512;
      const double uk =
          seconds([&] { products->by_columns(q.view.slice(2, 0, 128), kv_b.view.slice(1, 0, 128), latent.view.slice(2, 0, 512), place); });
      const TensorView from = TensorView::contiguous(latent.view.data, DType::bf16, {rows, heads, 512}, device.device);
      const double uv = seconds([&] { products->by_rows(from, kv_b.view.slice(1, 128, 256), out.view, place); });
      TensorView each_head = TensorView::contiguous(latent.view.data, DType::bf16, {rows, 1, 512}, device.device);
      each_head.sizes[1] = heads, each_head.strides[1] = 0;
      const double keys = seconds([&] {
        products->by_rows(each_head, kv_b.view.slice(1, 0, 128), k.view.slice(2, 0, 128), place);
        products->by_rows(each_head, kv_b.view.slice(1, 128, 256), out.view, place);
      });
      std::printf("  %5d rows: %8.1f %5.0f; %8.1f %5.0f; %8.1f %5.0f\n", rows, uk * 1e6, flops / uk * 1e-12, uv * 1e6, flops / uv * 1e-12,
                  keys * 1e6, 2 * flops / keys * 1e-12);
    }
  }
}

}  // namespace
}  // namespace imbrex::cuda
