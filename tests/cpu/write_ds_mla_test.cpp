// Plan::write_kv of records (fp8_ds_mla): every backend here writes the bytes of the codec, of every type that new latents come in,
// whatever their size, and nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention/kv_codec.h"
#include "attention/reference.h"
#include "core/cpu_features.h"
#include "core/float_types.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

constexpr int kTokens = 11, kRowElements = 576 + 9;
constexpr int64_t kRecordBytes = 656 + 5;

TEST(WriteDsMla, BytesAreThoseOfTheCodec) {
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  int written = 0;
  for (const DType q : {DType::bf16, DType::f16, DType::f32}) {
    AttentionSpec spec{.num_q_heads = 2, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512, .q_dtype = q};
    spec.kv_dtype = DType::fp8_e4m3, spec.kv_format = KvFormat::fp8_ds_mla, spec.block_size = 4;
    for (const DType source : spec.new_kv_dtypes()) {
      std::vector<char> rows(size_t(kTokens * kRowElements * size_of(source)));
      for (int t = 0; t < kTokens; ++t)
        for (int d = 0; d < kRowElements; ++d) {
          float x = std::ldexp(normal(random), (t * 4 + d / 128) * 6 - 133);  // from subnormal numbers on
          if (t == 3) x = d % 128 == 5 ? std::numeric_limits<float>::infinity() : -x;
          if (t == 4 && d < 256) x = 0.f;
          store_from_float(rows.data(), source, int64_t(t) * kRowElements + d, x);
        }
      TensorView k = TensorView::contiguous(rows.data(), source, {kTokens, 1, kRowElements});
      k.sizes[2] = 576;
      const std::vector<int64_t> slots{7, 0, -1, 3, 11, 2, 5, -1, 9, 8, 1};
      std::vector<char> wanted(size_t(3 * 4 * kRecordBytes), 77);
      const auto cache_of = [&](std::vector<char>& bytes) {
        KvCache cache{.k = TensorView::contiguous(bytes.data(), DType::u8, {3, 4, kRecordBytes})};
        cache.k.sizes[2] = 656;
        return cache;
      };
      const std::vector<char> before = wanted;
      for (int t = 0; t < kTokens; ++t) {
        const int64_t slot = slots[size_t(t)];
        const KvRow row{.data = rows.data(), .dtype = source, .first = int64_t(t) * kRowElements, .stride = 1};
        if (slot >= 0) codec_of(spec).encode(spec, cache_of(wanted), KvPart::k, {.block = slot / 4, .offset = slot % 4, .head = 0}, row);
      }
      for (const char* name : {"reference", "cpu_generic", "cpu_avx512", "cpu_amx"})
        for (const CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx}) {
          DeviceInfo device = probe_cpu();
          const bool here = isa == CpuIsa::amx_emulated ? cpu_features().missing(isa).empty() : isa <= device.isa;
          device.isa = isa;
          if (!here || !find_backend(name)->unsupported(spec, device).empty()) continue;
          const auto plan = find_backend(name)->plan(spec, device, {});
          const std::vector<int32_t> starts{0, kTokens}, lens{kTokens};
          std::vector<int32_t> table(3, 0);
          Batch batch;
          batch.query_start_loc = starts, batch.seq_lens = lens;
          batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, 3});
          batch.slot_mapping = TensorView::contiguous(const_cast<int64_t*>(slots.data()), DType::i64, {kTokens});
          plan->update(batch);
          std::vector<char> bytes = before;
          plan->write_kv(cache_of(bytes), k, {});
          for (size_t i = 0; i < bytes.size(); ++i)
            ASSERT_EQ(bytes[i], wanted[i]) << plan->str() << " from " << to_string(source) << ": byte " << i;
          ++written;
        }
    }
  }
  EXPECT_GE(written, 6);  // by the reference and the portable kernels, for each type; more where there are other instructions
}

}  // namespace
}  // namespace imbrex
