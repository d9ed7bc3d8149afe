// Plan::write_kv of the CPU backends: where each element lands (docs/kv-formats.md), how it is rounded, and that nothing else changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_features.h"
#include "core/float_types.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

constexpr int kBlocks = 3, kHeads = 2;
constexpr char kFill = char(0x5a);

AttentionSpec spec_of(KvFormat format, DType kv_dtype, int block_size, int dim_qk, int dim_v, DType q_dtype = DType::bf16) {
  return {.num_q_heads = 2 * kHeads,
          .num_kv_heads = kHeads,
          .head_dim_qk = dim_qk,
          .head_dim_v = dim_v,
          .q_dtype = q_dtype,
          .kv_dtype = kv_dtype,
          .kv_format = format,
          .block_size = block_size,
          .mask = {},
          .score = {}};
}

// The formulas of docs/kv-formats.md, word for word. D is head_dim rounded up to a multiple of 32.
int64_t key_element(int64_t t, int64_t d, int64_t D) {
  return (((t / 16) * (D / 32) + d / 32) * 16 + (d % 32) / 2) * 32 + (t % 16) * 2 + d % 2;
}
int64_t value_element(int64_t t, int64_t d, int64_t D, int64_t block_size) {
  const int64_t g = t / 32 * 32;
  if (block_size % 32 == 16 && g + 16 == block_size) return g * D + (d / 16) * 256 + ((t - g) / 2) * 32 + (d % 16) * 2 + t % 2;
  return ((t / 32) * (D / 16) + d / 16) * 512 + ((t % 32) / 2) * 32 + (d % 16) * 2 + t % 2;
}

// The byte in which the packed format has element e of fp8: pairs of rows share a line of 64 bytes.
int64_t byte_of_fp8(int64_t e) { return e / 64 * 64 + e % 32 * 2 + e % 64 / 32; }

TEST(PackedFormat, FormulasGiveEveryElementOnePlace) {
  for (int64_t block_size : {16, 32, 48, 64, 128})
    for (int64_t D : {32, 64, 96, 128, 576}) {
      const int64_t count = block_size * D;
      std::vector<char> keys(size_t(count), 0), values = keys, bytes = keys;  // whether an element has the place
      const auto take = [&](std::vector<char>& places, int64_t place) {
        ASSERT_TRUE(place >= 0 && place < count && places[size_t(place)] == 0) << place;
        places[size_t(place)] = 1;
      };
      for (int64_t t = 0; t < block_size; ++t)
        for (int64_t d = 0; d < D; ++d) {
          take(keys, key_element(t, d, D));
          take(values, value_element(t, d, D, block_size));
          take(bytes, byte_of_fp8(value_element(t, d, D, block_size)));
        }
      EXPECT_EQ(packed_block_bytes(int(block_size), int(D) - 8, DType::bf16), block_size * D * 2);
    }
}

// A backend that writes the format on this machine, or null: AMX kernels need AVX-512 at least.
struct Writer {
  const Backend* backend = nullptr;
  DeviceInfo device;
};
std::vector<Writer> writers(const AttentionSpec& spec) {
  std::vector<Writer> all;
  const DeviceInfo probed = probe_cpu();
  for (const char* name : {"cpu_generic", "cpu_avx512", "cpu_amx"})
    for (CpuIsa isa : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx}) {
      DeviceInfo device = probed;
      device.isa = isa;
      const bool emulated = isa == CpuIsa::amx_emulated && probed.isa >= CpuIsa::avx512 && cpu_features().missing(isa).empty();
      if ((isa <= probed.isa && isa != CpuIsa::amx_emulated) || emulated)
        if (find_backend(name)->unsupported(spec, device).empty()) all.push_back({find_backend(name), device});
    }
  return all;
}

