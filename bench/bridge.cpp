// The bridge over which Python (bench/native.py) makes plans, sends steps and launches layers in memory that another library owns, PyTorch
// above all. For measuring only: nothing here is installed or promised to stay.
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>

#include "attention/kv_codec.h"
#include "core/check.h"
#include "core/cores.h"
#include "cuda/driver/jit.h"
#include "family/precompile.h"
#include "imbrex/imbrex.hpp"

namespace imbrex::bench {
namespace {

using nlohmann::json;

thread_local std::string last_error;

// Nothing may be thrown through a C function: the text of an error waits in last_error instead.
template <class T, class Body>
T guarded(T failed, const Body& body) {
  try {
    last_error.clear();
    return body();
  } catch (const Error& error) {
    last_error = error.code() + ": " + error.what();
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return failed;
}

KvFormat kv_format_of(const std::string& name) {
  const auto format = find_kv_format(name);
  check(format.has_value(), "bench.kv_format", "expected {}, got {}", kv_format_names(), name);
  return *format;
}

Expression expression_of(const json& j, const char* field) {
  return j.contains(field) ? parse_expression(j.at(field).get<std::string>()) : Expression();
}

AttentionSpec spec_of(const json& j) {
  AttentionSpec spec{.num_q_heads = j.at("q_heads"), .num_kv_heads = j.at("kv_heads")};
  spec.head_dim_qk = j.at("head_dim");
  spec.head_dim_v = j.value("head_dim_v", spec.head_dim_qk);
  if (j.contains("kv_format")) spec.kv_format = kv_format_of(j.at("kv_format"));
  spec.score.scale = j.value("scale", 0.f);
  spec.q_dtype = parse_dtype(j.value("q", "bf16"));
  spec.kv_dtype = parse_dtype(j.at("kv").get<std::string>());
  spec.block_size = j.at("page");
  spec.mask.causal = j.at("causal");
  spec.mask.window_left = j.value("window", 0) - 1;  // counts the query itself
  spec.mask.custom = j.value("custom_mask", false);
  spec.score.soft_cap = j.value("soft_cap", 0.f);
  spec.score.sinks = j.value("sinks", false);
  spec.score_mod = expression_of(j, "score_mod");
  spec.mask_mod = expression_of(j, "mask_mod");
  return spec;
}

// A plan, and the step and tensors it was last given, so that its host cost can be timed without Python in between.
struct Planned {
  AttentionSpec spec;
  Device device;
  bool host_table = false;  // where update() finds block tables, instead of in the device's memory
  std::unique_ptr<AttentionPlan> plan;
  std::string text;
  std::vector<int32_t> query_start, seq_lens, key_start;
  Batch batch;
  AttentionInputs in;
  AttentionOutputs out;
  void* sinks = nullptr;
  TensorView custom_mask;
  std::vector<NamedTensor> mask_tensors, score_tensors;
};

Planned* make_plan(const json& j) {
  auto planned = std::make_unique<Planned>();
  const DeviceInfo device = describe_device(j.at("device").get<std::string>());
  planned->spec = spec_of(j.at("spec"));
  planned->device = device.device;
  planned->host_table = j.value("host_table", false);
  const std::string backend = j.at("backend");
  const Selection chosen = select(planned->spec, device, {.forced = backend == "auto" ? "" : backend});
  check(chosen.backend != nullptr, "backend.unsupported", "expected a backend for {}, got none: {}", planned->spec.str(), chosen.str());
  const json& limits = j.at("limits");
  PlanOptions options;
  options.limits = {.max_num_reqs = limits.at("requests"),
                    .max_num_tokens = limits.at("tokens"),
                    .max_seq_len = limits.at("seq_len"),
                    .max_query_len = limits.at("query_len"),
                    .min_query_len = limits.value("min_query_len", 0),
                    .shared_prompts = limits.value("shared_prompts", false)};
  options.balanced = j.at("balanced");
  options.out_dtype = planned->spec.out_dtypes().front();
  planned->plan = chosen.backend->plan(planned->spec, device, options);
  return planned.release();
}

void update(Planned& p, int num_reqs, const int32_t* query_start, const int32_t* seq_lens, void* keys, int64_t columns, Stream stream) {
  p.query_start.assign(query_start, query_start + num_reqs + 1);
  p.seq_lens.assign(seq_lens, seq_lens + num_reqs);
  p.batch = {.query_start_loc = p.query_start, .seq_lens = p.seq_lens};
  if (p.spec.block_size > 0) {
    p.batch.block_table = TensorView::contiguous(keys, DType::i32, {num_reqs, columns}, p.host_table ? Device{} : p.device);
  } else {
    const auto* starts = static_cast<const int32_t*>(keys);
    p.key_start.assign(starts, starts + num_reqs + 1);
    p.batch.kv_start_loc = TensorView::contiguous(p.key_start.data(), DType::i32, {num_reqs + 1});
  }
  p.batch.custom_mask = p.custom_mask;
  p.batch.mask_tensors = p.mask_tensors;
  p.plan->update(p.batch, stream);
}

void add_tensor(Planned& p, bool of_mask, const char* name, void* data, const char* dtype, std::span<const int64_t> sizes) {
  TensorView view{.data = data, .dtype = parse_dtype(dtype), .device = of_mask ? Device{} : p.device, .rank = int(sizes.size())};
  check(sizes.size() <= std::size(view.sizes), "bench.tensor", "expected at most {} dims, got {}", std::size(view.sizes), sizes.size());
  int64_t elements = 1;
  for (int d = view.rank - 1; d >= 0; --d) view.sizes[d] = sizes[size_t(d)], view.strides[d] = elements, elements *= view.sizes[d];
  (of_mask ? p.mask_tensors : p.score_tensors).push_back({name, view});
}

// Pages (or rows of ragged keys) lie `stride` elements apart and are contiguous inside.
TensorView pages(const Planned& p, void* data, int64_t count, int64_t stride) {
  const KvLayout layout = codec_of(p.spec).layout(p.spec, KvPart::k).value();
  TensorView view{.data = data, .dtype = layout.dtype, .device = p.device, .rank = int(layout.dims.size()), .sizes = layout.sizes};
  view.sizes[0] = count;
  int64_t elements = 1;
  for (int d = view.rank - 1; d > 0; --d) view.strides[d] = elements, elements *= view.sizes[d];
  view.strides[0] = stride;
  return view;
}

void run(Planned& p, void* q, void* k, void* v, int64_t count, int64_t stride, void* out, Stream stream) {
  const auto rows = [&](void* data, DType type, int dim) {
    return TensorView::contiguous(data, type, {p.batch.num_tokens(), p.spec.num_q_heads, dim}, p.device);
  };
  p.in = {.q = rows(q, p.spec.q_dtype, p.spec.head_dim_qk), .kv = {.k = pages(p, k, count, stride)}};
  if (v != nullptr) p.in.kv.v = pages(p, v, count, stride);
  if (p.spec.score.sinks) p.in.sinks = TensorView::contiguous(p.sinks, DType::f32, {p.spec.num_q_heads}, p.device);
  p.in.score_tensors = p.score_tensors;
  p.out = {.out = rows(out, p.spec.out_dtypes().front(), p.spec.head_dim_v)};
  p.plan->run(p.in, p.out, stream);
}

double host_us(Planned& p, bool of_update, int calls, Stream stream) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) {
    if (of_update) {
      p.plan->update(p.batch, stream);
    } else {
      p.plan->run(p.in, p.out, stream);
    }
  }
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / calls;
}

int compile(const json& j) {
  const DeviceInfo device = describe_device(j.at("device").get<std::string>());
  std::map<std::string, std::vector<LayerSpec>> by_backend;
  for (const json& one : j.at("specs")) {
    const AttentionSpec spec = spec_of(one);
    const std::string backend = j.at("backend");
    const Selection chosen = select(spec, device, {.forced = backend == "auto" ? "" : backend});
    if (chosen.backend != nullptr) by_backend[std::string(chosen.backend->name())].push_back(spec);
  }
  int compiled = 0;
  for (const auto& [backend, specs] : by_backend) {
    const PrecompileRequest request{
        .archs = {cuda::arch_of(device)}, .specs = specs, .backend = backend, .folder = j.at("folder"), .jobs = default_num_threads()};
    for (const PrecompiledKernel& kernel : precompile(request)) {
      check(kernel.error.empty(), "cuda.compile", "{}", kernel.error);
      compiled += kernel.compile_ms > 0;
    }
  }
  return compiled;
}

}  // namespace
}  // namespace imbrex::bench

