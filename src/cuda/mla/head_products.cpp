// See head_products.h. cuBLASLt's matrices are column by column, so that a product's columns are the rows that a step brings: to^T [n,
// rows] = weight^T [n, k] * from^T [k, rows], for each head.
#include "cuda/mla/head_products.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/tensor_format.h"
#include "core/tensor_layout.h"
#include "cuda/driver/cublaslt.h"
#include "cuda/driver/memory.h"
#include "gpu/shared_by_key.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kAlignment = 16;  // bytes
// The numbers of rows for which algorithms are proposed, those of tokens and of keys in their order, and for which one has to do.
constexpr uint64_t kUsualTokens = 128, kUsualKeys = 2048;
constexpr uint64_t kProposedRows[2][4] = {{kUsualTokens, 16, 1, kUsualKeys}, {kUsualKeys, kUsualTokens, 16, 1}};
constexpr uint64_t kCheckedRows[] = {1, 2, 16, 100, kUsualTokens, kUsualKeys, 8192};
constexpr int kMostProposals = 16;

int type_of(DType dtype) { return dtype == DType::f32 ? kCudaReal32F : dtype == DType::f16 ? kCudaReal16F : kCudaReal16BF; }

// cuBLASLt's state of a context, which all plans share.
class LtHandle {
 public:
  LtHandle() { check_cublaslt(need_cublaslt().cublasLtCreate(&handle_), "start cuBLASLt"); }
  ~LtHandle() {
    if (driver() != nullptr) need_cublaslt().cublasLtDestroy(handle_);
  }
  LtHandle(const LtHandle&) = delete;
  LtHandle& operator=(const LtHandle&) = delete;
  cublasLtHandle_t get() const { return handle_; }

 private:
  cublasLtHandle_t handle_ = nullptr;
};

std::shared_ptr<LtHandle> handle_of(const Context& context) {
  static auto* const handles = new gpu::SharedByKey<unsigned long long, LtHandle>;
  return handles->get(context.id(), [] { return std::make_shared<LtHandle>(); });
}

template <class T, cublasStatus_t (*CublasLtApi::*destroy)(T)>
struct Destroy {
  using pointer = T;
  void operator()(T t) const { (need_cublaslt().*destroy)(t); }
};
using Desc = std::unique_ptr<cublasLtMatmulDesc_t, Destroy<cublasLtMatmulDesc_t, &CublasLtApi::cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayout_t, Destroy<cublasLtMatrixLayout_t, &CublasLtApi::cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreference_t, Destroy<cublasLtMatmulPreference_t, &CublasLtApi::cublasLtMatmulPreferenceDestroy>>;

// A matrix of each head, whose place, number of columns and heads change from call to call.
class Matrices {
 public:
  Matrices(DType dtype, int64_t rows, int64_t columns, int32_t heads) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublaslt(need_cublaslt().cublasLtMatrixLayoutCreate(&made, type_of(dtype), uint64_t(rows), uint64_t(columns), rows),
                   "describe a matrix of {} x {}", rows, columns);
    layout_.reset(made);
    set(kLtLayoutBatchCount, heads);
  }
  void set_columns(uint64_t columns) { set(kLtLayoutCols, columns); }
  void set_heads(int32_t heads) { set(kLtLayoutBatchCount, heads); }
  void set_strides(int64_t column, int64_t head) { set(kLtLayoutLd, column), set(kLtLayoutBatchOffset, head); }
  cublasLtMatrixLayout_t get() const { return layout_.get(); }

 private:
  template <class T>
  void set(int attribute, T value) {
    check_cublaslt(need_cublaslt().cublasLtMatrixLayoutSetAttribute(layout_.get(), attribute, &value, sizeof value),
                   "set attribute {} of a matrix to {}", attribute, value);
  }
  Layout layout_;
};

struct Shape {
  bool columns;      // by_columns()
  bool shared_rows;  // all heads have the same rows
  int n, k;
  DType from, to;
  friend bool operator==(const Shape&, const Shape&) = default;
};