// One call of write_kv with random slots, and what the cache should hold afterwards.
class Write {
 public:
  Write(const AttentionSpec& spec, DType source, std::string_view order, std::vector<float> scales, int num_tokens, unsigned seed)
      : spec_(spec), source_(source), allocation_(spec, 2, kBlocks, order), scales_(std::move(scales)), random_(seed) {
    cache_ = allocation_.layer(1);
    if (!scales_.empty()) {
      cache_.k_scale = TensorView::contiguous(scales_.data(), DType::f32, {int64_t(scales_.size()) / 2});
      cache_.v_scale = TensorView::contiguous(scales_.data() + scales_.size() / 2, DType::f32, {int64_t(scales_.size()) / 2});
    }
    k_ = fill(num_tokens, spec.head_dim_qk, k_bytes_);
    v_ = fill(num_tokens, spec.head_dim_v, v_bytes_);
    std::vector<int64_t> all(size_t(kBlocks * spec.block_size));
    for (size_t i = 0; i < all.size(); ++i) all[i] = int64_t(i);
    std::shuffle(all.begin(), all.end(), random_);
    slots_.assign(all.begin(), all.begin() + num_tokens);
    for (size_t t = 3; t < slots_.size(); t += 4) slots_[t] = -1;
  }

  void expect_right(const Writer& writer, const ParallelFor& threads) {
    char* const memory = allocation_.layer(0).k.as<char>();
    std::memset(memory, kFill, size_t(allocation_.bytes()));
    std::vector<char> expected(memory, memory + allocation_.bytes());
    expect_side(expected, cache_.k.as<char>() - memory, cache_.k, k_, k_bytes_, cache_.k_scale, false);
    expect_side(expected, cache_.v.as<char>() - memory, cache_.v, v_, v_bytes_, cache_.v_scale, true);

    const int num_tokens = int(slots_.size());
    const auto plan = writer.backend->plan(spec_, writer.device, {.threads = threads});
    const std::vector<int32_t> starts{0, num_tokens}, lens{num_tokens};
    std::vector<int32_t> table(size_t(num_tokens / spec_.block_size + 1), 0);
    Batch batch;
    batch.query_start_loc = starts;
    batch.seq_lens = lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {1, int64_t(table.size())});
    batch.slot_mapping = TensorView::contiguous(slots_.data(), DType::i64, {num_tokens});
    plan->update(batch);
    plan->write_kv(cache_, k_, v_);
    for (int64_t i = 0; i < allocation_.bytes(); ++i) ASSERT_EQ(memory[i], expected[size_t(i)]) << plan->str() << ": byte " << i;
  }

 private:
  // [token, head, dim] with gaps between heads and rows.
  TensorView fill(int64_t tokens, int64_t dim, std::vector<char>& bytes) {
    const int64_t head_stride = dim + 3, stride = kHeads * head_stride + 5;
    bytes.assign(size_t(tokens * stride * size_of(source_)), char(0x7f));
    for (int64_t i = 0; i < tokens * stride; ++i) {
      const float f = float(int(random_() % 4001) - 2000) * (random_() % 8 == 0 ? 1.f : 0.001f);  // some saturate in fp8
      store_from_float(bytes.data(), source_, i, f);
    }
    TensorView t = TensorView::contiguous(bytes.data(), source_, {tokens, kHeads, dim});
    t.strides[0] = stride;
    t.strides[1] = head_stride;
    return t;
  }

  void expect_side(std::vector<char>& expected, int64_t start, const TensorView& side, const TensorView& source,
                   const std::vector<char>& bytes, const TensorView& scale, bool values) const {
    const bool packed = spec_.kv_format == KvFormat::amx_packed;
    const int64_t dim = source.size(2), D = packed ? (dim + 31) / 32 * 32 : dim, size = size_of(spec_.kv_dtype);
    for (size_t t = 0; t < slots_.size(); ++t) {
      if (slots_[t] < 0) continue;
      const int64_t block = slots_[t] / spec_.block_size, offset = slots_[t] % spec_.block_size;
      for (int64_t h = 0; h < kHeads; ++h) {
        const float divisor = scale.empty() ? 1.f : scale.as<float>()[scale.size(0) > 1 ? h : 0];
        for (int64_t d = 0; d < D; ++d) {
          int64_t element = 0;  // from `start`, in elements of the cache
          if (packed) {
            const int64_t within = values ? value_element(offset, d, D, spec_.block_size) : key_element(offset, d, D);
            element = (block * side.stride(0) + h * side.stride(1)) / size + (size == 1 ? byte_of_fp8(within) : within);
          } else {
            element = block * side.stride(0) + offset * side.stride(1) + h * side.stride(2) + d * side.stride(3);
          }
          float f = d < dim ? load_as_float(bytes.data(), source_, int64_t(t) * source.stride(0) + h * source.stride(1) + d) : 0.f;
          if (source_ != spec_.kv_dtype) f /= divisor;  // what is quantised already is copied
          store_from_float(expected.data() + start, spec_.kv_dtype, element, f);
        }
      }
    }
  }

  AttentionSpec spec_;
  DType source_;
  KvAllocation allocation_;
  std::vector<float> scales_;  // of k, then of v
  std::mt19937 random_;
  KvCache cache_;
  std::vector<char> k_bytes_, v_bytes_;
  TensorView k_, v_;
  std::vector<int64_t> slots_;
};

