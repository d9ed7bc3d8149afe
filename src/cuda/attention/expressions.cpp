// See expressions.h.
#include "cuda/attention/expressions.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "expression/text_parts.h"

namespace imbrex::cuda {
namespace {

constexpr int64_t kTensorAlignment = 16;  // of a tensor's elements

const TensorView& tensor_of(std::span<const NamedTensor> tensors, const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &NamedTensor::name);
  check(found != tensors.end(), "expression.tensor", "expected a tensor named {}, got none", name);
  return found->tensor;
}

// As a kernel reads it, with its elements at `data`.
ExpressionTensorData place_of(const TensorView& t, const void* data) {
  ExpressionTensorData place{.data = data, .sizes = {1, 1, 1}, .strides = {0, 0, 0}};
  for (int d = 0; d < t.rank; ++d) place.sizes[d] = int(t.size(d)), place.strides[d] = long(t.stride(d));
  return place;
}

int64_t bytes_of(const TensorView& t) {
  int64_t elements = 1;
  for (int d = 0; d < t.rank; ++d) elements *= t.size(d);
  return (elements * int64_t(size_of(t.dtype)) + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// A tensor of up to three dimensions as one piece.
void pack(const TensorView& t, char* to) {
  const size_t size = size_of(t.dtype);
  const int64_t sizes[3] = {t.rank > 0 ? t.size(0) : 1, t.rank > 1 ? t.size(1) : 1, t.rank > 2 ? t.size(2) : 1};
  const auto* const from = t.as<const char>();
  const auto offset = [&](int d, int64_t i) { return d < t.rank ? i * t.stride(d) : 0; };
  for (int64_t i = 0; i < sizes[0]; ++i)
    for (int64_t j = 0; j < sizes[1]; ++j)
      for (int64_t k = 0; k < sizes[2]; ++k, to += size)
        std::memcpy(to, from + (offset(0, i) + offset(1, j) + offset(2, k)) * long(size), size);
}

}  // namespace

bool is_affine_score(const AttentionSpec& spec) {
  return !spec.score_mod.empty() && spec.q_dtype != DType::f32 && !affine_text(spec.score_mod, "affine_score").empty();
}

std::string expression_functions(const AttentionSpec& spec) {
  if (!has_expressions(spec)) return {};
  std::string text = "#include \"expression/operations.h\"\n#include \"expression/short_operations.h\"\nnamespace imbrex::cuda {\n";
  const ExpressionFloats floats = spec.q_dtype == DType::f32 ? ExpressionFloats::exact : ExpressionFloats::approximate;
  if (!spec.score_mod.empty()) text += cuda_text(spec.score_mod, "score_mod", floats);
  if (is_affine_score(spec)) text += affine_text(spec.score_mod, "affine_score");
  if (!spec.mask_mod.empty()) text += cuda_text(spec.mask_mod, "mask_mod");
  return text + "}  // namespace imbrex::cuda\n";
}

ScoreParts score_parts_of(const AttentionSpec& spec) {
  constexpr int kMostNumbers = 16;  // of a key, in shared memory
  if (spec.score_mod.empty() || is_affine_score(spec)) return {};
  ScoreParts parts = score_parts(spec.score_mod);
  const int plain = int(parts.columns.size()) - parts.head_columns;
  constexpr int kManyDims = 128;  // whose bytes, beside what they are widened to, leave no room
  if (is_fp8(spec.kv_dtype) && spec.head_dim_qk > kManyDims) {
    parts.columns.clear(), parts.head_columns = 0;
  } else if (plain + parts.head_columns * spec.group_size() > kMostNumbers) {
    parts.columns.resize(size_t(plain)), parts.head_columns = 0;
  }
  return parts;
}

void add_score_parts(const AttentionSpec& spec, KernelKey& key) {
  const ScoreParts parts = score_parts_of(spec);
  key.config.push_back({"kScoreColumns", int(parts.columns.size())});
  key.config.push_back({"kScoreHeadColumns", parts.head_columns});
  key.config.push_back({"kScoreRows", int(parts.rows.size())});
  if (parts.empty()) return;
  const bool loads_stay = spec.head_dim_qk > 128;  // kColumnsBeforeTurn in attention_sm90_consumer.cuh
  if (loads_stay) key.functions += "#include \"expression/element_here.h\"\n";
  key.functions +=
      "namespace imbrex::cuda {\n" + score_parts_text(spec.score_mod, parts, "score", loads_stay) + "}  // namespace imbrex::cuda\n";
}

void set_score_tensors(const AttentionSpec& spec, std::span<const NamedTensor> tensors, AttentionParams& params) {
  if (spec.score_mod.empty()) return;
  ExpressionTensorData* place = params.score_tensors;
  for (const ExpressionTensor& t : spec.score_mod.tensors()) {
    const TensorView& tensor = tensor_of(tensors, t.name);
    *place++ = place_of(tensor, tensor.num_elements() > 0 ? tensor.data : params.seq_lens);  // kernels load an element at any rate
  }
}

int64_t mask_tensor_room(const AttentionSpec& spec, const PlanLimits& limits) {
  // A tensor may have an element for each key of each request, or as many as a small one has.
  constexpr int64_t kFew = 1 << 16, kMost = 1 << 22;
  if (spec.mask_mod.empty()) return 0;
  const int64_t elements = std::clamp(int64_t(limits.max_num_reqs) * limits.max_seq_len, kFew, kMost);
  return int64_t(spec.mask_mod.tensors().size()) * elements * int64_t(sizeof(int));
}

int64_t mask_tensor_bytes(const AttentionSpec& spec, std::span<const NamedTensor> tensors) {
  int64_t bytes = 0;
  for (const ExpressionTensor& t : spec.mask_mod.tensors()) bytes += bytes_of(tensor_of(tensors, t.name));
  return bytes;
}

void place_mask_tensors(const AttentionSpec& spec, std::span<const NamedTensor> tensors, const char* device, ExpressionTensorData* places) {
  for (const ExpressionTensor& t : spec.mask_mod.tensors()) {
    const TensorView& tensor = tensor_of(tensors, t.name);
    *places = place_of(tensor, device);
    long stride = 1;
    for (int d = tensor.rank; d-- > 0; stride *= places->sizes[d]) places->strides[d] = stride;
    ++places;
    device += bytes_of(tensor);
  }
}

void pack_mask_tensors(const AttentionSpec& spec, std::span<const NamedTensor> tensors, char* elements) {
  for (const ExpressionTensor& t : spec.mask_mod.tensors()) {
    const TensorView& tensor = tensor_of(tensors, t.name);
    pack(tensor, elements);
    elements += bytes_of(tensor);
  }
}

}  // namespace imbrex::cuda