class Product {
 public:
  // Error cuda.cublaslt where no algorithm does.
  Product(const ContextPtr& context, std::shared_ptr<LtHandle> handle, const Shape& shape, int heads)
      : shape_(shape),
        heads_(heads),
        handle_(std::move(handle)),
        weight_(shape.from, shape.columns ? shape.n : shape.k, shape.columns ? shape.k : shape.n, heads),
        from_(shape.from, shape.k, 1, heads),
        to_(shape.to, shape.n, 1, heads) {
    const CublasLtApi& lt = need_cublaslt();
    cublasLtMatmulDesc_t made = nullptr;
    check_cublaslt(lt.cublasLtMatmulDescCreate(&made, kCublasCompute32F, kCudaReal32F), "describe a product");
    desc_.reset(made);
    const int32_t transposed = shape.columns ? kCublasNoTranspose : kCublasTranspose;
    check_cublaslt(lt.cublasLtMatmulDescSetAttribute(desc_.get(), kLtDescTransA, &transposed, sizeof transposed), "describe a product");
    // As they lie in a plan's scratch. What an algorithm needs of other places is their alignment.
    const int64_t weight_column = shape.columns ? shape.n : shape.k;
    weight_.set_strides(weight_column, weight_column * (shape.columns ? 2 * shape.k : 2 * shape.n));
    from_.set_strides(shape.shared_rows ? shape.k : int64_t(heads) * shape.k, shape.shared_rows ? 0 : shape.k);
    to_.set_strides(int64_t(heads) * shape.n, shape.n);
    choose(context);
  }

  const Shape& shape() const { return shape_; }

  void run(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& place) {
    check_cublaslt(multiply(from, weight, to, place), "multiply {} rows of {} by {} columns of a weight", to.size(0), shape_.k, shape_.n);
  }

 private:
  void set_rows(uint64_t rows) { from_.set_columns(rows), to_.set_columns(rows); }

  cublasStatus_t multiply(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& place) {
    const auto column = [](const TensorView& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) : std::max(t.size(2), t.stride(dim)); };
    const auto head = [](const TensorView& t, int dim) { return t.size(dim) > 1 ? t.stride(dim) : 0; };
    weight_.set_strides(column(weight, 1), head(weight, 0));
    from_.set_strides(column(from, 0), head(from, 1));
    to_.set_strides(column(to, 0), head(to, 1));
    for (Matrices* each : {&weight_, &from_, &to_}) each->set_heads(int32_t(to.size(1)));
    set_rows(uint64_t(to.size(0)));
    const float one = 1.f, zero = 0.f;
    return need_cublaslt().cublasLtMatmul(handle_->get(), desc_.get(), &one, weight.data, weight_.get(), from.data, from_.get(), &zero,
                                          to.data, to_.get(), to.data, to_.get(), &algorithm_, place.workspace,
                                          size_t(kProductWorkspaceBytes), cu_stream(place.stream));
  }

  // The first of cuBLASLt's proposals for usual numbers of rows that adds up each sum in one sequence and does for every other number.
  void choose(const ContextPtr& context) {
    const CublasLtApi& lt = need_cublaslt();
    cublasLtMatmulPreference_t made = nullptr;
    check_cublaslt(lt.cublasLtMatmulPreferenceCreate(&made), "describe what algorithms may do");
    const Preference preference(made);
    const auto prefer = [&](int attribute, auto value) {
      check_cublaslt(lt.cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof value), "describe what algorithms may do");
    };
    prefer(kLtPreferWorkspaceBytes, uint64_t(kProductWorkspaceBytes));
    prefer(kLtPreferReductions, uint32_t(kLtReductionNone));
    for (const int alignment : {kLtPreferAlignmentA, kLtPreferAlignmentB, kLtPreferAlignmentC, kLtPreferAlignmentD})
      prefer(alignment, uint32_t(kAlignment));
    int all = 0;
    for (const uint64_t rows : kProposedRows[shape_.shared_rows ? 1 : 0]) {
      set_rows(rows);
      std::array<cublasLtMatmulHeuristicResult_t, kMostProposals> proposals{};
      int count = 0;
      const cublasStatus_t status = lt.cublasLtMatmulAlgoGetHeuristic(handle_->get(), desc_.get(), weight_.get(), from_.get(), to_.get(),
                                                                      to_.get(), made, kMostProposals, proposals.data(), &count);
      for (int i = 0; status == kCublasSuccess && i < count; ++i) {
        algorithm_ = proposals[size_t(i)].algo;
        if (proposals[size_t(i)].state == kCublasSuccess && is_whole() && does_for_all() && loads(context)) return;
      }
      all += count;
    }
    fail("cuda.cublaslt", "expected an algorithm of cuBLASLt for rows of {} by {} columns of {} that does not split sums, got none of {}",
         shape_.k, shape_.n, to_string(shape_.from), all);
  }

  // Computes a row of each head from zeros, so that the driver loads the kernel now: otherwise it would at the first call, which may be
  // captured. False: the algorithm does not run after all.
  bool loads(const ContextPtr& context) {
    const int64_t rows = shape_.columns ? shape_.k : shape_.n, columns = shape_.columns ? shape_.n : shape_.k;
    const int64_t weight_at = kProductWorkspaceBytes, from_at = weight_at + heads_ * rows * columns * size_of(shape_.from);
    const int64_t to_at = from_at + heads_ * shape_.k * size_of(shape_.from), end = to_at + heads_ * shape_.n * size_of(shape_.to);
    const DeviceBuffer memory = zeroed(context, size_t(end));
    const OwnedStream stream(context);
    const auto tensor = [&](int64_t at, DType dtype, std::initializer_list<int64_t> sizes) {
      return TensorView::contiguous(memory.as<char>() + at, dtype, sizes);
    };
    TensorView from = tensor(from_at, shape_.from, {1, shape_.shared_rows ? 1 : heads_, shape_.k});
    if (shape_.shared_rows) from.sizes[1] = heads_, from.strides[1] = 0;
    const cublasStatus_t status =
        multiply(from, tensor(weight_at, shape_.from, {heads_, rows, columns}), tensor(to_at, shape_.to, {1, heads_, shape_.n}),
                 {.stream = stream.get(), .workspace = memory.as<void>()});
    stream.synchronize();
    return status == kCublasSuccess;
  }

  // Whether a sum is made by one thread block, in one sequence.
  bool is_whole() const {
    int32_t parts = 0;
    size_t written = 0;
    const cublasStatus_t status =
        need_cublaslt().cublasLtMatmulAlgoConfigGetAttribute(&algorithm_, kLtAlgoSplitK, &parts, sizeof parts, &written);
    return status == kCublasSuccess && parts <= 1;
  }

  bool does_for_all() {
    return std::ranges::all_of(kCheckedRows, [&](uint64_t rows) {
      set_rows(rows);
      cublasLtMatmulHeuristicResult_t result{};
      const cublasStatus_t status = need_cublaslt().cublasLtMatmulAlgoCheck(handle_->get(), desc_.get(), weight_.get(), from_.get(),
                                                                            to_.get(), to_.get(), &algorithm_, &result);
      return status == kCublasSuccess && result.workspace_bytes <= size_t(kProductWorkspaceBytes);
    });
  }

  Shape shape_;
  int64_t heads_;
  std::shared_ptr<LtHandle> handle_;
  Desc desc_;
  Matrices weight_, from_, to_;
  cublasLtMatmulAlgo_t algorithm_{};
};

