// Objects that are shared by a key while somebody holds them.
#include "gpu/shared_by_key.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace imbrex::gpu {
namespace {

TEST(SharedByKey, OneObjectForAKeyWhileItIsHeld) {
  SharedByKey<std::string, const int> all;
  int made = 0;
  const auto make = [&] { return std::make_shared<const int>(++made); };
  auto first = all.get("a", make);
  EXPECT_EQ(all.get("a", make), first);
  EXPECT_NE(all.get("b", make), first);
  EXPECT_EQ(made, 2);
  first.reset();
  EXPECT_EQ(*all.get("a", make), 3) << "nobody held it any more";
}

TEST(SharedByKey, WhatCannotBeMadeIsAskedForAgain) {
  SharedByKey<int, const int> all;
  EXPECT_THROW(all.get(1, []() -> std::shared_ptr<const int> { throw 5; }), int);
  EXPECT_EQ(*all.get(1, [] { return std::make_shared<const int>(6); }), 6);
}

TEST(SharedByKey, ThreadsThatAskAtOnceAreGivenTheSame) {
  SharedByKey<int, const int> all;
  std::atomic<int> inside{0};
  std::vector<std::shared_ptr<const int>> given(4);
  std::vector<std::thread> threads;
  for (auto& mine : given)
    threads.emplace_back([&] {
      mine = all.get(1, [&] {
        for (++inside; inside < 4;) std::this_thread::yield();  // all of them make one
        return std::make_shared<const int>(7);
      });
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& one : given) EXPECT_EQ(one, given[0]);
}

}  // namespace
}  // namespace imbrex::gpu
