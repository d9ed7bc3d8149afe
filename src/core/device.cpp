// What the machine can do, asked from it, or from a description of one that is absent.
#include "imbrex/device.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "core/check.h"
#include "core/cores.h"
#include "core/cpu_features.h"
#include "core/env.h"
#include "core/gpus.h"
#include "core/last_level_cache.h"
#include "core/platform_names.h"
#include "core/text.h"
#include "imbrex/device_platform.h"

namespace imbrex {

const char* to_string(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::generic: return "generic";
    case CpuIsa::avx2: return "avx2";
    case CpuIsa::avx512: return "avx512";
    case CpuIsa::avx512_bf16: return "avx512_bf16";
    case CpuIsa::amx_emulated: return "amx_emulated";
    case CpuIsa::amx: return "amx";
  }
  return "unknown";
}

namespace {

constexpr CpuIsa kAllIsas[] = {CpuIsa::generic, CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx_emulated, CpuIsa::amx};

bool parse_isa(std::string_view text, CpuIsa& isa) {
  for (CpuIsa candidate : kAllIsas)
    if (to_string(candidate) == text) return isa = candidate, true;
  return false;
}

struct Gpu {
  const char *key, *name, *driver_name;
  int sm, multiprocessors;
  int64_t l2_mib, memory_gib;
  int smem_kib;
  double tflops, tb_per_s;  // dense bf16 products; memory
};
// NVIDIA's data sheets and the CUDA programming guide's table of compute capabilities; H200: as the driver reports it.
constexpr Gpu kGpus[] = {
    {"a100", "NVIDIA A100", "NVIDIA A100-SXM4-80GB", 80, 108, 40, 80, 163, 312, 2.039},
    {"h100", "NVIDIA H100", "NVIDIA H100 80GB HBM3", 90, 132, 50, 80, 227, 989.4, 3.35},
    {"h200", "NVIDIA H200", "NVIDIA H200", 90, 132, 60, 141, 227, 989.4, 4.8},
    {"b200", "NVIDIA B200", "NVIDIA B200", 100, 148, 126, 180, 227, 2250, 8},
    {"rtx5090", "NVIDIA RTX 5090", "NVIDIA GeForce RTX 5090", 120, 170, 96, 32, 99, 209.5, 1.792},
    {"l40s", "NVIDIA L40S", "NVIDIA L40S", 89, 142, 96, 48, 99, 362, 0.864},
};

[[noreturn]] void fail_unknown(std::string_view text) {
  std::string gpus, isas, plugins;
  for (const auto& platform : platforms()) plugins += fmt::format(", {}:0 (and so on)", platform->name());
  for (const Gpu& gpu : kGpus) gpus += (gpus.empty() ? "" : ", ") + std::string(gpu.key);
  for (CpuIsa isa : kAllIsas) isas += (isas.empty() ? "" : ", ") + std::string(to_string(isa));
  fail("device.unknown",
       "expected cpu, cuda:0 (and so on){}, one of {}, or CPU properties like \"avx512,32 threads\" (with one of {}), got \"{}\"", plugins,
       gpus, isas, text);
}

// "cuda" or "cuda:N"; "toy" or "toy:N" of a platform that has registered.
DeviceInfo present_device(std::string_view text, std::string_view platform) {
  int index = 0;
  if (text != platform) {
    const std::string_view number = text.substr(std::min(text.size(), platform.size() + 1));
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), index);
    if (text[platform.size()] != ':' || error != std::errc() || end != number.data() + number.size() || index < 0) fail_unknown(text);
  }
  std::string why;
  const std::vector<DeviceInfo> there = platform == "cuda" ? probe_cuda(&why) : devices_of(platform, &why);
  check(!there.empty(), "device.absent", "{} is not there: {}", text, why);
  check(size_t(index) < there.size(), "device.absent", "expected a device from {}:0 to {}:{}, got {}", platform, platform, there.size() - 1,
        text);
  return there[size_t(index)];
}

// "32 threads" or "1 thread"
bool parse_threads(std::string_view item, int& threads) {
  const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), threads);
  if (error != std::errc() || threads < 1 || threads > 4096) return false;
  const std::string_view unit = trim(item.substr(size_t(end - item.data())));
  return unit == "threads" || unit == "thread";
}

}  // namespace

bool is_described_device(std::string_view name) {
  CpuIsa isa{};
  return name == "cpu" || name.starts_with("cuda") || parse_isa(name, isa) ||
         std::any_of(std::begin(kGpus), std::end(kGpus), [&](const Gpu& gpu) { return gpu.key == name; });
}

