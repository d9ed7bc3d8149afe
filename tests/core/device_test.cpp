// Device probing and descriptions, and the environment variables they read.
#include "imbrex/device.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>

#include "core/cpu_features.h"
#include "core/env.h"
#include "core/gpus.h"
#include "expect_error.h"

namespace imbrex {
namespace {

using test::error_code;

// Sets (or with nullptr unsets) a variable for a scope.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    set(value);
  }
  ~ScopedEnv() { set(old_ ? old_->c_str() : nullptr); }

 private:
  void set(const char* value) {
    if (value)
      setenv(name_, value, 1);
    else
      unsetenv(name_);
  }
  const char* name_;
  std::optional<std::string> old_;
};

TEST(Device, TheProbeDescribesThisMachine) {
  const ScopedEnv isa("IMBREX_CPU_ISA", nullptr), threads("IMBREX_NUM_THREADS", nullptr);
  const DeviceInfo info = probe_cpu();
  EXPECT_EQ(info.device, Device{});
  EXPECT_TRUE(info.present);
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.num_workers, 1);
  EXPECT_GT(info.memory_bytes, 0);
  EXPECT_GE(info.l2_bytes, 0);
  EXPECT_NE(info.isa, CpuIsa::amx_emulated);  // never by itself
  EXPECT_EQ(info.isa_note.empty(), info.isa == CpuIsa::amx) << info.isa_note;
  EXPECT_NE(info.str().find(to_string(info.isa)), std::string::npos);