// The functions that Python calls. Those that can fail return null, or -1; imbrex_bench_error() then returns the reason, as "code: text".
extern "C" {
using namespace imbrex::bench;

const char* imbrex_bench_error() { return last_error.c_str(); }

void* imbrex_bench_plan(const char* request) {
  return guarded<Planned*>(nullptr, [&] { return make_plan(json::parse(request)); });
}

void imbrex_bench_free(void* plan) { delete static_cast<Planned*>(plan); }

const char* imbrex_bench_describe(void* plan) {
  return guarded<const char*>(nullptr, [&] {
    auto& planned = *static_cast<Planned*>(plan);
    planned.text = planned.plan->str();
    return planned.text.c_str();
  });
}

// keys: a block table i32 [num_reqs, columns] where the plan's device finds it, or on the host if the plan was made with host_table; or
// ragged starts i32 [num_reqs + 1] on the host.
int imbrex_bench_update(void* plan, int num_reqs, const int32_t* query_start, const int32_t* seq_lens, void* keys, int64_t columns,
                        void* stream) {
  return guarded(-1, [&] { return update(*static_cast<Planned*>(plan), num_reqs, query_start, seq_lens, keys, columns, stream), 0; });
}

// Sets the sinks of the runs that follow, for a layer that has them: f32 [q heads].
void imbrex_bench_sinks(void* plan, void* sinks) { static_cast<Planned*>(plan)->sinks = sinks; }

// Sets the custom mask of the updates that follow, for a layer that has one: `bytes` of it, on the plan's device.
void imbrex_bench_custom_mask(void* plan, void* mask, int64_t bytes) {
  auto& p = *static_cast<Planned*>(plan);
  p.custom_mask = imbrex::TensorView::contiguous(mask, imbrex::DType::u8, {bytes}, p.device);
}

// Adds a tensor that the layer's mask_mod reads (of_mask 1; on the host, for the updates that follow) or its score_mod (0; on the plan's
// device, for the runs that follow).
int imbrex_bench_tensor(void* plan, int of_mask, const char* name, void* data, const char* dtype, int rank, const int64_t* sizes) {
  return guarded(-1, [&] { return add_tensor(*static_cast<Planned*>(plan), of_mask != 0, name, data, dtype, {sizes, size_t(rank)}), 0; });
}

// q, out: [tokens, q heads, dims], contiguous. k, v: `count` pages, `stride` elements apart; v null: a part of the keys.
int imbrex_bench_run(void* plan, void* q, void* k, void* v, int64_t count, int64_t stride, void* out, void* stream) {
  return guarded(-1, [&] { return run(*static_cast<Planned*>(plan), q, k, v, count, stride, out, stream), 0; });
}

// Microseconds of the host for one of `calls` calls of the last update (of_update 1) or the last run (0).
double imbrex_bench_host_us(void* plan, int of_update, int calls, void* stream) {
  return guarded(-1.0, [&] { return host_us(*static_cast<Planned*>(plan), of_update != 0, calls, stream); });
}

// Fills a folder with the kernels that plans for the specs usually run, those that are there already left alone; how many were compiled.
int imbrex_bench_compile(const char* request) {
  return guarded(-1, [&] { return compile(json::parse(request)); });
}
}
