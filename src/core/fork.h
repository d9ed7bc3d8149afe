#pragma once
// Tells a process from the children that fork() makes of it. A child has its parent's memory and a single thread: the parent's other
// threads do not exist in it, a lock that one of them held stays locked, and CUDA does not work. Objects that depend on threads, locks or
// CUDA remember the number of the process that made them.
#include <cstdint>

namespace imbrex {

// The number of forks between the first process and this one: 0 in a process that was not forked off. Costs a load. Code that runs between
// fork() and exec() may see the old number.
uint64_t fork_generation() noexcept;

}  // namespace imbrex
