#pragma once
// Structs that cross the C ABI: their defaults, their sizes as callers of any version know them, and what they are in C++.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "api/guard.h"
#include "imbrex/attention.h"
#include "imbrex/layer_spec.h"
#include "imbrex/select.h"

namespace imbrex::api {

// Bytes that a struct had in the first version of the ABI: what every caller gives at least. These numbers never change.
template <class T>
constexpr size_t kFirstSize = 0;
template <>
inline constexpr size_t kFirstSize<imbrex_device_properties> = 56;
template <>
inline constexpr size_t kFirstSize<imbrex_spec_fields> = 96;
template <>
inline constexpr size_t kFirstSize<imbrex_select_options> = 40;
template <>
inline constexpr size_t kFirstSize<imbrex_kv_cache> = 40;
template <>
inline constexpr size_t kFirstSize<imbrex_plan_options> = 72;
template <>
inline constexpr size_t kFirstSize<imbrex_batch> = 88;
template <>
inline constexpr size_t kFirstSize<imbrex_device_batch> = 80;
template <>
inline constexpr size_t kFirstSize<imbrex_inputs> = 64;
template <>
inline constexpr size_t kFirstSize<imbrex_outputs> = 24;
template <>
inline constexpr size_t kFirstSize<imbrex_backend> = 96;
template <>
inline constexpr size_t kFirstSize<imbrex_short_conv_backend> = 112;
template <>
inline constexpr size_t kFirstSize<imbrex_recurrent_backend> = 112;
template <>
inline constexpr size_t kFirstSize<imbrex_device_description> = 56;
template <>
inline constexpr size_t kFirstSize<imbrex_device_table> = 264;
template <>
inline constexpr size_t kFirstSize<imbrex_short_conv_fields> = 32;
template <>
inline constexpr size_t kFirstSize<imbrex_short_conv_inputs> = 40;
template <>
inline constexpr size_t kFirstSize<imbrex_short_conv_outputs> = 16;
template <>
inline constexpr size_t kFirstSize<imbrex_mla_fields> = 88;
template <>
inline constexpr size_t kFirstSize<imbrex_mla_inputs> = 40;
template <>
inline constexpr size_t kFirstSize<imbrex_mla_outputs> = 24;
template <>
inline constexpr size_t kFirstSize<imbrex_recurrent_fields> = 88;
template <>
inline constexpr size_t kFirstSize<imbrex_recurrent_inputs> = 80;
template <>
inline constexpr size_t kFirstSize<imbrex_recurrent_outputs> = 16;
template <>
inline constexpr size_t kFirstSize<imbrex_phase_options> = 32;

// The defaults of a struct's fields.
template <class T>
T defaults() {
  return {};
}
template <>
imbrex_spec_fields defaults();
template <>
imbrex_plan_options defaults();
template <>
imbrex_short_conv_fields defaults();
template <>
imbrex_mla_fields defaults();
template <>
imbrex_recurrent_fields defaults();
template <>
imbrex_phase_options defaults();

template <class T>
void init(T* given, size_t struct_size) {
  if (given == nullptr) return;
  T all = defaults<T>();
  all.struct_size = struct_size;
  std::memset(static_cast<void*>(given), 0, struct_size);
  std::memcpy(static_cast<void*>(given), &all, std::min(struct_size, sizeof all));
}

// No version will have a larger struct: a larger size was never set, and so many bytes must not be read.
inline constexpr size_t kLargestSize = 4096;

template <class T>
void check_size(const T& given, const char* name) {
  static_assert(kFirstSize<T> > 0 && sizeof(T) >= kFirstSize<T> && sizeof(T) <= kLargestSize);
  check(given.struct_size >= kFirstSize<T> && given.struct_size <= kLargestSize, "api.struct_size",
        "{}: expected a struct_size of {} to {}, got {}: call its init function", name, kFirstSize<T>, kLargestSize, given.struct_size);
}

// The struct in the size that this version knows. Later fields of a newer caller must be zero, because they would be ignored.
template <class T>
T read(const T* pointer, const char* name) {
  const T& given = deref(pointer, name);
  check_size(given, name);
  T all = defaults<T>();
  std::memcpy(static_cast<void*>(&all), &given, std::min(given.struct_size, sizeof all));
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  const bool known =
      given.struct_size <= sizeof all || std::all_of(bytes + sizeof all, bytes + given.struct_size, [](int b) { return b == 0; });
  check(known, "api.struct_size", "{}: of its {} bytes, those from {} on belong to a later version and are not zero", name,
        given.struct_size, sizeof all);
  all.struct_size = sizeof all;
  return all;
}

// For the caller, as far as it knows the struct.
template <class T>
void write(T* pointer, T value, const char* name) {
  T& out = deref(pointer, name);
  check_size(out, name);
  value.struct_size = out.struct_size;
  std::memcpy(static_cast<void*>(&out), &value, std::min(out.struct_size, sizeof value));
}

// NULL: an empty view. Error api.tensor for what no tensor of ours can be.
TensorView view_of(const imbrex_tensor*, const char* name);
AttentionSpec spec_of(const imbrex_spec_fields*);
ShortConvSpec spec_of(const imbrex_short_conv_fields*);
MlaSpec spec_of(const imbrex_mla_fields*);
RecurrentSpec spec_of(const imbrex_recurrent_fields*);
SelectOptions select_options_of(const imbrex_select_options*);
KvCache kv_of(const imbrex_kv_cache*);
PlanOptions plan_options_of(const imbrex_plan_options*);
std::vector<NamedTensor> named_tensors_of(const imbrex_named_tensors&, const char* what);
Batch batch_of(const imbrex_batch*, std::vector<NamedTensor>& mask_tensors);  // which the batch views
DeviceBatch device_batch_of(const imbrex_device_batch*);
AttentionInputs inputs_of(const imbrex_inputs*, std::vector<NamedTensor>& score_tensors);  // likewise
AttentionOutputs outputs_of(const imbrex_outputs*);
ShortConvInputs inputs_of(const imbrex_short_conv_inputs*);
ShortConvOutputs outputs_of(const imbrex_short_conv_outputs*);
MlaInputs inputs_of(const imbrex_mla_inputs*);
MlaOutputs outputs_of(const imbrex_mla_outputs*);
RecurrentInputs inputs_of(const imbrex_recurrent_inputs*);
RecurrentOutputs outputs_of(const imbrex_recurrent_outputs*);

// A view as a C tensor, with the room that its sizes need.
class CTensor {
 public:
  CTensor() = default;
  explicit CTensor(const TensorView&);
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;
  const imbrex_tensor* get() const { return is_given_ ? &tensor_ : nullptr; }  // NULL: an empty view
  void set(const TensorView&);

