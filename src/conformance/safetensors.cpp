// See safetensors.h.
#include "conformance/safetensors.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/json_gate.h"
#include "core/read_file.h"

namespace imbrex {
namespace {

using nlohmann::json;

constexpr int64_t kMaxFile = int64_t(1) << 40;
constexpr uint64_t kMaxHeader = 100'000'000;
constexpr int kMaxHeaderDepth = 4;  // header, tensor, shape; one to spare

struct NamedDType {
  const char* name;
  DType dtype;
};
constexpr NamedDType kNamedDTypes[] = {{"F32", DType::f32},          {"F16", DType::f16},          {"BF16", DType::bf16},
                                       {"F8_E4M3", DType::fp8_e4m3}, {"F8_E5M2", DType::fp8_e5m2}, {"U8", DType::u8},
                                       {"I32", DType::i32},          {"I64", DType::i64}};

DType dtype_named(const std::string& tensor, const std::string& name) {
  for (const NamedDType& d : kNamedDTypes)
    if (name == d.name) return d.dtype;
  fail("safetensors.dtype", "tensor {}: expected F32, F16, BF16, F8_E4M3, F8_E5M2, U8, I32 or I64, got {}", tensor, name);
}

const char* name_of(DType dtype) {
  for (const NamedDType& d : kNamedDTypes)
    if (dtype == d.dtype) return d.name;
  return "";
}

// Text of the file for a message, so that a hostile name cannot flood it.
std::string shortened(const std::string& text) { return text.size() <= 64 ? text : text.substr(0, 61) + "..."; }

json parse_header(std::string_view text) {
  try {
    return parse_json(text, kMaxHeaderDepth);
  } catch (const JsonProblem& p) {
    check(p.kind != JsonProblem::depth, "safetensors.header.depth", "expected at most {} levels, got more", kMaxHeaderDepth);
    check(p.kind != JsonProblem::duplicate, "safetensors.header.duplicate", "the name {} appears twice", shortened(p.name));
    check(p.kind != JsonProblem::number, "safetensors.header.json", "the header has a number that does not fit a double");
    fail("safetensors.header.json", "the header is not JSON: error at byte {} of {}", p.byte, text.size());
  }
}

struct Entry {
  std::string name;
  DType dtype;
  std::vector<int64_t> sizes;
  uint64_t begin, end;
};

uint64_t unsigned_number(const json& value, std::string_view code, const std::string& tensor, const char* what) {
  check(value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(INT64_MAX), code,
        "tensor {}: {} must be a whole number from 0 on, is {}", shortened(tensor), what,
        shortened(value.dump(-1, ' ', true, json::error_handler_t::replace)));
  return value.get<uint64_t>();
}

Entry parse_entry(const std::string& name, const json& value, uint64_t data_size) {
  const std::string shown = shortened(name);
  check(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") && value.contains("data_offsets"),
        "safetensors.tensor.fields", "tensor {}: expected exactly dtype, shape and data_offsets", shown);
  check(value["dtype"].is_string(), "safetensors.dtype", "tensor {}: dtype is no string", shown);
  Entry entry{.name = name, .dtype = dtype_named(shown, shortened(value["dtype"].get<std::string>())), .sizes = {}, .begin = 0, .end = 0};
  const json &shape = value["shape"], &offsets = value["data_offsets"];
  check(shape.is_array() && shape.size() <= TensorView::kMaxRank, "safetensors.shape.rank", "tensor {}: expected at most {} dimensions",
        shown, TensorView::kMaxRank);
  int64_t bytes = size_of(entry.dtype);
  for (const json& size : shape) {
    entry.sizes.push_back(int64_t(unsigned_number(size, "safetensors.shape.size", name, "a size")));
    bytes = checked_mul("safetensors.shape.overflow", bytes, entry.sizes.back());
  }
  check(offsets.is_array() && offsets.size() == 2, "safetensors.offsets.fields", "tensor {}: expected two data_offsets", shown);
  entry.begin = unsigned_number(offsets[0], "safetensors.offsets.number", name, "data_offsets[0]");
  entry.end = unsigned_number(offsets[1], "safetensors.offsets.number", name, "data_offsets[1]");
  check(entry.begin <= entry.end, "safetensors.offsets.order", "tensor {}: data_offsets fall from {} to {}", shown, entry.begin, entry.end);
  check(entry.end <= data_size, "safetensors.offsets.range", "tensor {}: data_offsets end at {}, the data at {}", shown, entry.end,
        data_size);
  check(entry.end - entry.begin == uint64_t(bytes), "safetensors.offsets.size",
        "tensor {}: its shape needs {} bytes, data_offsets are {} apart", shown, bytes, entry.end - entry.begin);
  return entry;
}

}  // namespace

Safetensors parse_safetensors(std::string_view bytes) {
  check(bytes.size() >= 8, "safetensors.truncated", "expected 8 bytes of header size, the file has {}", bytes.size());
  uint64_t header_size = 0;
  for (int i = 7; i >= 0; --i) header_size = header_size << 8 | uint8_t(bytes[size_t(i)]);
  check(header_size <= kMaxHeader, "safetensors.header.limit", "expected a header of at most {} bytes, got {}", kMaxHeader, header_size);
  check(header_size <= bytes.size() - 8, "safetensors.header.truncated", "the header has {} bytes, the file only {} after its size",
        header_size, bytes.size() - 8);
  const json header = parse_header(bytes.substr(8, size_t(header_size)));
  check(header.is_object(), "safetensors.header.object", "the header is no JSON object");
  const std::string_view data = bytes.substr(8 + size_t(header_size));

  Safetensors file;
  std::vector<Entry> entries;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(name, value, data.size()));
      continue;
    }
    check(value.is_object(), "safetensors.metadata", "__metadata__ is no object");
    for (const auto& [key, text] : value.items()) {
      check(text.is_string(), "safetensors.metadata.string", "__metadata__ {} is no string", shortened(key));
      file.metadata[key] = text.get<std::string>();
    }
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
  uint64_t covered = 0;
  for (const Entry& entry : entries) {
    check(entry.begin >= covered, "safetensors.data.overlap", "tensor {} begins at {}, inside another that ends at {}",
          shortened(entry.name), entry.begin, covered);
    check(entry.begin == covered, "safetensors.data.hole", "no tensor has the bytes from {} to {}", covered, entry.begin);
    covered = entry.end;
  }
  check(covered == data.size(), "safetensors.data.trailing", "the tensors end at {}, the data at {}", covered, data.size());
  for (Entry& entry : entries) {
    HostTensor tensor{.dtype = entry.dtype, .sizes = std::move(entry.sizes), .bytes = {}};
    tensor.bytes.assign(data.begin() + int64_t(entry.begin), data.begin() + int64_t(entry.end));
    file.tensors.emplace(std::move(entry.name), std::move(tensor));
  }
  return file;
}

Safetensors load_safetensors(const std::string& path) {
  return parse_safetensors(read_file(path, kMaxFile, {"safetensors.open", "safetensors.read", "safetensors.size"}));
}

std::string write_safetensors(const Safetensors& file) {
  json header = json::object();
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;
  int64_t at = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const int64_t end = at + int64_t(tensor.bytes.size());
    header[name] = {{"dtype", name_of(tensor.dtype)}, {"shape", tensor.sizes}, {"data_offsets", {at, end}}};
    at = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');  // readers that map the file like aligned data
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes += char(uint64_t(text.size()) >> (8 * i));
  bytes += text;
  for (const auto& [name, tensor] : file.tensors) bytes.append(tensor.bytes.data(), tensor.bytes.size());
  return bytes;
}

void save_safetensors(const Safetensors& file, const std::string& path) {
  const std::string bytes = write_safetensors(file);
  std::ofstream stream(path, std::ios::binary);
  stream.write(bytes.data(), std::streamsize(bytes.size()));
  stream.close();
  check(stream.good(), "safetensors.write", "cannot write {}", path);
}

}  // namespace imbrex
