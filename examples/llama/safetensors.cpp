// See safetensors.h. The format: u64 header size, little endian; a JSON header of that size; the data.
#include "safetensors.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "check.h"
#include "floats.h"

namespace llama {
namespace {

namespace fs = std::filesystem;
using imbrex::DType;
using nlohmann::json;

constexpr int64_t kMaxHeader = 100'000'000;  // what the format allows
constexpr int kMaxDepth = 4;                 // header, tensor, shape; one to spare
constexpr int kMaxRank = 8;

int64_t bytes_of(const std::string& dtype, const std::string& where) {
  static const std::map<std::string, int64_t> sizes{{"F64", 8},     {"I64", 8},     {"U64", 8},  {"F32", 4}, {"I32", 4},
                                                    {"U32", 4},     {"F16", 2},     {"BF16", 2}, {"I16", 2}, {"U16", 2},
                                                    {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1},   {"U8", 1},  {"BOOL", 1}};
  const auto found = sizes.find(dtype);
  check(found != sizes.end(), where, ": expected a dtype of safetensors, such as F32 or BF16, got ", shortened(dtype));
  return found->second;
}

// The library's parser keeps the last of two equal keys and nests without limit; both are refused on the way.
json parse_json(const std::string& text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    check(depth <= kMaxDepth, where, ": expected JSON of at most ", kMaxDepth, " levels, got more");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& name = parsed.get_ref<const std::string&>();
      check(keys.back().insert(name).second, where, ": the name ", shortened(name), " appears twice");
    }
    return true;
  };
  try {
    json parsed = json::parse(text, watch);
    check(parsed.is_object(), where, ": expected a JSON object, got ", parsed.type_name());
    return parsed;
  } catch (const json::exception& error) {
    fail(where, ": not JSON: ", shortened(error.what()));
  }
}

int64_t whole_number(const json& value, const std::string& where, const char* what) {
  check(value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t(INT64_MAX), where, ": ", what,
        ": expected a whole number from 0 to ", INT64_MAX, ", got ", shortened(value.dump(-1, ' ', true, json::error_handler_t::replace)));
  return value.get<int64_t>();
}

// `data` is the number of bytes behind the header.
StoredTensor parse_entry(const json& value, int64_t data, const std::string& where) {
  check(value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") && value.contains("data_offsets"),
        where, ": expected an object of dtype, shape and data_offsets");
  const json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  check(dtype.is_string(), where, ": dtype: expected a string, got ", dtype.type_name());
  check(shape.is_array() && shape.size() <= kMaxRank, where, ": shape: expected an array of at most ", kMaxRank, " numbers, got ",
        shape.is_array() ? std::to_string(shape.size()) : shape.type_name());
  check(offsets.is_array() && offsets.size() == 2, where, ": data_offsets: expected two numbers");
  StoredTensor tensor{.dtype = dtype.get<std::string>(), .sizes = {}};
  int64_t bytes = bytes_of(tensor.dtype, where);
  for (const json& size : shape) {
    tensor.sizes.push_back(whole_number(size, where, "shape"));
    check(!__builtin_mul_overflow(bytes, tensor.sizes.back(), &bytes), where, ": expected less than 2^63 bytes, the shape needs more");
  }
  tensor.begin = whole_number(offsets[0], where, "data_offsets");
  const int64_t end = whole_number(offsets[1], where, "data_offsets");
  check(tensor.begin <= end && end <= data, where, ": data_offsets: expected a range within the ", data, " bytes of data, got ",
        tensor.begin, " to ", end);
  tensor.bytes = end - tensor.begin;
  check(tensor.bytes == bytes, where, ": expected the ", bytes, " bytes of its shape, data_offsets have ", tensor.bytes);
  return tensor;
}

std::string read_text(const fs::path& path, int64_t limit) {
  check(fs::is_regular_file(path), path.string(), " is not a file");
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  check(stream.good(), "cannot open ", path.string());
  const int64_t size = stream.tellg();
  check(size >= 0 && size <= limit, path.string(), ": expected at most ", limit, " bytes, got ", size);
  std::string text(size_t(size), '\0');
  check(bool(stream.seekg(0).read(text.data(), size)), "cannot read ", path.string());
  return text;
}

template <class From, class To>
std::vector<char> converted(const std::vector<char>& stored) {
  const size_t count = stored.size() / sizeof(From);
  std::vector<char> result(count * sizeof(To));
  for (size_t i = 0; i < count; ++i) {
    From from;
    To to;
    std::memcpy(&from, stored.data() + i * sizeof from, sizeof from);
    from_float(to_float(from), to);
    std::memcpy(result.data() + i * sizeof to, &to, sizeof to);
  }
  return result;
}

std::string text_of(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  for (size_t i = 0; i < sizes.size(); ++i) text << (i == 0 ? "[" : ", ") << sizes[i];
  text << (sizes.empty() ? "[]" : "]");
  return text.str();
}

}  // namespace