void add_peaks(DeviceInfo& probed) {
  for (const Gpu& gpu : kGpus) {
    if (probed.name != gpu.driver_name) continue;
    probed.peak_flops = gpu.tflops * 1e12;
    probed.peak_bytes_per_s = gpu.tb_per_s * 1e12;
  }
}

DeviceInfo probe_cpu() {
  const CpuFeatures& features = cpu_features();
  DeviceInfo info;
  info.name = features.name;
  for (CpuIsa isa : {CpuIsa::avx2, CpuIsa::avx512, CpuIsa::avx512_bf16, CpuIsa::amx})
    if (features.missing(isa).empty()) info.isa = isa;
  info.isa_note = features.note;
  if (const auto wanted = env::get(env::kCpuIsa)) {
    CpuIsa isa = CpuIsa::generic;
    check(parse_isa(*wanted, isa), "device.cpu_isa.unknown",
          "expected generic, avx2, avx512, avx512_bf16, amx_emulated or amx in {}, got \"{}\"", env::kCpuIsa, *wanted);
    check(features.missing(isa).empty(), "device.cpu_isa.absent", "{} asks for {}, but this CPU cannot: {}", env::kCpuIsa, *wanted,
          features.missing(isa));
    if (isa != info.isa) info.isa_note = fmt::format("{}: set by {}", *wanted, env::kCpuIsa);
    info.isa = isa;
  }
  info.num_workers = default_num_threads();
  info.l2_bytes = std::max(0l, sysconf(_SC_LEVEL2_CACHE_SIZE));
  info.l3_bytes = last_level_cache_bytes();
  if (info.l3_bytes == 0) info.l3_bytes = std::max(0l, sysconf(_SC_LEVEL3_CACHE_SIZE));
  info.memory_bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return info;
}

DeviceInfo describe_device(std::string_view text) {
  const std::string lower = to_lower(trim(text));
  if (lower == "cpu") return probe_cpu();
  if (lower.starts_with("cuda")) return present_device(lower, "cuda");
  if (const std::string_view platform = std::string_view(lower).substr(0, lower.find(':')); is_platform(platform))
    return present_device(lower, platform);
  for (const Gpu& gpu : kGpus)
    if (lower == gpu.key)
      return {.device = {DeviceType::cuda, 0},
              .name = gpu.name,
              .present = false,
              .sm = gpu.sm,
              .num_workers = gpu.multiprocessors,
              .l2_bytes = gpu.l2_mib << 20,
              .memory_bytes = gpu.memory_gib << 30,
              .peak_flops = gpu.tflops * 1e12,
              .peak_bytes_per_s = gpu.tb_per_s * 1e12,
              .max_smem_bytes = gpu.smem_kib << 10,
              .isa_note = {}};
  // Caches and memory of a described CPU are those of a common server part; nothing but sizes of tiles depends on them.
  DeviceInfo info;
  info.name = "described CPU";
  info.present = false;
  info.l2_bytes = int64_t(2) << 20;
  info.l3_bytes = int64_t(64) << 20;
  info.memory_bytes = int64_t(256) << 30;
  bool has_isa = false;
  for (std::string_view rest = lower; !rest.empty();) {
    const size_t comma = rest.find(',');
    const std::string_view item = trim(rest.substr(0, comma));
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
    if (!has_isa && parse_isa(item, info.isa)) {
      has_isa = true;
    } else if (!parse_threads(item, info.num_workers)) {
      fail_unknown(text);
    }
  }
  if (!has_isa) fail_unknown(text);
  return info;
}

std::string DeviceInfo::str() const {
  const char* absent = present ? "" : ", described";
  if (device.type == DeviceType::plugin)
    return fmt::format("{} ({}, {} worker{}, {} MiB{})", name, device.str(), num_workers, num_workers == 1 ? "" : "s", memory_bytes >> 20,
                       absent);
  if (device.type == DeviceType::cuda)
    return fmt::format("{} ({}, sm_{}, {} multiprocessors, {} MiB L2{})", name, device.str(), sm, num_workers, l2_bytes >> 20, absent);
  return fmt::format("{} ({}, {} thread{}{}{}{})", name, to_string(isa), num_workers, num_workers == 1 ? "" : "s", absent,
                     isa_note.empty() ? "" : "; ", isa_note);
}

}  // namespace imbrex
