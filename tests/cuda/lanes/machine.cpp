// See machine.h. Compiled once for all libraries of kernel texts, each of which has a machine of its own.
#include "cuda/lanes/machine.h"

#include <ucontext.h>

#include <cstdio>

namespace imbrex::cuda {
alignas(1024) char memory[kMostBlocks * kMostShared];
}  // namespace imbrex::cuda

namespace imbrex::lanes {

Block block;

void fail(const char* what) {
  std::fprintf(stderr, "lane %d: %s\n", block.current, what);
  std::abort();
}

namespace {

unsigned next_chance() { return (block.chance = block.chance * 1664525u + 1013904223u) >> 8; }

// Jumps, unlike swapcontext(), leave signal masks alone: two system calls a switch were most of the time.
void switch_to(jmp_buf& from, jmp_buf& to) {
  if (_setjmp(from) == 0) _longjmp(to, 1);
}

void fiber_main() {
  switch_to(block.fiber().here, block.scheduler);
  block.body(block.body_of);
  for (const auto& group : block.fiber().groups)
    if (!group.empty()) fail("copies nobody waited for");
  if (!block.fiber().open_products.empty() || !block.fiber().product_groups.empty()) fail("products nobody waited for");
  block.fiber().done = true;
  _longjmp(block.scheduler, 1);
}

// Up to its first instruction.
void start_fiber(int lane) {
  constexpr size_t kStack = 256 << 10;
  Fiber& fiber = block.fibers[size_t(block.current = lane)];
  fiber.stack = std::make_unique_for_overwrite<char[]>(kStack);
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack.get();
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, fiber_main, 0);
  if (_setjmp(block.scheduler) == 0) setcontext(&context);
}

// One turn of a warp: each lane until it waits, again and again, but not for ever. Whether any ran.
bool run_warp(int warp) {
  bool ran = false, again = true;
  for (unsigned turns = 1 + next_chance() % 400; again && turns > 0; --turns) {
    again = false;
    for (int lane = 32 * warp; lane < 32 * warp + 32; ++lane) {
      Fiber& fiber = block.fibers[size_t(lane)];
      if (fiber.done || (fiber.ready != nullptr && !fiber.ready(fiber.ready_of))) continue;
      fiber.ready = nullptr;
      block.current = lane;
      switch_to(block.scheduler, fiber.here);
      ran = again = true;
    }
  }
  return ran;
}

}  // namespace

void wait_until(bool (*ready)(const void*), const void* of) {
  const int me = block.current;
  block.fiber().ready = ready, block.fiber().ready_of = of;
  switch_to(block.fiber().here, block.scheduler);
  block.current = me;
}

void run_cluster(int blocks, int threads, void (*body)(const void*), const void* of) {
  constexpr int kRegisters = 65536, kRegistersUnit = 8, kMostRegisters = 255;  // a launch hands out what it can
  block.threads = threads;
  block.fibers = std::vector<Fiber>(size_t(blocks * threads));
  block.warps = std::vector<Warp>(block.fibers.size() / 32);
  for (Warp& warp : block.warps) warp.registers = std::min(kRegisters / threads, kMostRegisters) / kRegistersUnit * kRegistersUnit;
  for (int i = 0; i < blocks; ++i) block.barriers[i] = {}, block.votes[i] = {}, block.mbarriers[i].clear(), block.spare_registers[i] = 0;
  block.of_cluster = {};
  block.body = body, block.body_of = of;
  for (int lane = 0; lane < blocks * threads; ++lane) start_fiber(lane);
  const auto alive = [] {
    for (const Fiber& fiber : block.fibers)
      if (!fiber.done) return true;
    return false;
  };
  constexpr long kStarvedTurns = 300;  // of which a starved warp gets one, and those when no other runs
  for (long turn = 0; alive(); ++turn) {
    bool ran = false;
    const unsigned first = next_chance();
    for (size_t i = 0; i < block.warps.size(); ++i) {
      const int warp = int((first + i) % block.warps.size());
      if (warp != block.starved || turn % kStarvedTurns == 0) ran |= run_warp(warp);
    }
    if (!ran && !(size_t(block.starved) < block.warps.size() && run_warp(block.starved))) fail("all lanes wait");
  }
  for (int i = 0; i < blocks; ++i)
    for (const auto& [address, barrier] : block.mbarriers[i])
      if (barrier.bytes != 0 || !barrier.writes.empty()) fail("bytes that nobody waited for");
}

}  // namespace imbrex::lanes
