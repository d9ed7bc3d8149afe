// Contexts, memory, streams and events: what is made is given back, and the caller's context stays current. On the fake driver.
#include "cuda/driver/memory.h"

#include <gtest/gtest.h>

#include <memory>
#include <new>
#include <optional>
#include <thread>

#include "allocations.h"
#include "cuda/fake/fake_driver.h"
#include "expect_error.h"
#include "sanitizers.h"

namespace imbrex::cuda {
namespace {

using fake::state;
using imbrex::test::error_code, imbrex::test::FailAllocation;

CUcontext current() {
  CUcontext context = nullptr;
  need_driver().cuCtxGetCurrent(&context);
  return context;
}

TEST(Context, ThePrimaryOneIsRetainedOnceAUserAndReleased) {
  ASSERT_EQ(state().contexts, 0);
  {
    const auto first = Context::of_device(0), second = Context::of_device(0), other = Context::of_device(1);
    EXPECT_EQ(first->get(), second->get());
    EXPECT_EQ(first->id(), second->id());
    EXPECT_NE(first->get(), other->get());
    EXPECT_NE(first->id(), other->id());
    EXPECT_EQ(other->device(), 1);
    EXPECT_EQ(state().contexts, 3);
    EXPECT_EQ(current(), nullptr) << "nothing became current";
  }
  EXPECT_EQ(state().contexts, 0);
  EXPECT_EQ(error_code([] { Context::of_device(2); }), "cuda.device");
  EXPECT_EQ(error_code([] { Context::of_device(-1); }), "cuda.device");
}

TEST(Context, TheCallersOwnIsBorrowed) {
  CUcontext callers = nullptr;
  ASSERT_EQ(need_driver().cuDevicePrimaryCtxRetain(&callers, 0), 0);
  need_driver().cuCtxPushCurrent_v2(callers);
  const int references = state().contexts;
  {
    const auto borrowed = Context::of_device(0), other = Context::of_device(1);
    EXPECT_EQ(borrowed->get(), callers);
    EXPECT_NE(other->get(), callers) << "it belongs to another device";
    EXPECT_EQ(state().contexts, references + 1);
  }
  EXPECT_EQ(state().contexts, references);
  EXPECT_EQ(current(), callers);
  need_driver().cuCtxPopCurrent_v2(&callers);
  need_driver().cuDevicePrimaryCtxRelease_v2(0);
}

TEST(Context, IsNotRetainedWhereMemoryForItIsMissing) {
  if (imbrex::test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer's operator new cannot be made to fail";
  const auto held = Context::of_device(0);  // so that the fake driver has made the context
  const int before = state().contexts;
  long number = 0;
  for (bool failed = true; failed;) {
    {
      const FailAllocation fails(++number);
      try {
        Context::of_device(0);
      } catch (const std::bad_alloc&) {
      }
      failed = fails.has_failed();
    }
    ASSERT_EQ(state().contexts, before) << "allocation " << number;
  }
  EXPECT_GE(number, 2);
}

TEST(Context, IsCurrentForAScopeOnly) {
  const auto a = Context::of_device(0), b = Context::of_device(1);
  {
    const CurrentContext outer(*a);
    const int pushes = state().context_pushes;
    EXPECT_EQ(current(), a->get());
    {
      const CurrentContext same(*a);
      EXPECT_EQ(state().context_pushes, pushes) << "it is current already";
      const CurrentContext inner(*b);
      EXPECT_EQ(current(), b->get());
    }
    EXPECT_EQ(current(), a->get());
  }
  EXPECT_EQ(current(), nullptr);
}

TEST(Memory, IsGivenBackAndLeavesTheContextAlone) {
  const auto context = Context::of_device(0), other = Context::of_device(1);
  const CurrentContext callers(*other);
  {
    DeviceBuffer a(context, 100), b;
    const PinnedBuffer pinned(context, 100);
    const OwnedStream stream(context);
    const Event event(context), timed(context, true);
    EXPECT_EQ(state().buffers, 1);
    EXPECT_EQ(state().pinned, 1);
    EXPECT_EQ(state().streams, 1);
    EXPECT_EQ(state().events, 2);
    b = std::move(a);
    EXPECT_FALSE(a);  // NOLINT: what is left of it is the point
    EXPECT_TRUE(b);
    const DeviceBuffer c(std::move(b));
    EXPECT_EQ(c.bytes(), 100u);
    EXPECT_EQ(state().buffers, 1);
    b = DeviceBuffer(context, 50);
    EXPECT_EQ(state().buffers, 2);
    b = DeviceBuffer(context, 60);
    EXPECT_EQ(state().buffers, 2);
    EXPECT_FALSE(DeviceBuffer(context, 0));
    EXPECT_TRUE(timed.done()) << "there is nothing to wait for yet";
    timed.record(stream.get());
    EXPECT_FALSE(timed.done());
    timed.synchronize();
    EXPECT_TRUE(timed.done());
    stream.synchronize();
    EXPECT_EQ(elapsed_ms(timed, timed), 1.5f);
    EXPECT_EQ(current(), other->get());
  }
  EXPECT_EQ(state().buffers + state().pinned + state().streams + state().events, 0);
  EXPECT_EQ(current(), other->get());
}

TEST(Memory, KeepsItsContextAlive) {
  std::optional<DeviceBuffer> buffer;
  buffer.emplace(Context::of_device(1), 8);
  EXPECT_EQ(state().contexts, 1);
  buffer.reset();
  EXPECT_EQ(state().contexts, 0);
  EXPECT_EQ(state().buffers, 0);
}

TEST(Memory, FailuresHaveCodesAndLeaveNothingBehind) {
  const auto context = Context::of_device(0);
  state().fail_next = kCudaOutOfMemory;
  EXPECT_EQ(error_code([&] { DeviceBuffer(context, 1 << 20); }), "cuda.memory");
  state().fail_next = kCudaOutOfMemory;
  EXPECT_EQ(error_code([&] { PinnedBuffer(context, 1 << 20); }), "cuda.memory");
  state().fail_next = kCudaInvalidValue;
  EXPECT_EQ(error_code([&] { OwnedStream stream(context); }), "cuda.driver");
  state().fail_next = kCudaInvalidValue;
  EXPECT_EQ(error_code([&] { Event event(context); }), "cuda.driver");
  EXPECT_EQ(state().buffers + state().pinned + state().streams + state().events, 0);
  EXPECT_EQ(current(), nullptr);
}

TEST(Memory, Copies) {
  const auto context = Context::of_device(0);
  const CurrentContext scope(*context);
  const DeviceBuffer a(context, 16), b(context, 16);
  const char text[16] = "fifteen letters";
  char back[16] = {};
  copy_to_device(a.address(), text, 16, nullptr);
  copy_on_device(b.address(), a.address(), 16, nullptr);
  fill_bytes(b.address(), 'x', 1, nullptr);
  copy_to_host(back, b.address(), 16, nullptr);
  EXPECT_STREQ(back, "xifteen letters");
  copy_to_host(nullptr, 0, 0, nullptr);
}

TEST(Memory, CanBeGivenBackByAnotherThread) {
  auto buffer = std::make_unique<DeviceBuffer>(Context::of_device(0), 8);
  std::thread([&] {
    buffer.reset();
    EXPECT_EQ(current(), nullptr);
  }).join();
  EXPECT_EQ(state().buffers, 0);
}

}  // namespace
}  // namespace imbrex::cuda
