#pragma once
// A thread block, or those of a cluster, on the host: every lane a fiber, every instruction of a warp a meeting of its 32 lanes. For tests
// of kernel texts.
//
// Lanes run until they wait for each other, warps take turns in an order of chance. So a missing barrier shows as a wrong result under
// some seed, lanes that disagree about the next instruction are found when they meet, and so is a barrier that nobody else comes to. A warp
// may be starved: one that comes late to an mbarrier can find its phase turned twice, and wait for ever.
#include <setjmp.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

namespace imbrex::cuda {
constexpr unsigned kMostShared = 227 << 10, kMostBlocks = 8;  // bytes of a block, blocks of a cluster
alignas(1024) extern char memory[kMostBlocks * kMostShared];  // kernels declare it: `extern __shared__ char memory[]`
}  // namespace imbrex::cuda

namespace imbrex::lanes {

[[noreturn]] void fail(const char* what);

struct Copy {  // an asynchronous one
  char* to;
  const void* from;
  int size, valid;  // bytes; behind the valid ones come zeros
};

struct Fiber {
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool (*ready)(const void*) = nullptr;  // set while it waits; of what lies on its stack
  const void* ready_of = nullptr;
  bool done = false;
  long meetings = 0;
  std::vector<Copy> open;                          // copies since the last commit
  std::vector<std::vector<Copy>> groups;           // committed, not waited for
  std::vector<std::function<void()>> open_stores;  // of TMA, that nobody has waited for
  std::vector<std::function<void()>> open_products;
  std::vector<std::vector<std::function<void()>>> product_groups;
};

struct Warp {
  alignas(64) char brought[2][32 * 64];  // what lanes bring to a meeting and, while the last may still read, to the one before
  int kind[2];                           // of that of the first lane that came
  int arrived[2] = {};
  long met = 0;                       // meetings that all lanes came to
  long committed = 0, performed = 0;  // groups of products
  int registers;                      // of a thread
};

struct Barrier {
  int arrived = 0;
  long generation = 0;
};

struct MBarrier {
  unsigned arrivals, pending;                 // of a phase: all, and those that are missing
  long phase, bytes;                          // bytes: expected, not loaded
  std::vector<std::function<void()>> writes;  // that it counts the bytes of, and nobody has waited for
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::array<Barrier, 16> barriers[cuda::kMostBlocks];
  std::array<bool, 16> votes[cuda::kMostBlocks];
  Barrier of_cluster;
  std::map<unsigned, MBarrier> mbarriers[cuda::kMostBlocks];  // by their address
  int spare_registers[cuda::kMostBlocks];                     // of a thread, that warps have given back
  jmp_buf scheduler;
  void (*body)(const void*);
  const void* body_of;
  int threads;      // of a thread block
  int current = 0;  // lane that runs
  bool late_copies = true;
  unsigned chance = 1;
  int starved = -1;
  int rank() const { return current / threads; }
  Fiber& fiber() { return fibers[size_t(current)]; }
  Warp& warp() { return warps[size_t(current / 32)]; }
};
extern Block block;

// Lets others run until ready(of).
void wait_until(bool (*ready)(const void*), const void* of);
template <class Ready>
void wait_until(const Ready& ready) {
  if (!ready()) wait_until([](const void* of) { return (*static_cast<const Ready*>(of))(); }, &ready);
}

// Runs body() in every one of `threads` threads of each of `blocks`.
void run_cluster(int blocks, int threads, void (*body)(const void*), const void* of);
template <class Body>
void run_cluster(int blocks, int threads, const Body& body) {
  run_cluster(
      blocks, threads, [](const void* of) { (*static_cast<const Body*>(of))(); }, &body);
}

// All 32 lanes bring a T; each gets what its `f` makes of them.
template <class T, class F>
auto meet(int kind, const T& mine, F f) {
  static_assert(sizeof(T) <= 64);
  Warp& warp = block.warp();
  const int lane = block.current % 32;
  const long meeting = ++block.fiber().meetings;
  char* const brought = warp.brought[meeting % 2];
  std::memcpy(brought + size_t(lane) * sizeof(T), &mine, sizeof(T));
  int &first_kind = warp.kind[meeting % 2], &arrived = warp.arrived[meeting % 2];
  if (arrived == 0) first_kind = kind;
  if (first_kind != kind) fail("the lanes of a warp are at different instructions");
  if (++arrived == 32) arrived = 0, warp.met = meeting;
  wait_until([&warp, meeting] { return warp.met >= meeting; });
  return f(reinterpret_cast<const T*>(brought));
}

inline void arrive_at(Barrier& barrier, int threads) {
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.generation;
}
inline void wait_at(Barrier& barrier, int threads) {
  const long generation = barrier.generation;
  arrive_at(barrier, threads);
  wait_until([&barrier, generation] { return barrier.generation != generation; });
}

inline char* shared_of(int rank) { return cuda::memory + unsigned(rank) * cuda::kMostShared; }
inline char* shared() { return shared_of(block.rank()); }
inline char* shared_at(unsigned address, unsigned size, int rank = block.rank()) {
  if (address % size != 0 || address + size > cuda::kMostShared) fail("a bad address in shared memory");
  return shared_of(rank) + address;
}

inline void check_aligned(const void* p, unsigned size) {
  if (reinterpret_cast<unsigned long>(p) % size != 0) fail("a misaligned address");
}

inline void perform(const Copy& copy) {
  if (copy.valid > 0) std::memcpy(copy.to, copy.from, size_t(copy.valid));
  std::memset(copy.to + copy.valid, 0, size_t(copy.size - copy.valid));
}

}  // namespace imbrex::lanes
