// The reader of .safetensors files: every broken rule has its own code, and no damaged file gets through or crashes.
#include "conformance/safetensors.h"

#include <gtest/gtest.h>

#include <random>

#include "expect_error.h"

namespace imbrex::test {
namespace {

std::string file_of(const std::string& header, const std::string& data) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += char(uint64_t(header.size()) >> (8 * i));
  return bytes + header + data;
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const std::string header =
      R"({"__metadata__":{"who":"test"},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}})";
  const Safetensors file = parse_safetensors(file_of(header, std::string("\0\0\x80\x3f\0\0\0\xc0\1\2\3", 11)));
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.metadata.at("who"), "test");
  const HostTensor& a = file.tensors.at("a");
  EXPECT_EQ(a.sizes, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(a.get(0), 1.0);
  EXPECT_EQ(a.get(1), -2.0);
  EXPECT_EQ(file.tensors.at("b").get(2), 3.0);
}

Safetensors sample() {
  Safetensors file;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2}) {
    HostTensor t = HostTensor::make(dtype, {2, 3});
    for (int i = 0; i < 6; ++i) t.set(i, i - 2.5);
    file.tensors[to_string(dtype)] = t;
  }
  file.tensors["ids"] = HostTensor::make(DType::i64, {0, 7});
  file.tensors["scalar"] = HostTensor::make(DType::i32, {});
  file.metadata = {{"k", "v \"quoted\""}};
  return file;
}

TEST(Safetensors, WritesWhatItReads) {
  const Safetensors file = sample();
  const std::string bytes = write_safetensors(file);
  const Safetensors again = parse_safetensors(bytes);
  EXPECT_EQ(again.metadata, file.metadata);
  ASSERT_EQ(again.tensors.size(), file.tensors.size());
  for (const auto& [name, tensor] : file.tensors) {
    EXPECT_EQ(again.tensors.at(name).dtype, tensor.dtype) << name;
    EXPECT_EQ(again.tensors.at(name).sizes, tensor.sizes) << name;
    EXPECT_EQ(again.tensors.at(name).bytes, tensor.bytes) << name;
  }
  EXPECT_EQ(write_safetensors(again), bytes);
}

TEST(Safetensors, RefusesBrokenRules) {
  const auto tensor = [](const char* fields) { return std::string(R"({"a":{)") + fields + "}}"; };
  const std::string eight(8, 'x'), deep = R"({"a":)" + std::string(200, '[') + std::string(200, ']') + "}";
  const struct {
    std::string bytes;
    const char* code;
  } broken[] = {
      {"", "safetensors.truncated"},
      {"1234567", "safetensors.truncated"},
      {std::string(8, '\xff') + "{}", "safetensors.header.limit"},
      {std::string("\x01\xe1\xf5\x05\0\0\0\0", 8) + "{}", "safetensors.header.limit"},  // 100,000,001
      {std::string("\x03\0\0\0\0\0\0\0", 8) + "{}", "safetensors.header.truncated"},
      {file_of("{", ""), "safetensors.header.json"},
      {file_of("{} x", ""), "safetensors.header.json"},
      {file_of(R"({"a":1e999})", ""), "safetensors.header.json"},
      {file_of("\"\xff\"", ""), "safetensors.header.json"},
      {file_of("[]", ""), "safetensors.header.object"},
      {file_of("7", ""), "safetensors.header.object"},
      {file_of(deep, ""), "safetensors.header.depth"},
      {file_of(R"({"a":1,"a":1})", ""), "safetensors.header.duplicate"},
      {file_of(tensor(R"("dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8])"), eight), "safetensors.header.duplicate"},
      {file_of(R"({"__metadata__":3})", ""), "safetensors.metadata"},
      {file_of(R"({"__metadata__":{"a":3}})", ""), "safetensors.metadata.string"},
      {file_of(R"({"a":3})", ""), "safetensors.tensor.fields"},
      {file_of(tensor(R"("dtype":"U8","shape":[8])"), eight), "safetensors.tensor.fields"},
      {file_of(tensor(R"("dtype":"U8","shape":[8],"data_offsets":[0,8],"x":1)"), eight), "safetensors.tensor.fields"},
      {file_of(tensor(R"("dtype":"F64","shape":[1],"data_offsets":[0,8])"), eight), "safetensors.dtype"},
      {file_of(tensor(R"("dtype":4,"shape":[1],"data_offsets":[0,8])"), eight), "safetensors.dtype"},
      {file_of(tensor(R"("dtype":"U8","shape":8,"data_offsets":[0,8])"), eight), "safetensors.shape.rank"},
      {file_of(tensor(R"("dtype":"U8","shape":[8,1,1,1,1,1],"data_offsets":[0,8])"), eight), "safetensors.shape.rank"},
      {file_of(tensor(R"("dtype":"U8","shape":[-8],"data_offsets":[0,8])"), eight), "safetensors.shape.size"},
      {file_of(tensor(R"("dtype":"U8","shape":[8.0],"data_offsets":[0,8])"), eight), "safetensors.shape.size"},
      {file_of(tensor(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,8])"), eight), "safetensors.shape.size"},
      {file_of(tensor(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"), eight), "safetensors.shape.overflow"},
      {file_of(tensor(R"("dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,8])"), eight), "safetensors.shape.overflow"},
      {file_of(tensor(R"("dtype":"U8","shape":[8],"data_offsets":[0])"), eight), "safetensors.offsets.fields"},
      {file_of(tensor(R"("dtype":"U8","shape":[8],"data_offsets":[-1,7])"), eight), "safetensors.offsets.number"},
      {file_of(tensor(R"("dtype":"U8","shape":[8],"data_offsets":[8,0])"), eight), "safetensors.offsets.order"},
      {file_of(tensor(R"("dtype":"U8","shape":[9],"data_offsets":[0,9])"), eight), "safetensors.offsets.range"},
      {file_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,8])"), eight), "safetensors.offsets.size"},
      {file_of(R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", eight),
       "safetensors.data.overlap"},
      {file_of(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", eight),
       "safetensors.data.hole"},
      {file_of(tensor(R"("dtype":"U8","shape":[7],"data_offsets":[0,7])"), eight), "safetensors.data.trailing"},
  };
  for (const auto& [bytes, code] : broken)
    EXPECT_EQ(error_code([&, &bytes = bytes] { parse_safetensors(bytes); }), code) << bytes.substr(0, 120);
  EXPECT_EQ(error_code([] { load_safetensors("/nonexistent/file"); }), "safetensors.open");
  EXPECT_EQ(error_code([] { load_safetensors("/"); }), "safetensors.open") << "a folder";
  EXPECT_EQ(error_code([] { save_safetensors({}, "/nonexistent/file"); }), "safetensors.write");
}

TEST(Safetensors, DamagedFilesAreReadOrRefused) {
  const std::string good = write_safetensors(sample());
  std::mt19937_64 random(3);
  int refused = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string bytes = good;
    for (uint64_t n = 1 + random() % 3; n > 0; --n) bytes[random() % bytes.size()] = char(random());
    if (trial % 5 == 0) bytes.resize(random() % bytes.size());
    const std::string code = error_code([&] { parse_safetensors(bytes); });
    if (code == "nothing thrown") continue;
    EXPECT_TRUE(code.starts_with("safetensors.")) << code;
    ++refused;
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace imbrex::test
