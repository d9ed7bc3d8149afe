// cuBLASLt beside the fake driver: products in double precision, done when the stream does its work. It is in the fake driver's library,
// which tests name as both. It proposes an algorithm that splits sums first, which nobody may take.
#include "cuda/driver/cublaslt.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/small_floats.h"
#include "cuda/fake/fake_objects.h"

namespace imbrex::cuda {

struct cublasLtContext {};
struct cublasLtMatmulPreferenceOpaque {
  uint64_t workspace_bytes = 0;
  uint32_t reductions = ~0u;
};
struct cublasLtMatmulDescOpaque {
  int32_t transposed = 0;
};
struct cublasLtMatrixLayoutOpaque {
  int type = 0;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0, batch_offset = 0;
  int32_t batches = 1;

  int64_t place(uint64_t row, uint64_t column, int64_t batch) const { return int64_t(row) + int64_t(column) * ld + batch * batch_offset; }
  double get(const void* data, int64_t i) const {
    if (type == kCudaReal32F) return static_cast<const float*>(data)[i];
    const uint16_t code = static_cast<const uint16_t*>(data)[i];
    return type == kCudaReal16F ? f16_to_float(code) : bf16_to_float(code);
  }
  void put(void* data, int64_t i, float x) const {
    if (type == kCudaReal32F)
      static_cast<float*>(data)[i] = x;
    else
      static_cast<uint16_t*>(data)[i] = type == kCudaReal16F ? float_to_f16(x) : float_to_bf16(x);
  }
};

namespace {

constexpr cublasStatus_t kInvalidValue = 7;
constexpr uint64_t kSplits = 1, kWhole = 2;
constexpr size_t kScribbled = 1 << 16;

template <class T>
void set(T& to, const void* value, size_t bytes) {
  if (bytes == sizeof to) std::memcpy(&to, value, bytes);
}

bool fit(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t d) {
  const bool transposed = desc->transposed != 0;
  const uint64_t n = transposed ? a->columns : a->rows, k = transposed ? a->rows : a->columns;
  return n == d->rows && k == b->rows && b->columns == d->columns && a->ld >= int64_t(a->rows) && b->ld >= int64_t(b->rows) &&
         d->ld >= int64_t(d->rows) && a->batches == d->batches && b->batches == d->batches && a->type == b->type;
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return kMinCublasLtVersion; }
const char* cublasLtGetStatusString(cublasStatus_t) { return "a status"; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return *handle = new cublasLtContext, kCublasSuccess; }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return delete handle, kCublasSuccess; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, int compute, int scale) {
  if (compute != kCublasCompute32F || scale != kCudaReal32F) return kInvalidValue;
  return *desc = new cublasLtMatmulDescOpaque, kCublasSuccess;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return delete desc, kCublasSuccess; }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, int attribute, const void* value, size_t bytes) {
  if (attribute != kLtDescTransA) return kInvalidValue;
  return set(desc->transposed, value, bytes), kCublasSuccess;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  return *layout = new cublasLtMatrixLayoutOpaque{.type = type, .rows = rows, .columns = columns, .ld = ld}, kCublasSuccess;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return delete layout, kCublasSuccess; }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, int attribute, const void* value, size_t bytes) {
  switch (attribute) {
    case kLtLayoutRows: return set(layout->rows, value, bytes), kCublasSuccess;
    case kLtLayoutCols: return set(layout->columns, value, bytes), kCublasSuccess;
    case kLtLayoutLd: return set(layout->ld, value, bytes), kCublasSuccess;
    case kLtLayoutBatchCount: return set(layout->batches, value, bytes), kCublasSuccess;
    case kLtLayoutBatchOffset: return set(layout->batch_offset, value, bytes), kCublasSuccess;
    default: return kInvalidValue;
  }
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return *preference = new cublasLtMatmulPreferenceOpaque, kCublasSuccess;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return delete preference, kCublasSuccess; }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, int attribute, const void* value, size_t bytes) {
  if (attribute == kLtPreferWorkspaceBytes) set(preference->workspace_bytes, value, bytes);
  if (attribute == kLtPreferReductions) set(preference->reductions, value, bytes);
  return kCublasSuccess;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most, cublasLtMatmulHeuristicResult_t* results,
                                              int* count) {
  if (most < 2 || preference->reductions != 0 || !fit(desc, a, b, d)) return kInvalidValue;
  results[0] = {.algo = {{kSplits}}, .workspace_bytes = 0, .state = kCublasSuccess, .waves = 1, .reserved = {}};
  results[1] = {.algo = {{kWhole}}, .workspace_bytes = 16, .state = kCublasSuccess, .waves = 1, .reserved = {}};
  return *count = 2, kCublasSuccess;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t*,
                                       cublasLtMatmulHeuristicResult_t* result) {
  result->workspace_bytes = 16;
  return fit(desc, a, b, d) ? kCublasSuccess : kInvalidValue;
}
cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algo, int attribute, void* value, size_t bytes, size_t*) {
  if (attribute != kLtAlgoSplitK || bytes != sizeof(int32_t)) return kInvalidValue;
  *static_cast<int32_t*>(value) = algo->data[0] == kSplits ? 4 : 1;
  return kCublasSuccess;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t, void* d, cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algo, void* workspace, size_t workspace_bytes, CUstream stream) {
  if (const CUresult result = fake::failure(); result != 0) return 13;
  const bool plain = *static_cast<const float*>(alpha) == 1 && *static_cast<const float*>(beta) == 0 && c == d;
  if (!plain || !fit(desc, a_layout, b_layout, d_layout) || algo->data[0] != kWhole || workspace == nullptr || workspace_bytes < 16)
    return kInvalidValue;
  const auto work = [=, transposed = desc->transposed != 0, la = *a_layout, lb = *b_layout, ld = *d_layout] {
    // Both ends of it: more would take longer than the product.
    for (char* const end :
         {static_cast<char*>(workspace), static_cast<char*>(workspace) + workspace_bytes - std::min(workspace_bytes, kScribbled)})
      std::memset(end, 0x5a, std::min(workspace_bytes, kScribbled));
    const size_t k = lb.rows;
    std::vector<double> rows(k * ld.rows), column(k);  // of a, and of b
    for (int64_t batch = 0; batch < ld.batches; ++batch) {
      for (uint64_t row = 0; row < ld.rows; ++row)
        for (size_t i = 0; i < k; ++i) rows[row * k + i] = la.get(a, la.place(transposed ? i : row, transposed ? row : i, batch));
      for (uint64_t to = 0; to < ld.columns; ++to) {
        for (size_t i = 0; i < k; ++i) column[i] = lb.get(b, lb.place(i, to, batch));
        for (uint64_t row = 0; row < ld.rows; ++row) {
          double sum = 0;
          for (size_t i = 0; i < k; ++i) sum += rows[row * k + i] * column[i];
          ld.put(d, ld.place(row, to, batch), float(sum));
        }
      }
    }
  };
  return fake::enqueue(stream, work) == 0 ? kCublasSuccess : 13;
}

}  // extern "C"
}  // namespace imbrex::cuda
