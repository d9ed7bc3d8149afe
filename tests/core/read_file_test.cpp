// read_file(): whole regular files, and a code and a reason for everything else that a path can be.
#include "core/read_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "forked.h"
#include "imbrex/error.h"
#include "scoped.h"

namespace imbrex {
namespace {

std::string outcome(const std::string& path, int64_t max_bytes = 100) {
  try {
    return "read: " + read_file(path, max_bytes, {"x.open", "x.read", "x.size"});
  } catch (const Error& error) {
    return error.code() + ": " + error.what();
  }
}

TEST(ReadFile, GivesTheBytesOrSaysWhyNot) {
  const test::ScopedFolder folder;
  const std::string file = folder.path() / "file", pipe = folder.path() / "pipe", link = folder.path() / "link";
  std::ofstream(file) << std::string("a\0b\r\n", 5);
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  ASSERT_EQ(symlink(file.c_str(), link.c_str()), 0);
  const std::string content("read: a\0b\r\n", 11);
  EXPECT_EQ(outcome(file), content);
  EXPECT_EQ(outcome(file, 5), content);
  EXPECT_EQ(outcome(link), content);
  EXPECT_EQ(outcome(file, 4), "x.size: expected at most 4 bytes, " + file + " has 5");
  EXPECT_EQ(outcome(folder.path()), "x.open: expected a file, " + folder.path().string() + " is a folder");
  EXPECT_EQ(outcome(pipe), "x.open: expected a file, " + pipe + " is a pipe");
  EXPECT_EQ(outcome("/dev/null"), "x.open: expected a file, /dev/null is a device or a socket");
  EXPECT_EQ(outcome(folder.path() / "none"), "x.open: cannot open " + (folder.path() / "none").string() + ": No such file or directory");
  EXPECT_EQ(outcome(""), "x.open: cannot open : No such file or directory");
  EXPECT_EQ(outcome(file + "/x"), "x.open: cannot open " + file + "/x: Not a directory");
}

TEST(ReadFile, AFileThatMayNotBeReadSaysSo) {
  const test::ScopedFolder folder;
  const std::string file = folder.path() / "file";
  std::ofstream(file) << "x";
  ASSERT_EQ(chmod(file.c_str(), 0), 0);
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
  EXPECT_EQ(test::in_child([&] {
              if (geteuid() == 0 && setuid(65534) != 0) return false;  // root may read everything
              return outcome(file) == "x.open: cannot open " + file + ": Permission denied";
            }),
            0);
}

}  // namespace
}  // namespace imbrex
