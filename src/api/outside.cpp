// Backends from outside of the library, by the C ABI: a backend and a plan that hand on to functions of somebody else.
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "api/structs.h"
#include "attention/plan_checks.h"
#include "attention/spec_fields.h"
#include "imbrex/device_platform.h"

namespace imbrex::api {
namespace {

// The functions of a backend from outside, whose code may be unloaded after it is unregistered, and copies of its texts, which need not
// live longer than the call that registers it.
struct Functions : imbrex_backend {
  explicit Functions(const imbrex_backend& given) : imbrex_backend(given), name_text(given.name), description_text(given.description) {}
  std::string name_text, description_text;

  // Held shared by threads that call a function without having a plan, and exclusively by the one that unregisters the backend.
  mutable std::shared_mutex mutex;
  bool unregistered = false;  // no function may be called any more
  mutable std::atomic<int> num_plans{0};

  void must(imbrex_status status, const char* what) const {
    if (status == IMBREX_OK) return;
    const char* why = error == nullptr ? nullptr : error(context);
    throw StatusError(status, "backend.outside",
                      fmt::format("{} of {} failed with status {}: {}", what, name_text, status, why == nullptr ? "" : why));
  }
};
using FunctionsPtr = std::shared_ptr<Functions>;

// The plan of a backend from outside. It checks the arguments of each call, as a built-in plan does, before it calls the backend's
// function.
class OutsidePlan final : public AttentionPlan {
 public:
  OutsidePlan(FunctionsPtr functions, const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options)
      : functions_(std::move(functions)), spec_(spec), device_(device.device), limits_(options.limits), validate_(options.validate) {
    imbrex_plan_options o = defaults<imbrex_plan_options>();
    o.struct_size = sizeof o;
    o.max_num_reqs = options.limits.max_num_reqs, o.max_num_tokens = options.limits.max_num_tokens;
    o.max_seq_len = options.limits.max_seq_len, o.max_query_len = options.limits.max_query_len;
    o.min_query_len = options.limits.min_query_len;
    o.parallel_for = options.threads.invoke, o.parallel_for_context = options.threads.context, o.num_workers = options.threads.num_workers;
    o.balanced = options.balanced, o.validate = options.validate, o.load_on_demand = options.load_on_demand,
    o.on_device = options.on_device;
    const int32_t out_dtype = int32_t(options.out_dtype.value_or(DType::f32));
    if (options.out_dtype) o.out_dtype = &out_dtype;
    const imbrex_spec_fields fields = fields_of(spec);
    const imbrex_device_properties properties = properties_of(device);
    if (device_.type == DeviceType::plugin) open_ = open_device(device);
    const std::shared_lock lock(functions_->mutex);
    check(!functions_->unregistered, "backend.unsupported", "{} was unregistered", functions_->name_text);
    functions_->must(functions_->plan(functions_->context, &fields, &properties, &o, &plan_), "plan");
    ++functions_->num_plans;
  }
  ~OutsidePlan() override {
    functions_->plan_free(plan_);
    --functions_->num_plans;
  }

  void update(const Batch& batch, Stream stream) override {
    if (validate_) validate(batch, spec_, limits_, -1);
    const CTensor table(batch.block_table), indptr(batch.kv_indptr), indices(batch.kv_indices), last(batch.kv_last_page_len),
        start(batch.kv_start_loc), slots(batch.slot_mapping), mask(batch.custom_mask);
    const imbrex_batch b{.struct_size = sizeof b,
                         .num_reqs = batch.num_reqs(),
                         .query_start_loc = batch.query_start_loc.data(),
                         .seq_lens = batch.seq_lens.data(),
                         .block_table = table.get(),
                         .kv_indptr = indptr.get(),
                         .kv_indices = indices.get(),
                         .kv_last_page_len = last.get(),
                         .kv_start_loc = start.get(),
                         .slot_mapping = slots.get(),
                         .custom_mask = mask.get(),
                         .positions = batch.positions.empty() ? nullptr : batch.positions.data()};
    const BatchReach reach = reach_of(batch, spec_, validate_);
    functions_->must(functions_->update(plan_, &b, stream), "update");
    num_tokens_ = batch.num_tokens();
    slots_ = batch.slot_mapping;
    reach_ = reach;
  }

  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const override {
    check_write(spec_, device_, cache, k, v, slots_, num_tokens_, reach_);
    const CKvCache kv(cache);
    const CTensor new_k(k), new_v(v);
    functions_->must(functions_->write_kv(plan_, &kv.cache, new_k.get(), new_v.get(), stream), "write_kv");
  }

  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream stream) const override {
    check_run(spec_, device_, in, out, num_tokens_, reach_);
    const CKvCache kv(in.kv);
    const CTensor q(in.q), q_scale(in.q_scale), sinks(in.sinks), slopes(in.alibi_slopes), head_scales(in.head_scales),
        bias(in.relative_bias);
    const CTensor to(out.out), lse(out.lse);
    const imbrex_inputs inputs{.struct_size = sizeof inputs,
                               .q = q.get(),
                               .q_scale = q_scale.get(),
                               .kv = &kv.cache,
                               .sinks = sinks.get(),
                               .alibi_slopes = slopes.get(),
                               .head_scales = head_scales.get(),
                               .relative_bias = bias.get()};
    const imbrex_outputs outputs{.struct_size = sizeof outputs, .out = to.get(), .lse = lse.get()};
    functions_->must(functions_->run(plan_, &inputs, &outputs, stream), "run");
  }

