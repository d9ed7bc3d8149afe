// write_kv and copy_blocks on a GPU: every pair of types, layouts, scales, padding, inside a graph; nothing else is touched.
#include <cmath>
#include <cstring>
#include <random>

#include "core/float_types.h"
#include "cuda/attention/write_kv.h"
#include "cuda/gpu.h"
#include "cuda/graph.h"
#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"

namespace imbrex::cuda {
namespace {

using test::on_device;

// Numbers of all sizes, and some that are none.
std::vector<char> random_elements(DType type, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<char> bytes(count * size_t(size_of(type)));
  constexpr float kSpecial[] = {0.f, -0.f, INFINITY, -INFINITY, NAN, 448.f, 449.f, 464.f, 480.f, 57344.f, 61440.f, 1e30f, -1e30f, 1e-30f};
  for (size_t i = 0; i < count; ++i) {
    const float x =
        random() % 16 == 0 ? kSpecial[random() % std::size(kSpecial)] : normal(random) * std::exp2(float(int(random() % 24) - 12));
    store_from_float(bytes.data(), type, int64_t(i), x);
  }
  return bytes;
}

struct Layout {
  const char* name;
  int k_pad, v_pad;    // elements between heads of new rows
  int64_t dim_stride;  // of the cache
  int misaligned;      // elements the cache begins later
};
constexpr Layout kLayouts[] = {{"contiguous", 0, 0, 1, 0},
                               {"padded", 8, 16, 1, 0},
                               {"odd rows", 1, 3, 1, 0},
                               {"strided cache", 0, 0, 2, 0},
                               {"misaligned", 0, 0, 1, 1}};

struct Side {
  DType from, to;
  int64_t tokens, heads, dim, blocks, block_size;
  const Layout& layout;
  int pad;
  std::vector<char> rows, before;  // new rows; the cache before, every byte poisoned
  TensorView row_view, cache_view;
  DeviceBuffer row_buffer, cache_buffer;
};

class DeviceCache : public test::Gpu {
 protected:
  Side side(DType from, DType to, int64_t tokens, int64_t heads, int64_t dim, int64_t blocks, int64_t block_size, const Layout& layout,
            int pad, unsigned seed) {
    Side s{from, to, tokens, heads, dim, blocks, block_size, layout, pad, {}, {}, {}, {}, {}, {}};
    s.rows = random_elements(from, size_t(tokens * heads * (dim + pad)), seed);
    s.row_view = {
        .data = s.rows.data(), .dtype = from, .rank = 3, .sizes = {tokens, heads, dim}, .strides = {heads * (dim + pad), dim + pad, 1}};
    const int64_t row = dim * layout.dim_stride;
    s.before.assign(size_t((blocks * block_size * heads * row + layout.misaligned) * size_of(to)), char(0xa5));
    s.cache_view = {.data = s.before.data() + layout.misaligned * size_of(to),
                    .dtype = to,
                    .rank = 4,
                    .sizes = {blocks, block_size, heads, dim},
                    .strides = {block_size * heads * row, row, block_size * row, layout.dim_stride}};  // head-major inside of a block
    s.row_buffer = upload(s.rows);
    s.cache_buffer = upload(s.before);
    return s;
  }
  TensorView device_rows(const Side& s) { return on_device(s.row_view, s.row_buffer); }
  TensorView device_cache(const Side& s) { return on_device(s.cache_view, s.cache_buffer, s.layout.misaligned * size_of(s.to)); }

