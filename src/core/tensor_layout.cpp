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

// Dimensions from the smallest stride on: each steps over all that those before it reach.
bool elements_are_apart(const TensorView& t) {
  struct Dimension {
    int64_t stride, size;
  } dims[TensorView::kMaxRank];
  int count = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.size(d) <= 1) continue;
    const Dimension next{t.stride(d) < 0 ? -t.stride(d) : t.stride(d), t.size(d)};
    int at = count++;
    for (; at > 0 && dims[at - 1].stride > next.stride; --at) dims[at] = dims[at - 1];
    dims[at] = next;
  }
  int64_t reach = 0;  // of the dimensions so far, in elements
  for (int i = 0; i < count; ++i) {
    if (dims[i].stride <= reach) return false;
    reach += (dims[i].size - 1) * dims[i].stride;
  }
  return true;
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

}  // namespace imbrex
