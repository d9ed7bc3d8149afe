#pragma once
// Which process this is, of those that fork() has made of one. A child has the memory of its parent and one thread: other threads are not
// there, a lock that one of them held stays locked, and CUDA does not work. What depends on these keeps the number of its process.
#include <cstdint>

namespace imbrex {

// 0 in a process that was not forked off, one more in each child; costs a load. Code between fork() and exec() is not counted on.
uint64_t fork_generation() noexcept;

}  // namespace imbrex
