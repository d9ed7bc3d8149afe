// The table of cache formats: every row keeps what it is given, and formats that are none of the table's run through it as its own do:
// quantised records with a scale inside, with scales beside, and one record for a latent whose parts have types of their own.
#include "attention/kv_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

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
                     .ragged = false,
                     .block_unit = 1,
                     .preferred = nullptr,
                     .check = check_bytes,
                     .layout = layout,
                     .encode = encode,
                     .decode = decode};

}  // namespace beside

// [block, token, 656]: 512 e4m3 with a scale for each 128, then 64 bf16. The values are the first 512.
namespace mixed {

constexpr int kLatent = 512, kRope = 64, kGroup = 128, kGroups = kLatent / kGroup, kBytes = kLatent + 4 * kGroups + 2 * kRope;
static_assert(kBytes == 656);

void check_mixed(const AttentionSpec& spec) {
  if (spec.num_kv_heads != 1 || spec.head_dim_qk != kLatent + kRope || spec.head_dim_v != kLatent || spec.block_size == 0)
    throw Error("test.codec", "not for " + spec.str());
}
std::optional<KvLayout> layout(const AttentionSpec& spec, KvPart part) {
  if (part != KvPart::k) return std::nullopt;
  return KvLayout{.dtype = DType::u8, .dims = "btx", .sizes = {1, spec.block_size, kBytes}, .piece = "a token's record"};
}
char* record_of(const KvCache& cache, KvPlace at) {
  return cache.k.as<char>() + at.block * cache.k.stride(0) + at.offset * cache.k.stride(1);
}

void encode(const AttentionSpec& spec, const KvCache& cache, KvPart, KvPlace at, const KvRow& row) {
  const std::vector<float> x = floats_of(row, spec.head_dim_qk);
  char* const record = record_of(cache, at);
  for (int g = 0; g < kGroups; ++g) {
    const float scale = scale_for({x.begin() + g * kGroup, x.begin() + (g + 1) * kGroup}, 448);
    std::memcpy(record + kLatent + 4 * g, &scale, 4);
    for (int d = g * kGroup; d < (g + 1) * kGroup; ++d) store_from_float(record, DType::fp8_e4m3, d, x[size_t(d)] / scale);
  }
  for (int d = 0; d < kRope; ++d) store_from_float(record + kLatent + 4 * kGroups, DType::bf16, d, x[size_t(kLatent + d)]);
}
void decode(const AttentionSpec&, const KvCache& cache, KvPart part, KvPlace at, double* row) {
  const char* const record = record_of(cache, at);
  for (int d = 0; d < kLatent; ++d) {
    float scale;
    std::memcpy(&scale, record + kLatent + 4 * (d / kGroup), 4);
    row[d] = double(scale) * load_as_double(record, DType::fp8_e4m3, d);
  }
  if (part == KvPart::k)
    for (int d = 0; d < kRope; ++d) row[kLatent + d] = load_as_double(record + kLatent + 4 * kGroups, DType::bf16, d);
}

const KvCodec kCodec{.name = "mixed_latent",
                     .strided = false,
                     .values_in_keys = true,
                     .ragged = false,
                     .block_unit = 1,
                     .preferred = nullptr,
                     .check = check_mixed,
                     .layout = layout,
                     .encode = encode,
                     .decode = decode};

}  // namespace mixed

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
  for (const KvCodec* codec : {&inside::kCodec, &beside::kCodec, &mixed::kCodec}) {
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
  const AttentionSpec with_inside = case_of(format_of(inside::kCodec)).spec, with_beside = case_of(format_of(beside::kCodec)).spec,
                      with_mixed = case_of(format_of(mixed::kCodec)).spec;
  EXPECT_EQ(with_inside.kv_bytes_per_token(), 2 * (48 + 32 + 2 * 4));
  EXPECT_EQ(with_beside.kv_bytes_per_token(), 2 * (48 + 32 + 2 * 4));
  EXPECT_EQ(with_mixed.kv_bytes_per_token(), 656);
  EXPECT_NE(with_mixed.str().find("mixed_latent"), std::string::npos);
  for (const AttentionSpec& spec : {with_inside, with_beside, with_mixed}) {
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
  for (const KvFormat format : {KvFormat::strided, KvFormat::amx_packed, KvFormat::latent})
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
