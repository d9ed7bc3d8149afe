// The table of cache formats: every row keeps what it is given, and formats that are none of the table's run through it as its own do:
// quantised records with a scale inside, and with scales beside. Also the bytes of fp8_ds_mla, and what latent_rope is of latent.
#include "attention/kv_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "attention/ds_mla.h"
#include "attention/reference.h"
#include "conformance/attention/case_runner.h"
#include "core/float_types.h"
#include "expect_error.h"
#include "imbrex/select.h"

namespace imbrex::test {
namespace {

constexpr int64_t kScaleBytes = sizeof(float);

int dim_of(const AttentionSpec& spec, KvPart part) { return part == KvPart::k ? spec.head_dim_qk : spec.head_dim_v; }

std::vector<float> floats_of(const KvRow& row, int count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (int d = 0; d < count; ++d) x[size_t(d)] = load_as_float(row.data, row.dtype, row.first + d * row.stride);
  return x;
}

// The scale of a row: a power of two, so that what an element stands for is exact.
float scale_for(const std::vector<float>& row, float largest) {
  float top = 0;
  for (float x : row) top = std::max(top, std::abs(x));
  return top == 0 ? 1.f : std::exp2(std::ceil(std::log2(top / largest)));
}

// Makes a row integers of eight bits, each of which stands for itself times the scale.
float quantise(const std::vector<float>& row, int8_t* to) {
  const float scale = scale_for(row, 127);
  for (size_t d = 0; d < row.size(); ++d) to[d] = int8_t(std::lround(row[d] / scale));
  return scale;
}
void dequantise(const int8_t* from, float scale, int count, double* row) {
  for (int d = 0; d < count; ++d) row[d] = double(scale) * from[d];
}

void check_bytes(const AttentionSpec& spec) {
  if (spec.kv_dtype != DType::u8 || spec.block_size == 0) throw Error("test.codec", "not for " + spec.str());
}

int64_t offset_of(const TensorView& t, KvPlace at) { return at.block * t.stride(0) + at.offset * t.stride(1) + at.head * t.stride(2); }

// A format whose records have their scale, a float, in front of the elements.
namespace inside {

std::optional<KvLayout> layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k && part != KvPart::v) return std::nullopt;
  return KvLayout{.dtype = DType::u8,
                  .dims = "bthx",
                  .sizes = {1, spec.block_size, spec.num_kv_heads, kScaleBytes + dim_of(spec, part)},
                  .piece = "a record"};
}
void encode(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace at, const KvRow& row) {
  char* const record = part_of(cache, part).as<char>() + offset_of(part_of(cache, part), at);
  const float scale = quantise(floats_of(row, dim_of(spec, part)), reinterpret_cast<int8_t*>(record + kScaleBytes));
  std::memcpy(record, &scale, kScaleBytes);
}
void decode(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace at, double* row) {
  const char* const record = part_of(cache, part).as<char>() + offset_of(part_of(cache, part), at);
  float scale;
  std::memcpy(&scale, record, kScaleBytes);
  dequantise(reinterpret_cast<const int8_t*>(record + kScaleBytes), scale, dim_of(spec, part), row);
}

const KvCodec kCodec{.name = "scale_inside",
                     .strided = false,
                     .values_in_keys = false,
                     .scales_inside = true,
                     .ragged = false,
                     .block_unit = 1,
                     .preferred = nullptr,
                     .check = check_bytes,
                     .layout = layout,
                     .encode = encode,
                     .decode = decode};

}  // namespace inside