 private:
  bool is_given_ = false;
  int64_t sizes_[TensorView::kMaxRank] = {}, strides_[TensorView::kMaxRank] = {};
  imbrex_tensor tensor_{};
};
struct CKvCache {
  CTensor k, v, k_scale, v_scale, k_rope, k_rope_scale;
  imbrex_kv_cache cache{};
  explicit CKvCache(const KvCache&);
};
// Plan options as C has them, without a workspace.
class CPlanOptions {
 public:
  explicit CPlanOptions(const PlanOptions&);
  CPlanOptions(const CPlanOptions&) = delete;
  CPlanOptions& operator=(const CPlanOptions&) = delete;
  const imbrex_plan_options* get() const { return &options_; }

 private:
  imbrex_plan_options options_{};
  int32_t out_dtype_ = 0;
};
imbrex_spec_fields fields_of(const AttentionSpec&);
imbrex_short_conv_fields fields_of(const ShortConvSpec&);
imbrex_recurrent_fields fields_of(const RecurrentSpec&);
imbrex_device_properties properties_of(const DeviceInfo&);

// The family of the contents of a handle. of_family() checks that it is the one that a function is for.
inline std::string_view family_of(const AttentionSpec&) { return AttentionFamily::name; }
inline std::string_view family_of(const ShortConvSpec&) { return ShortConvFamily::name; }
inline std::string_view family_of(const MlaSpec&) { return MlaFamily::name; }
inline std::string_view family_of(const RecurrentSpec&) { return RecurrentFamily::name; }
inline std::string_view family_of(const std::unique_ptr<AttentionPlan>&) { return AttentionFamily::name; }
inline std::string_view family_of(const std::unique_ptr<ShortConvPlan>&) { return ShortConvFamily::name; }
inline std::string_view family_of(const std::unique_ptr<MlaPlan>&) { return MlaFamily::name; }
inline std::string_view family_of(const std::unique_ptr<RecurrentPlan>&) { return RecurrentFamily::name; }
template <class Wanted, class... Families>
const Wanted& of_family(const std::variant<Families...>& held, const char* name) {
  const auto* wanted = std::get_if<Wanted>(&held);
  check(wanted != nullptr, "api.family", "{}: expected one of the family {}, got one of {}", name, family_of(Wanted{}),
        std::visit([](const auto& other) { return family_of(other); }, held));
  return *wanted;
}

inline imbrex_reason c_reason(const Reason& r) { return {r.code.c_str(), r.wanted.c_str(), r.actual.c_str()}; }

}  // namespace imbrex::api

// Handles.
struct imbrex_threads {
  explicit imbrex_threads(int count) : pool(count) {}
  imbrex::ThreadPool pool;
};
struct imbrex_device {
  imbrex::DeviceInfo info;
  std::string text;
};
struct imbrex_workspace {
  explicit imbrex_workspace(std::shared_ptr<imbrex::Workspace> scratch) : workspace(std::move(scratch)) {}
  std::shared_ptr<imbrex::Workspace> workspace;
};
struct imbrex_spec {
  imbrex::LayerSpec spec;
  std::string text;
  std::string score_mod = {}, mask_mod = {};  // texts of expressions
};
struct imbrex_selection {
  imbrex_spec spec;
  imbrex::DeviceInfo device;
  std::variant<const imbrex::BackendOf<imbrex::AttentionFamily>*, const imbrex::BackendOf<imbrex::ShortConvFamily>*,
               const imbrex::BackendOf<imbrex::MlaFamily>*, const imbrex::BackendOf<imbrex::RecurrentFamily>*>
      backend;                                   // of the spec's family; null: none
  const imbrex::BasicBackend* chosen = nullptr;  // the same
  struct Candidate {
    std::string name;
    std::vector<imbrex::Reason> reasons;
  };
  std::vector<Candidate> candidates;
  std::vector<std::string> proposals;
  std::string rule, text, name;  // name: of the backend
};
struct imbrex_plan {
  std::variant<std::unique_ptr<imbrex::AttentionPlan>, std::unique_ptr<imbrex::ShortConvPlan>, std::unique_ptr<imbrex::MlaPlan>,
               std::unique_ptr<imbrex::RecurrentPlan>>
      plan;
  std::string text;
  std::vector<imbrex::Reason> problems;

  imbrex::BasicPlan& basic() const {
    return std::visit([](const auto& of_family) -> imbrex::BasicPlan& { return *of_family; }, plan);
  }
};
