// See tensor_layout.h. Each tensor of each layer is checked, so no text is formatted unless a check fails.
#include "core/tensor_layout.h"

#include <algorithm>

#include "core/check.h"
#include "core/tensor_format.h"

namespace imbrex {
namespace {

bool has_elements(const TensorView& t) {
  if (t.empty() || t.rank > TensorView::kMaxRank) return false;  // a rank that nobody expects is refused as such
  for (int d = 0; d < t.rank; ++d)
    if (t.size(d) <= 0) return false;
  return true;
}

// The dimensions of more than one element, the largest stride first, whatever its sign.
struct Dimensions {
  struct Dimension {
    int64_t stride, size;  // stride in elements
  } of[TensorView::kMaxRank];
  int count = 0;

  explicit Dimensions(const TensorView& t) {
    for (int d = 0; d < t.rank; ++d) {
      if (t.size(d) <= 1) continue;
      const Dimension next{t.stride(d) < 0 ? -t.stride(d) : t.stride(d), t.size(d)};
      int at = count++;
      for (; at > 0 && of[at - 1].stride < next.stride; --at) of[at] = of[at - 1];
      of[at] = next;
    }
  }
};

// From the smallest stride on, each dimension steps over all that those before it reach.
bool elements_are_apart(const TensorView& t) {
  const Dimensions dims(t);
  int64_t reach = 0;  // of the dimensions so far, in elements
  for (int i = dims.count; i-- > 0;) {
    if (dims.of[i].stride <= reach) return false;
    reach += (dims.of[i].size - 1) * dims.of[i].stride;
  }
  return true;
}

// The bytes of a tensor: where the lowest lies, and the dimensions that spread them.
struct Spread {
  Dimensions dims;
  int64_t element;
  intptr_t begin;

  explicit Spread(const TensorView& t) : dims(t), element(size_of(t.dtype)), begin(reinterpret_cast<intptr_t>(t.data)) {
    for (int d = 0; d < t.rank; ++d)
      if (t.size(d) > 1 && t.stride(d) < 0) begin += (t.size(d) - 1) * t.stride(d) * element;
  }
  int64_t stride(int d) const { return d < dims.count ? dims.of[d].stride * element : 0; }
  int64_t extent(int from) const {  // of the dimensions from that one on
    int64_t bytes = element;
    for (int d = from; d < dims.count; ++d) bytes += (dims.of[d].size - 1) * stride(d);
    return bytes;
  }
};

// Whether bytes of a and b, from dimensions i and j on, can be the same, where b begins `ahead` bytes after a.
bool meet(const Spread& a, int i, const Spread& b, int j, int64_t ahead) {
  if (ahead >= a.extent(i) || -ahead >= b.extent(j)) return false;
  const int64_t stride = std::max(a.stride(i), b.stride(j));
  if (stride == 0) return true;
  // Rows of the larger stride; the other tensor lies in one of them, or is taken to meet all.
  const bool of_a = a.stride(i) == stride, of_b = b.stride(j) == stride;
  const int64_t rows_a = of_a ? a.dims.of[i].size : 1, rows_b = of_b ? b.dims.of[j].size : 1;
  if (a.extent(i + of_a) > stride || b.extent(j + of_b) > stride) return true;
  const int64_t between = ahead / stride;
  for (int64_t n = between - 1; n <= between + 1; ++n)  // rows of a in front of the row of b
    if (n < rows_a && -n < rows_b && meet(a, i + of_a, b, j + of_b, ahead - n * stride)) return true;
  return false;
}

std::string strides_of(const TensorView& t) { return fmt::format("{}", fmt::join(t.strides.begin(), t.strides.begin() + t.rank, ", ")); }

}  // namespace

void check_layout(const TensorView& t, const char* name) {
  if (!has_elements(t)) return;
  if (!t.is_addressable())
    fail("tensor.strides", "{}: expected elements whose distances in bytes fit 63 bits, got {} with strides {}", name, t, strides_of(t));
  const uintptr_t behind = reinterpret_cast<uintptr_t>(t.data) % uintptr_t(size_of(t.dtype));
  check(behind == 0, "tensor.alignment", "{}: expected an address that is a multiple of {} bytes, got {} that begins {} bytes behind one",
        name, size_of(t.dtype), t, behind);
}

void check_written_layout(const TensorView& t, const char* name) {
  check_layout(t, name);
  if (has_elements(t) && !elements_are_apart(t))
    fail("tensor.overlap", "{}: expected elements that do not overlap, got {} with strides {}", name, t, strides_of(t));
}

bool may_meet(const TensorView& a, const TensorView& b) {
  if (!has_elements(a) || !has_elements(b) || a.device != b.device) return false;
  const Spread first(a), second(b);
  return meet(first, 0, second, 0, second.begin - first.begin);
}

}  // namespace imbrex
