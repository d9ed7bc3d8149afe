// Reads and writes files of the kernel cache: binary, log, then a seal with both lengths and a hash over all of it.
#include "gpu/kernel_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "core/check.h"
#include "core/env.h"
#include "core/log.h"
#include "gpu/hash.h"

namespace imbrex::gpu {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'i', 'm', 'b', 'r', 'e', 'x', 'k', '1'};

struct Seal {
  char magic[8];
  uint64_t binary_bytes, log_bytes, hash_high, hash_low;
};

Seal seal_of(const std::string& name, std::string_view binary, std::string_view log) {
  Hash128 hash;
  hash.add(name).add(binary).add(log);  // the name too: a file that was renamed is not what it claims to be
  Seal seal{{}, binary.size(), log.size(), hash.high(), hash.low()};
  std::memcpy(seal.magic, kMagic, sizeof kMagic);
  return seal;
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Why the contents of a file or folder may be somebody else's; empty when only this process's user and root can write it.
std::string distrust(const struct stat& status) {
  if (status.st_uid != geteuid() && status.st_uid != 0)
    return fmt::format("it belongs to user {}, expected {} (this process's) or root", status.st_uid, geteuid());
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return fmt::format("others may write to it, its mode is {:o}; chmod go-w takes that away", status.st_mode & 07777);
  return {};
}

// Opens a folder of the cache if it can be trusted: its files run on the GPU with access to this process's memory, so a folder that others
// can write to is not used, and the reason is logged once for each folder. Files are opened relative to the descriptor, so that nobody can
// replace the folder after the check.
Descriptor open_trusted(const fs::path& folder, std::string* why = nullptr) {
  Descriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct stat status {};
  if (!opened || fstat(opened.get(), &status) != 0) return Descriptor(-1);
  const std::string reason = distrust(status);
  if (reason.empty()) return opened;
  if (why != nullptr) *why = reason;
  static std::mutex mutex;
  static auto* const told = new std::set<std::string>;  // never destroyed: plans may be made while static objects go down
  const std::lock_guard lock(mutex);
  if (why == nullptr && told->insert(folder.string()).second)
    log_warning("the folder of compiled GPU kernels {} is not used: {}", folder.string(), reason);
  return Descriptor(-1);
}

std::optional<std::string> read_whole(const Descriptor& file, size_t size) {
  std::string bytes(size, '\0');
  for (size_t done = 0; done < size;) {
    const ssize_t got = read(file.get(), bytes.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    done += size_t(got);
  }
  return bytes;
}

bool write_whole(const Descriptor& file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t done = write(file.get(), bytes.data(), bytes.size());
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    bytes.remove_prefix(size_t(done));
  }
  return true;
}

}  // namespace

std::string why_not_trusted(const fs::path& folder) {
  std::string why;
  open_trusted(folder, &why);
  return why;
}

fs::path kernel_cache_folder() {
  if (const auto folder = env::get(env::kCudaCache)) return *folder;
  if (const auto folder = env::get(env::kCacheHome)) return fs::path(*folder) / "imbrex";
  if (const auto home = env::get(env::kHome)) return fs::path(*home) / ".cache" / "imbrex";
  return {};
}

fs::path cached_file(const fs::path& folder, const std::string& name) { return folder / (name + ".cubin"); }

std::optional<CompiledKernel> load_cached(const fs::path& folder, const std::string& name) {
  if (folder.empty()) return std::nullopt;
  const Descriptor in = open_trusted(folder);
  if (!in) return std::nullopt;
  // O_NONBLOCK: opening a pipe would wait for a writer.
  const Descriptor file(openat(in.get(), cached_file({}, name).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode) || !distrust(status).empty()) return std::nullopt;
  if (status.st_size < off_t(sizeof(Seal))) return std::nullopt;
  const std::optional<std::string> whole = read_whole(file, size_t(status.st_size));
  if (!whole) return std::nullopt;
  const std::string& bytes = *whole;
  Seal seal;
  std::memcpy(&seal, bytes.data() + bytes.size() - sizeof seal, sizeof seal);
  const uint64_t content = bytes.size() - sizeof seal;
  if (seal.binary_bytes > content || seal.log_bytes != content - seal.binary_bytes) return std::nullopt;
  CompiledKernel kernel{.binary = bytes.substr(0, seal.binary_bytes), .log = bytes.substr(seal.binary_bytes, seal.log_bytes)};
  const Seal expected = seal_of(name, kernel.binary, kernel.log);
  if (std::memcmp(&seal, &expected, sizeof seal) != 0) return std::nullopt;
  return kernel;
}

bool store_cached(const fs::path& folder, const std::string& name, const CompiledKernel& kernel) {
  if (folder.empty()) return false;
  std::error_code ignored;
  fs::create_directories(folder.parent_path(), ignored);
  mkdir(folder.c_str(), S_IRWXU);  // where it is missing
  const Descriptor in = open_trusted(folder);
  if (!in) return false;
  uint64_t random = 0;
  if (getentropy(&random, sizeof random) != 0) return false;
  const std::string aside = fmt::format("{}.{:016x}.tmp", name, random);
  {
    const Descriptor file(openat(in.get(), aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
    if (!file) return false;
    const Seal seal = seal_of(name, kernel.binary, kernel.log);
    const std::string_view sealed(reinterpret_cast<const char*>(&seal), sizeof seal);
    // Whoever gives groups write access by default must not lose the file by it: it would not be trusted.
    const bool complete =
        fchmod(file.get(), 0644) == 0 && write_whole(file, kernel.binary) && write_whole(file, kernel.log) && write_whole(file, sealed);
    if (complete && renameat(in.get(), aside.c_str(), in.get(), cached_file({}, name).c_str()) == 0) return true;
  }
  unlinkat(in.get(), aside.c_str(), 0);
  return false;
}

std::shared_ptr<const CompiledKernel> compiled_once(const std::string& name, const fs::path& folder, const std::string& what,
                                                    const std::function<CompiledKernel()>& compile) {
  struct Entry {
    std::mutex mutex;
    std::shared_ptr<const CompiledKernel> kernel;
  };
  struct Entries {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Entry>> by_name;
  };
  static auto* const entries = new Entries;  // never destroyed: plans may be made while static objects go down

  std::shared_ptr<Entry> entry;
  {
    const std::lock_guard lock(entries->mutex);
    auto& slot = entries->by_name[name];
    if (!slot) slot = std::make_shared<Entry>();
    entry = slot;
  }
  const std::lock_guard lock(entry->mutex);
  if (entry->kernel) return entry->kernel;
  std::optional<CompiledKernel> kernel = load_cached(folder, name);
  if (!kernel) {
    kernel = compile();
    store_cached(folder, name, *kernel);
  }
  log_info("kernel: {}, {}", what, kernel->compile_ms > 0 ? fmt::format("compiled in {:.0f} ms", kernel->compile_ms) : "from the cache");
  entry->kernel = std::make_shared<const CompiledKernel>(std::move(*kernel));
  return entry->kernel;
}

}  // namespace imbrex::gpu
