#pragma once
// Which (case, backend, instruction set, KV format) combinations of attention this machine can run; the conformance tests walk over them.
#include <map>
#include <string>
#include <vector>

#include "conformance/attention/case_runner.h"
#include "conformance/attention/cases.h"
#include "conformance/attention/judge.h"
#include "imbrex/select.h"
#include "targets.h"

namespace imbrex::test {

struct Target {
  const BackendOf<AttentionFamily>* backend = nullptr;
  DeviceInfo device;
  KvFormat kv_format = KvFormat::strided;
  std::string name() const;  // "cpu_avx512__avx2", "cpu_amx__amx__amx_packed", "cuda_sm80__sm_90"
  bool on_gpu() const { return device.device.type == DeviceType::cuda; }
};

struct Combination {
  const Case* c = nullptr;
  const Target* target = nullptr;
  std::string name() const { return c->name + "__" + target->name(); }
};

struct Totals {
  int run = 0, left_out = 0;
  std::map<std::string, int> refused;  // reason code -> cases
};

// The targets of attention: every backend on every device, once for each set of kernels that it may choose, in every KV format.
const std::vector<Target>& targets();
// The options that run a case in a target's format; nothing when the format cannot hold the case.
bool options_for(const Case&, const Target&, RunOptions&);
bool runs(const Case&, const Target&);
// All but what is left out: most cases of the reference, and of an emulated unit beside the real one.
std::vector<Combination> combinations();
const std::map<std::string, Totals>& totals();  // by target; filled by combinations()

// The inputs and the expected results of a case. Those of the last kMostShards cases are kept.
const CaseInputs& inputs_of(const Case&);
const Expected& expected_of(const Case&);

// Expects outputs and log-sum-exps of the same bits.
void expect_same(const RunResult&, const RunResult&, const std::string& what);

}  // namespace imbrex::test
