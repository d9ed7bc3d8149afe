#pragma once
// Handles of the C ABI that free themselves, and tensors, for tests.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "imbrex/imbrex.h"

namespace imbrex::test {

template <class T, void (*free)(T*)>
struct Free {
  void operator()(T* handle) const { free(handle); }
};
using DeviceHandle = std::unique_ptr<imbrex_device, Free<imbrex_device, imbrex_device_free>>;
using SpecHandle = std::unique_ptr<imbrex_spec, Free<imbrex_spec, imbrex_spec_free>>;
using SelectionHandle = std::unique_ptr<imbrex_selection, Free<imbrex_selection, imbrex_selection_free>>;
using ThreadsHandle = std::unique_ptr<imbrex_threads, Free<imbrex_threads, imbrex_threads_free>>;
using WorkspaceHandle = std::unique_ptr<imbrex_workspace, Free<imbrex_workspace, imbrex_workspace_free>>;
using PlanHandle = std::unique_ptr<imbrex_plan, Free<imbrex_plan, imbrex_plan_free>>;
using AllocationHandle = std::unique_ptr<imbrex_kv_allocation, Free<imbrex_kv_allocation, imbrex_kv_allocation_free>>;
using CopierHandle = std::unique_ptr<imbrex_block_copier, Free<imbrex_block_copier, imbrex_block_copier_free>>;
using MergerHandle = std::unique_ptr<imbrex_merger, Free<imbrex_merger, imbrex_merger_free>>;
using PoolHandle = std::unique_ptr<imbrex_block_pool, Free<imbrex_block_pool, imbrex_block_pool_free>>;

// The handle that `make(&handle)` makes; null when it fails, and then it must not have changed `handle`.
template <class Handle, class Make>
Handle make_handle(const Make& make) {
  typename Handle::pointer handle = nullptr;
  const imbrex_status status = make(&handle);
  if (status != IMBREX_OK) {
    EXPECT_EQ(handle, nullptr);
  }
  return Handle(handle);
}

inline DeviceHandle cpu() {
  return make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("cpu", out); });
}

template <class T>
T init(void (*function)(T*, size_t)) {
  T value;
  function(&value, sizeof value);
  return value;
}

inline imbrex_spec_fields small_fields() {
  imbrex_spec_fields f = init(imbrex_spec_fields_init);
  f.num_q_heads = 4, f.num_kv_heads = 2, f.head_dim_qk = f.head_dim_v = 64;
  f.q_dtype = f.kv_dtype = IMBREX_F32;
  return f;
}
inline SpecHandle spec_of(const imbrex_spec_fields& fields) {
  return make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create(&fields, out); });
}
inline SelectionHandle select_for(const imbrex_spec* spec, const imbrex_device* device, const char* forced = nullptr) {
  imbrex_select_options options = init(imbrex_select_options_init);
  options.forced = forced;
  return make_handle<SelectionHandle>([&](auto** out) { return imbrex_select(spec, device, &options, out); });
}

// A backend from outside, until the end of a test.
struct Registered {
  const char* name;
  imbrex_status (*unregister)(const char*) = imbrex_unregister_backend;
  ~Registered() { EXPECT_EQ(unregister(name), IMBREX_OK) << imbrex_last_error(); }
};

// A contiguous tensor in host memory, which it owns.
template <class T>
struct HostTensor {
  std::vector<T> data;
  std::vector<int64_t> shape;
  imbrex_tensor view{};

  HostTensor(std::vector<int64_t> sizes, imbrex_dl_type type, T value = {}) : shape(std::move(sizes)) {
    size_t count = 1;
    for (const int64_t n : shape) count *= size_t(n);
    data.assign(count, value);
    view.data = data.data(), view.device = {1, 0}, view.ndim = int32_t(shape.size()), view.dtype = type, view.shape = shape.data();
  }
  HostTensor(const HostTensor&) = delete;
  HostTensor& operator=(const HostTensor&) = delete;
};
constexpr imbrex_dl_type kFloat{2, 32, 1}, kInt{0, 32, 1}, kLong{0, 64, 1};

inline std::string last_code() { return imbrex_last_error_code(); }

}  // namespace imbrex::test