SafetensorsFile::SafetensorsFile(const fs::path& path) : path_(path), stream_(path, std::ios::binary | std::ios::ate) {
  const std::string where = path.string();
  check(stream_.good(), "cannot open ", where);
  const int64_t file = stream_.tellg();
  check(file >= 8, where, ": expected 8 bytes of header size, the file has ", file);
  unsigned char little_endian[8];
  check(bool(stream_.seekg(0).read(reinterpret_cast<char*>(little_endian), 8)), "cannot read ", where);
  uint64_t header = 0;
  for (int i = 7; i >= 0; --i) header = header << 8 | little_endian[i];
  check(header <= uint64_t(kMaxHeader), where, ": expected a header of at most ", kMaxHeader, " bytes, got ", header);
  check(int64_t(header) <= file - 8, where, ": expected a header of ", header, " bytes, the file has ", file - 8, " after its size");
  std::string text(size_t(header), '\0');
  check(bool(stream_.read(text.data(), int64_t(header))), "cannot read ", where);

  const int64_t data = file - 8 - int64_t(header);
  const json parsed = parse_json(text, where);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [name, value] : parsed.items()) {
    if (name == "__metadata__") continue;
    StoredTensor tensor = parse_entry(value, data, where + ": " + shortened(name));
    ranges.emplace_back(tensor.begin, tensor.begin + tensor.bytes);
    tensor.begin += 8 + int64_t(header);
    tensors_.emplace(name, std::move(tensor));
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t covered = 0;
  for (const auto& [begin, end] : ranges) {
    check(begin == covered, where, ": expected a tensor that begins at byte ", covered, " of the data, the next one begins at ", begin);
    covered = end;
  }
  check(covered == data, where, ": expected tensors up to byte ", data, " of the data, they end at ", covered);
}

std::vector<char> SafetensorsFile::read(const StoredTensor& tensor) {
  std::vector<char> bytes(size_t(tensor.bytes));
  stream_.clear();
  check(bool(stream_.seekg(tensor.begin).read(bytes.data(), tensor.bytes)), path_.string(), ": expected ", tensor.bytes, " bytes at ",
        tensor.begin, ", the file got shorter");
  return bytes;
}

Checkpoint::Checkpoint(const fs::path& folder) {
  const fs::path index = folder / "model.safetensors.index.json";
  std::map<std::string, std::string> file_of;  // of each tensor; empty without an index
  std::set<std::string> names{"model.safetensors"};
  if (!fs::exists(folder / "model.safetensors") && fs::exists(index)) {
    names.clear();
    const json parsed = parse_json(read_text(index, kMaxHeader), index.string());
    check(parsed.contains("weight_map") && parsed["weight_map"].is_object(), index.string(), ": expected an object weight_map");
    for (const auto& [tensor, file] : parsed["weight_map"].items()) {
      check(file.is_string(), index.string(), ": ", shortened(tensor), ": expected the name of a file, got ", file.type_name());
      const auto& name = file.get_ref<const std::string&>();
      check(fs::path(name).filename() == name && name.ends_with(".safetensors"), index.string(), ": ", shortened(tensor),
            ": expected the name of a .safetensors file in the folder, got ", shortened(name));
      names.insert(file_of[tensor] = name);
    }
  }
  for (const std::string& name : names) {
    files_.push_back(std::make_unique<SafetensorsFile>(folder / name));
    for (const auto& [tensor, stored] : files_.back()->tensors()) {
      check(file_of.empty() || (file_of.contains(tensor) && file_of[tensor] == name), index.string(), ": ", shortened(tensor), " is in ",
            name, ", expected in ", file_of.contains(tensor) ? file_of[tensor] : "no file");
      shards_[tensor] = files_.back().get();
      left_.insert(tensor);
    }
  }
  for (const auto& [tensor, file] : file_of)
    check(shards_.contains(tensor), (folder / file).string(), ": expected the tensor ", shortened(tensor),
          ", the file has none of that name");
}

const StoredTensor& Checkpoint::stored(const std::string& name) const {
  const auto shard = shards_.find(name);
  check(shard != shards_.end(), "expected a tensor ", name, ", the checkpoint has none");
  return shard->second->tensors().at(name);
}

DType Checkpoint::dtype(const std::string& name) const {
  const std::string& dtype = stored(name).dtype;
  check(dtype == "F32" || dtype == "F16" || dtype == "BF16", name, ": expected F32, F16 or BF16, got ", dtype);
  return dtype == "F32" ? DType::f32 : dtype == "F16" ? DType::f16 : DType::bf16;
}

std::vector<char> Checkpoint::read(const std::string& name, const std::vector<int64_t>& sizes, DType as) {
  const StoredTensor& tensor = stored(name);
  check(tensor.sizes == sizes, name, ": expected the shape ", text_of(sizes), ", got ", text_of(tensor.sizes));
  const DType from = dtype(name);
  left_.erase(name);
  std::vector<char> bytes = shards_.at(name)->read(tensor);
  const bool f32 = as == DType::f32;
  if (from == as) return bytes;
  if (from == DType::f32) return converted<float, BFloat16>(bytes);
  if (from == DType::bf16) return converted<BFloat16, float>(bytes);
  return f32 ? converted<Float16, float>(bytes) : converted<Float16, BFloat16>(bytes);
}

}  // namespace llama
