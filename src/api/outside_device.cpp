// Devices from outside of the library, by the C ABI: a platform whose functions are somebody else's.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "api/structs.h"
#include "attention/device_operations.h"
#include "attention/merge_checks.h"

namespace imbrex::api {
namespace {

// Functions of somebody else, who may unload them after unregistering; and a copy of the name, which may be gone at once.
struct Table : imbrex_device_table {
  explicit Table(const imbrex_device_table& given) : imbrex_device_table(given), name_text(given.name) {}
  std::string name_text;

  // Held shared by who calls a function without having a device open, and alone by who unregisters the table.
  mutable std::shared_mutex mutex;
  bool unregistered = false;  // no function may be called any more
  mutable std::atomic<int> num_open{0};

  [[noreturn]] void fail_with(imbrex_status status, const char* what) const {
    const char* why = error == nullptr ? nullptr : error(context);
    throw StatusError(status, status == IMBREX_OUT_OF_MEMORY ? "stream.memory" : "device.outside",
                      fmt::format("{} of {} failed with status {}: {}", what, name_text, status, why == nullptr ? "" : why));
  }
  void must(imbrex_status status, const char* what) const {
    if (status != IMBREX_OK) fail_with(status, what);
  }
  void check_registered() const {
    check(!unregistered, "device.absent", "expected a device that is registered, {} was unregistered", name_text);
  }
  bool has_graphs() const { return capture_begin != nullptr; }
};
using TablePtr = std::shared_ptr<const Table>;

class OutsideDevice final : public OpenDevice, public std::enable_shared_from_this<OutsideDevice> {
 public:
  OutsideDevice(TablePtr table, int number, const Device& device) : table_(std::move(table)), device_(device) {
    table_->must(table_->open(table_->context, number, &handle_), "open");
    ++table_->num_open;
  }
  ~OutsideDevice() override {
    table_->close(handle_);
    --table_->num_open;
  }
  Device device() const override { return device_; }
  int64_t free_bytes() const override { return table_->free_bytes(handle_); }

  std::shared_ptr<void> allocate(int64_t bytes) const override {
    void* memory = nullptr;
    table_->must(table_->allocate(handle_, std::max<int64_t>(bytes, 1), &memory), "allocate");
    return owned(memory, table_->release);
  }
  std::shared_ptr<void> allocate_host(int64_t bytes) const override {
    constexpr int64_t kAlignment = 64;
    const int64_t room = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = nullptr;
    if (table_->allocate_host != nullptr) {
      table_->must(table_->allocate_host(handle_, room, &memory), "allocate_host");
      return owned(memory, table_->release_host);
    }
    memory = std::aligned_alloc(kAlignment, size_t(room));
    check(memory != nullptr, "stream.memory", "expected what the host has left, got {} bytes", bytes);
    return {memory, std::free};
  }

  std::shared_ptr<void> make_stream() const override {
    void* stream = nullptr;
    table_->must(table_->stream_create(handle_, &stream), "stream_create");
    return owned(stream, table_->stream_free);
  }
  void synchronize(Stream stream) const override { table_->must(table_->stream_synchronize(handle_, stream), "stream_synchronize"); }
  void upload(void* to, const void* from, int64_t bytes, Stream stream) const override {
    if (bytes > 0) table_->must(table_->upload(handle_, to, from, bytes, stream), "upload");
  }
  void download(void* to, const void* from, int64_t bytes, Stream stream) const override {
    if (bytes > 0) table_->must(table_->download(handle_, to, from, bytes, stream), "download");
  }
  void copy(void* to, const void* from, int64_t bytes, Stream stream) const override {
    if (bytes > 0) table_->must(table_->copy(handle_, to, from, bytes, stream), "copy");
  }
  void fill(void* to, unsigned char value, int64_t bytes, Stream stream) const override {
    if (bytes > 0) table_->must(table_->fill(handle_, to, value, bytes, stream), "fill");
  }
  void gather(const TensorView& from, const TensorView& offsets, const TensorView& to, Stream stream) const override {
    if (table_->gather == nullptr) return OpenDevice::gather(from, offsets, to, stream);
    const CTensor c_from(from), c_offsets(offsets), c_to(to);
    if (to.num_elements() > 0) table_->must(table_->gather(handle_, c_from.get(), c_offsets.get(), c_to.get(), stream), "gather");
  }