  bool capturable() const override {
    return functions_->capturable != 0 && device_.type != DeviceType::cpu && (open_ == nullptr || open_->has_graphs());
  }

  std::string str() const override {
    const char* text = functions_->str == nullptr ? nullptr : functions_->str(plan_);
    return text == nullptr ? functions_->name_text : text;
  }

 private:
  FunctionsPtr functions_;
  AttentionSpec spec_;
  Device device_;
  OpenDevicePtr open_;  // of a plug-in's device, which stays there with the plan
  PlanLimits limits_;
  bool validate_;
  void* plan_ = nullptr;
  int num_tokens_ = 0;
  TensorView slots_;
  BatchReach reach_;
};

class OutsideBackend final : public BackendOf<AttentionFamily> {
 public:
  explicit OutsideBackend(const imbrex_backend& given) : functions_(std::make_shared<Functions>(given)) {}
  std::string_view name() const override { return functions_->name_text; }
  std::string_view description() const override { return functions_->description_text; }

  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override {
    std::vector<Reason> reasons = unknown_fields(spec);
    const size_t known = functions_->device_size == 0 ? kFirstSize<imbrex_device_properties> : functions_->device_size;
    if (device.device.type == DeviceType::plugin && known <= offsetof(imbrex_device_properties, platform_number))
      reasons.push_back({"device.type", "cpu or cuda", device.device.str()});
    if (!reasons.empty()) return reasons;
    const imbrex_spec_fields fields = fields_of(spec);
    const imbrex_device_properties properties = properties_of(device);
    const imbrex_reasons sink{&reasons, [](void* to, const char* code, const char* wanted, const char* actual) {
                                const auto text = [](const char* s) { return std::string(s == nullptr ? "" : s); };
                                static_cast<std::vector<Reason>*>(to)->push_back({text(code), text(wanted), text(actual)});
                              }};
    const std::shared_lock lock(functions_->mutex);
    if (functions_->unregistered) return {{"backend.unregistered", "a backend that is registered", "one that was unregistered"}};
    functions_->unsupported(functions_->context, &fields, &properties, &sink);
    return reasons;
  }

  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<OutsidePlan>(functions_, spec, device, options);
  }

  void unregister() const {
    const std::unique_lock lock(functions_->mutex);
    const int plans = functions_->num_plans;
    check(plans == 0, "registry.in_use", "expected all plans of {} to be freed before it is unregistered, {} are left", name(), plans);
    unregister_backend(name());
    functions_->unregistered = true;
  }

 private:
  // Fields that came after the backend was compiled, and are not at their defaults.
  std::vector<Reason> unknown_fields(const AttentionSpec& spec) const {
    const size_t known = functions_->spec_size == 0 ? kFirstSize<imbrex_spec_fields> : functions_->spec_size;
    const AttentionSpec usual;
    const imbrex_spec_fields places{};
    const auto* const begin = reinterpret_cast<const char*>(&places);
    std::vector<Reason> reasons;
    for_each_row<AttentionSpec>([&](const auto& row) {
      const bool later = reinterpret_cast<const char*>(&row.named(places)) >= begin + known;
      if (later && row.of(spec) != row.of(usual))
        reasons.push_back({"backend.spec_field", "fields of a spec that the backend knows", std::string(row.field.name)});
    });
    return reasons;
  }

  FunctionsPtr functions_;
};

}  // namespace
}  // namespace imbrex::api

using namespace imbrex;
using namespace imbrex::api;

imbrex_status imbrex_register_backend(const imbrex_backend* given) {
  return guarded([&] {
    const imbrex_backend b = read(given, "backend");
    const bool complete = b.name != nullptr && b.name[0] != 0 && b.description != nullptr && b.unsupported != nullptr &&
                          b.plan != nullptr && b.plan_free != nullptr && b.update != nullptr && b.write_kv != nullptr && b.run != nullptr;
    check(complete, "api.backend", "expected a name, a description and every function but str and error, {}",
          b.name == nullptr || b.name[0] == 0 ? "there is no name" : "one is NULL");
    register_backend(std::make_shared<OutsideBackend>(b));
  });
}

imbrex_status imbrex_unregister_backend(const char* name) {
  return guarded([&] {
    const std::string_view wanted = &deref(name, "name");
    if (const auto* outside = dynamic_cast<const OutsideBackend*>(find_backend(wanted))) return outside->unregister();
    unregister_backend(wanted);  // one of C++, or none
  });
}
