// DeviceStream on a GPU: copies, gathers, marks and graphs in the stream's order, and caches in its memory. On the fake driver, which does
// nothing before somebody waits.
#include "imbrex/device_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/fake/fake_driver.h"
#include "cuda/fake/host_kernels.h"
#include "expect_error.h"
#include "imbrex/block_pool.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {
namespace {

using imbrex::test::error_code;

class CudaStreams : public testing::Test {
 protected:
  CudaStreams() { fake::run_on_host(spec); }
  ~CudaStreams() override { fake::state().on_launch = nullptr, fake::state().param_sizes.clear(), fake::state().launches.clear(); }
  template <class T>
  TensorView host(std::vector<T>& values, DType dtype) {
    return TensorView::contiguous(values.data(), dtype, {int64_t(values.size())});
  }
  AttentionSpec spec{.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8};
  std::unique_ptr<DeviceStream> stream = open_stream(probe_cuda().at(1));
};

TEST_F(CudaStreams, CopiesAreDoneWhenSomebodyWaits) {
  EXPECT_EQ(stream->device(), (Device{DeviceType::cuda, 1}));
  EXPECT_TRUE(stream->asynchronous());
  EXPECT_EQ(stream->free_bytes(), int64_t(fake::state().free_bytes));
  std::vector<int32_t> values{1, 2, 3, 4}, back(4, 9);
  const DeviceTensor copy = stream->copy_of(host(values, DType::i32));
  EXPECT_EQ(copy.view.str(), "i32[4] on cuda:1");
  stream->fill(copy.view.as<int32_t>() + 1, 0, 8);
  stream->download(back.data(), copy.view.data, 16);
  EXPECT_EQ(back, (std::vector<int32_t>{9, 9, 9, 9}));
  stream->synchronize();
  EXPECT_EQ(back, (std::vector<int32_t>{1, 0, 0, 4}));
  auto* const pinned = static_cast<int32_t*>(stream->allocate_host(16).get());
  EXPECT_EQ(pinned == nullptr, false);
  EXPECT_EQ(fake::state().pinned, 0);
}

TEST_F(CudaStreams, GatherTakesRowsOfEveryElementSize) {
  std::vector<int32_t> offsets{5, 0, 2};
  const DeviceTensor where = stream->copy_of(host(offsets, DType::i32));
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32}) {
    const int64_t size = size_of(dtype);
    std::vector<unsigned char> bytes(size_t(8 * size)), back(size_t(9 * size));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = (unsigned char)(i + 1);
    const DeviceTensor from = stream->copy_of(TensorView::contiguous(bytes.data(), dtype, {8}));
    const DeviceTensor to = stream->tensor(dtype, {3, 3});
    stream->gather(from.view, where.view, to.view);
    stream->download(back.data(), to.view.data, int64_t(back.size()));
    stream->synchronize();
    for (size_t row = 0; row < 3; ++row)
      EXPECT_EQ(std::memcmp(&back[row * size_t(3 * size)], &bytes[size_t(offsets[row] * size)], size_t(3 * size)), 0) << size;
  }
  const DeviceTensor from = stream->tensor(DType::bf16, {8}), to = stream->tensor(DType::bf16, {3, 3});
  const auto code = [&](TensorView f, TensorView o, TensorView t) { return error_code([&] { stream->gather(f, o, t); }); };
  EXPECT_EQ(code(host(offsets, DType::i32), where.view, to.view), "stream.gather");
  EXPECT_EQ(code(from.view, from.view, to.view), "stream.gather");
  EXPECT_EQ(code(from.view, where.view.slice(0, 0, 2), to.view), "stream.gather");
  EXPECT_EQ(code(from.view, where.view, to.view.slice(1, 0, 2)), "stream.gather");
  EXPECT_EQ(code(stream->tensor(DType::i64, {8}).view, where.view, stream->tensor(DType::i64, {3, 3}).view), "stream.gather");
}

TEST_F(CudaStreams, MarksWaitForTheLaterOne) {
  stream->mark(0);
  stream->mark(3);
  EXPECT_DOUBLE_EQ(stream->seconds(0, 3), double(1.5f) * 1e-3);
}

TEST_F(CudaStreams, GraphsRepeatWhatWasCaptured) {
  std::vector<int32_t> offsets{1, 0}, values{7, 8}, back(2);
  const DeviceTensor where = stream->copy_of(host(offsets, DType::i32)), from = stream->copy_of(host(values, DType::i32));
  const DeviceTensor to = stream->tensor(DType::i32, {2, 1});
  const auto result = [&] {
    stream->download(back.data(), to.view.data, 8);
    stream->synchronize();
    return back;
  };
  stream->fill(to.view.data, 0, 8);
  const DeviceGraph graph = stream->capture([&] { stream->gather(from.view, where.view, to.view); });
  EXPECT_EQ(result(), (std::vector<int32_t>{0, 0}));
  stream->replay(graph);
  EXPECT_EQ(result(), (std::vector<int32_t>{8, 7}));
  EXPECT_THROW(stream->capture([] { throw std::runtime_error("no"); }), std::runtime_error);
  stream->replay(graph);  // the stream captures no longer
  EXPECT_EQ(result(), (std::vector<int32_t>{8, 7}));
}

