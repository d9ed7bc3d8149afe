// KvCache and KvAllocation: every physical order is one cache, memory is zeroed and disjoint, and one refusal for every rule.
#include "imbrex/kv_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;

AttentionSpec small_spec() {
  return {.num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 16, .head_dim_v = 8, .block_size = 4, .mask = {}, .score = {}};
}
AttentionSpec packed_spec() {
  AttentionSpec spec = small_spec();
  spec.kv_format = KvFormat::amx_packed;
  spec.block_size = 32;
  return spec;
}

int64_t offset(const TensorView& t, std::initializer_list<int64_t> index) {
  int64_t sum = 0;
  int d = 0;
  for (int64_t i : index) sum += i * t.stride(d++);
  return sum;
}

TEST(KvAllocation, EveryOrderGivesEveryElementItsOwnPlace) {
  const AttentionSpec spec = small_spec();
  constexpr int kLayers = 3, kBlocks = 5;
  std::string order = "bdhlt";  // sorted: all 120 permutations follow
  int permutations = 0;
  do {
    const KvAllocation allocation(spec, kLayers, kBlocks, order);
    std::set<const void*> places;
    for (int l = 0; l < kLayers; ++l) {
      const KvCache cache = allocation.layer(l);
      cache.validate(spec);
      for (const TensorView* t : {&cache.k, &cache.v})
        for (int64_t b = 0; b < t->size(0); ++b)
          for (int64_t p = 0; p < t->size(1); ++p)
            for (int64_t h = 0; h < t->size(2); ++h)
              for (int64_t d = 0; d < t->size(3); ++d) {
                uint16_t* place = t->as<uint16_t>() + offset(*t, {b, p, h, d});
                ASSERT_EQ(*place, 0);
                *place = 0xffff;  // a place that is met again is not zero any more
                places.insert(place);
              }
    }
    ASSERT_EQ(places.size(), size_t(kLayers * kBlocks * 4 * 2 * (16 + 8))) << order;
    ++permutations;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(permutations, 120);
}

TEST(KvAllocation, StridesFollowTheOrder) {
  const AttentionSpec spec = small_spec();
  const KvCache nhd = KvAllocation(spec, 2, 3).layer(1);  // heads before tokens
  EXPECT_EQ(nhd.k.strides, (std::array<int64_t, 5>{2 * 4 * 16, 16, 4 * 16, 1, 0}));
  EXPECT_EQ(nhd.num_blocks(spec), 3);
  const KvAllocation blocks_first(spec, 2, 3, "blthd");
  EXPECT_EQ(blocks_first.layer(0).k.stride(0), 2 * 4 * 2 * 16);
  EXPECT_EQ(blocks_first.layer(1).k.as<char>() - blocks_first.layer(0).k.as<char>(), 4 * 2 * 16 * 2);
  EXPECT_EQ(blocks_first.num_layers(), 2);
  EXPECT_EQ(blocks_first.num_blocks(), 3);
  EXPECT_GE(blocks_first.bytes(), 2 * 3 * 4 * spec.kv_bytes_per_token());
}

TEST(KvAllocation, MemoryIsAlignedToHugePagesAndOutlivesMoves) {
  const AttentionSpec spec = small_spec();
  KvAllocation a(spec, 1, 2);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.layer(0).k.data) % (uintptr_t(2) << 20), 0u);
  const KvAllocation b = std::move(a);
  b.layer(0).v.as<uint16_t>()[0] = 1;
  EXPECT_EQ(b.layer(0).v.as<uint16_t>()[0], 1);
  const KvAllocation large(spec, 4, 20000);  // more than a huge page
  uint16_t* values = large.layer(3).v.as<uint16_t>();
  EXPECT_EQ(values[large.layer(3).v.num_elements() - 1], 0);
}

TEST(KvAllocation, PackedBlocksOfAHeadAreInOnePiece) {
  const AttentionSpec spec = packed_spec();
  for (const char* order : {"lbh", "lbhtd", "hlb", "btdlh"}) {
    const KvAllocation allocation(spec, 2, 3, order);
    const KvCache cache = allocation.layer(1);
    cache.validate(spec);
    EXPECT_EQ(cache.k.dtype, DType::u8);
    EXPECT_EQ(cache.k.rank, 3);
    EXPECT_EQ(cache.k.size(2), 32 * 32 * 2);  // head_dim 16 padded to 32
    EXPECT_EQ(cache.k.stride(2), 1);
    EXPECT_EQ(cache.v.size(2), 32 * 32 * 2);
  }
}