TEST(WriteKv, PackedElementsLieWhereTheDocumentSays) {
  bool any = false;
  unsigned seed = 1;
  for (int block_size : {16, 32, 48, 64, 128})
    for (DType kv : {DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2})
      for (auto [dim_qk, dim_v] : {std::pair{128, 128}, {80, 72}, {8, 32}}) {
        const AttentionSpec spec = spec_of(KvFormat::amx_packed, kv, block_size, dim_qk, dim_v);
        const std::vector<float> scales = kv == DType::bf16 ? std::vector<float>{} : std::vector<float>{0.5f, 0.03f, 2.f, 0.7f};
        for (const Writer& writer : writers(spec)) {
          any = true;
          Write write(spec, DType::bf16, seed % 2 ? "lbh" : "hbl", scales, kBlocks * block_size - 5, seed);
          ++seed;
          ASSERT_NO_FATAL_FAILURE(write.expect_right(writer, {})) << spec.str();
        }
      }
  if (!any) GTEST_SKIP() << "no backend here writes amx_packed: it needs AVX-512 with bf16 and vbmi";
}

TEST(WriteKv, StridedCachesOfEveryTypeAndOrder) {
  unsigned seed = 100;
  for (DType q : {DType::f32, DType::f16, DType::bf16})
    for (DType kv : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2}) {
      const AttentionSpec spec = spec_of(KvFormat::strided, kv, 7, 40, 24, q);
      const bool fp8 = size_of(kv) == 1;
      for (const Writer& writer : writers(spec))
        for (const char* order : {"lbhtd", "lbthd", "dhtbl"})
          for (DType source : {q, kv}) {  // both are taken
            Write write(spec, source, order, fp8 ? std::vector<float>{0.25f, 3.f} : std::vector<float>{}, 20, ++seed);
            ASSERT_NO_FATAL_FAILURE(write.expect_right(writer, {})) << spec.str() << " order " << order;
          }
    }
}

TEST(WriteKv, ThreadsShareTheTokens) {
  ThreadPool pool(3);
  const AttentionSpec spec = spec_of(KvFormat::strided, DType::f32, 256, 64, 128, DType::f32);
  for (const Writer& writer : writers(spec)) {
    Write write(spec, DType::f32, "lbhtd", {}, 700, 9);  // enough bytes for the pool to be worth it
    ASSERT_NO_FATAL_FAILURE(write.expect_right(writer, pool.parallel_for()));
  }
}

}  // namespace
}  // namespace imbrex
