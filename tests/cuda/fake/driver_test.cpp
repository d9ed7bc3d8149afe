// Opening libraries: what is missing, too old or does not start is an answer with a reason. On the fake driver.
#include "cuda/driver/driver.h"

#include <gtest/gtest.h>

#include <thread>

#include "cuda/driver/cublaslt.h"
#include "cuda/driver/open_library.h"
#include "cuda/fake/fake_driver.h"
#include "expect_error.h"
#include "imbrex/device.h"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::string why(const std::string& library) {
  const auto loaded = load_driver(library);
  EXPECT_EQ(loaded.api, nullptr) << library;
  return loaded.why;
}

TEST(Driver, AMissingLibraryIsNamed) {
  EXPECT_TRUE(contains(why("/nowhere/libcuda.so.1"), "no NVIDIA driver: /nowhere/libcuda.so.1")) << why("/nowhere/libcuda.so.1");
}

TEST(Driver, ALibraryWithoutAFunctionIsTooOld) {
  EXPECT_TRUE(contains(why("libm.so.6"), "libm.so.6 has no cuDriverGetVersion"));
  EXPECT_TRUE(contains(why(IMBREX_PARTIAL_DRIVER), "has no cuInit")) << why(IMBREX_PARTIAL_DRIVER);
}

TEST(Driver, AnOldDriverSaysItsVersion) {
  state().version = 11080;
  const std::string text = why(IMBREX_FAKE_DRIVER);
  state().version = 13000;
  EXPECT_TRUE(contains(text, "12.0 or newer") && contains(text, "is for 11.8")) << text;
}

TEST(Driver, ADriverThatDoesNotStartSaysWhy) {
  state().init_result = kCudaNoDevice;
  const std::string text = why(IMBREX_FAKE_DRIVER);
  state().init_result = 0;
  EXPECT_TRUE(contains(text, "CUDA_ERROR_NO_DEVICE (a fake failure)")) << text;
}

TEST(Driver, ThreadsGetOneTable) {
  const DriverApi* tables[4] = {};
  std::vector<std::thread> threads;
  for (auto& table : tables) threads.emplace_back([&] { table = driver(); });
  for (auto& thread : threads) thread.join();
  for (const auto* table : tables) EXPECT_EQ(table, &need_driver());
  std::string text = "old";
  EXPECT_NE(driver(&text), nullptr);
  EXPECT_EQ(text, "");
}

TEST(Driver, FailuresHaveTheDriversWords) {
  EXPECT_NO_THROW(check_cuda(kCudaSuccess, "nothing"));
  EXPECT_EQ(error_code([] { check_cuda(kCudaOutOfMemory, "allocate"); }), "cuda.memory");
  EXPECT_EQ(error_code([] { check_cuda(kCudaInvalidValue, "x"); }), "cuda.driver");
  try {
    check_cuda(kCudaOutOfMemory, "allocate {} bytes", 42);
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "allocate 42 bytes: CUDA_ERROR_OUT_OF_MEMORY (a fake failure)");
  }
}

TEST(Nvrtc, AMissingLibraryListsWhatWasTriedAndWhatToDo) {
  const auto loaded = load_nvrtc({"/nowhere/libnvrtc.so.13", "/nowhere/libnvrtc.so"});
  EXPECT_EQ(loaded.api, nullptr);
  for (const char* part : {"/nowhere/libnvrtc.so.13", "/nowhere/libnvrtc.so:", "CUDA_HOME", "imbrex compile", "IMBREX_CUDA_CACHE"})
    EXPECT_TRUE(contains(loaded.why, part)) << part << "\n" << loaded.why;
  EXPECT_TRUE(contains(load_nvrtc({"/nowhere/x.so", "libm.so.6"}).why, "libm.so.6 has no nvrtcVersion"));
}

TEST(CublasLt, AMissingLibraryListsWhatWasTriedAndWhatToDo) {
  const auto loaded = load_cublaslt({"/nowhere/libcublasLt.so.13"});
  EXPECT_EQ(loaded.api, nullptr);
  for (const char* part : {"/nowhere/libcublasLt.so.13", "nvidia-cublas", "CUDA_HOME", "IMBREX_CUDA_CUBLASLT"})
    EXPECT_TRUE(contains(loaded.why, part)) << part << "\n" << loaded.why;
  EXPECT_TRUE(contains(load_cublaslt({"libm.so.6"}).why, "libm.so.6 has no cublasLtGetVersion"));
  EXPECT_EQ(error_code([] { check_cublaslt(kCublasNotSupported, "multiply"); }), "cuda.cublaslt");
}

TEST(ToolkitNames, GoThroughTheFoldersInOrder) {
  setenv("CUDA_HOME", "/toolkit", 1);
  const std::vector<std::string> names = toolkit_names("IMBREX_NO_SUCH_VARIABLE", {"a.so", "b.so"}, {"/beside/"});
  unsetenv("CUDA_HOME");
  EXPECT_EQ(names, (std::vector<std::string>{"a.so", "b.so", "/toolkit/lib64/a.so", "/toolkit/lib64/b.so", "/toolkit/lib/a.so",
                                             "/toolkit/lib/b.so", "/usr/local/cuda/lib64/a.so", "/usr/local/cuda/lib64/b.so",
                                             "/beside/a.so", "/beside/b.so"}));
  EXPECT_EQ(toolkit_names("IMBREX_CUDA_CUBLASLT", {"a.so"}), (std::vector<std::string>{IMBREX_FAKE_DRIVER}));
}

TEST(Device, GpusAreProbedWithoutAContext) {
  std::string text;
  const auto devices = probe_cuda(&text);
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(text, "");
  EXPECT_EQ(devices[1].device, (Device{DeviceType::cuda, 1}));
  EXPECT_EQ(devices[1].name, "Fake GPU 1");
  EXPECT_TRUE(devices[1].present);
  EXPECT_EQ(devices[1].sm, 90);
  EXPECT_EQ(devices[1].num_workers, 132);
  EXPECT_EQ(devices[1].l2_bytes, 60 << 20);
  EXPECT_EQ(devices[1].memory_bytes, int64_t(141) << 30);
  EXPECT_EQ(devices[1].max_smem_bytes, 227 << 10);
  EXPECT_EQ(state().contexts, 0);

  EXPECT_EQ(describe_device("cuda").device, (Device{DeviceType::cuda, 0}));
  EXPECT_EQ(describe_device("CUDA:1").name, "Fake GPU 1");
  EXPECT_EQ(error_code([] { describe_device("cuda:2"); }), "device.absent");
  for (const char* bad : {"cuda:", "cuda:x", "cuda:-1", "cuda:1x", "cuda1", "cuda:99999999999"})
    EXPECT_EQ(error_code([&] { describe_device(bad); }), "device.unknown") << bad;
}

TEST(Device, ADriverWithoutDevicesIsAReason) {
  state().num_devices = 0;
  std::string text;
  EXPECT_TRUE(probe_cuda(&text).empty());
  EXPECT_EQ(text, "the NVIDIA driver sees no device");
  EXPECT_EQ(error_code([] { describe_device("cuda"); }), "device.absent");
  state().num_devices = 2;
}

}  // namespace
}  // namespace imbrex::cuda