  // What the cache has to be: `before`, with the rows of this step at their slots.
  void expect_written(const Side& s, const std::vector<int64_t>& slots, const std::vector<float>& scales, const std::string& what) {
    std::vector<char> expected = s.before;
    const int64_t begin = s.layout.misaligned * size_of(s.to);
    for (int64_t t = 0; t < s.tokens; ++t) {
      if (slots[size_t(t)] < 0) continue;
      const int64_t block = slots[size_t(t)] / s.block_size, offset = slots[size_t(t)] % s.block_size;
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t d = 0; d < s.dim; ++d) {
          const int64_t at =
              block * s.cache_view.stride(0) + offset * s.cache_view.stride(1) + h * s.cache_view.stride(2) + d * s.cache_view.stride(3);
          const int64_t from = t * s.row_view.stride(0) + h * s.row_view.stride(1) + d;
          float x = load_as_float(s.rows.data(), s.from, from);
          if (s.from != s.to) x /= scales[size_t(scales.size() > 1 ? h : 0)];
          if (s.from == s.to) {
            std::memcpy(expected.data() + begin + at * size_of(s.to), s.rows.data() + from * size_of(s.from), size_t(size_of(s.to)));
          } else {
            store_from_float(expected.data() + begin, s.to, at, x);
          }
        }
    }
    const auto got = download<char>(s.cache_buffer);
    int wrong = 0;
    const int64_t count = int64_t(got.size()) / size_of(s.to);
    for (int64_t i = 0; i < count && wrong < 5; ++i) {
      const size_t at = size_t(i * size_of(s.to));
      if (std::memcmp(&got[at], &expected[at], size_t(size_of(s.to))) == 0) continue;
      const double a = load_as_double(got.data(), s.to, i), b = load_as_double(expected.data(), s.to, i);
      if (s.from != s.to && std::isnan(a) && std::isnan(b)) continue;
      ++wrong;
      ADD_FAILURE() << what << ": element " << i << " of " << count << " is " << a << ", expected " << b;
    }
  }
};

TEST_F(DeviceCache, EveryPairOfTypesAndLayout) {
  constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2};
  unsigned seed = 1;
  for (const DType q : {DType::f32, DType::f16, DType::bf16})
    for (const DType kv : kTypes) {
      AttentionSpec spec{
          .num_q_heads = 6, .num_kv_heads = 3, .head_dim_qk = 72, .head_dim_v = 40, .q_dtype = q, .kv_dtype = kv, .block_size = 4};
      const WriteKv writer(context, arch_of(device), spec);
      for (const DType from : {q, kv})
        for (const Layout& layout : kLayouts)
          for (const size_t num_scales : {0, 1, 3}) {
            const bool fp8 = size_of(kv) == 1;
            if (num_scales > 0 && !fp8) continue;
            const std::vector<int64_t> slots{7, -1, 0, 19, 18, -5, 11};
            const int64_t tokens = int64_t(slots.size());
            const std::vector<float> scales =
                num_scales == 3 ? std::vector<float>{0.3f, 1.f, 7.7f} : std::vector<float>{num_scales ? 0.37f : 1.f};
            const Side k = side(from, kv, tokens, 3, 72, 5, 4, layout, layout.k_pad, seed++);
            const Side v = side(from, kv, tokens, 3, 40, 5, 4, layout, layout.v_pad, seed++);
            const DeviceBuffer slot_buffer = upload(slots), scale_buffer = upload(scales);
            KvCache cache{.k = device_cache(k), .v = device_cache(v), .k_scale = {}, .v_scale = {}};
            if (num_scales > 0) {
              const TensorView view = TensorView::contiguous(const_cast<float*>(scales.data()), DType::f32, {int64_t(scales.size())});
              cache.k_scale = on_device(view, scale_buffer);
              cache.v_scale = num_scales == 1 ? view : cache.k_scale;  // one for all heads may be on the host
            }
            writer.run(cache, device_rows(k), device_rows(v),
                       {.slots = TensorView::contiguous(slot_buffer.as(), DType::i64, {tokens}, {DeviceType::cuda, 0}),
                        .num_tokens = int(tokens),
                        .reach = {}},
                       stream.get());
            const std::string what =
                std::string(to_string(from)) + " to " + to_string(kv) + ", " + layout.name + ", " + std::to_string(num_scales) + " scales";
            expect_written(k, slots, scales, what + ", k");
            expect_written(v, slots, scales, what + ", v");
          }
    }
}

TEST_F(DeviceCache, ManyTokensAndHeadsOfDifferentSize) {
  AttentionSpec spec{.num_q_heads = 8, .num_kv_heads = 8, .head_dim_qk = 192, .head_dim_v = 128, .kv_dtype = DType::fp8_e4m3};
  const WriteKv writer(context, arch_of(device), spec);
  const int64_t tokens = 1000, blocks = 70;
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) slots[size_t(i)] = i * 7 % 1009 % (blocks * 16);
  const Side k = side(DType::bf16, DType::fp8_e4m3, tokens, 8, 192, blocks, 16, kLayouts[0], 0, 1);
  const Side v = side(DType::bf16, DType::fp8_e4m3, tokens, 8, 128, blocks, 16, kLayouts[0], 0, 2);
  const DeviceBuffer slot_buffer = upload(slots);
  writer.run({.k = device_cache(k), .v = device_cache(v), .k_scale = {}, .v_scale = {}}, device_rows(k), device_rows(v),
             {.slots = TensorView::contiguous(slot_buffer.as(), DType::i64, {tokens}, {DeviceType::cuda, 0}),
              .num_tokens = int(tokens),
              .reach = {}},
             stream.get());
  expect_written(k, slots, {1.f}, "k");
  expect_written(v, slots, {1.f}, "v");
}