  std::shared_ptr<void> make_event(bool timed) const override {
    void* event = nullptr;
    table_->must(table_->event_create(handle_, timed, &event), "event_create");
    return owned(event, table_->event_free);
  }
  void record(void* event, Stream stream) const override { table_->must(table_->event_record(handle_, event, stream), "event_record"); }
  void wait(void* event, Stream stream) const override { table_->must(table_->stream_wait(handle_, stream, event), "stream_wait"); }
  void synchronize_event(void* event) const override { table_->must(table_->event_synchronize(handle_, event), "event_synchronize"); }
  double seconds(void* begin, void* end) const override {
    double seconds = 0;
    table_->must(table_->event_seconds(handle_, begin, end, &seconds), "event_seconds");
    return seconds;
  }

  bool has_graphs() const override { return table_->has_graphs(); }
  std::shared_ptr<void> capture(Stream stream, const std::function<void()>& launches) const override {
    check(table_->has_graphs(), "stream.capture", "expected a device with graphs, got {}, which has none", device_.str());
    table_->must(table_->capture_begin(handle_, stream), "capture_begin");
    try {
      launches();
    } catch (...) {
      table_->capture_end(handle_, stream, nullptr);
      throw;
    }
    void* graph = nullptr;
    table_->must(table_->capture_end(handle_, stream, &graph), "capture_end");
    return owned(graph, table_->graph_free);
  }
  void launch(void* graph, Stream stream) const override { table_->must(table_->graph_launch(handle_, graph, stream), "graph_launch"); }

  uint64_t capture_of(Stream stream) const {
    uint64_t number = 0;
    if (table_->has_graphs()) table_->must(table_->capture_of(handle_, stream, &number), "capture_of");
    return number;
  }
  void merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Stream stream) const {
    std::vector<std::array<CTensor, 2>> tensors(parts.size());
    std::vector<imbrex_partial_result> results;
    for (size_t i = 0; i < parts.size(); ++i) {
      tensors[i][0].set(parts[i].out), tensors[i][1].set(parts[i].lse);
      results.push_back({tensors[i][0].get(), tensors[i][1].get()});
    }
    const CTensor to(out), to_lse(lse);
    table_->must(table_->merge(handle_, results.data(), int32_t(results.size()), to.get(), to_lse.get(), stream), "merge");
  }

 private:
  // Keeps the device open for as long as it is there.
  std::shared_ptr<void> owned(void* made, void (*give_back)(void* device, void*)) const {
    return {made, [device = shared_from_this(), give_back](void* gone) { give_back(device->handle_, gone); }};
  }

  TablePtr table_;
  Device device_;
  void* handle_ = nullptr;
};

class OutsideMerger final : public PartialMerger {
 public:
  explicit OutsideMerger(std::shared_ptr<const OutsideDevice> device) : device_(std::move(device)) {}
  void merge(std::span<const PartialResult> parts, const TensorView& out, const TensorView& lse, Stream stream) const override {
    check_merge(parts, out, lse, device_->device());
    device_->merge(parts, out, lse, stream);
  }

 private:
  std::shared_ptr<const OutsideDevice> device_;
};

class OutsidePlatform final : public DevicePlatform, public DeviceOperations {
 public:
  explicit OutsidePlatform(const imbrex_device_table& given) : table_(std::make_shared<Table>(given)) {}
  std::string_view name() const override { return table_->name_text; }

  std::vector<DeviceInfo> devices(std::string* why) const override {
    const std::shared_lock lock(table_->mutex);
    std::vector<DeviceInfo> all;
    if (table_->unregistered) return all;
    const int count = table_->count(table_->context);
    for (int number = 0; number < count; ++number) {
      imbrex_device_description d{.struct_size = sizeof d, .num_workers = 1};
      table_->must(table_->describe(table_->context, number, &d), "describe");
      all.push_back({.device = {},
                     .name = d.name == nullptr ? table_->name_text : d.name,
                     .num_workers = std::max(d.num_workers, 1),
                     .l2_bytes = d.l2_bytes,
                     .memory_bytes = d.memory_bytes,
                     .peak_flops = d.peak_flops,
                     .peak_bytes_per_s = d.peak_bytes_per_s,
                     .isa_note = {}});
    }
    if (count <= 0 && why != nullptr) {
      const char* text = table_->error == nullptr ? nullptr : table_->error(table_->context);
      *why = text == nullptr || *text == 0 ? fmt::format("{} has no device", table_->name_text) : text;
    }
    return all;
  }