TEST(KvCache, PackedBlockBytes) {
  EXPECT_EQ(packed_block_bytes(16, 128, DType::bf16), 16 * 128 * 2);
  EXPECT_EQ(packed_block_bytes(32, 80, DType::bf16), 32 * 96 * 2);
  EXPECT_EQ(packed_block_bytes(64, 576, DType::fp8_e4m3), 64 * 576);
  EXPECT_EQ(error_code([] { packed_block_bytes(24, 128, DType::bf16); }), "kv_cache.packed.block_size");
  EXPECT_EQ(error_code([] { packed_block_bytes(0, 128, DType::bf16); }), "kv_cache.packed.block_size");
  EXPECT_EQ(error_code([] { packed_block_bytes(16, 0, DType::bf16); }), "kv_cache.packed.head_dim");
  EXPECT_EQ(error_code([] { packed_block_bytes(16, 128, DType::f16); }), "kv_cache.packed.dtype");
}

TEST(KvAllocation, Refusals) {
  const AttentionSpec good = small_spec();
  const auto code = [](const AttentionSpec& spec, int layers, int64_t blocks, std::string_view order) {
    return error_code([&] { KvAllocation allocation(spec, layers, blocks, order); });
  };
  for (const char* order : {"lbhtx", "LBHTD", "lbht d"}) EXPECT_EQ(code(good, 1, 1, order), "kv_cache.order.letter") << order;
  for (const char* order : {"lbhtdd", "llbht"}) EXPECT_EQ(code(good, 1, 1, order), "kv_cache.order.twice") << order;
  for (const char* order : {"", "lbht", "bhtd", "lbh"}) EXPECT_EQ(code(good, 1, 1, order), "kv_cache.order.missing") << order;
  EXPECT_EQ(code(packed_spec(), 1, 1, "lb"), "kv_cache.order.missing");
  EXPECT_EQ(code(good, 0, 1, "lbhtd"), "kv_cache.size.num_layers");
  EXPECT_EQ(code(good, -1, 1, "lbhtd"), "kv_cache.size.num_layers");
  for (int64_t blocks : {int64_t(0), int64_t(-1), int64_t(1) << 31, INT64_MAX, INT64_MIN})
    EXPECT_EQ(code(good, 1, blocks, "lbhtd"), "kv_cache.size.num_blocks") << blocks;
  AttentionSpec ragged = good, huge = good, wrong = good;
  ragged.block_size = 0;
  EXPECT_EQ(code(ragged, 1, 1, "lbhtd"), "kv_cache.size.ragged");
  huge.num_q_heads = huge.num_kv_heads = 4096;
  huge.block_size = 65536;
  EXPECT_EQ(code(huge, INT32_MAX, INT32_MAX, "lbhtd"), "kv_cache.size.overflow");
  EXPECT_EQ(code(huge, 1, INT32_MAX / 64, "lbhtd"), "kv_cache.size.memory");  // 2^58 bytes: more than an address space
  wrong.head_dim_qk = 7;
  EXPECT_EQ(code(wrong, 1, 1, "lbhtd"), "spec.head_dim_qk");
  const KvAllocation allocation(good, 2, 1);
  EXPECT_EQ(error_code([&] { allocation.layer(2); }), "kv_cache.layer");
  EXPECT_EQ(error_code([&] { allocation.layer(-1); }), "kv_cache.layer");
}

struct BadCache {
  const char* code;
  std::function<void(KvCache&, AttentionSpec&)> spoil;
};

