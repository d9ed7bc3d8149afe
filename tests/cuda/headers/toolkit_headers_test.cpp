// The functions and values that cuda/driver/driver.h declares by hand are those of the CUDA headers. Compiled only where these exist.
#include "cuda/driver/driver.h"

namespace imbrex::cuda {

// Our types under names of their own, before the headers hide some of the symbols behind macros.
#define X(name, parameters) using ours_##name = decltype(DriverApi::name);
IMBREX_CUDA_DRIVER_API(X)
IMBREX_CUDA_OPTIONAL_DRIVER_API(X)
#undef X
#define X(name, parameters) using ours_##name = decltype(NvrtcApi::name);
IMBREX_NVRTC_API(X)
#undef X
#define X(name, value, theirs) constexpr int ours_##name = value;
IMBREX_CUDA_CONSTANTS(X)
#undef X

}  // namespace imbrex::cuda

#include <cuda.h>
#include <gtest/gtest.h>
#include <nvrtc.h>

#include <type_traits>

namespace imbrex::cuda {
namespace {

// What a calling convention sees of a type: the size of a number (enums are numbers), and what a pointer points to. Handles are
// pointers to structs that nobody defines.
template <int bytes>
struct Number {};
template <class T>
struct To {};
struct Handle {};
template <int bytes>
struct Struct {};
template <class Result, class... Arguments>
struct Function {};

template <class T, class = void>
struct IsComplete : std::false_type {};
template <class T>
struct IsComplete<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

template <class T>
struct Seen;
template <class T>
using seen = typename Seen<std::remove_cv_t<T>>::type;

template <class T>
auto look() {
  if constexpr (std::is_void_v<T>) {
    return To<void>();
  } else if constexpr (std::is_pointer_v<T>) {
    using Pointee = std::remove_cv_t<std::remove_pointer_t<T>>;
    if constexpr (std::is_function_v<Pointee>) {
      return seen<Pointee>();
    } else if constexpr (std::is_void_v<Pointee>) {
      return To<void>();
    } else if constexpr (std::is_class_v<Pointee> && !IsComplete<Pointee>::value) {
      return Handle();
    } else {
      return To<seen<Pointee>>();
    }
  } else if constexpr (std::is_floating_point_v<T>) {
    return T();
  } else if constexpr (std::is_class_v<T>) {
    return Struct<sizeof(T)>();
  } else {
    return Number<sizeof(T)>();
  }
}
template <class T>
struct Seen {
  using type = decltype(look<T>());
};
template <class Result, class... Arguments>
struct Seen<Result(Arguments...)> {
  using type = Function<seen<Result>, seen<Arguments>...>;
};

// The check can fail.
static_assert(!std::is_same_v<seen<int (*)(int)>, seen<int (*)(long)>>);
static_assert(!std::is_same_v<seen<int (*)(int)>, seen<int (*)(int, int)>>);
static_assert(!std::is_same_v<seen<int (*)(int*)>, seen<int (*)(void*)>>);
static_assert(!std::is_same_v<seen<int (*)(CUstream)>, seen<int (*)(CUdeviceptr)>>);
static_assert(!std::is_same_v<seen<int (*)(float)>, seen<int (*)(int)>>);

#define X(name, parameters) \
  static_assert(std::is_same_v<seen<ours_##name>, seen<decltype(&::name)>>, #name " has another signature in cuda.h");
IMBREX_CUDA_DRIVER_API(X)
IMBREX_CUDA_OPTIONAL_DRIVER_API(X)
#undef X
#define X(name, parameters) \
  static_assert(std::is_same_v<seen<ours_##name>, seen<decltype(&::name)>>, #name " has another signature in nvrtc.h");
IMBREX_NVRTC_API(X)
#undef X
#define X(name, value, theirs) static_assert(ours_##name == int(theirs), #name " has another value in cuda.h");
IMBREX_CUDA_CONSTANTS(X)
#undef X

static_assert(sizeof(CUlaunchAttribute) == sizeof(::CUlaunchAttribute) && sizeof(CUlaunchConfig) == sizeof(::CUlaunchConfig));
static_assert(offsetof(CUlaunchAttribute, value) == offsetof(::CUlaunchAttribute, value));
static_assert(offsetof(CUlaunchConfig, smem_bytes) == offsetof(::CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(CUlaunchConfig, stream) == offsetof(::CUlaunchConfig, hStream));
static_assert(offsetof(CUlaunchConfig, attributes) == offsetof(::CUlaunchConfig, attrs));
static_assert(offsetof(CUlaunchConfig, num_attributes) == offsetof(::CUlaunchConfig, numAttrs));
static_assert(sizeof(CUtensorMap) == sizeof(::CUtensorMap) && alignof(CUtensorMap) >= alignof(::CUtensorMap));

TEST(ToolkitHeaders, AgreeWithTheTable) { SUCCEED() << "compared when this file was compiled"; }

}  // namespace
}  // namespace imbrex::cuda
