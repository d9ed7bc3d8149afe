// See poison.h.
#include "conformance/poison.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace imbrex {
namespace {

// Quiet NaN of a type, little-endian; u8 stands for packed bf16.
std::array<unsigned char, 4> nan_bytes(DType dtype) {
  switch (dtype) {
    case DType::f32: return {0x00, 0x00, 0xc0, 0x7f};
    case DType::f16: return {0x00, 0x7e, 0x00, 0x7e};
    case DType::u8:
    case DType::bf16: return {0xc0, 0x7f, 0xc0, 0x7f};
    default: return {0x7f, 0x7f, 0x7f, 0x7f};
  }
}

// Elements from one head to the next, and from one row to the next.
std::array<int64_t, 2> strides_of(DType dtype, int64_t heads, int64_t dim, Gaps gaps) {
  if (gaps == Gaps::none) return {dim, heads * dim};
  if (gaps == Gaps::odd) return {(dim | 1) + 4, heads * ((dim | 1) + 4) + (heads % 2 == 0 ? 3 : 2)};
  const int64_t head_stride = dim + std::max<int64_t>(8, 16 / size_of(dtype));
  return {head_stride, heads * head_stride + 16};
}

}  // namespace

const char* to_string(Poison poison) {
  switch (poison) {
    case Poison::zero: return "zero";
    case Poison::nan: return "nan";
    case Poison::ones: return "ones";
  }
  return "unknown";
}

const char* to_string(Gaps gaps) {
  switch (gaps) {
    case Gaps::none: return "none";
    case Gaps::aligned: return "aligned";
    case Gaps::odd: return "odd";
  }
  return "unknown";
}

void fill_poison(char* bytes, size_t count, DType dtype, Poison poison) {
  if (poison != Poison::nan) {
    std::memset(bytes, poison == Poison::zero ? 0 : 0xff, count);
    return;
  }
  const auto pattern = nan_bytes(dtype);
  size_t filled = std::min(count, pattern.size());
  std::memcpy(bytes, pattern.data(), filled);
  for (size_t more; filled < count; filled += more) std::memcpy(bytes + filled, bytes, more = std::min(filled, count - filled));
}

int32_t poison_index(Poison poison) { return poison == Poison::zero ? 0 : poison == Poison::ones ? -1 : INT32_MAX; }

SpreadTensor::SpreadTensor(DType dtype, int64_t rows, int64_t heads, int64_t dim, Poison poison, Gaps gaps) {
  const auto [head_stride, row_stride] = strides_of(dtype, heads, dim, gaps);
  bytes.resize(size_t(std::max<int64_t>(1, rows) * row_stride * size_of(dtype)));
  fill_poison(bytes.data(), bytes.size(), dtype, poison);
  view = TensorView::contiguous(bytes.data(), dtype, {rows, heads, dim});
  view.strides[0] = row_stride;
  view.strides[1] = head_stride;
}

void SpreadTensor::copy_row(int64_t row, const HostTensor& source, int64_t source_row) {
  const int64_t heads = view.size(1), size = view.size(2) * size_of(view.dtype);
  for (int64_t h = 0; h < heads; ++h) std::memcpy(at(row, h), source.bytes.data() + (source_row * heads + h) * size, size_t(size));
}

void SpreadTensor::poison_row(int64_t row, int64_t head, Poison poison) {
  fill_poison(at(row, head), size_t(view.size(2) * size_of(view.dtype)), view.dtype, poison);
}

std::string foreign_write(const char* what, const SpreadTensor& t, Poison poison, int64_t tokens) {
  std::vector<char> clean(t.bytes.size());
  fill_poison(clean.data(), clean.size(), t.view.dtype, poison);
  if (t.bytes == clean) return {};
  const int64_t i = std::mismatch(t.bytes.begin(), t.bytes.end(), clean.begin()).first - t.bytes.begin(), size = size_of(t.view.dtype),
                row = i / size / t.view.stride(0);
  return fmt::format("{}: byte {} of row {} was written, the batch has {} tokens", what, i - row * t.view.stride(0) * size, row, tokens);
}

}  // namespace imbrex
