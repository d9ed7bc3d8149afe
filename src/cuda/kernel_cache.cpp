// Reads and writes files of the kernel cache: cubin, log, then a seal with both lengths and a hash over all of it.
#include "cuda/kernel_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>

#include "core/env.h"
#include "cuda/hash.h"

namespace imbrex::cuda {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'i', 'm', 'b', 'r', 'e', 'x', 'k', '1'};

struct Seal {
  char magic[8];
  uint64_t cubin_bytes, log_bytes, hash_high, hash_low;
};

Seal seal_of(const std::string& name, std::string_view cubin, std::string_view log) {
  Hash128 hash;
  hash.add(name).add(cubin).add(log);  // the name too: a file that was renamed is not what it claims to be
  Seal seal{{}, cubin.size(), log.size(), hash.high(), hash.low()};
  std::memcpy(seal.magic, kMagic, sizeof kMagic);
  return seal;
}

}  // namespace

fs::path kernel_cache_folder() {
  if (const auto folder = env::get(env::kCudaCache)) return *folder;
  if (const auto folder = env::get(env::kCacheHome)) return fs::path(*folder) / "imbrex";
  if (const auto home = env::get(env::kHome)) return fs::path(*home) / ".cache" / "imbrex";
  return {};
}

fs::path cached_file(const fs::path& folder, const std::string& name) { return folder / (name + ".cubin"); }

std::optional<CompiledKernel> load_cached(const fs::path& folder, const std::string& name) {
  if (folder.empty()) return std::nullopt;
  const fs::path path = cached_file(folder, name);
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return std::nullopt;  // a folder opens like a file, and is endless
  const uintmax_t size = fs::file_size(path, error);
  if (error || size < sizeof(Seal)) return std::nullopt;
  std::ifstream file(path, std::ios::binary);
  std::string bytes(size, '\0');
  if (!file.read(bytes.data(), std::streamsize(size))) return std::nullopt;
  Seal seal;
  std::memcpy(&seal, bytes.data() + bytes.size() - sizeof seal, sizeof seal);
  const uint64_t content = bytes.size() - sizeof seal;
  if (seal.cubin_bytes > content || seal.log_bytes != content - seal.cubin_bytes) return std::nullopt;
  CompiledKernel kernel{.cubin = bytes.substr(0, seal.cubin_bytes), .log = bytes.substr(seal.cubin_bytes, seal.log_bytes)};
  const Seal expected = seal_of(name, kernel.cubin, kernel.log);
  if (std::memcmp(&seal, &expected, sizeof seal) != 0) return std::nullopt;
  return kernel;
}

bool store_cached(const fs::path& folder, const std::string& name, const CompiledKernel& kernel) {
  static std::atomic<int> count{0};
  if (folder.empty()) return false;
  std::error_code error;
  fs::create_directories(folder, error);
  const fs::path aside = folder / fmt::format("{}.{}.{}.tmp", name, getpid(), count++);
  const Seal seal = seal_of(name, kernel.cubin, kernel.log);
  std::ofstream file(aside, std::ios::binary);
  file.write(kernel.cubin.data(), std::streamsize(kernel.cubin.size()));
  file.write(kernel.log.data(), std::streamsize(kernel.log.size()));
  file.write(reinterpret_cast<const char*>(&seal), sizeof seal);
  file.close();
  if (file) {
    fs::rename(aside, cached_file(folder, name), error);
    if (!error) return true;
  }
  fs::remove(aside, error);
  return false;
}

}  // namespace imbrex::cuda