class CublasLtProducts final : public HeadProducts {
 public:
  CublasLtProducts(const std::shared_ptr<const Context>& context, const MlaSpec& spec, std::optional<DType> out) : context_(context) {
    const CurrentContext current(*context);
    const RelaxedCapture relaxed;
    const std::shared_ptr<LtHandle> handle = handle_of(*context);
    const auto add = [&](const Shape& shape) {
      if (find(shape) != nullptr) return;
      products_.push_back(std::make_unique<Product>(context, handle, shape, spec.num_heads));
    };
    const int rank = spec.kv_lora_rank, nope = spec.qk_nope_dim, v = spec.v_dim;
    const DType type = spec.dtype;
    add({.columns = true, .shared_rows = false, .n = rank, .k = nope, .from = type, .to = type});
    for (const DType to : {type, DType::f32})
      if (to == out.value_or(to)) add({.columns = false, .shared_rows = false, .n = v, .k = rank, .from = type, .to = to});
    for (const int n : {nope, v}) add({.columns = false, .shared_rows = true, .n = n, .k = rank, .from = type, .to = type});
  }

  void by_columns(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& place) const override {
    run(true, from, weight, to, place);
  }
  void by_rows(const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& place) const override {
    run(false, from, weight, to, place);
  }
  DType row_type(DType weight) const override { return weight; }

 private:
  Product* find(const Shape& shape) const {
    const auto found = std::ranges::find(products_, shape, [](const auto& product) { return product->shape(); });
    return found == products_.end() ? nullptr : found->get();
  }

  void run(bool columns, const TensorView& from, const TensorView& weight, const TensorView& to, const ProductPlace& place) const {
    if (to.size(0) == 0) return;
    const Shape shape{.columns = columns,
                      .shared_rows = !columns && from.stride(1) == 0,
                      .n = int(to.size(2)),
                      .k = int(from.size(2)),
                      .from = from.dtype,
                      .to = to.dtype};
    Product* const product = find(shape);
    check(product != nullptr, "cuda.cublaslt", "expected a product that the plan was made for, got {} to {}", from, to);
    product->run(from, weight, to, place);
  }

  std::shared_ptr<const Context> context_;
  std::vector<std::unique_ptr<Product>> products_;
};

}  // namespace

std::unique_ptr<HeadProducts> cublaslt_products(const std::shared_ptr<const Context>& context, const MlaSpec& spec,
                                                std::optional<DType> out) {
  return std::make_unique<CublasLtProducts>(context, spec, out);
}

bool are_aligned(const TensorView& t) {
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(kAlignment) != 0) return false;
  for (int d = 0; d < 2; ++d)
    if (byte_stride(t, d) % kAlignment != 0) return false;
  return true;
}

}  // namespace imbrex::cuda
