// See mirror.h.
#include "conformance/mirror.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {
namespace {

constexpr int64_t kGuard = 256;  // bytes before and after a copy; keeps the alignment of what lies between
constexpr unsigned char kUnowned = 0xff;

}  // namespace

Mirrored::Span Mirrored::span_of(const TensorView& t) {
  int64_t low = 0, high = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.size(d) <= 0) return {.begin = t.as<const char>()};
    (t.stride(d) < 0 ? low : high) += (t.size(d) - 1) * t.stride(d);
  }
  const int64_t size = size_of(t.dtype);
  return {.begin = t.as<const char>() + low * size, .bytes = (high - low + 1) * size, .first = -low * size};
}

TensorView Mirrored::take(const TensorView& t, const DeviceStream& stream) {
  if (t.empty()) return t;
  host_ = span_of(t);
  const int64_t bytes = host_.bytes + 2 * kGuard;
  if (capacity_ < bytes) {
    capacity_ = std::max(bytes, 2 * capacity_);
    memory_ = stream.allocate(capacity_);
  }
  char* const data = static_cast<char*>(memory_.get());
  stream.fill(data, kUnowned, kGuard);
  stream.upload(data + kGuard, host_.begin, host_.bytes);
  stream.fill(data + kGuard + host_.bytes, kUnowned, kGuard);
  TensorView view = t;
  view.data = data + kGuard + host_.first;
  view.device = stream.device();
  return view;
}

void Mirrored::give_back(const TensorView& t, const char* name, const DeviceStream& stream) {
  if (t.empty() || host_.bytes == 0) return;
  back_.resize(size_t(host_.bytes + 2 * kGuard));
  stream.download(back_.data(), memory_.get(), int64_t(back_.size()));
  stream.synchronize();
  const auto is_clean = [](const unsigned char* guard) { return std::count(guard, guard + kGuard, kUnowned) == kGuard; };
  check(is_clean(back_.data()), "mirror.guard", "{}: bytes in front of {} were written", name, t);
  check(is_clean(back_.data() + kGuard + host_.bytes), "mirror.guard", "{}: bytes behind {} were written", name, t);
  std::memcpy(const_cast<char*>(host_.begin), back_.data() + kGuard, size_t(host_.bytes));
}

}  // namespace imbrex
