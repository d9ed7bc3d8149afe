// A device outside of imbrex: a toy accelerator with all that a real one has. Its memory is an arena that the host cannot touch (pages
// without access; the device has another mapping of the same bytes), a stream is a queue that a thread carries out, events and graphs are
// what they are called. Build:
//   c++ -std=c++20 -shared -fPIC -Iinclude examples/device/toy*.cpp -o toy.so -Lbuild -limbrex -pthread
// Use: imbrex_load_plugin("./toy.so"), or IMBREX_PLUGINS=./toy.so imbrex run --device toy:0 ...
#include "toy.h"

namespace toy {

const char* why(void*) { return problem.c_str(); }

namespace {

std::shared_ptr<Event>& event_of(void* event) { return *static_cast<std::shared_ptr<Event>*>(event); }
std::shared_ptr<Graph>& graph_of(void* graph) { return *static_cast<std::shared_ptr<Graph>*>(graph); }

int32_t count(void*) { return kNumDevices; }

imbrex_status describe(void*, int32_t number, imbrex_device_description* out) {
  static const char* const kNames[kNumDevices] = {"Toy accelerator", "Toy accelerator, the other one"};
  out->name = kNames[number], out->num_workers = 1, out->memory_bytes = kArenaBytes;
  return IMBREX_OK;
}

// By number: a plan is made for a number.
std::mutex open_mutex;
Device* open_devices[kNumDevices] = {};

imbrex_status open_device(void*, int32_t number, void** out) {
  return guarded([&] {
    auto made = std::make_unique<Device>();
    const std::lock_guard lock(open_mutex);
    open_devices[number] = made.get();
    *out = made.release();
    return IMBREX_OK;
  });
}
void close_device(void* device) {
  {
    const std::lock_guard lock(open_mutex);
    for (Device*& open : open_devices)
      if (open == device) open = nullptr;
  }
  delete &device_of(device);
}

int64_t free_bytes(void* device) { return device_of(device).arena.largest_hole(); }
imbrex_status allocate(void* device, int64_t bytes, void** out) {
  return guarded([&] {
    void* const memory = device_of(device).arena.allocate(bytes);
    if (memory == nullptr)
      return fail(IMBREX_OUT_OF_MEMORY, std::to_string(free_bytes(device)) + " bytes are left in one piece, not " + std::to_string(bytes));
    *out = memory;
    return imbrex_status(IMBREX_OK);
  });
}
void release(void* device, void* memory) {
  Device& d = device_of(device);
  {
    const std::lock_guard lock(d.mutex);
    for (Stream* stream : d.streams) stream->drain();
  }
  d.arena.release(memory);
}

imbrex_status stream_create(void* device, void** out) {
  return guarded([&] {
    Device& d = device_of(device);
    auto made = std::make_unique<Stream>();
    const std::lock_guard lock(d.mutex);
    d.streams.insert(made.get());
    *out = made.release();
    return IMBREX_OK;
  });
}
void stream_free(void* device, void* stream) {
  Device& d = device_of(device);
  {
    const std::lock_guard lock(d.mutex);
    d.streams.erase(static_cast<Stream*>(stream));
  }
  delete static_cast<Stream*>(stream);  // when it is done
}
imbrex_status stream_synchronize(void*, void* stream) {
  return guarded([&] { return stream_of(stream).synchronize(); });
}

imbrex_status give_copy(void* stream, void* to, const void* from, int64_t bytes) {
  return stream_of(stream).give([=] { return std::memcpy(to, from, size_t(bytes)), IMBREX_OK; });
}
imbrex_status upload(void* device, void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { return give_copy(stream, device_of(device).arena.bytes_at(to), from, bytes); });
}
imbrex_status download(void* device, void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { return give_copy(stream, to, device_of(device).arena.bytes_at(from), bytes); });
}
imbrex_status copy(void* device, void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { return give_copy(stream, device_of(device).arena.bytes_at(to), device_of(device).arena.bytes_at(from), bytes); });
}
imbrex_status fill(void* device, void* to, uint8_t value, int64_t bytes, void* stream) {
  return guarded([&] {
    char* const at = device_of(device).arena.bytes_at(to);
    return stream_of(stream).give([=] { return std::memset(at, value, size_t(bytes)), IMBREX_OK; });
  });
}

