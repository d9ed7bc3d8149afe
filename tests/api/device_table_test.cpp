// Tables of devices from outside that bring no more than they must (the host's memory, and all is done when a call returns), that fail, or
// that are incomplete.
#include <cstdlib>
#include <cstring>

#include "api/handles.h"
#include "expect_error.h"
#include "imbrex/capture.h"
#include "imbrex/device_stream.h"
#include "imbrex/kv_cache.h"
#include "imbrex/merge.h"
#include "imbrex/select.h"

namespace imbrex::test {
namespace {

imbrex_device_table least_table() {
  imbrex_device_table t{};
  t.struct_size = sizeof t, t.name = "least";
  t.count = [](void*) { return int32_t(1); };
  t.describe = [](void*, int32_t, imbrex_device_description*) { return imbrex_status(IMBREX_OK); };
  t.open = [](void*, int32_t, void** device) { return *device = nullptr, imbrex_status(IMBREX_OK); };
  t.close = [](void*) {};
  t.free_bytes = [](void*) { return int64_t(1) << 20; };
  t.allocate = [](void*, int64_t bytes, void** out) { return *out = std::malloc(size_t(bytes)), imbrex_status(IMBREX_OK); };
  t.release = [](void*, void* memory) { std::free(memory); };
  t.stream_create = [](void*, void** out) { return *out = std::malloc(1), imbrex_status(IMBREX_OK); };
  t.stream_free = [](void*, void* stream) { std::free(stream); };
  t.stream_synchronize = [](void*, void*) { return imbrex_status(IMBREX_OK); };
  t.upload = t.download = t.copy = [](void*, void* to, const void* from, int64_t bytes, void*) {
    return std::memcpy(to, from, size_t(bytes)), imbrex_status(IMBREX_OK);
  };
  t.fill = [](void*, void* to, uint8_t value, int64_t bytes, void*) {
    return std::memset(to, value, size_t(bytes)), imbrex_status(IMBREX_OK);
  };
  t.event_create = [](void*, int32_t, void** out) { return *out = std::malloc(1), imbrex_status(IMBREX_OK); };
  t.event_free = [](void*, void* event) { std::free(event); };
  t.event_record = [](void*, void*, void*) { return imbrex_status(IMBREX_OK); };
  t.stream_wait = [](void*, void*, void*) { return imbrex_status(IMBREX_OK); };
  t.event_synchronize = [](void*, void*) { return imbrex_status(IMBREX_OK); };
  t.event_seconds = [](void*, void*, void*, double* out) { return *out = 1.5, imbrex_status(IMBREX_OK); };
  return t;
}

// A backend that makes plans, which no test runs.
imbrex_backend unused_backend() {
  imbrex_backend b{};
  b.struct_size = sizeof b, b.name = "unused", b.description = "makes plans";
  b.unsupported = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons*) {};
  b.plan = [](void*, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_plan_options*, void** plan) {
    return *plan = nullptr, imbrex_status(IMBREX_OK);
  };
  b.plan_free = [](void*) {};
  b.update = [](void*, const imbrex_batch*, void*) { return imbrex_status(IMBREX_OK); };
  b.write_kv = [](void*, const imbrex_kv_cache*, const imbrex_tensor*, const imbrex_tensor*, void*) { return imbrex_status(IMBREX_OK); };
  b.run = [](void*, const imbrex_inputs*, const imbrex_outputs*, void*) { return imbrex_status(IMBREX_OK); };
  return b;
}

TEST(CApiDeviceTable, MayBringNoGraphsNoKernelsAndNoHostMemory) {
  const imbrex_device_table table = least_table();
  ASSERT_EQ(imbrex_register_device(&table), IMBREX_OK) << imbrex_last_error();
  const DeviceInfo device = describe_device("least");
  EXPECT_EQ(device.name, "least");
  EXPECT_EQ(device.num_workers, 1);
  {
    const auto stream = open_stream(device);
    EXPECT_EQ(error_code([&] { stream->capture([] {}); }), "stream.capture");
    EXPECT_EQ(capture_of(device.device, stream->get()), 0u);
    EXPECT_EQ(error_code([&] { make_partial_merger(device); }), "merge.missing");
    EXPECT_NE(stream->allocate_host(100), nullptr);
    stream->mark(0), stream->mark(1);
    EXPECT_EQ(stream->seconds(0, 1), 1.5);
    std::vector<float> numbers{1, 2, 3, 4}, back(2);
    const DeviceTensor there = stream->copy_of(TensorView::contiguous(numbers.data(), DType::f32, {4}));
    stream->download(back.data(), there.view.as<float>() + 2, 8);
    stream->synchronize();
    EXPECT_EQ(back, (std::vector<float>{3, 4}));
    imbrex_backend backend = unused_backend();
    backend.device_size = sizeof(imbrex_device_properties), backend.capturable = 1;
    ASSERT_EQ(imbrex_register_backend(&backend), IMBREX_OK) << imbrex_last_error();
    for (const DeviceInfo& on : {device, probe_cpu()})
      EXPECT_FALSE(find_backend("unused")
                       ->plan(AttentionSpec{.num_q_heads = 1, .num_kv_heads = 1, .head_dim_qk = 32, .head_dim_v = 32}, on, {})
                       ->capturable())
          << on.str();
    EXPECT_EQ(imbrex_unregister_backend("unused"), IMBREX_OK) << imbrex_last_error();
    const Selection selection = select(AttentionSpec{.num_q_heads = 1, .num_kv_heads = 1, .head_dim_qk = 32, .head_dim_v = 32}, device);
    EXPECT_EQ(selection.backend, nullptr);
  }
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_OK) << imbrex_last_error();
}