// A format with a scale for each token and head, in tensors of their own.
namespace beside {

KvPart scale_of(KvPart part) { return part == KvPart::k ? KvPart::k_scale : KvPart::v_scale; }

std::optional<KvLayout> layout(const AttentionSpec& spec, KvPart part) {
  if (part == KvPart::k_rope) return std::nullopt;
  if (part == KvPart::k_scale || part == KvPart::v_scale)
    return KvLayout{.dtype = DType::f32, .dims = "bth", .sizes = {1, spec.block_size, spec.num_kv_heads}, .piece = {}};
  return KvLayout{.dtype = DType::u8, .dims = "bthd", .sizes = {1, spec.block_size, spec.num_kv_heads, dim_of(spec, part)}, .piece = {}};
}
void encode(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace at, const KvRow& row) {
  const TensorView &t = part_of(cache, part), &scales = part_of(cache, scale_of(part));
  std::vector<int8_t> elements(static_cast<size_t>(dim_of(spec, part)));
  scales.as<float>()[offset_of(scales, at)] = quantise(floats_of(row, dim_of(spec, part)), elements.data());
  for (size_t d = 0; d < elements.size(); ++d) t.as<int8_t>()[offset_of(t, at) + int64_t(d) * t.stride(3)] = elements[d];
}
void decode(const AttentionSpec& spec, const KvCache& cache, KvPart part, KvPlace at, double* row) {
  const TensorView &t = part_of(cache, part), &scales = part_of(cache, scale_of(part));
  const float scale = scales.as<float>()[offset_of(scales, at)];
  for (int d = 0; d < dim_of(spec, part); ++d) row[d] = double(scale) * t.as<int8_t>()[offset_of(t, at) + d * t.stride(3)];
}

const KvCodec kCodec{.name = "scale_beside",
                     .strided = false,
                     .values_in_keys = false,
                     .scales_inside = true,
                     .ragged = false,
                     .block_unit = 1,
                     .preferred = nullptr,
                     .check = check_bytes,
                     .layout = layout,
                     .encode = encode,
                     .decode = decode};

}  // namespace beside

// The format of a codec, which the first test that needs it adds.
KvFormat format_of(const KvCodec& codec) {
  if (const auto known = find_kv_format(codec.name)) return *known;
  return add_kv_codec(codec);
}

Case case_of(KvFormat format) {
  Case c;
  const bool latent = codec_of(format).values_in_keys;
  c.spec.num_q_heads = 6, c.spec.num_kv_heads = latent ? 1 : 2;
  c.spec.head_dim_qk = latent ? 576 : 48, c.spec.head_dim_v = latent ? 512 : 32;
  c.spec.kv_dtype = latent ? DType::fp8_e4m3 : DType::u8;
  c.spec.kv_format = format;
  c.requests = {{1, 37, 0}, {5, 21, 1}, {18, 18, 2}};
  c.seed = 7;
  return c;
}

// The rows as a cache of the format gives them back, written and read one at a time.
HostTensor kept_by(const HostTensor& rows, const AttentionSpec& spec, KvPart part) {
  HostTensor kept = HostTensor::make(DType::f32, rows.sizes);
  const int64_t heads = rows.sizes[1], dim = rows.sizes[2];
  const KvAllocation memory(spec, 1, 1);
  std::vector<double> row(static_cast<size_t>(dim));
  for (int64_t i = 0; i < rows.sizes[0]; ++i)
    for (int h = 0; h < heads; ++h) {
      const KvPlace place{.block = 0, .offset = i % spec.block_size, .head = h};
      const KvRow from{.data = rows.bytes.data(), .dtype = rows.dtype, .first = (i * heads + h) * dim, .stride = 1};
      codec_of(spec).encode(spec, memory.layer(0), part, place, from);
      codec_of(spec).decode(spec, memory.layer(0), part, place, row.data());
      for (int64_t d = 0; d < dim; ++d) kept.set((i * heads + h) * dim + d, row[size_t(d)]);
    }
  return kept;
}