TEST_F(CudaStreams, CachesCanBeInItsMemory) {
  const KvAllocation cache(spec, 2, 3, "lbhtd", stream.get());
  const KvCache layer = cache.layer(1);
  layer.validate(spec);
  EXPECT_EQ(layer.v.device, stream->device());
  std::vector<char> bytes(size_t(layer.v.num_elements() * 2), 'x');
  stream->download(bytes.data(), layer.v.data, int64_t(bytes.size()));
  stream->synchronize();
  EXPECT_EQ(bytes, std::vector<char>(bytes.size(), 0));
}

// Copy on write: a block that two requests share is copied before one of them writes, in the order of the stream and in graphs.
TEST_F(CudaStreams, BlocksAreCopiedInTheStreamsOrder) {
  const KvAllocation cache(spec, 1, 4, "lbhtd", stream.get());
  const KvCache layer = cache.layer(0);
  const int64_t k_bytes = layer.k.num_elements() / 4 * 2, v_bytes = layer.v.num_elements() / 4 * 2;
  const auto fill = [&](int block, unsigned char value) {
    stream->fill(layer.k.as<char>() + block * k_bytes, value, k_bytes);
    stream->fill(layer.v.as<char>() + block * v_bytes, (unsigned char)(value + 1), v_bytes);
  };
  const auto block = [&](int index) {  // the value that all its bytes have in k and in v
    std::string k(size_t(k_bytes), ' '), v(size_t(v_bytes), ' ');
    stream->download(k.data(), layer.k.as<char>() + index * k_bytes, k_bytes);
    stream->download(v.data(), layer.v.as<char>() + index * v_bytes, v_bytes);
    stream->synchronize();
    return std::pair(k == std::string(k.size(), k[0]) ? int(k[0]) : -1, v == std::string(v.size(), v[0]) ? int(v[0]) : -1);
  };
  BlockPool pool(4);
  std::vector<int32_t> blocks;
  ASSERT_TRUE(pool.allocate(2, blocks));
  pool.retain({&blocks[1], 1});
  const std::optional<int32_t> mine = pool.make_writable(blocks[1]);
  ASSERT_TRUE(mine && *mine != blocks[1]);
  const auto copier = make_block_copier(probe_cuda().at(1));
  const std::vector<BlockCopy> copies{{blocks[1], *mine}};
  fill(blocks[1], 10), fill(*mine, 0), fill(blocks[0], 50);
  copier->copy(spec, layer, copies, stream->get());
  fill(blocks[1], 20);  // later in the stream
  EXPECT_EQ(block(*mine), std::pair(10, 11));
  EXPECT_EQ(block(blocks[1]), std::pair(20, 21));
  EXPECT_EQ(block(blocks[0]), std::pair(50, 51));

  DeviceGraph graph;
  {
    const std::vector<BlockCopy> gone = copies;
    graph = stream->capture([&] { copier->copy(spec, layer, gone, stream->get()); });
  }
  EXPECT_EQ(block(*mine), std::pair(10, 11)) << "captured, not done";
  stream->replay(graph);
  EXPECT_EQ(block(*mine), std::pair(20, 21));
  fill(blocks[1], 30);
  stream->replay(graph);
  EXPECT_EQ(block(*mine), std::pair(30, 31));

  KvCache elsewhere = layer;
  elsewhere.k.device = elsewhere.v.device = {DeviceType::cuda, 0};
  EXPECT_EQ(error_code([&] { copier->copy(spec, elsewhere, copies, stream->get()); }), "kv_cache.copy.device");
  EXPECT_EQ(error_code([&] { copier->copy(spec, layer, std::vector<BlockCopy>{{0, 4}}, stream->get()); }), "kv_cache.copy.to");
  EXPECT_EQ(error_code([&] { copy_blocks(spec, layer, copies); }), "kv_cache.copy.device");
  EXPECT_EQ(error_code([] { make_block_copier(describe_device("h200")); }), "backend.device_absent");
}

TEST_F(CudaStreams, WhatIsNotThereIsRefused) {
  EXPECT_EQ(error_code([] { open_stream(describe_device("h200")); }), "backend.device_absent");
  fake::state().fail_next = kCudaOutOfMemory;
  EXPECT_EQ(error_code([&] { stream->allocate(1 << 20); }), "cuda.memory");
}

}  // namespace
}  // namespace imbrex::cuda