TEST_F(DeviceCache, AGraphReplaysWithOtherSlots) {
  AttentionSpec spec{.num_q_heads = 2, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .block_size = 8};
  const WriteKv writer(context, arch_of(device), spec);
  const std::vector<int64_t> first{3, 4, -1}, second{-1, 20, 0};
  const Side k = side(DType::bf16, DType::bf16, 3, 2, 64, 4, 8, kLayouts[0], 0, 1),
             v = side(DType::bf16, DType::bf16, 3, 2, 64, 4, 8, kLayouts[0], 0, 2);
  const DeviceBuffer slot_buffer = upload(first);
  const test::Graph graph(stream.get(), [&] {
    writer.run({.k = device_cache(k), .v = device_cache(v), .k_scale = {}, .v_scale = {}}, device_rows(k), device_rows(v),
               {.slots = TensorView::contiguous(slot_buffer.as(), DType::i64, {3}, {DeviceType::cuda, 0}), .num_tokens = 3, .reach = {}},
               stream.get());
  });
  for (const auto* slots : {&first, &second}) {
    copy_to_device(slot_buffer.address(), slots->data(), 24, stream.get());
    copy_to_device(k.cache_buffer.address(), k.before.data(), k.before.size(), stream.get());
    graph.replay();
    expect_written(k, *slots, {1.f}, "k");
  }
}

TEST_F(DeviceCache, BlocksAreCopiedAsOnTheHost) {
  const auto copier = make_block_copier(device);
  for (const DType type : {DType::bf16, DType::fp8_e4m3, DType::f32})
    for (const char* order : {"lbhtd", "lbthd", "dtlhb"})
      for (const auto& [dim, format] : {std::pair(64, KvFormat::strided),
                                        {72, KvFormat::strided},
                                        {8, KvFormat::strided},
                                        {64, KvFormat::latent},
                                        {72, KvFormat::latent},
                                        {72, KvFormat::latent_rope}}) {
        const bool latent = format != KvFormat::strided, apart = format == KvFormat::latent_rope;
        const AttentionSpec spec{.num_q_heads = 6,
                                 .num_kv_heads = 3,
                                 .head_dim_qk = dim,
                                 .head_dim_v = 40,
                                 .kv_dtype = type,
                                 .kv_format = format,
                                 .block_size = 5};
        const KvAllocation host(spec, 2, 700, order);
        // Both sides lie in one piece of memory: fill it, and take a copy of it to the device.
        std::vector<char> bytes(size_t(host.bytes()));
        std::mt19937 random(7);
        for (char& b : bytes) b = char(random());
        const KvCache layer = host.layer(1);
        char* const base = host.layer(0).k.as<char>();  // values lie behind the keys
        const int64_t reach = int64_t(bytes.size());
        const auto inside = [&](const TensorView& t) {
          int64_t last = t.as<char>() - base + size_of(t.dtype);
          for (int d = 0; d < t.rank; ++d) last += (t.size(d) - 1) * t.stride(d) * size_of(t.dtype);
          return last <= reach;
        };
        ASSERT_TRUE(inside(layer.k) && (latent || inside(layer.v)) && (!apart || inside(layer.k_rope)));
        std::memcpy(base, bytes.data(), bytes.size());
        const DeviceBuffer buffer = upload(bytes);
        const KvCache moved{.k = on_device(layer.k, buffer, layer.k.as<char>() - base),
                            .v = latent ? TensorView{} : on_device(layer.v, buffer, layer.v.as<char>() - base),
                            .k_rope = apart ? on_device(layer.k_rope, buffer, layer.k_rope.as<char>() - base) : TensorView{}};
        std::vector<BlockCopy> copies;
        for (int i = 0; i < 300; ++i) copies.push_back({i, 699 - i});
        copy_blocks(spec, layer, copies);
        copier->copy(spec, moved, copies, stream.get());
        const auto got = download<char>(buffer);
        EXPECT_EQ(std::memcmp(got.data(), base, got.size()), 0) << to_string(type) << " " << order << " " << dim;
      }
}

TEST_F(DeviceCache, CopiesOfBlocksAreCaptured) {
  const AttentionSpec spec{.num_q_heads = 6, .num_kv_heads = 3, .head_dim_qk = 64, .head_dim_v = 40};
  const auto of_its_own = open_stream(device);
  const KvAllocation cache(spec, 1, 8, "lbhtd", of_its_own.get());
  const KvCache layer = cache.layer(0);
  const int64_t block_bytes = layer.k.num_elements() / 8 * size_of(spec.kv_dtype);
  const auto copier = make_block_copier(device);
  const DeviceGraph graph = of_its_own->capture([&] {
    copier->copy(spec, layer, std::vector<BlockCopy>{{1, 6}, {2, 5}}, of_its_own->get());
  });
  for (const unsigned char value : {7, 9}) {
    of_its_own->fill(layer.k.as<char>() + block_bytes, value, 2 * block_bytes);
    of_its_own->replay(graph);
    std::vector<unsigned char> got(size_t(8 * block_bytes));
    of_its_own->download(got.data(), layer.k.data, int64_t(got.size()));
    of_its_own->synchronize();
    for (size_t i = 0; i < got.size(); ++i) {
      const auto block = int64_t(i) / block_bytes;
      ASSERT_EQ(int(got[i]), block == 1 || block == 2 || block == 5 || block == 6 ? int(value) : 0) << i;
    }
  }
}

}  // namespace
}  // namespace imbrex::cuda
