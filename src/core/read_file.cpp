// See read_file.h. It uses the system's calls, because C++ streams open folders, wait for the writer of a pipe, and do not say why they
// fail.
#include "core/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "core/check.h"

namespace imbrex {

std::string read_file(const std::string& path, int64_t max_bytes, const ReadFileCodes& codes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // not blocking: a pipe may have no writer
  check(fd >= 0, codes.open, "cannot open {:.500}: {}", path, std::strerror(errno));
  const auto closes = [](const int* descriptor) { close(*descriptor); };
  const std::unique_ptr<const int, decltype(closes)> closed_at_the_end(&fd, closes);
  struct stat status {};
  check(fstat(fd, &status) == 0, codes.read, "cannot read {:.500}: {}", path, std::strerror(errno));
  check(S_ISREG(status.st_mode), codes.open, "expected a file, {:.500} is {}", path,
        S_ISDIR(status.st_mode)    ? "a folder"
        : S_ISFIFO(status.st_mode) ? "a pipe"
                                   : "a device or a socket");
  check(int64_t(status.st_size) <= max_bytes, codes.size, "expected at most {} bytes, {:.500} has {}", max_bytes, path, status.st_size);
  std::string bytes(size_t(status.st_size), '\0');
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t got = read(fd, bytes.data() + done, bytes.size() - done);
    if (got < 0 && errno == EINTR) continue;
    check(got > 0, codes.read, "expected {} bytes in {:.500}, got {}: {}", bytes.size(), path, done,
          got < 0 ? std::strerror(errno) : "it became shorter");
    done += size_t(got);
  }
  return bytes;
}

}  // namespace imbrex
