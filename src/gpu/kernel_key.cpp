// See kernel_key.h.
#include "gpu/kernel_key.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace imbrex::gpu {
namespace {

bool is_constant_name(std::string_view name) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  return name.size() >= 2 && name.size() <= 64 && name[0] == 'k' && name[1] >= 'A' && name[1] <= 'Z' &&
         std::all_of(name.begin(), name.end(), [&](char c) { return letter(c) || digit(c); });
}

std::string value_text(const Constant& constant) {
  if (const bool* value = std::get_if<bool>(&constant.value)) return *value ? "true" : "false";
  if (const int* value = std::get_if<int>(&constant.value)) return fmt::format("{}", *value);
  const float value = std::get<float>(constant.value);
  check(std::isfinite(value), "cuda.config.value", "expected a finite {}, got {}", constant.name, value);
  return fmt::format("{:a}f", value);  // hexadecimal: every bit of it
}

const char* type_name(const Constant& constant) {
  constexpr const char* kNames[] = {"bool", "int", "float"};
  return kNames[constant.value.index()];
}

}  // namespace

std::string KernelKey::constants() const {
  std::string text;
  for (const Constant& c : config)
    text += std::visit([&](auto value) { return fmt::format("{}{} {}", text.empty() ? "" : ", ", c.name, value); }, c.value);
  return text;
}

std::string KernelKey::str() const { return fmt::format("{} for {}{}", path, arch, config.empty() ? "" : " (" + constants() + ")"); }

std::string config_text(std::string_view path, std::span<const Constant> config) {
  std::string text = fmt::format("#pragma once\n// {}\n", path);
  std::vector<std::string_view> names;
  for (const Constant& constant : config) {
    check(is_constant_name(constant.name), "cuda.config.name",
          "expected the name of a constant, k and a capital letter and then letters and digits, got \"{}\"", constant.name);
    check(std::find(names.begin(), names.end(), constant.name) == names.end(), "cuda.config.twice", "{} is there twice for {}",
          constant.name, path);
    names.push_back(constant.name);
    text += fmt::format("constexpr {} {} = {};\n", type_name(constant), constant.name, value_text(constant));
  }
  return text;
}

}  // namespace imbrex::gpu
