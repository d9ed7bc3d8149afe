// Tests of the list of backends: order, names, and backends that come and go at run time.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "attention/fake_backend.h"
#include "expect_error.h"
#include "forked.h"
#include "imbrex/error.h"
#include "imbrex/select.h"

namespace imbrex {
namespace {

std::shared_ptr<FakeBackend> fake(std::string name) {
  return std::make_shared<FakeBackend>(std::move(name), [](const auto&, const auto&) { return std::vector<Reason>{}; });
}

TEST(Registry, ReferenceIsLast) {
  ASSERT_FALSE(backends().empty());
  EXPECT_EQ(backends().back()->name(), "reference");
  EXPECT_EQ(find_backend("reference"), backends().back());
  EXPECT_EQ(find_backend("no_such"), nullptr);
}

TEST(Registry, RegisteredComeFirstInTheirOrder) {
  const size_t before = backends().size();
  register_backend(fake("outside_a"));
  register_backend(fake("outside_b"));
  ASSERT_EQ(backends().size(), before + 2);
  EXPECT_EQ(backends()[0]->name(), "outside_a");
  EXPECT_EQ(backends()[1]->name(), "outside_b");
  EXPECT_NE(find_backend("outside_b"), nullptr);
  unregister_backend("outside_a");
  unregister_backend("outside_b");
  EXPECT_EQ(backends().size(), before);
  EXPECT_EQ(find_backend("outside_b"), nullptr);
}

TEST(Registry, RefusesWhatCannotBeNamed) {
  register_backend(fake("outside"));
  EXPECT_EQ(test::error_code([] { register_backend(fake("outside")); }), "registry.duplicate");
  unregister_backend("outside");
  EXPECT_EQ(test::error_code([] { register_backend(fake("reference")); }), "registry.duplicate");
  EXPECT_EQ(test::error_code([] { register_backend(fake("")); }), "registry.name");
  EXPECT_EQ(test::error_code([] { register_backend(nullptr); }), "registry.null");
  EXPECT_EQ(test::error_code([] { unregister_backend("outside"); }), "registry.unknown");
  EXPECT_EQ(test::error_code([] { unregister_backend("reference"); }), "registry.unknown");
}

TEST(Registry, PointersSurviveAnUnregistration) {
  register_backend(fake("outside"));
  const Backend* backend = find_backend("outside");
  unregister_backend("outside");
  EXPECT_EQ(backend->name(), "outside");
}

// A fork while another thread registers: its lock is not left to the child.
TEST(Registry, AForkedChildFindsItFree) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "its run time allows no fork beside threads";
  struct Slow final : FakeBackend {  // the list asks for names while it is locked
    Slow() : FakeBackend("outside_slow", [](const auto&, const auto&) { return std::vector<Reason>{}; }) {}
    std::string_view name() const override {
      if (slowly.exchange(false)) {
        inside = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      }
      return FakeBackend::name();
    }
    mutable std::atomic<bool> slowly{false}, inside{false};
  };
  const auto slow = std::make_shared<Slow>();
  register_backend(slow);
  slow->slowly = true;
  std::thread other([] { register_backend(fake("outside_other")); });
  while (!slow->inside) std::this_thread::yield();
  EXPECT_EQ(test::in_child([] { return find_backend("reference") != nullptr; }), 0);
  other.join();
  unregister_backend("outside_other");
  unregister_backend("outside_slow");
}

TEST(Registry, ThreadsMayRegisterAndLookAtOnce) {
  const size_t before = backends().size();
  std::atomic<bool> stop = false;
  std::thread reader([&] {
    while (!stop) {
      for (const Backend* backend : backends()) ASSERT_FALSE(backend->name().empty());
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < 3; ++t) {
    writers.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        const std::string name = "outside_" + std::to_string(t);
        register_backend(fake(name));
        unregister_backend(name);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  stop = true;
  reader.join();
  EXPECT_EQ(backends().size(), before);
}

}  // namespace
}  // namespace imbrex