  OpenDevicePtr open(const Device& device) const override { return open_one(device); }
  uint64_t capture_of(const Device& device, Stream stream) const override { return open_one(device)->capture_of(stream); }

  std::unique_ptr<BlockCopier> block_copier(const DeviceInfo&) const override { return nullptr; }
  std::unique_ptr<PartialMerger> partial_merger(const DeviceInfo& device) const override {
    return table_->merge == nullptr ? nullptr : std::make_unique<OutsideMerger>(open_one(device.device));
  }

  void unregister() const {
    const std::unique_lock lock(table_->mutex);
    const int open = table_->num_open;
    check(
        open == 0, "registry.in_use",
        "expected all streams, memory, graphs and plans on devices of {} to be freed before it is unregistered, {} of its devices are open",
        name(), open);
    unregister_platform(name());
    table_->unregistered = true;
  }

 private:
  std::shared_ptr<const OutsideDevice> open_one(const Device& device) const {
    const std::shared_lock lock(table_->mutex);
    table_->check_registered();
    const int number = number_of(device);
    const std::lock_guard opening(opening_);
    std::weak_ptr<const OutsideDevice>& known = open_[number];
    if (auto open = known.lock()) return open;
    const int count = table_->count(table_->context);
    check(number < count, "device.absent", "expected a device from {}:0 to {}:{}, got {}", name(), name(), count - 1, device.str());
    auto open = std::make_shared<const OutsideDevice>(table_, number, device);
    known = open;
    return open;
  }

  std::shared_ptr<Table> table_;
  mutable std::mutex opening_;
  mutable std::map<int, std::weak_ptr<const OutsideDevice>> open_;  // by number
};

bool is_complete(const imbrex_device_table& t) {
  const bool memory = t.free_bytes != nullptr && t.allocate != nullptr && t.release != nullptr;
  const bool copies = t.upload != nullptr && t.download != nullptr && t.copy != nullptr && t.fill != nullptr;
  const bool streams =
      t.stream_create != nullptr && t.stream_free != nullptr && t.stream_synchronize != nullptr && t.stream_wait != nullptr;
  const bool events = t.event_create != nullptr && t.event_free != nullptr && t.event_record != nullptr && t.event_synchronize != nullptr &&
                      t.event_seconds != nullptr;
  return t.count != nullptr && t.describe != nullptr && t.open != nullptr && t.close != nullptr && memory && copies && streams && events;
}

}  // namespace
}  // namespace imbrex::api

using namespace imbrex;
using namespace imbrex::api;

imbrex_status imbrex_register_device(const imbrex_device_table* given) {
  return guarded([&] {
    const imbrex_device_table t = read(given, "table");
    check(t.name != nullptr && is_complete(t), "api.device",
          "expected a name and every function but error, allocate_host, graphs, gather and merge, {}",
          t.name == nullptr ? "there is no name" : "one is NULL");
    const int graphs = int(t.capture_begin != nullptr) + int(t.capture_end != nullptr) + int(t.capture_of != nullptr) +
                       int(t.graph_launch != nullptr) + int(t.graph_free != nullptr);
    check(graphs == 0 || graphs == 5, "api.device", "expected all 5 functions of graphs or none, got {}", graphs);
    check((t.allocate_host == nullptr) == (t.release_host == nullptr), "api.device",
          "expected both of allocate_host and release_host, or none");
    register_platform(std::make_shared<OutsidePlatform>(t));
  });
}

imbrex_status imbrex_unregister_device(const char* name) {
  return guarded([&] {
    const std::string_view wanted = &deref(name, "name");
    for (const auto& platform : platforms())
      if (const auto* outside = dynamic_cast<const OutsidePlatform*>(platform.get()); outside != nullptr && outside->name() == wanted)
        return outside->unregister();
    unregister_platform(wanted);  // one of C++, or none
  });
}