#if defined(__x86_64__)
  // The compiler's own view of the processor agrees.
  EXPECT_EQ(info.isa >= CpuIsa::avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(info.isa >= CpuIsa::avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
#else
  EXPECT_EQ(info.isa, CpuIsa::generic);
  EXPECT_EQ(info.isa_note.rfind("aarch64 with neon", 0), 0u) << info.isa_note;
  // No processor of this kind is without a name: it is one that is known, or the text has its numbers.
  EXPECT_NE(info.name, "aarch64 CPU");
#endif
}

TEST(Device, TheInstructionSetCanBeLowered) {
  CpuIsa best;
  {
    const ScopedEnv isa("IMBREX_CPU_ISA", nullptr);
    best = probe_cpu().isa;
  }
  for (CpuIsa wanted : {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx}) {
    const ScopedEnv isa("IMBREX_CPU_ISA", to_string(wanted));
    if (wanted <= best) {
      EXPECT_EQ(probe_cpu().isa, wanted);
      EXPECT_EQ(probe_cpu().isa_note.empty(), best == CpuIsa::amx && wanted == best);
    } else {
      EXPECT_EQ(error_code([] { probe_cpu(); }), "device.cpu_isa.absent") << to_string(wanted);
      try {
        probe_cpu();
      } catch (const Error& error) {
        const std::string text = error.what();
        EXPECT_TRUE(text.find(kX86 ? "not in cpuid" : "not an instruction set of aarch64") != std::string::npos ||
                    (kX86 && text.find("system") != std::string::npos))
            << text;
      }
    }
  }
  for (const char* bad : {"avx1024", "AVX2", "amx ", "0"}) {
    const ScopedEnv isa("IMBREX_CPU_ISA", bad);
    EXPECT_EQ(error_code([] { probe_cpu(); }), "device.cpu_isa.unknown") << bad;
  }
  const ScopedEnv empty("IMBREX_CPU_ISA", "");
  EXPECT_EQ(probe_cpu().isa, best);
}

TEST(Device, EmulatedTilesNeedOnlyAvx512WithVbmiAndBf16) {
  const ScopedEnv isa("IMBREX_CPU_ISA", "amx_emulated");
#if defined(__x86_64__)
  const bool able = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
#else
  const bool able = false;
#endif
  if (able) {
    EXPECT_EQ(probe_cpu().isa, CpuIsa::amx_emulated);
    EXPECT_NE(probe_cpu().isa_note, "");
  } else {
    EXPECT_EQ(error_code([] { probe_cpu(); }), "device.cpu_isa.absent");
  }
}

TEST(Device, TheNumberOfThreadsCanBeSet) {
  {
    const ScopedEnv threads("IMBREX_NUM_THREADS", "3");
    EXPECT_EQ(probe_cpu().num_workers, 3);
    EXPECT_EQ(describe_device("cpu").num_workers, 3);
  }
  for (const char* bad : {"0", "-1", "two", "2x", "99999999999", "4097", " 2"}) {
    const ScopedEnv threads("IMBREX_NUM_THREADS", bad);
    EXPECT_EQ(error_code([] { probe_cpu(); }), "env.num_threads") << bad;
  }
}

TEST(Device, KnownGpusAreDescribed) {
  for (const auto& [key, sm, multiprocessors] : {std::tuple{"a100", 80, 108},
                                                 {"h100", 90, 132},
                                                 {"h200", 90, 132},
                                                 {"b200", 100, 148},
                                                 {"rtx5090", 120, 170},
                                                 {"l40s", 89, 142},
                                                 {" H200 ", 90, 132}}) {
    const DeviceInfo info = describe_device(key);
    EXPECT_EQ(info.device.type, DeviceType::cuda) << key;
    EXPECT_FALSE(info.present) << key;
    EXPECT_EQ(info.sm, sm) << key;
    EXPECT_EQ(info.num_workers, multiprocessors) << key;
    EXPECT_EQ(info.max_smem_bytes, (sm == 80 ? 163 : sm == 90 || sm == 100 ? 227 : 99) * 1024) << key;
    EXPECT_GE(info.l2_bytes, int64_t(40) << 20) << key;
    EXPECT_GE(info.memory_bytes, int64_t(32) << 30) << key;
    EXPECT_GE(info.peak_flops, 209e12) << key;
    EXPECT_GE(info.peak_bytes_per_s, 0.8e12) << key;
  }
}

TEST(Device, PeaksOfAProbedGpuGoByItsExactName) {
  for (const auto& [name, tflops] : {std::pair{"NVIDIA H200", 989.4}, {"NVIDIA H100 80GB HBM3", 989.4}, {"NVIDIA H200 NVL", 0.}}) {
    DeviceInfo info;
    info.name = name;
    add_peaks(info);
    EXPECT_DOUBLE_EQ(info.peak_flops, tflops * 1e12) << name;
    EXPECT_EQ(info.peak_bytes_per_s > 0, tflops > 0) << name;
  }
}

TEST(Device, CpusAreDescribedByTheirProperties) {
  DeviceInfo info = describe_device("avx512,32 threads");
  EXPECT_EQ(info.device.type, DeviceType::cpu);
  EXPECT_FALSE(info.present);
  EXPECT_EQ(info.isa, CpuIsa::avx512);
  EXPECT_EQ(info.num_workers, 32);
  info = describe_device("64 threads , AMX");
  EXPECT_EQ(info.isa, CpuIsa::amx);
  EXPECT_EQ(info.num_workers, 64);
  EXPECT_EQ(describe_device("generic, 1 thread").num_workers, 1);
  EXPECT_EQ(describe_device("avx2").isa, CpuIsa::avx2);
  EXPECT_TRUE(describe_device("cpu").present);
}

TEST(Device, UnknownDescriptionsAreRefused) {
  for (const char* bad : {"", ",", "h300", "avx512,threads", "avx512,0 threads", "avx512,-4 threads", "avx512,4", "4 threads",
                          "avx512,99999999999 threads", "avx512,avx2,x", "h200,2 threads", "avx512;2 threads"}) {
    EXPECT_EQ(error_code([&] { describe_device(bad); }), "device.unknown") << bad;
  }
  try {
    describe_device("h300");
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("h200"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("h300"), std::string::npos) << error.what();
  }
}

TEST(Env, TheTableIsComplete) {
  std::set<std::string> names;
  for (const env::Variable& variable : env::variables()) {
    EXPECT_TRUE(names.insert(variable.name).second) << variable.name;
    EXPECT_EQ(std::string(variable.name).rfind("IMBREX_", 0), 0u);
    EXPECT_STRNE(variable.meaning, "");
  }
  EXPECT_EQ(names, (std::set<std::string>{"IMBREX_CPU_ISA", "IMBREX_BACKEND", "IMBREX_PLUGINS", "IMBREX_NUM_THREADS", "IMBREX_LOG",
                                          "IMBREX_CUDA_CACHE", "IMBREX_CUDA_DUMP", "IMBREX_CUDA_DRIVER", "IMBREX_CUDA_NVRTC",
                                          "IMBREX_CUDA_CUBLASLT"}));
}

}  // namespace
}  // namespace imbrex