imbrex_status event_create(void*, int32_t, void** out) {
  return guarded([&] { return *out = new std::shared_ptr<Event>(std::make_shared<Event>()), IMBREX_OK; });
}
void event_free(void*, void* event) { delete &event_of(event); }
imbrex_status event_record(void*, void* event, void* stream) {
  return guarded([&] { return stream_of(stream).record(event_of(event)); });
}
imbrex_status stream_wait(void*, void* stream, void* event) {
  return guarded([&] { return stream_of(stream).wait(event_of(event)); });
}
imbrex_status event_synchronize(void*, void* event) {
  return guarded([&] {
    Event& e = *event_of(event);
    std::unique_lock lock(e.mutex);
    e.changed.wait(lock, [&, recorded = e.recorded] { return e.done >= recorded; });
    return e.status == IMBREX_OK ? imbrex_status(IMBREX_OK) : fail(e.status, e.why);
  });
}
imbrex_status event_seconds(void*, void* begin, void* end, double* out) {
  *out = std::chrono::duration<double>(event_of(end)->time - event_of(begin)->time).count();
  return IMBREX_OK;
}

imbrex_status capture_begin(void*, void* stream) {
  return guarded([&] { return stream_of(stream).begin_capture(); });
}
imbrex_status capture_end(void*, void* stream, void** graph) {
  return guarded([&] {
    std::shared_ptr<Graph> captured = stream_of(stream).end_capture();
    if (captured == nullptr) return fail(IMBREX_INVALID, "the stream captures nothing");
    if (graph != nullptr) *graph = new std::shared_ptr<Graph>(std::move(captured));
    return imbrex_status(IMBREX_OK);
  });
}
imbrex_status capture_of(void*, void* stream, uint64_t* out) {
  return guarded([&] { return *out = stream_of(stream).capture(), IMBREX_OK; });
}
imbrex_status graph_launch(void*, void* graph, void* stream) {
  return guarded([&] {
    return stream_of(stream).give([captured = graph_of(graph)] {
      for (const Work& work : *captured)
        if (const imbrex_status status = work(); status != IMBREX_OK) return status;
      return imbrex_status(IMBREX_OK);
    });
  });
}
void graph_free(void*, void* graph) { delete &graph_of(graph); }

imbrex_status merge(void* device, const imbrex_partial_result* parts, int32_t num_parts, const imbrex_tensor* out, const imbrex_tensor* lse,
                    void* stream) {
  return guarded([&] {
    auto tensors = std::make_shared<std::deque<Tensor>>();
    for (int i = 0; i < num_parts; ++i) {
      tensors->emplace_back(device_of(device), parts[i].out);
      tensors->emplace_back(device_of(device), parts[i].lse);
    }
    tensors->emplace_back(device_of(device), out);
    tensors->emplace_back(device_of(device), lse);
    return stream_of(stream).give([tensors, num_parts] {
      std::vector<imbrex_partial_result> results;
      for (size_t i = 0; i < size_t(num_parts); ++i) results.push_back({(*tensors)[2 * i].get(), (*tensors)[2 * i + 1].get()});
      const size_t last = 2 * size_t(num_parts);
      return of_library(
          imbrex_merge_partial_results(results.data(), num_parts, (*tensors)[last].get(), (*tensors)[last + 1].get(), nullptr));
    });
  });
}

}  // namespace

Device* open_device_of(int number) {
  const std::lock_guard lock(open_mutex);
  return open_devices[number];
}

}  // namespace toy

extern "C" IMBREX_API imbrex_status imbrex_plugin(const imbrex_host* host) {
  using namespace toy;
  if (host->abi_version != IMBREX_ABI_VERSION || host->struct_size < sizeof *host) return IMBREX_INVALID;
  imbrex_device_table table{};
  table.struct_size = sizeof table, table.name = "toy", table.error = why;
  table.count = count, table.describe = describe, table.open = open_device, table.close = close_device;
  table.free_bytes = free_bytes, table.allocate = allocate, table.release = release;
  table.stream_create = stream_create, table.stream_free = stream_free, table.stream_synchronize = stream_synchronize;
  table.upload = upload, table.download = download, table.copy = copy, table.fill = fill;
  table.event_create = event_create, table.event_free = event_free, table.event_record = event_record;
  table.stream_wait = stream_wait, table.event_synchronize = event_synchronize, table.event_seconds = event_seconds;
  table.capture_begin = capture_begin, table.capture_end = capture_end, table.capture_of = capture_of;
  table.graph_launch = graph_launch, table.graph_free = graph_free;
  table.merge = merge;
  if (const imbrex_status status = host->register_device(&table); status != IMBREX_OK) return status;

  if (const imbrex_status status = register_backend(host); status != IMBREX_OK) return status;
  return register_short_conv_backend(host);
}