TEST(KvCache, EveryBrokenRuleHasItsCode) {
  static float scales[2] = {1, 1};
  static float bad_scales[2] = {1, NAN}, zero_scale[1] = {0}, negative_scale[1] = {-1};
  const auto scale = [](float* data, int64_t size) { return TensorView::contiguous(data, DType::f32, {size}); };
  using C = KvCache&;
  using S = AttentionSpec&;
  const std::vector<BadCache> all = {
      {"kv_cache.k.missing", [](C c, S) { c.k = {}; }},
      {"kv_cache.v.missing", [](C c, S) { c.v = {}; }},
      {"kv_cache.k.dtype", [](C c, S) { c.k.dtype = DType::f16; }},
      {"kv_cache.k.dtype", [](C, S s) { s.kv_dtype = DType::fp8_e5m2; }},
      {"kv_cache.k.dtype", [](C, S s) { s.kv_format = KvFormat::amx_packed, s.block_size = 16; }},
      {"kv_cache.v.dtype", [](C c, S) { c.v.dtype = DType::u8; }},
      {"kv_cache.k.rank", [](C c, S) { c.k.rank = 3; }},
      {"kv_cache.k.rank", [](C c, S) { c.k.rank = 0; }},
      {"kv_cache.k.rank", [](C, S s) { s.block_size = 0; }},
      {"kv_cache.v.rank", [](C c, S) { c.v.rank = 5; }},
      {"kv_cache.k.block_size", [](C c, S) { c.k.sizes[1] = 5; }},
      {"kv_cache.k.block_size", [](C, S s) { s.block_size = 16; }},
      {"kv_cache.v.block_size", [](C c, S) { c.v.sizes[1] = -4; }},
      {"kv_cache.k.num_heads", [](C c, S) { c.k.sizes[2] = 4; }},
      {"kv_cache.v.num_heads", [](C c, S) { c.v.sizes[2] = 1; }},
      {"kv_cache.k.head_dim", [](C c, S) { c.k.sizes[3] = 8; }},
      {"kv_cache.k.head_dim", [](C, S s) { s.head_dim_qk = 24; }},
      {"kv_cache.v.head_dim", [](C c, S) { c.v.sizes[3] = 16; }},
      {"kv_cache.k.strides", [](C c, S) { c.k.strides[0] = 0; }},
      {"kv_cache.k.strides", [](C c, S) { c.k.strides[3] = -1; }},
      {"kv_cache.k.strides", [](C c, S) { c.k.strides[0] = INT64_MAX; }},
      {"kv_cache.k.strides", [](C c, S) { c.k.strides[0] = INT64_MAX / 4; }},
      {"kv_cache.v.strides", [](C c, S) { c.v.strides[1] = INT64_MIN; }},
      {"kv_cache.device",
       [](C c, S) {
         c.v.device = {DeviceType::cuda, 0};
       }},
      {"kv_cache.num_blocks.differ", [](C c, S) { c.v.sizes[0] = 2; }},
      {"kv_cache.num_blocks.range", [](C c, S) { c.k.sizes[0] = c.v.sizes[0] = int64_t(1) << 31; }},
      {"kv_cache.num_blocks.range", [](C c, S) { c.k.sizes[0] = c.v.sizes[0] = -1; }},
      {"kv_cache.k_scale.unexpected", [&](C c, S) { c.k_scale = scale(scales, 1); }},
      {"kv_cache.v_scale.unexpected", [&](C c, S) { c.v_scale = scale(scales, 1); }},
  };
  const std::vector<BadCache> all_fp8 = {
      {"kv_cache.k_scale.dtype", [&](C c, S) { c.k_scale.dtype = DType::bf16; }},
      {"kv_cache.v_scale.dtype", [&](C c, S) { c.v_scale.dtype = DType::i32; }},
      {"kv_cache.k_scale.size", [&](C c, S) { c.k_scale.sizes[0] = 3; }},
      {"kv_cache.k_scale.size", [&](C c, S) { c.k_scale.sizes[0] = 0; }},
      {"kv_cache.v_scale.size", [&](C c, S) { c.v_scale.rank = 0; }},
      {"kv_cache.k_scale.device",
       [&](C c, S) {
         c.k_scale.device = {DeviceType::cuda, 0};
       }},
      {"kv_cache.v_scale.device",
       [&](C c, S) {
         c.v_scale.device = {DeviceType::cuda, 3};
       }},
      {"kv_cache.k_scale.value", [&](C c, S) { c.k_scale = scale(bad_scales, 2); }},
      {"kv_cache.k_scale.value", [&](C c, S) { c.k_scale = scale(zero_scale, 1); }},
      {"kv_cache.v_scale.value", [&](C c, S) { c.v_scale = scale(negative_scale, 1); }},
  };
  const std::vector<BadCache> all_packed = {
      {"kv_cache.k.packed_bytes", [](C c, S) { c.k.sizes[2] -= 1; }},   {"kv_cache.v.packed_bytes", [](C c, S) { c.v.sizes[2] *= 2; }},
      {"kv_cache.k.packed_bytes", [](C, S s) { s.block_size = 16; }},   {"kv_cache.k.packed_stride", [](C c, S) { c.k.strides[2] = 2; }},
      {"kv_cache.v.packed_stride", [](C c, S) { c.v.strides[2] = 0; }}, {"kv_cache.k.dtype", [](C c, S) { c.k.dtype = DType::bf16; }},
  };
  AttentionSpec fp8 = small_spec();
  fp8.kv_dtype = DType::fp8_e4m3;
  std::set<std::string> codes;
  const auto refuse_all = [&](const std::vector<BadCache>& cases, const AttentionSpec& good, bool with_scales) {
    const KvAllocation allocation(good, 1, 3);
    for (size_t i = 0; i < cases.size(); ++i) {
      KvCache cache = allocation.layer(0);
      AttentionSpec spec = good;
      if (with_scales) cache.k_scale = scale(scales, 2), cache.v_scale = scale(scales, 1);
      ASSERT_NO_THROW(cache.validate(spec));
      cases[i].spoil(cache, spec);
      EXPECT_EQ(error_code([&] { cache.validate(spec); }), cases[i].code) << i;
      codes.insert(cases[i].code);
    }
  };
  refuse_all(all, small_spec(), false);
  refuse_all(all_fp8, fp8, true);
  refuse_all(all_packed, packed_spec(), false);
  EXPECT_EQ(codes.size(), 31u);
}

