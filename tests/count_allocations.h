#pragma once
// Counts calls of operator new, and lets them fail, by replacing it. Include in exactly one file of a test program; others include
// allocations.h.
#include <cstdlib>
#include <new>

#include "allocations.h"

namespace imbrex::test {

[[gnu::noinline]] inline void* counted_allocation(std::size_t bytes, std::size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (allocations_left > 0 && --allocations_left == 0) return nullptr;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  return alignment <= alignof(std::max_align_t) ? std::malloc(bytes > 0 ? bytes : 1) : std::aligned_alloc(alignment, rounded);
}
[[gnu::noinline]] inline void* counted_allocation_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const p = counted_allocation(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
[[gnu::noinline]] inline void release(void* p) { std::free(p); }

}  // namespace imbrex::test

// All forms, because sanitizers replace each of them with one of their own that does not mix with malloc.
void* operator new(std::size_t n) { return imbrex::test::counted_allocation_or_throw(n, 1); }
void* operator new[](std::size_t n) { return imbrex::test::counted_allocation_or_throw(n, 1); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return imbrex::test::counted_allocation(n, 1); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return imbrex::test::counted_allocation(n, 1); }
void* operator new(std::size_t n, std::align_val_t a) { return imbrex::test::counted_allocation_or_throw(n, std::size_t(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return imbrex::test::counted_allocation_or_throw(n, std::size_t(a)); }
void operator delete(void* p) noexcept { imbrex::test::release(p); }
void operator delete[](void* p) noexcept { imbrex::test::release(p); }
void operator delete(void* p, std::size_t) noexcept { imbrex::test::release(p); }
void operator delete[](void* p, std::size_t) noexcept { imbrex::test::release(p); }
void operator delete(void* p, std::align_val_t) noexcept { imbrex::test::release(p); }
void operator delete[](void* p, std::align_val_t) noexcept { imbrex::test::release(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { imbrex::test::release(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { imbrex::test::release(p); }