TEST(KvCodec, FormatsOfNobodyRunThroughTheTable) {
  for (const KvCodec* codec : {&inside::kCodec, &beside::kCodec, &kDsMlaCodec}) {
    const KvFormat format = format_of(*codec);
    const Case c = case_of(format);
    ASSERT_NO_THROW(c.spec.validate()) << codec->name;
    const CaseInputs in = make_inputs(c);
    CaseInputs plain = in;  // the same numbers, stored as they are
    plain.spec.kv_format = KvFormat::strided;
    plain.spec.kv_dtype = DType::f32;
    plain.k = kept_by(in.k, c.spec, KvPart::k);
    plain.v = codec->values_in_keys ? first_elements(plain.k, c.spec.head_dim_v) : kept_by(in.v, c.spec, KvPart::v);
    plain.k_scale = plain.v_scale = {};
    int changed = 0;  // by the way into the cache and back
    for (int64_t i = 0; i < in.k.num_elements(); ++i) changed += in.k.get(i) != plain.k.get(i);
    EXPECT_GT(changed, in.k.num_elements() / 2) << codec->name;
    for (const char* order : {"lbhtd", "blthd"})
      for (int block_size : {1, 16}) {
        RunOptions options;
        options.order = order;
        options.block_size = block_size;
        options.chunk = block_size == 1 ? 7 : 0;
        const RunResult expected = run_case(reference_backend(), probe_cpu(), plain, options);
        options.kv_format = format;
        CaseInputs given = in;  // these formats have scales of their own
        given.k_scale = given.v_scale = {};
        const RunResult result = run_case(reference_backend(), probe_cpu(), given, options);
        EXPECT_TRUE(result.violations.empty()) << codec->name << ": " << result.violations.front();
        EXPECT_EQ(result.out, expected.out) << codec->name << " " << order << " " << block_size;
        EXPECT_EQ(result.lse, expected.lse) << codec->name << " " << order << " " << block_size;
      }
  }
}

TEST(KvCodec, FormatsOfNobodyHaveSizesAndChecks) {
  const AttentionSpec with_inside = case_of(format_of(inside::kCodec)).spec, with_beside = case_of(format_of(beside::kCodec)).spec;
  EXPECT_EQ(with_inside.kv_bytes_per_token(), 2 * (48 + 32 + 2 * 4));
  EXPECT_EQ(with_beside.kv_bytes_per_token(), 2 * (48 + 32 + 2 * 4));
  EXPECT_NE(with_inside.str().find("scale_inside"), std::string::npos);
  for (const AttentionSpec& spec : {with_inside, with_beside}) {
    const KvAllocation memory(spec, 2, 5);
    KvCache cache = memory.layer(1);
    EXPECT_NO_THROW(cache.validate(spec));
    EXPECT_GE(memory.bytes(), 2 * block_bytes(spec) * 5);
    cache.k.sizes[size_t(cache.k.rank - 1)] -= 1;
    EXPECT_TRUE(error_code([&] { cache.validate(spec); }).starts_with("kv_cache.k."));
    for (const Backend* backend : backends())  // nobody else reads it
      EXPECT_EQ(backend->unsupported(spec, probe_cpu()).empty(), backend == &reference_backend()) << backend->name();
  }
  KvCache cache = KvAllocation(with_beside, 1, 3).layer(0);
  EXPECT_EQ(cache.k_scale.rank, 3);
  cache.v_scale.sizes[2] = 1;
  EXPECT_EQ(error_code([&] { cache.validate(with_beside); }), "kv_cache.scale");
  cache.v_scale = {};
  EXPECT_EQ(error_code([&] { cache.validate(with_beside); }), "kv_cache.scale");
}

