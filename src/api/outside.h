#pragma once
// Backends from outside of the library, by the C ABI, for every family: a backend and a plan that hand on to functions of somebody else.
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "api/structs.h"
#include "attention/plan_checks.h"
#include "family/spec_fields.h"
#include "imbrex/device_platform.h"

namespace imbrex::api {

// The struct of functions that a backend of a family is in C.
template <class Family>
struct TableOfFamily;
template <>
struct TableOfFamily<AttentionFamily> {
  using type = imbrex_backend;
};
template <>
struct TableOfFamily<ShortConvFamily> {
  using type = imbrex_short_conv_backend;
};
template <>
struct TableOfFamily<RecurrentFamily> {
  using type = imbrex_recurrent_backend;
};
template <class Family>
using TableOf = typename TableOfFamily<Family>::type;

// The functions of a backend, whose code may be unloaded after it is unregistered, and copies of its texts, which need not live longer than
// the call that registers it.
template <class Table>
struct Functions : Table {
  explicit Functions(const Table& given) : Table(given), name_text(given.name), description_text(given.description) {}
  std::string name_text, description_text;

  // Held shared by threads that call a function without having a plan, and exclusively by the one that unregisters the backend.
  mutable std::shared_mutex mutex;
  bool unregistered = false;  // no function may be called any more
  mutable std::atomic<int> num_plans{0};

  void must(imbrex_status status, const char* what) const {
    if (status == IMBREX_OK) return;
    const char* why = this->error == nullptr ? nullptr : this->error(this->context);
    throw StatusError(status, "backend.outside",
                      fmt::format("{} of {} failed with status {}: {}", what, name_text, status, why == nullptr ? "" : why));
  }
};
template <class Family>
using FunctionsPtr = std::shared_ptr<Functions<TableOf<Family>>>;

// The plan of a backend from outside. That of a family derives from it and hands on update() and the calls of a layer: it checks their
// arguments, as a built-in plan does, before it calls the backend's function.
template <class OfFamily>
class OutsidePlan : public OfFamily::Plan {
 public:
  using Family = OfFamily;
  OutsidePlan(FunctionsPtr<Family> functions, const typename Family::Spec& spec, const DeviceInfo& device, const PlanOptions& options)
      : functions_(std::move(functions)), spec_(spec), device_(device.device), limits_(options.limits), validate_(options.validate) {
    const CPlanOptions c_options(options);
    const auto fields = fields_of(spec);
    const imbrex_device_properties properties = properties_of(device);
    if (device_.type == DeviceType::plugin) open_ = open_device(device);
    const std::shared_lock lock(functions_->mutex);
    check(!functions_->unregistered, "backend.unsupported", "{} was unregistered", functions_->name_text);
    functions_->must(functions_->plan(functions_->context, &fields, &properties, c_options.get(), &plan_), "plan");
    ++functions_->num_plans;
  }
  ~OutsidePlan() override {
    functions_->plan_free(plan_);
    --functions_->num_plans;
  }

  bool capturable() const override {
    return functions_->capturable != 0 && device_.type != DeviceType::cpu && (open_ == nullptr || open_->has_graphs());
  }
  std::string str() const override {
    const char* text = functions_->str == nullptr ? nullptr : functions_->str(plan_);
    return text == nullptr ? functions_->name_text : text;
  }

 protected:
  FunctionsPtr<Family> functions_;
  typename Family::Spec spec_;
  Device device_;
  OpenDevicePtr open_;  // of a plug-in's device, which stays there with the plan
  PlanLimits limits_;
  bool validate_;
  void* plan_ = nullptr;
};

// `Plan` derives from OutsidePlan.
template <class Plan, class Family = typename Plan::Family>
class OutsideBackend final : public BackendOf<Family> {
 public:
  using Spec = typename Family::Spec;
  using Table = TableOf<Family>;
  explicit OutsideBackend(const Table& given) : functions_(std::make_shared<Functions<Table>>(given)) {}
  std::string_view name() const override { return functions_->name_text; }
  std::string_view description() const override { return functions_->description_text; }

  std::vector<Reason> unsupported(const Spec& spec, const DeviceInfo& device) const override {
    std::vector<Reason> reasons = unknown_fields(spec);
    if constexpr (std::is_same_v<Spec, AttentionSpec>) std::ranges::move(refuse_expressions(spec), std::back_inserter(reasons));
    const size_t known = functions_->device_size == 0 ? kFirstSize<imbrex_device_properties> : functions_->device_size;
    if (device.device.type == DeviceType::plugin && known <= offsetof(imbrex_device_properties, platform_number))
      reasons.push_back({"device.type", "cpu or cuda", device.device.str()});
    if (!reasons.empty()) return reasons;
    const auto fields = fields_of(spec);
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

  std::unique_ptr<typename Family::Plan> plan(const Spec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    begin_plan(*this, spec, device, options);
    return std::make_unique<Plan>(functions_, spec, device, options);
  }

  void unregister() const {
    const std::unique_lock lock(functions_->mutex);
    const int plans = functions_->num_plans;
    check(plans == 0, "registry.in_use", "expected all plans of {} to be freed before it is unregistered, {} are left", name(), plans);
    unregister_backend<Family>(name());
    functions_->unregistered = true;
  }

 private:
  // Fields that came after the backend was compiled, and are not at their defaults.
  std::vector<Reason> unknown_fields(const Spec& spec) const {
    using Fields = decltype(fields_of(spec));
    const size_t known = functions_->spec_size == 0 ? kFirstSize<Fields> : functions_->spec_size;
    const Spec usual;
    const Fields places{};
    const auto* const begin = reinterpret_cast<const char*>(&places);
    std::vector<Reason> reasons;
    for_each_row<Spec>([&](const auto& row) {
      const bool later = reinterpret_cast<const char*>(&row.named(places)) >= begin + known;
      if (later && row.of(spec) != row.of(usual))
        reasons.push_back({"backend.spec_field", "fields of a spec that the backend knows", std::string(row.field.name)});
    });
    return reasons;
  }

  FunctionsPtr<Family> functions_;
};

// `has_calls`: the functions of a layer's calls are there, which the table of each family has under names of its own.
template <class Plan>
void register_outside(const TableOf<typename Plan::Family>& b, bool has_calls) {
  const bool complete = b.name != nullptr && b.name[0] != 0 && b.description != nullptr && b.unsupported != nullptr && b.plan != nullptr &&
                        b.plan_free != nullptr && b.update != nullptr && has_calls;
  check(complete, "api.backend", "expected a name, a description and every function but str and error, {}",
        b.name == nullptr || b.name[0] == 0 ? "there is no name" : "one is NULL");
  register_backend<typename Plan::Family>(std::make_shared<OutsideBackend<Plan>>(b));
}

template <class Plan>
void unregister_outside(const char* name) {
  using Family = typename Plan::Family;
  const std::string_view wanted = &deref(name, "name");
  if (const auto* outside = dynamic_cast<const OutsideBackend<Plan>*>(find_backend<Family>(wanted))) return outside->unregister();
  unregister_backend<Family>(wanted);  // one of C++, or none
}

}  // namespace imbrex::api
