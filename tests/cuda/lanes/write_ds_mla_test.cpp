// The text of write_ds_mla.cu, run lane by lane on the host, beside the reference's encode: the same bytes, and none that is not a
// record's.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention/kv_codec.h"
#include "cuda/attention/kv_side.h"
#include "cuda/lanes/library.h"
#include "cuda/params.h"

namespace imbrex::test {
namespace {

TEST(LanesWriteDsMla, WritesTheBytesOfTheReference) {
  AttentionSpec spec{.num_q_heads = 1, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512, .q_dtype = DType::f32};
  spec.kv_dtype = DType::fp8_e4m3, spec.kv_format = KvFormat::fp8_ds_mla, spec.block_size = 16;
  spec.validate();
  const Library wide = open_library("write_ds_mla_write_records"), strided = open_library("write_ds_mla_strided_write_records");
  constexpr int kTokens = 9;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (const int gap : {16, 3}) {  // bytes between records, and elements between rows
    const int64_t record = 656 + gap, row = 576 + gap;
    std::vector<float> rows(size_t(kTokens * row));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::ldexp(normal(random), int(i / 128 % 40) * 6 - 120);
    rows[7] = std::numeric_limits<float>::infinity(), rows[200] = -0.f;
    for (int d = 0; d < 128; ++d) rows[size_t(row + d)] = 0.f;  // of a group
    std::vector<long> slots{3, -1, 31, 16, 0, 1, 15, 2, 40};
    std::vector<char> bytes(size_t(3 * 16 * record), 77), wanted = bytes;
    const auto cache_of = [&](std::vector<char>& memory) {
      KvCache cache{.k = TensorView::contiguous(memory.data(), DType::u8, {3, 16, record})};
      cache.k.sizes[2] = 656;
      return cache;
    };
    for (int t = 0; t < kTokens; ++t) {
      if (slots[size_t(t)] < 0) continue;
      const KvPlace place{.block = slots[size_t(t)] / 16, .offset = slots[size_t(t)] % 16, .head = 0};
      codec_of(spec).encode(spec, cache_of(wanted), KvPart::k, place, {rows.data(), DType::f32, t * row, 1});
    }
    cuda::WriteKvParams p{.k = cuda::record_side(cache_of(bytes).k)};
    p.new_k = {reinterpret_cast<const char*>(rows.data()), row * 4, 0, 4};
    p.new_v = p.new_k, p.new_v.data += 512 * 4;  // rope parts
    p.slots = slots.data(), p.slot_stride = 1, p.num_tokens = kTokens, p.num_kv_heads = 1;
    (gap == 16 ? wide : strided).run(&p, nullptr, {.blocks = 2});
    for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], wanted[i]) << "byte " << i << ", gap " << gap;
  }
}

}  // namespace
}  // namespace imbrex::test