TEST(KvCodec, BlocksAreCopiedWithTheirScales) {
  const AttentionSpec spec = case_of(format_of(beside::kCodec)).spec;
  const KvAllocation memory(spec, 1, 4);
  const KvCache cache = memory.layer(0);
  const HostTensor row = make_inputs(case_of(format_of(beside::kCodec))).k;
  const KvRow from{.data = row.bytes.data(), .dtype = row.dtype, .first = 0, .stride = 1};
  const KvCodec& codec = codec_of(spec);
  std::vector<double> before(48), after(48);
  codec.encode(spec, cache, KvPart::k, {.block = 1, .offset = 3, .head = 1}, from);
  codec.decode(spec, cache, KvPart::k, {.block = 1, .offset = 3, .head = 1}, before.data());
  const BlockCopy copies[] = {{1, 2}};
  copy_blocks(spec, cache, copies);
  codec.decode(spec, cache, KvPart::k, {.block = 2, .offset = 3, .head = 1}, after.data());
  EXPECT_EQ(before, after);
  EXPECT_NE(before, std::vector<double>(48, 0.0));
}

// Every element of a block has a place of its own, and comes back as the bits that were put there.
TEST(KvCodec, RowsOfTheTableKeepElementsAsTheyAre) {
  for (const KvFormat format : {KvFormat::strided, KvFormat::amx_packed, KvFormat::latent, KvFormat::latent_rope})
    for (const DType type : {DType::bf16, DType::fp8_e4m3})
      for (int block_size : {16, 32, 48}) {
        AttentionSpec spec{.num_q_heads = 2, .num_kv_heads = 2, .head_dim_qk = 48, .head_dim_v = 40, .block_size = block_size};
        spec.kv_format = format, spec.kv_dtype = type;
        const KvAllocation memory(spec, 1, 3);
        const KvCache cache = memory.layer(0);
        const KvCodec& codec = codec_of(spec);
        const auto element = [&](int token, int head, int d, KvPart part) {
          return uint16_t((token * 7 + head * 31 + d * 3 + (part == KvPart::v ? 11 : 0)) % 100 + 1);  // no NaN
        };
        std::vector<uint16_t> words(48);
        std::vector<uint8_t> bytes(48);
        for (const KvPart part : {KvPart::k, KvPart::v}) {
          if (!codec.layout(spec, part)) continue;
          for (int t = 0; t < block_size; ++t)
            for (int h = 0; h < 2; ++h) {
              for (int d = 0; d < 48; ++d) words[size_t(d)] = element(t, h, d, part), bytes[size_t(d)] = uint8_t(words[size_t(d)]);
              const void* const data = size_of(type) == 2 ? static_cast<const void*>(words.data()) : bytes.data();
              codec.encode(spec, cache, part, {.block = 1, .offset = t, .head = h}, {.data = data, .dtype = type, .first = 0, .stride = 1});
            }
        }
        std::vector<double> row(48);
        for (const KvPart part : {KvPart::k, KvPart::v})
          for (int t = 0; t < block_size; ++t)
            for (int h = 0; h < 2; ++h) {
              codec.decode(spec, cache, part, {.block = 1, .offset = t, .head = h}, row.data());
              for (int d = 0; d < (part == KvPart::k ? 48 : 40); ++d) {
                const uint16_t word = element(t, h, d, codec.values_in_keys ? KvPart::k : part);
                const auto byte = uint8_t(word);
                const void* const wanted = size_of(type) == 2 ? static_cast<const void*>(&word) : &byte;
                ASSERT_EQ(row[size_t(d)], load_as_double(wanted, type, 0)) << spec.str() << " token " << t << " dim " << d;
              }
            }
      }
}

AttentionSpec latent_spec(KvFormat format, DType kv_dtype) {
  AttentionSpec spec{.num_q_heads = 6, .num_kv_heads = 1, .head_dim_qk = 576, .head_dim_v = 512, .kv_dtype = kv_dtype};
  spec.kv_format = format, spec.block_size = 4;
  return spec;
}

