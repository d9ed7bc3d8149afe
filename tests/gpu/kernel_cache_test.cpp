// Files of the kernel cache: whole ones come back as they were, and nothing else comes back.
#include "gpu/kernel_cache.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "gpu/hash.h"
#include "scoped.h"

namespace imbrex::gpu {
namespace {

namespace fs = std::filesystem;
using imbrex::test::ScopedEnv;
using imbrex::test::ScopedFolder;

const CompiledKernel kKernel{.binary = std::string("\x7f"
                                                   "ELF\0 a cubin",
                                                   13),
                             .log = "ptxas info    : Used 3 registers\n",
                             .compile_ms = 12};

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}
void write(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

TEST(Hash, IsFnv1aOf128BitsOverTextAndLength) {
  EXPECT_EQ(Hash128().hex(), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(Hash128().add("ab").hex(), "71dd3784ec80095c591c62dfc926ce60");
  EXPECT_NE(Hash128().add("ab").add("c").hex(), Hash128().add("a").add("bc").hex());
  EXPECT_NE(Hash128().add("").hex(), Hash128().hex());
}

TEST(KernelCache, AFileComesBackAsItWas) {
  const ScopedFolder folder;
  const fs::path deep = folder.path() / "a" / "b";  // folders are made
  EXPECT_FALSE(load_cached(deep, "name"));
  ASSERT_TRUE(store_cached(deep, "name", kKernel));
  const auto loaded = load_cached(deep, "name");
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->binary, kKernel.binary);
  EXPECT_EQ(loaded->log, kKernel.log);
  EXPECT_EQ(loaded->compile_ms, 0);
  EXPECT_EQ(read(cached_file(deep, "name")).substr(0, kKernel.binary.size()), kKernel.binary);  // other tools can open it
  // Nothing else is left in the folder.
  EXPECT_EQ(std::distance(fs::directory_iterator(deep), fs::directory_iterator()), 1);
}

TEST(KernelCache, CutOffOrChangedFilesAreNotTaken) {
  const ScopedFolder folder;
  ASSERT_TRUE(store_cached(folder.path(), "name", kKernel));
  const fs::path file = cached_file(folder.path(), "name");
  const std::string whole = read(file);
  for (size_t size = 0; size < whole.size(); ++size) {
    write(file, whole.substr(0, size));
    EXPECT_FALSE(load_cached(folder.path(), "name")) << size;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string changed = whole;
    changed[at] = char(changed[at] ^ 0x10);
    write(file, changed);
    EXPECT_FALSE(load_cached(folder.path(), "name")) << at;
  }
  write(file, whole + "x");
  EXPECT_FALSE(load_cached(folder.path(), "name"));
  write(file, whole);
  EXPECT_TRUE(load_cached(folder.path(), "name"));
  fs::copy_file(file, cached_file(folder.path(), "other"));
  EXPECT_FALSE(load_cached(folder.path(), "other")) << "the file of another kernel";
  fs::remove(file);
  fs::create_directory(file);
  EXPECT_FALSE(load_cached(folder.path(), "name")) << "a folder";
  EXPECT_FALSE(store_cached(folder.path(), "name", kKernel));
}

TEST(KernelCache, AFolderThatCannotBeWrittenCostsNothingElse) {
  const ScopedFolder folder;
  write(folder.path() / "file", "");
  EXPECT_FALSE(store_cached(folder.path() / "file", "name", kKernel));  // not a folder, even for root
  EXPECT_FALSE(load_cached(folder.path() / "file", "name"));
  EXPECT_FALSE(store_cached({}, "name", kKernel));
  EXPECT_FALSE(load_cached({}, "name"));
  EXPECT_FALSE(store_cached("/proc/self", "name", kKernel));  // a folder in which nobody may write
}

TEST(KernelCache, AFolderIsMadeForItsUserAlone) {
  const ScopedFolder folder;
  ASSERT_TRUE(store_cached(folder.path() / "deep" / "cache", "name", kKernel));
  EXPECT_EQ(fs::status(folder.path() / "deep" / "cache").permissions(), fs::perms::owner_all);
}

TEST(KernelCache, AFolderThatOthersMayWriteIsNotUsedAndNamedOnce) {
  const ScopedEnv usual("IMBREX_LOG", nullptr);
  for (const fs::perms writers : {fs::perms::group_write, fs::perms::others_write}) {
    const ScopedFolder folder(std::to_string(int(writers)));
    ASSERT_TRUE(store_cached(folder.path(), "name", kKernel));
    fs::permissions(folder.path(), writers, fs::perm_options::add);
    testing::internal::CaptureStderr();
    EXPECT_FALSE(load_cached(folder.path(), "name"));
    EXPECT_FALSE(store_cached(folder.path(), "other", kKernel));
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_NE(said.find(folder.path().string() + " is not used: others may write to it"), std::string::npos) << said;
    EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
    EXPECT_NE(why_not_trusted(folder.path()), "");
    EXPECT_FALSE(fs::exists(cached_file(folder.path(), "other")));
    fs::permissions(folder.path(), fs::perms::owner_all);
    EXPECT_TRUE(load_cached(folder.path(), "name")) << "as soon as they may not";
    EXPECT_EQ(why_not_trusted(folder.path()), "");
  }
}

TEST(KernelCache, AFolderOfSomebodyElseIsNotUsed) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give folders away";
  const ScopedEnv quiet("IMBREX_LOG", "off");
  const ScopedFolder folder;
  ASSERT_TRUE(store_cached(folder.path(), "name", kKernel));
  ASSERT_EQ(chown(folder.path().c_str(), 12345, gid_t(-1)), 0);
  EXPECT_FALSE(load_cached(folder.path(), "name"));
  EXPECT_NE(why_not_trusted(folder.path()).find("belongs to user 12345, expected 0"), std::string::npos) << why_not_trusted(folder.path());
  EXPECT_EQ(chown(folder.path().c_str(), 0, gid_t(-1)), 0);
  ASSERT_TRUE(load_cached(folder.path(), "name"));
  EXPECT_EQ(chown(cached_file(folder.path(), "name").c_str(), 12345, gid_t(-1)), 0);
  EXPECT_FALSE(load_cached(folder.path(), "name")) << "a file of somebody else";
}

TEST(KernelCache, FilesThatOthersMayWriteLinksAndPipesAreNotTaken) {
  const ScopedFolder folder, elsewhere("elsewhere");
  ASSERT_TRUE(store_cached(folder.path(), "name", kKernel));
  const fs::path file = cached_file(folder.path(), "name"), target = elsewhere.path() / "name.cubin";
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  EXPECT_FALSE(load_cached(folder.path(), "name"));
  ASSERT_TRUE(store_cached(folder.path(), "name", kKernel)) << "it is replaced";
  EXPECT_TRUE(load_cached(folder.path(), "name"));
  fs::rename(file, target);
  fs::create_symlink(target, file);
  EXPECT_FALSE(load_cached(folder.path(), "name"));
  write(target, "somebody's");
  ASSERT_TRUE(store_cached(folder.path(), "name", kKernel));
  EXPECT_EQ(read(target), "somebody's") << "the link is replaced, not what it leads to";
  EXPECT_TRUE(load_cached(folder.path(), "name"));
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  EXPECT_FALSE(load_cached(folder.path(), "name")) << "and nobody waits for a writer";
}

TEST(KernelCache, ReadersSeeWholeFilesWhileOthersWrite) {
  const ScopedFolder folder;
  const CompiledKernel large{.binary = std::string(200000, 'c'), .log = "l"};
  ASSERT_TRUE(store_cached(folder.path(), "name", large));
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop) store_cached(folder.path(), "name", large);
  });
  for (int i = 0; i < 50; ++i) EXPECT_TRUE(load_cached(folder.path(), "name"));
  stop = true;
  writer.join();
}

TEST(KernelCache, TheFolderIsNamedByTheEnvironment) {
  const ScopedEnv none("IMBREX_CUDA_CACHE", nullptr), no_cache("XDG_CACHE_HOME", nullptr), no_home("HOME", nullptr);
  EXPECT_EQ(kernel_cache_folder(), "");
  const ScopedEnv home("HOME", "/h");
  EXPECT_EQ(kernel_cache_folder(), "/h/.cache/imbrex");
  const ScopedEnv cache("XDG_CACHE_HOME", "/x");
  EXPECT_EQ(kernel_cache_folder(), "/x/imbrex");
  const ScopedEnv own("IMBREX_CUDA_CACHE", "/own");
  EXPECT_EQ(kernel_cache_folder(), "/own");
}

}  // namespace
}  // namespace imbrex::gpu
