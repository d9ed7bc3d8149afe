// See structs.h.
#include "api/structs.h"

#include <array>
#include <limits>
#include <type_traits>

#include "attention/kv_codec.h"
#include "attention/spec_fields.h"
#include "core/platform_names.h"
#include "core/tensor_format.h"
#include "imbrex/device_platform.h"
#include "mla/spec_fields.h"
#include "recurrent/spec_fields.h"
#include "short_conv/spec_fields.h"

namespace imbrex::api {

// --- defaults

namespace {

// The fields of a spec as C has them.
template <class Fields, class Spec>
Fields fields_from(const Spec& spec) {
  Fields fields{};
  fields.struct_size = sizeof fields;
  for_each_named_field(spec, fields, [](const SpecField&, const auto& value, auto& given) {
    if constexpr (std::is_same_v<decltype(value), const Expression&>)
      given = nullptr;  // whoever has a place for its text sets it
    else
      given = std::remove_reference_t<decltype(given)>(value);
  });
  return fields;
}

}  // namespace

template <>
imbrex_spec_fields defaults() {
  return fields_of(AttentionSpec());
}
template <>
imbrex_short_conv_fields defaults() {
  return fields_of(ShortConvSpec());
}
template <>
imbrex_mla_fields defaults() {
  return fields_from<imbrex_mla_fields>(MlaSpec());
}
template <>
imbrex_recurrent_fields defaults() {
  return fields_from<imbrex_recurrent_fields>(RecurrentSpec());
}
template <>
imbrex_plan_options defaults() {
  const PlanOptions options;
  imbrex_plan_options o{};
  o.max_num_reqs = options.limits.max_num_reqs;
  o.max_num_tokens = options.limits.max_num_tokens;
  o.max_seq_len = options.limits.max_seq_len;
  o.max_query_len = options.limits.max_query_len;
  o.min_query_len = options.limits.min_query_len;
  o.shared_prompts = options.limits.shared_prompts;
  o.validate = options.validate;
  return o;
}

// --- tensors

namespace {

struct DlType {
  DType type;
  uint8_t code, bits;
};
constexpr std::array kDlTypes = {DlType{DType::f32, 2, 32},      DlType{DType::f16, 2, 16},      DlType{DType::bf16, 4, 16},
                                 DlType{DType::fp8_e4m3, 10, 8}, DlType{DType::fp8_e5m2, 12, 8}, DlType{DType::u8, 1, 8},
                                 DlType{DType::i32, 0, 32},      DlType{DType::i64, 0, 64}};
enum DlDevice { kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlExtension = 12, kDlCudaManaged = 13 };

DType dtype_of(const imbrex_dl_type& t, const char* name) {
  const auto* found = std::ranges::find_if(kDlTypes, [&](const DlType& k) { return k.code == t.code && k.bits == t.bits; });
  check(found != kDlTypes.end() && t.lanes == 1, "api.tensor",
        "{}: expected elements of float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, uint8, int32 or int64, got DLPack's code {} with "
        "{} "
        "bits and {} lanes",
        name, t.code, t.bits, t.lanes);
  return found->type;
}

// `one_of`: how many values the enum has.
template <class Enum>
Enum enum_of(int32_t value, int32_t one_of, const char* name) {
  check(value >= 0 && value < one_of, "api.enum", "{}: expected 0 to {}, got {}", name, one_of - 1, value);
  return Enum(value);
}

bool flag_of(int32_t value, const char* name) { return enum_of<int>(value, 2, name) == 1; }

// How many values there are of what a field of a spec names.
constexpr int32_t count_of(AttentionKind) { return 4; }
int32_t count_of(KvFormat) { return int32_t(kv_formats().size()); }
constexpr int32_t count_of(ShortConvForm) { return 2; }
constexpr int32_t count_of(ShortConvActivation) { return 2; }
constexpr int32_t count_of(RecurrentGate) { return 4; }
constexpr int32_t count_of(StateLayout) { return 2; }
constexpr int32_t count_of(RecurrentConv) { return 3; }
constexpr int32_t count_of(OutputGate) { return 3; }
constexpr int32_t count_of(OutputNorm) { return 3; }
constexpr int32_t count_of(DType) { return int32_t(kDlTypes.size()); }

// A field of a spec as C has it.
template <class Value, class Given>
void take(Value& value, Given given, const char* name) {
  if constexpr (std::is_enum_v<Value>)
    value = enum_of<Value>(given, count_of(Value{}), name);
  else if constexpr (std::is_same_v<Value, bool>)
    value = flag_of(given, name);
  else if constexpr (std::is_same_v<Value, Expression>)
    value = given == nullptr || *given == 0 ? Expression() : parse_expression(given);
  else
    value = given;
}

}  // namespace

TensorView view_of(const imbrex_tensor* pointer, const char* name) {
  if (pointer == nullptr) return {};
  const imbrex_tensor& t = *pointer;
  check(t.ndim >= 0 && t.ndim <= TensorView::kMaxRank, "api.tensor", "{}: expected 0 to {} dimensions, got {}", name, TensorView::kMaxRank,
        t.ndim);
  check(t.ndim == 0 || t.shape != nullptr, "api.tensor", "{}: has {} dimensions, but no shape", name, t.ndim);
  const int device = t.device.type;
  check(device == kDlCpu || device == kDlCuda || device == kDlCudaHost || device == kDlCudaManaged || device == kDlExtension, "api.tensor",
        "{}: expected memory of a host (DLPack's device type 1 or 3), of CUDA (2 or 13) or of a plug-in's device (12), got {}", name,
        device);
  TensorView view{.dtype = dtype_of(t.dtype, name), .rank = t.ndim};
  if (device == kDlCuda || device == kDlCudaManaged) view.device = {DeviceType::cuda, t.device.index};
  if (device == kDlExtension) view.device = {DeviceType::plugin, t.device.index};
  int64_t count = 1;  // of elements in the dimensions from i on
  for (int i = t.ndim - 1; i >= 0; --i) {
    view.sizes[size_t(i)] = t.shape[i];
    view.strides[size_t(i)] = t.strides != nullptr && t.shape[i] > 1 ? t.strides[i] : count;  // of one element it may be anything
    count = checked_mul("api.tensor", count, t.shape[i]);
  }
  checked_mul("api.tensor", count, size_of(view.dtype));
  check(view.is_addressable(), "api.tensor", "{}: the strides of {} reach past 63 bits", name, view);
  check(t.byte_offset <= uint64_t(std::numeric_limits<int64_t>::max()), "api.tensor", "{}: expected an offset of 63 bits, got {}", name,
        t.byte_offset);
  check(t.data != nullptr || count == 0, "api.tensor", "{}: {} has no data", name, view);
  if (t.data != nullptr) view.data = static_cast<char*>(t.data) + t.byte_offset;
  return view;
}

namespace {

DlDevice dl_device(DeviceType type) {
  if (type == DeviceType::plugin) return kDlExtension;
  return type == DeviceType::cuda ? kDlCuda : kDlCpu;
}

}  // namespace

CTensor::CTensor(const TensorView& view) { set(view); }

void CTensor::set(const TensorView& view) {
  is_given_ = !view.empty() || view.rank > 0;
  if (!is_given_) return;
  std::copy_n(view.sizes.begin(), view.rank, sizes_);
  std::copy_n(view.strides.begin(), view.rank, strides_);
  const auto* type = std::ranges::find(kDlTypes, view.dtype, &DlType::type);
  tensor_ = {.data = view.data,
             .device = {dl_device(view.device.type), view.device.index},
             .ndim = view.rank,
             .dtype = {type->code, type->bits, 1},
             .shape = sizes_,
             .strides = strides_,
             .byte_offset = 0};
}

CKvCache::CKvCache(const KvCache& kv)
    : k(kv.k), v(kv.v), k_scale(kv.k_scale), v_scale(kv.v_scale), k_rope(kv.k_rope), k_rope_scale(kv.k_rope_scale) {
  cache = {.struct_size = sizeof cache,
           .k = k.get(),
           .v = v.get(),
           .k_scale = k_scale.get(),
           .v_scale = v_scale.get(),
           .k_rope = k_rope.get(),
           .k_rope_scale = k_rope_scale.get()};
}

// --- from C

namespace {

template <class Spec, class Fields>
Spec spec_from(const Fields& fields) {
  Spec spec;
  for_each_named_field(spec, fields, [](const SpecField& field, auto& value, auto given) { take(value, given, field.name.data()); });
  spec.validate();
  return spec;
}

}  // namespace

AttentionSpec spec_of(const imbrex_spec_fields* pointer) { return spec_from<AttentionSpec>(read(pointer, "spec")); }
ShortConvSpec spec_of(const imbrex_short_conv_fields* pointer) { return spec_from<ShortConvSpec>(read(pointer, "fields")); }
MlaSpec spec_of(const imbrex_mla_fields* pointer) { return spec_from<MlaSpec>(read(pointer, "fields")); }
RecurrentSpec spec_of(const imbrex_recurrent_fields* pointer) { return spec_from<RecurrentSpec>(read(pointer, "fields")); }

SelectOptions select_options_of(const imbrex_select_options* pointer) {
  if (pointer == nullptr) return {};
  const imbrex_select_options o = read(pointer, "options");
  const auto text = [](const char* s) { return std::string(s == nullptr ? "" : s); };
  return {.forced = text(o.forced),
          .forced_prefill = text(o.forced_prefill),
          .forced_decode = text(o.forced_decode),
          .phase = enum_of<Phase>(o.phase, 3, "phase")};
}

KvCache kv_of(const imbrex_kv_cache* pointer) {
  const imbrex_kv_cache c = read(pointer, "kv");
  return {.k = view_of(c.k, "k"),
          .v = view_of(c.v, "v"),
          .k_scale = view_of(c.k_scale, "k_scale"),
          .v_scale = view_of(c.v_scale, "v_scale"),
          .k_rope = view_of(c.k_rope, "k_rope"),
          .k_rope_scale = view_of(c.k_rope_scale, "k_rope_scale")};
}

PlanOptions plan_options_of(const imbrex_plan_options* pointer) {
  const imbrex_plan_options o = pointer != nullptr ? read(pointer, "options") : defaults<imbrex_plan_options>();
  PlanOptions options;
  options.limits = {.max_num_reqs = o.max_num_reqs,
                    .max_num_tokens = o.max_num_tokens,
                    .max_seq_len = o.max_seq_len,
                    .max_query_len = o.max_query_len,
                    .min_query_len = o.min_query_len,
                    .shared_prompts = flag_of(o.shared_prompts, "shared_prompts")};
  check(o.threads == nullptr || o.parallel_for == nullptr, "api.threads", "options: threads and parallel_for are both given");
  if (o.threads != nullptr) options.threads = o.threads->pool.parallel_for();
  if (o.parallel_for != nullptr) {
    check(o.num_workers > 0, "api.threads", "options: parallel_for is given, expected num_workers of 1 or more, got {}", o.num_workers);
    options.threads = {.num_workers = o.num_workers, .context = o.parallel_for_context, .invoke = o.parallel_for};
  }
  options.balanced = flag_of(o.balanced, "balanced");
  options.validate = flag_of(o.validate, "validate");
  options.load_on_demand = flag_of(o.load_on_demand, "load_on_demand");
  options.on_device = flag_of(o.on_device, "on_device");
  if (o.workspace != nullptr) options.workspace = o.workspace->workspace;
  if (o.out_dtype != nullptr) options.out_dtype = enum_of<DType>(*o.out_dtype, int32_t(kDlTypes.size()), "out_dtype");
  return options;
}

namespace {

// Reads the tensors that imbrex_batch and imbrex_device_batch both have.
template <class Given, class To>
void take_tables(const Given& b, To& batch) {
  batch.block_table = view_of(b.block_table, "block_table");
  batch.kv_indptr = view_of(b.kv_indptr, "kv_indptr");
  batch.kv_indices = view_of(b.kv_indices, "kv_indices");
  batch.kv_start_loc = view_of(b.kv_start_loc, "kv_start_loc");
  batch.slot_mapping = view_of(b.slot_mapping, "slot_mapping");
  batch.custom_mask = view_of(b.custom_mask, "custom_mask");
  batch.packed_mask = view_of(b.packed_mask, "packed_mask");
  if (flag_of(b.has_pad_slot, "has_pad_slot")) batch.pad_slot = b.pad_slot;
}

}  // namespace

Batch batch_of(const imbrex_batch* pointer, std::vector<NamedTensor>& mask_tensors) {
  const imbrex_batch b = read(pointer, "batch");
  check(b.num_reqs >= 0, "api.batch", "batch.num_reqs: expected 0 or more, got {}", b.num_reqs);
  check(b.num_reqs == 0 || (b.query_start_loc != nullptr && b.seq_lens != nullptr), "api.null",
        "batch: {} requests need query_start_loc and seq_lens", b.num_reqs);
  Batch batch;
  const auto reqs = size_t(b.num_reqs);
  if (b.query_start_loc != nullptr) batch.query_start_loc = {b.query_start_loc, reqs + 1};
  if (reqs > 0) batch.seq_lens = {b.seq_lens, reqs};
  batch.kv_last_page_len = view_of(b.kv_last_page_len, "kv_last_page_len");
  const auto of_requests = [&](const int32_t* list) { return list == nullptr ? std::span<const int32_t>() : std::span(list, reqs); };
  batch.state_slots = of_requests(b.state_slots);
  batch.num_drafts = of_requests(b.num_drafts);
  batch.accepted_drafts = of_requests(b.accepted_drafts);
  batch.source_slots = of_requests(b.source_slots);
  const auto of_tokens = [&](const int32_t* list) {
    return list == nullptr || reqs == 0 ? std::span<const int32_t>() : std::span(list, size_t(std::max(batch.num_tokens(), 0)));
  };
  batch.positions = of_tokens(b.positions);
  batch.draft_parents = of_tokens(b.draft_parents);
  if (b.mask_indptr != nullptr) batch.mask_indptr = {b.mask_indptr, reqs + 1};
  take_tables(b, batch);
  batch.mask_tensors = mask_tensors = named_tensors_of(b.mask_tensors, "mask_tensors");
  return batch;
}

DeviceBatch device_batch_of(const imbrex_device_batch* pointer) {
  const imbrex_device_batch b = read(pointer, "batch");
  DeviceBatch batch;
  batch.query_start_loc = view_of(&deref(b.query_start_loc, "query_start_loc"), "query_start_loc");
  batch.seq_lens = view_of(&deref(b.seq_lens, "seq_lens"), "seq_lens");
  take_tables(b, batch);
  batch.state_slots = view_of(b.state_slots, "state_slots");
  batch.num_drafts = view_of(b.num_drafts, "num_drafts");
  batch.accepted_drafts = view_of(b.accepted_drafts, "accepted_drafts");
  batch.positions = view_of(b.positions, "positions");
  batch.source_slots = view_of(b.source_slots, "source_slots");
  batch.draft_parents = view_of(b.draft_parents, "draft_parents");
  batch.max_num_tokens = b.max_num_tokens;
  return batch;
}

AttentionInputs inputs_of(const imbrex_inputs* pointer, std::vector<NamedTensor>& score_tensors) {
  const imbrex_inputs in = read(pointer, "inputs");
  score_tensors = named_tensors_of(in.score_tensors, "score_tensors");
  return {.q = view_of(&deref(in.q, "q"), "q"),
          .q_scale = view_of(in.q_scale, "q_scale"),
          .kv = kv_of(in.kv),
          .sinks = view_of(in.sinks, "sinks"),
          .alibi_slopes = view_of(in.alibi_slopes, "alibi_slopes"),
          .head_scales = view_of(in.head_scales, "head_scales"),
          .relative_bias = view_of(in.relative_bias, "relative_bias"),
          .score_tensors = score_tensors};
}

AttentionOutputs outputs_of(const imbrex_outputs* pointer) {
  const imbrex_outputs o = read(pointer, "outputs");
  return {.out = view_of(&deref(o.out, "out"), "out"), .lse = view_of(o.lse, "lse")};
}

ShortConvInputs inputs_of(const imbrex_short_conv_inputs* pointer) {
  const imbrex_short_conv_inputs in = read(pointer, "inputs");
  return {.input = view_of(&deref(in.bcx, "bcx"), "bcx"),
          .weight = view_of(&deref(in.weight, "weight"), "weight"),
          .bias = view_of(in.bias, "bias"),
          .state = view_of(&deref(in.state, "state"), "state")};
}

ShortConvOutputs outputs_of(const imbrex_short_conv_outputs* pointer) {
  const imbrex_short_conv_outputs o = read(pointer, "outputs");
  return {.out = view_of(&deref(o.out, "out"), "out")};
}

MlaInputs inputs_of(const imbrex_mla_inputs* pointer) {
  const imbrex_mla_inputs in = read(pointer, "inputs");
  return {.q = view_of(&deref(in.q, "q"), "q"), .kv_b = view_of(in.kv_b, "kv_b"), .kv = kv_of(in.kv), .sinks = view_of(in.sinks, "sinks")};
}

MlaOutputs outputs_of(const imbrex_mla_outputs* pointer) {
  const imbrex_mla_outputs o = read(pointer, "outputs");
  return {.out = view_of(&deref(o.out, "out"), "out"), .lse = view_of(o.lse, "lse")};
}

RecurrentInputs inputs_of(const imbrex_recurrent_inputs* pointer) {
  const imbrex_recurrent_inputs in = read(pointer, "inputs");
  const auto of_conv = [&](const imbrex_tensor* t, const char* name) {  // not with a convolution
    return in.input == nullptr ? view_of(&deref(t, name), name) : view_of(t, name);
  };
  return {.q = of_conv(in.q, "q"),
          .k = of_conv(in.k, "k"),
          .v = of_conv(in.v, "v"),
          .gate = view_of(in.gate, "gate"),
          .beta = view_of(in.beta, "beta"),
          .rates = view_of(in.rates, "rates"),
          .gate_bias = view_of(in.gate_bias, "gate_bias"),
          .skip = view_of(in.skip, "skip"),
          .state = view_of(&deref(in.state, "state"), "state"),
          .z = view_of(in.z, "z"),
          .norm_weight = view_of(in.norm_weight, "norm_weight"),
          .input = view_of(in.input, "input"),
          .conv_weight = view_of(in.conv_weight, "conv_weight"),
          .conv_bias = view_of(in.conv_bias, "conv_bias"),
          .conv_state = view_of(in.conv_state, "conv_state")};
}

RecurrentOutputs outputs_of(const imbrex_recurrent_outputs* pointer) {
  const imbrex_recurrent_outputs o = read(pointer, "outputs");
  return {.out = view_of(&deref(o.out, "out"), "out")};
}

// --- to C

imbrex_spec_fields fields_of(const AttentionSpec& spec) { return fields_from<imbrex_spec_fields>(spec); }
imbrex_short_conv_fields fields_of(const ShortConvSpec& spec) { return fields_from<imbrex_short_conv_fields>(spec); }
imbrex_recurrent_fields fields_of(const RecurrentSpec& spec) { return fields_from<imbrex_recurrent_fields>(spec); }

CPlanOptions::CPlanOptions(const PlanOptions& options) : options_(defaults<imbrex_plan_options>()) {
  imbrex_plan_options& o = options_;
  o.struct_size = sizeof o;
  o.max_num_reqs = options.limits.max_num_reqs, o.max_num_tokens = options.limits.max_num_tokens;
  o.max_seq_len = options.limits.max_seq_len, o.max_query_len = options.limits.max_query_len;
  o.min_query_len = options.limits.min_query_len, o.shared_prompts = options.limits.shared_prompts;
  o.parallel_for = options.threads.invoke, o.parallel_for_context = options.threads.context, o.num_workers = options.threads.num_workers;
  o.balanced = options.balanced, o.validate = options.validate, o.load_on_demand = options.load_on_demand, o.on_device = options.on_device;
  if (!options.out_dtype) return;
  out_dtype_ = int32_t(*options.out_dtype);
  o.out_dtype = &out_dtype_;
}

// A number stays what it is in imbrex.h when a set is added between two others.
int32_t number_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic: return 0;
    case CpuIsa::avx2: return 1;
    case CpuIsa::avx512: return 2;
    case CpuIsa::amx_emulated: return 3;
    case CpuIsa::amx: return 4;
    case CpuIsa::avx512_bf16: return 5;
  }
  return 0;
}