TEST(DsMla, BytesOfARecordAreKnown) {
  const AttentionSpec spec = latent_spec(KvFormat::fp8_ds_mla, DType::fp8_e4m3);
  EXPECT_EQ(spec.kv_bytes_per_token(), 656);
  const KvAllocation memory(spec, 1, 2);
  const KvCache cache = memory.layer(0);
  std::vector<float> row(576, 0.f);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  row[0] = 448.f, row[1] = -1.f, row[2] = 0x1p-9f, row[3] = 19.f;                 // group 0 has scale 1; 19 is between 18 and 20
  row[128] = 449.f, row[129] = -448.f;                                            // scale 2
  row[256] = 0x1p-140f;                                                           // the least scale, 2^-126
  row[384] = kInfinity, row[385] = -3.f, row[386] = -kInfinity, row[387] = 3.5f;  // the largest finite one decides: 3.5 is 448 * 2^-7
  row[512] = 1.f, row[513] = 1.00390625f, row[575] = -2.f;                        // halfway between two bf16: the even one
  codec_of(spec).encode(spec, cache, KvPart::k, {.block = 1, .offset = 2, .head = 0}, {row.data(), DType::f32, 0, 1});
  const uint8_t* const record = cache.k.as<uint8_t>() + cache.k.stride(0) + 2 * cache.k.stride(1);
  EXPECT_EQ(std::vector<int>(record, record + 5), (std::vector<int>{0x7e, 0xb8, 0x01, 0x5a, 0x00}));
  EXPECT_EQ(std::vector<int>(record + 128, record + 131), (std::vector<int>{0x76, 0xf6, 0x00}));
  EXPECT_EQ(std::vector<int>(record + 384, record + 388), (std::vector<int>{0x7e, 0xfc, 0xfe, 0x7e}));
  float scales[4];
  std::memcpy(scales, record + 512, sizeof scales);
  EXPECT_EQ(scales[0], 1.f);
  EXPECT_EQ(scales[1], 2.f);
  EXPECT_EQ(scales[2], 0x1p-126f);
  EXPECT_EQ(scales[3], 0x1p-7f);
  EXPECT_EQ(std::vector<int>(record + 528, record + 532), (std::vector<int>{0x80, 0x3f, 0x80, 0x3f}));
  EXPECT_EQ(std::vector<int>(record + 654, record + 656), (std::vector<int>{0x00, 0xc0}));
  EXPECT_TRUE(std::all_of(record + 656, record + 1312, [](uint8_t byte) { return byte == 0; }));

  // Readers take any scale.
  scales[1] = 0.3f;
  std::memcpy(cache.k.as<char>() + cache.k.stride(0) + 2 * cache.k.stride(1) + 512, scales, sizeof scales);
  std::vector<double> key(576), value(512);
  codec_of(spec).decode(spec, cache, KvPart::k, {.block = 1, .offset = 2, .head = 0}, key.data());
  codec_of(spec).decode(spec, cache, KvPart::v, {.block = 1, .offset = 2, .head = 0}, value.data());
  EXPECT_EQ(key[3], 20.0);
  EXPECT_EQ(key[128], double(0.3f) * 224.0);
  EXPECT_EQ(key[575], -2.0);
  EXPECT_TRUE(std::equal(value.begin(), value.end(), key.begin()));
}

TEST(DsMla, ScalesAreTheLeastPowersOfTwoThatHoldAGroup) {
  for (float x = 0x1p-130f; x < 0x1p127f; x *= 1.0137f) {
    const float scale = std::bit_cast<float>(ds_mla_scale(ds_mla_magnitude(std::bit_cast<uint32_t>(-x))));
    EXPECT_LE(double(x), 448.0 * double(scale));
    EXPECT_TRUE(scale == 0x1p-126f || double(x) > 224.0 * double(scale));
    EXPECT_EQ(std::bit_cast<float>(ds_mla_reciprocal(std::bit_cast<uint32_t>(scale))) * scale, 1.f);
  }
  for (const float x : {448.f, std::nextafter(448.f, 0.f), std::nextafter(448.f, 1e3f)})
    EXPECT_EQ(ds_mla_scale(std::bit_cast<uint32_t>(x)), std::bit_cast<uint32_t>(x > 448.f ? 2.f : 1.f));
}

