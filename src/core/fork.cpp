// Counts forks with a handler that the C library calls in each child, because asking for the process's id is a system call.
#include "core/fork.h"

#include <pthread.h>

#include <atomic>

namespace imbrex {
namespace {

constinit std::atomic<uint64_t> generation{0};

[[maybe_unused]] const int counts_forks = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

uint64_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

}  // namespace imbrex