TEST(KvCache, RaggedKeysHaveRowsInsteadOfBlocks) {
  AttentionSpec spec = small_spec();
  spec.block_size = 0;
  std::vector<uint16_t> memory(100 * 2 * 16);
  KvCache cache{.k = TensorView::contiguous(memory.data(), DType::bf16, {100, 2, 16}),
                .v = TensorView::contiguous(memory.data(), DType::bf16, {100, 2, 8}),
                .k_scale = {},
                .v_scale = {}};
  cache.validate(spec);
  EXPECT_EQ(cache.num_blocks(spec), -1);
  cache.v.sizes[0] = 99;
  EXPECT_EQ(error_code([&] { cache.validate(spec); }), "kv_cache.num_blocks.differ");
}

TEST(KvCache, LatentValuesAreAPartOfTheKeys) {
  AttentionSpec spec = small_spec();
  const int64_t both = spec.kv_bytes_per_token();
  EXPECT_EQ(both, 2 * (16 + 8) * 2);
  spec.kv_format = KvFormat::latent;
  EXPECT_EQ(spec.kv_bytes_per_token(), 2 * 16 * 2);
  for (const char* order : {"lbhtd", "blthd", "dthbl"}) {
    const KvAllocation allocation(spec, 2, 3, order);
    EXPECT_EQ(allocation.bytes(), 2 * 3 * 4 * spec.kv_bytes_per_token());
    const KvCache good = allocation.layer(1);
    EXPECT_TRUE(good.v.empty() && good.v.rank == 0);
    EXPECT_NO_THROW(good.validate(spec));
    KvCache cache = good;
    cache.v = good.k.slice(3, 0, 8);
    EXPECT_NO_THROW(cache.validate(spec)) << "the part of the keys that they are";
    const auto code_with = [&](const TensorView& v) {
      cache.v = v;
      return error_code([&] { cache.validate(spec); });
    };
    EXPECT_EQ(code_with(good.k.slice(3, 8, 16)), "kv_cache.v.unexpected");
    EXPECT_EQ(code_with(good.k.slice(3, 0, 7)), "kv_cache.v.unexpected");
    EXPECT_EQ(code_with(good.k.slice(3, 0, 8).slice(0, 0, 2)), "kv_cache.v.unexpected");
    EXPECT_EQ(code_with(allocation.layer(0).k.slice(3, 0, 8)), "kv_cache.v.unexpected");
    cache = good, cache.k = {};
    EXPECT_EQ(error_code([&] { cache.validate(spec); }), "kv_cache.k.missing");
  }
  // A latent stands for keys and values, so it has one scale, that of keys.
  spec.kv_dtype = DType::fp8_e4m3;
  const KvAllocation bytes(spec, 1, 3);
  KvCache cache = bytes.layer(0);
  float one = 1;
  cache.k_scale = TensorView::contiguous(&one, DType::f32, {1});
  EXPECT_NO_THROW(cache.validate(spec));
  cache.v_scale = cache.k_scale;
  EXPECT_EQ(error_code([&] { cache.validate(spec); }), "kv_cache.v_scale.unexpected");
}

TEST(KvCache, ValuesMayBeAPartOfTheKeys) {
  AttentionSpec spec = small_spec();  // as in MLA, where v is the first part of the latent
  std::vector<uint16_t> memory(3 * 4 * 2 * 16);
  KvCache cache;
  cache.k = TensorView::contiguous(memory.data(), DType::bf16, {3, 4, 2, 16});
  cache.v = cache.k.slice(3, 0, 8);
  EXPECT_NO_THROW(cache.validate(spec));
}

}  // namespace
}  // namespace imbrex