TEST(DsMla, SpecsAndScalesThatItCannotHaveAreRefused) {
  const AttentionSpec good = latent_spec(KvFormat::fp8_ds_mla, DType::fp8_e4m3);
  const auto code = [&](auto change) {
    AttentionSpec spec = good;
    change(spec);
    return error_code([&] { spec.validate(); });
  };
  EXPECT_EQ(code([](AttentionSpec& s) { s.kv_dtype = DType::bf16; }), "spec.kv_dtype.ds_mla");
  EXPECT_EQ(code([](AttentionSpec& s) { s.head_dim_v = 448; }), "spec.ds_mla");
  EXPECT_EQ(code([](AttentionSpec& s) { s.num_kv_heads = 2; }), "spec.ds_mla");
  EXPECT_EQ(code([](AttentionSpec& s) { s.block_size = 0; }), "spec.block_size.ds_mla");
  const KvAllocation memory(good, 1, 2);
  KvCache cache = memory.layer(0);
  float one = 1;
  cache.k_scale = TensorView::contiguous(&one, DType::f32, {1});
  EXPECT_EQ(error_code([&] { cache.validate(good); }), "kv_cache.k_scale.unexpected");
  cache.k_scale = {}, cache.k.sizes[2] = 655;
  EXPECT_EQ(error_code([&] { cache.validate(good); }), "kv_cache.k.packed_bytes");
}

TEST(LatentRope, PartsOfOneTensorAreALatent) {
  for (const DType type : {DType::bf16, DType::fp8_e4m3}) {
    const AttentionSpec whole = latent_spec(KvFormat::latent, type), apart = latent_spec(KvFormat::latent_rope, type);
    EXPECT_EQ(apart.kv_bytes_per_token(), whole.kv_bytes_per_token());
    const KvAllocation memory(whole, 1, 2);
    KvCache latent = memory.layer(0), parts = latent;
    parts.k.sizes[3] = 512;
    parts.k_rope = latent.k, parts.k_rope.sizes[3] = 64;
    parts.k_rope.data = latent.k.as<char>() + 512 * size_of(type);
    float scales[2] = {0.5f, 0.25f};
    if (is_fp8(type)) {
      latent.k_scale = parts.k_scale = TensorView::contiguous(scales, DType::f32, {1});
      parts.k_rope_scale = TensorView::contiguous(scales + 1, DType::f32, {1});
    }
    EXPECT_NO_THROW(parts.validate(apart));
    std::vector<float> row(576);
    for (size_t d = 0; d < row.size(); ++d) row[d] = float(int(d * 37 % 101) - 50) / 8;
    const KvPlace place{.block = 1, .offset = 3, .head = 0};
    std::vector<double> whole_row(576), parts_row(576);
    codec_of(apart).encode(apart, parts, KvPart::k, place, {row.data(), DType::f32, 0, 1});
    codec_of(whole).decode(whole, latent, KvPart::k, place, whole_row.data());
    codec_of(apart).decode(apart, parts, KvPart::k, place, parts_row.data());
    for (size_t d = 0; d < row.size(); ++d) {
      EXPECT_EQ(parts_row[d], (is_fp8(type) && d >= 512 ? 0.5 : 1.0) * whole_row[d]);
      EXPECT_NEAR(parts_row[d], double(row[d]), std::abs(double(row[d])) / 16);
    }
  }
}