imbrex_device_properties properties_of(const DeviceInfo& d) {
  imbrex_device_properties p{};
  p.struct_size = sizeof p;
  p.cuda = int32_t(d.device.type);
  p.index = d.device.index;
  p.present = d.present;
  p.sm = d.sm;
  p.num_workers = d.num_workers;
  p.cpu_isa = number_of(d.isa);
  p.l2_bytes = d.l2_bytes, p.l3_bytes = d.l3_bytes, p.memory_bytes = d.memory_bytes;
  p.platform = d.device.type == DeviceType::plugin ? platform_name(d.device.index) : to_string(d.device.type);
  p.platform_number = number_of(d.device);
  return p;
}

}  // namespace imbrex::api

using namespace imbrex::api;

void imbrex_spec_fields_init(imbrex_spec_fields* s, size_t struct_size) { init(s, struct_size); }
void imbrex_select_options_init(imbrex_select_options* s, size_t struct_size) { init(s, struct_size); }
void imbrex_kv_cache_init(imbrex_kv_cache* s, size_t struct_size) { init(s, struct_size); }
void imbrex_plan_options_init(imbrex_plan_options* s, size_t struct_size) { init(s, struct_size); }
void imbrex_batch_init(imbrex_batch* s, size_t struct_size) { init(s, struct_size); }
void imbrex_device_batch_init(imbrex_device_batch* s, size_t struct_size) { init(s, struct_size); }
void imbrex_inputs_init(imbrex_inputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_outputs_init(imbrex_outputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_short_conv_fields_init(imbrex_short_conv_fields* s, size_t struct_size) { init(s, struct_size); }
void imbrex_short_conv_inputs_init(imbrex_short_conv_inputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_short_conv_outputs_init(imbrex_short_conv_outputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_mla_fields_init(imbrex_mla_fields* s, size_t struct_size) { init(s, struct_size); }
void imbrex_mla_inputs_init(imbrex_mla_inputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_mla_outputs_init(imbrex_mla_outputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_recurrent_fields_init(imbrex_recurrent_fields* s, size_t struct_size) { init(s, struct_size); }
void imbrex_recurrent_inputs_init(imbrex_recurrent_inputs* s, size_t struct_size) { init(s, struct_size); }
void imbrex_recurrent_outputs_init(imbrex_recurrent_outputs* s, size_t struct_size) { init(s, struct_size); }
