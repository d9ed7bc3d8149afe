// See argument.h.
#include "fuzz/metadata/argument.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>

namespace imbrex::test {
namespace {

constexpr int64_t kHeap = 8 << 20, kReserve = int64_t(1) << 40;  // bytes from the heap; bytes that are only reserved
constexpr __int128 kAddresses = std::numeric_limits<int64_t>::max();

std::shared_ptr<unsigned char> exactly(int64_t bytes) {
  if (bytes > kHeap) {
    void* memory = mmap(nullptr, size_t(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    return {static_cast<unsigned char*>(memory), [bytes](void* p) { munmap(p, size_t(bytes)); }};
  }
  constexpr std::align_val_t kAlign{64};
  return {static_cast<unsigned char*>(operator new(size_t(bytes), kAlign)), [](void* p) { operator delete(p, kAlign); }};
}

}  // namespace

void Argument::set(imbrex_dl_type t, std::vector<int64_t> sizes, std::vector<unsigned char> bytes) {
  given = true;
  type = t;
  ndim = int32_t(sizes.size());
  shape = std::move(sizes);
  content = std::move(bytes);
}

int64_t Argument::number(size_t index) const {
  int64_t value = 0;
  if (element() == 4) {
    int32_t narrow = 0;
    std::memcpy(&narrow, &content[index * 4], 4);
    return narrow;
  }
  std::memcpy(&value, &content[index * element()], element());
  return value;
}

void Argument::set_number(size_t index, int64_t value) { std::memcpy(&content[index * element()], &value, element()); }

Argument::Extent Argument::extent() const {
  Extent e{0, __int128(element())};
  __int128 dense = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] <= 0) return {0, 0};
    const __int128 stride = strides.empty() ? dense : __int128(strides[d]);
    const __int128 reach = __int128(shape[d] - 1) * stride * __int128(element());
    (reach < 0 ? e.low : e.high) += reach;
    if (dense < kAddresses) dense *= shape[d];
  }
  e.high += byte_offset;
  return e;
}

bool Argument::is_honest() const {
  const Extent e = extent();
  const __int128 bytes = e.high - e.low;
  return bytes <= kReserve || bytes > kAddresses;
}

template <class Visit>
void Argument::each_run(const Visit& visit) const {
  int64_t count = 1;
  for (const int64_t n : shape) count = n <= 0 || count > kHeap / n ? 0 : count * n;
  auto* const first = static_cast<unsigned char*>(tensor_.data) + byte_offset;
  if (strides.empty()) return visit(size_t(0), first, size_t(count));
  std::vector<int64_t> index(shape.size());
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < shape.size(); ++d) at += index[d] * strides[d];
    visit(size_t(i), first + at * int64_t(element()), size_t(1));
    for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) index[d] = 0;
  }
}

const imbrex_tensor* Argument::make() {
  if (!given) return nullptr;
  const Extent e = extent();
  const bool impossible = e.high - e.low > kAddresses;
  memory_ = exactly(impossible ? int64_t(content.size()) : std::max<int64_t>(int64_t(e.high - e.low), 0));
  given_shape_ = shape, given_strides_ = strides;
  tensor_ = {.data = null_data ? nullptr : memory_.get() - (impossible ? 0 : int64_t(e.low)),
             .device = device,
             .ndim = ndim,
             .dtype = type,
             .shape = null_shape ? nullptr : given_shape_.data(),
             .strides = strides.empty() ? nullptr : given_strides_.data(),
             .byte_offset = byte_offset};
  if (memory_ == nullptr || null_data || impossible || count() == 0) return &tensor_;  // 0: the content is less than an element
  each_run([&](size_t begin, unsigned char* to, size_t elements) {
    for (size_t done = 0; done < elements;) {
      const size_t from = (begin + done) % count(), some = std::min(elements - done, count() - from);
      std::memcpy(to + done * element(), &content[from * element()], some * element());
      done += some;
    }
  });
  return &tensor_;
}

std::vector<unsigned char> Argument::elements() const {
  std::vector<unsigned char> all;
  if (!given || memory_ == nullptr || tensor_.data == nullptr || extent().high - extent().low > kAddresses) return all;
  each_run([&](size_t, const unsigned char* from, size_t elements) { all.insert(all.end(), from, from + elements * element()); });
  return all;
}

}  // namespace imbrex::test