TEST(CApiDeviceTable, FailuresKeepTheirStatusAndText) {
  imbrex_device_table table = least_table();
  table.error = [](void*) { return "as it was told"; };
  table.open = [](void*, int32_t, void**) { return imbrex_status(IMBREX_DEVICE); };
  ASSERT_EQ(imbrex_register_device(&table), IMBREX_OK) << imbrex_last_error();
  const DeviceHandle device = make_handle<DeviceHandle>([](auto** out) { return imbrex_device_create("least", out); });
  imbrex_block_copier* none = nullptr;
  EXPECT_EQ(imbrex_block_copier_create(device.get(), nullptr, &none), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "device.outside");
  EXPECT_NE(std::string(imbrex_last_error()).find("open of least failed with status 3: as it was told"), std::string::npos)
      << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_OK) << imbrex_last_error();

  table.count = [](void*) { return int32_t(0); };
  ASSERT_EQ(imbrex_register_device(&table), IMBREX_OK) << imbrex_last_error();
  imbrex_device* absent = nullptr;
  EXPECT_EQ(imbrex_device_create("least:0", &absent), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "device.absent");
  EXPECT_NE(std::string(imbrex_last_error()).find("as it was told"), std::string::npos) << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_OK) << imbrex_last_error();

  table.count = [](void*) { return int32_t(65); };
  ASSERT_EQ(imbrex_register_device(&table), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_device_create("least:0", &absent), IMBREX_DEVICE);
  EXPECT_EQ(last_code(), "device.many");
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_OK) << imbrex_last_error();
}

TEST(CApiDeviceTable, IncompleteTablesAreRefused) {
  const auto code = [](auto&& change) {
    imbrex_device_table t = least_table();
    change(t);
    EXPECT_EQ(imbrex_register_device(&t), IMBREX_INVALID);
    return last_code();
  };
  EXPECT_EQ(code([](auto& t) { t.copy = nullptr; }), "api.device");
  EXPECT_EQ(code([](auto& t) { t.name = nullptr; }), "api.device");
  EXPECT_EQ(code([](auto& t) { t.capture_of = [](void*, void*, uint64_t*) { return imbrex_status(IMBREX_OK); }; }), "api.device");
  EXPECT_EQ(code([](auto& t) { t.release_host = t.release; }), "api.device");
  EXPECT_EQ(code([](auto& t) { t.struct_size = 100; }), "api.struct_size");
  for (const char* name : {"", "Least", "9", "a-b", "cpu", "cuda", "cudax", "h200", "amx"})
    EXPECT_EQ(code([&](auto& t) { t.name = name; }), "registry.name") << name;
  const imbrex_device_table table = least_table();
  ASSERT_EQ(imbrex_register_device(&table), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_register_device(&table), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.duplicate");
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_OK) << imbrex_last_error();
  EXPECT_EQ(imbrex_unregister_device("least"), IMBREX_INVALID);
  EXPECT_EQ(last_code(), "registry.unknown");
}

}  // namespace
}  // namespace imbrex::test