TEST(LatentRope, BadCachesHaveTheirCodes) {
  const AttentionSpec spec = latent_spec(KvFormat::latent_rope, DType::fp8_e4m3);
  AttentionSpec without = spec;
  without.head_dim_v = 576;
  EXPECT_EQ(error_code([&] { without.validate(); }), "spec.head_dim_v.latent_rope");
  const KvAllocation memory(spec, 1, 3);
  float scale = 0.5f, bad = -1.f;
  const TensorView good = TensorView::contiguous(&scale, DType::f32, {1});
  const auto code = [&](auto change, AttentionSpec of) {
    KvCache cache = KvAllocation(of, 1, 3).layer(0);
    change(cache);
    return error_code([&] { cache.validate(of); });
  };
  EXPECT_EQ(code([](KvCache&) {}, spec), "nothing thrown");
  EXPECT_EQ(code([&](KvCache& c) { c.k_scale = c.k_rope_scale = good; }, spec), "nothing thrown");
  EXPECT_EQ(code([&](KvCache& c) { c.k_scale = good; }, spec), "kv_cache.k_rope_scale.alone");
  EXPECT_EQ(code([&](KvCache& c) { c.k_rope_scale = good; }, spec), "kv_cache.k_rope_scale.alone");
  EXPECT_EQ(code([&](KvCache& c) { c.k_scale = good, c.k_rope_scale = TensorView::contiguous(&bad, DType::f32, {1}); }, spec),
            "kv_cache.k_rope_scale.value");
  EXPECT_EQ(code([&](KvCache& c) { c.k_scale = good, c.k_rope_scale = good, c.k_rope_scale.dtype = DType::i32; }, spec),
            "kv_cache.k_rope_scale.dtype");
  EXPECT_EQ(code([&](KvCache& c) { c.k_scale = good, c.k_rope_scale = good, c.k_rope_scale.sizes[0] = 3; }, spec),
            "kv_cache.k_rope_scale.size");
  EXPECT_EQ(code(
                [&](KvCache& c) {
                  c.k_scale = good, c.k_rope_scale = good, c.k_rope_scale.device = {DeviceType::cuda, 0};
                },
                spec),
            "kv_cache.k_rope_scale.device");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope = {}; }, spec), "kv_cache.k_rope.missing");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.dtype = DType::bf16; }, spec), "kv_cache.k_rope.dtype");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.rank = 3; }, spec), "kv_cache.k_rope.rank");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.sizes[1] = 5; }, spec), "kv_cache.k_rope.block_size");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.sizes[2] = 2; }, spec), "kv_cache.k_rope.num_heads");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.sizes[3] = 56; }, spec), "kv_cache.k_rope.head_dim");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.strides[1] = 0; }, spec), "kv_cache.k_rope.strides");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.sizes[0] = 2; }, spec), "kv_cache.num_blocks.differ");
  EXPECT_EQ(code([](KvCache& c) { c.k_rope.device = {DeviceType::cuda, 0}; }, spec), "kv_cache.device");
  const AttentionSpec latent = latent_spec(KvFormat::latent, DType::fp8_e4m3), plain = latent_spec(KvFormat::latent_rope, DType::bf16);
  EXPECT_EQ(code([](KvCache& c) { c.k_rope = c.k; }, latent), "kv_cache.k_rope.unexpected");
  EXPECT_EQ(code([&](KvCache& c) { c.k_rope_scale = good; }, latent), "kv_cache.k_rope_scale.unexpected");
  EXPECT_EQ(code([&](KvCache& c) { c.k_rope_scale = good; }, plain), "kv_cache.k_rope_scale.unexpected");
}

TEST(KvCodec, NamesAndNumbersAreUnique) {
  std::set<std::string> names;
  for (const KvFormat format : kv_formats()) {
    EXPECT_TRUE(names.insert(to_string(format)).second);
    EXPECT_EQ(find_kv_format(to_string(format)), format);
    EXPECT_EQ(block_size_in(format, 0), 0);
    EXPECT_EQ(block_size_in(format, 1), codec_of(format).block_unit);
  }
  EXPECT_EQ(find_kv_format("zigzag"), std::nullopt);
  EXPECT_EQ(error_code([] { codec_of(KvFormat(200)); }), "spec.kv_format");
  EXPECT_STREQ(to_string(KvFormat(200)), "unknown");
}

}  // namespace
}  // namespace imbrex::test
