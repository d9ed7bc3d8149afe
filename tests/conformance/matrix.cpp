// See matrix.h.
#include "matrix.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "attention/kv_codec.h"
#include "attention/reference.h"
#include "shards.h"

namespace imbrex::test {
namespace {

std::map<std::string, Totals>& mutable_totals() {
  static std::map<std::string, Totals> totals;
  return totals;
}

// The kernels a backend uses on a device, as its plans print them; empty when it runs nothing of the table there.
std::string kernels_of(const BackendOf<AttentionFamily>& backend, const DeviceInfo& device, KvFormat format) {
  const Target target{.backend = &backend, .device = device, .kv_format = format};
  for (const Case& c : cases()) {
    if (!runs(c, target)) continue;
    if (target.on_gpu()) return target.name();  // every GPU has kernels of its own
    RunOptions options;
    options_for(c, target, options);
    AttentionSpec spec = c.spec;
    spec.kv_format = format;
    spec.block_size = options.block_size;
    const std::string text = backend.plan(spec, device, {.limits = {1, 1, 1}, .threads = {}})->str();
    return text.substr(0, text.find(':'));
  }
  return {};
}

// Whether a target may leave a case out: for some of them a part of the cases is enough.
bool is_left_out(const Case& c, const Target& target) {
  // Every case is computed by the reference anyway: it is what the others are compared with. Fp8 queries no other one runs on a CPU.
  if (target.backend == &reference_backend()) return c.seed % 8 != 0 && c.spec.q_dtype != DType::fp8_e4m3;
  // Rows in two places are put together, and then are those of a latent.
  if (target.kv_format == KvFormat::latent_rope && c.spec.kv_format == KvFormat::latent && c.seed % 4 != 0) return true;
  // Beside a real AMX unit the emulated one is the same text, and slower.
  static const bool real_unit = probe_cpu().isa == CpuIsa::amx;
  return real_unit && target.device.isa == CpuIsa::amx_emulated && c.seed % 16 != 0;
}

}  // namespace

std::string Target::name() const {
  std::string name = target_name(*backend, device);
  if (kv_format != KvFormat::strided) name += std::string("__") + to_string(kv_format);
  return name;
}

const std::vector<Target>& targets() {
  static const std::vector<Target> all = [] {
    std::vector<Target> result;
    for (const KvFormat format : kv_formats())
      for_each_target<AttentionFamily>(
          [&](const BackendOf<AttentionFamily>& backend, const DeviceInfo& device) { return kernels_of(backend, device, format); },
          [&](const BackendOf<AttentionFamily>* backend, const DeviceInfo& device) {
            result.push_back({.backend = backend, .device = device, .kv_format = format});
          });
    return result;
  }();
  return all;
}

bool options_for(const Case& c, const Target& target, RunOptions& options) {
  options = default_options(c);
  options.kv_format = target.kv_format;
  options.block_size = block_size_in(target.kv_format, c.spec.block_size);
  return holds(target.kv_format, c.spec) && fits(c.spec, target.kv_format, options.block_size);
}

bool runs(const Case& c, const Target& target) {
  RunOptions options;
  if (!options_for(c, target, options)) return false;
  AttentionSpec spec = c.spec;
  spec.kv_format = target.kv_format;
  spec.block_size = options.block_size;
  return target.backend->unsupported(spec, target.device).empty();
}

std::vector<Combination> combinations() {
  std::vector<Combination> all;
  mutable_totals().clear();
  for (const Case& c : cases())
    for (const Target& target : targets()) {
      Totals& totals = mutable_totals()[target.name()];
      RunOptions options;
      if (!options_for(c, target, options)) {
        ++totals.refused["(not a case of this KV format)"];
        continue;
      }
      AttentionSpec spec = c.spec;
      spec.kv_format = target.kv_format;
      spec.block_size = options.block_size;
      const auto reasons = target.backend->unsupported(spec, target.device);
      if (!reasons.empty()) {
        ++totals.refused[reasons.front().code];
        continue;
      }
      if (is_left_out(c, target)) {
        ++totals.left_out;
        continue;
      }
      ++totals.run;
      all.push_back({.c = &c, .target = &target});
    }
  return all;
}

const std::map<std::string, Totals>& totals() { return mutable_totals(); }

const CaseInputs& inputs_of(const Case& c) {
  return kept<CaseInputs, kMostShards>(c, [](const Case& of) { return make_inputs(of); });
}

const Expected& expected_of(const Case& c) {
  return kept<Expected, kMostShards>(c, [](const Case& of) { return expect(inputs_of(of)); });
}

void expect_same(const RunResult& a, const RunResult& b, const std::string& what) {
  EXPECT_TRUE(bit_identical(a.out, b.out)) << what << " changes out";
  EXPECT_TRUE(bit_identical(a.lse, b.lse)) << what << " changes lse";
}

}  // namespace imbrex::test
