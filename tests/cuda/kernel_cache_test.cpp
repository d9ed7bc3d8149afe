// Files of the kernel cache: whole ones come back as they were, and nothing else comes back.
#include "cuda/kernel_cache.h"

#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <sstream>
#include <thread>

#include "cuda/hash.h"
#include "cuda/scoped.h"

namespace imbrex::cuda {
namespace {

namespace fs = std::filesystem;
using test::ScopedEnv;
using test::ScopedFolder;

const CompiledKernel kKernel{.cubin = std::string("\x7f"
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
  EXPECT_EQ(loaded->cubin, kKernel.cubin);
  EXPECT_EQ(loaded->log, kKernel.log);
  EXPECT_EQ(loaded->compile_ms, 0);
  EXPECT_EQ(read(cached_file(deep, "name")).substr(0, kKernel.cubin.size()), kKernel.cubin);  // other tools can open it
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

TEST(KernelCache, ReadersSeeWholeFilesWhileOthersWrite) {
  const ScopedFolder folder;
  const CompiledKernel large{.cubin = std::string(200000, 'c'), .log = "l"};
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
}  // namespace imbrex::cuda
