#pragma once
// A backend that runs nothing: it refuses what it is told to. Used by the tests of the registry and of selection.
#include <functional>
#include <string>

#include "imbrex/backend.h"

namespace imbrex {

struct FakeBackend : Backend {
  using Refuse = std::function<std::vector<Reason>(const AttentionSpec&, const DeviceInfo&)>;
  FakeBackend(std::string name, Refuse refuse) : name_(std::move(name)), refuse_(std::move(refuse)) {}
  std::string_view name() const override { return name_; }
  std::string_view description() const override { return "a fake"; }
  std::vector<Reason> unsupported(const AttentionSpec& spec, const DeviceInfo& device) const override { return refuse_(spec, device); }
  std::unique_ptr<Plan> plan(const AttentionSpec&, const DeviceInfo&, const PlanOptions&) const override { return nullptr; }
  std::string name_;
  Refuse refuse_;
};

}  // namespace imbrex
