// See plan.h. Arrays are looked at with Python's lock held, and the work is done without it.
#include "plan.h"

#include <limits>
#include <map>
#include <memory>

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attention/kv_codec.h"
#include "imbrex/imbrex.hpp"
#include "tensors.h"
#include "threads.h"

namespace imbrex::python {
namespace {

void* address(uintptr_t number) { return reinterpret_cast<void*>(number); }  // NOLINT: of Python, as frameworks give it

// A batch of requests that are alike, ragged keys one after the other.
struct EqualLengths {
  std::vector<int32_t> query_start_loc, seq_lens, kv_start_loc;

  static std::vector<int32_t> multiples(int count, int of) {
    if (int64_t{count} * of > std::numeric_limits<int32_t>::max())
      throw Error("python.lengths",
                  "expected fewer than 2^31 tokens, got " + std::to_string(count - 1) + " requests of " + std::to_string(of));
    std::vector<int32_t> list;
    for (int i = 0; i < count; ++i) list.push_back(i * of);
    return list;
  }
  EqualLengths() = default;
  EqualLengths(int num_reqs, int query_len, int seq_len)
      : query_start_loc(multiples(num_reqs + 1, query_len)), seq_lens(num_reqs, seq_len), kv_start_loc(multiples(num_reqs + 1, seq_len)) {}

  Batch batch() {
    Batch made;
    made.query_start_loc = query_start_loc, made.seq_lens = seq_lens;
    made.kv_start_loc = TensorView::contiguous(kv_start_loc.data(), DType::i32, {int64_t(kv_start_loc.size())});
    return made;
  }
};

// The part of a plan that graphs which captured it keep alive.
struct PlanState {
  std::unique_ptr<ThreadPool> threads;
  std::unique_ptr<AttentionPlan> plan;
  std::optional<StreamOrder> order;
  std::vector<Array> held;  // what tensors of the last update show
  EqualLengths equal;       // of the last update, if it was one of these
};

struct PyPlan {
  AttentionSpec spec;
  DeviceInfo device;
  std::shared_ptr<PlanState> state;

  void hold(std::initializer_list<const OptionalArray*> arrays) {
    state->held.clear();
    for (const OptionalArray* a : arrays)
      if (*a) state->held.push_back(**a);
  }
  // Does work without Python's lock; with ordered=True after the plan's last use on another stream. A capture has an order of its own.
  template <class Work>
  void use(uintptr_t address, Work work) const {
    const nb::gil_scoped_release release;
    const Stream stream = stream_of(address);
    const StreamOrder* const order = state->order && capture_of(device.device, stream) == 0 ? &*state->order : nullptr;
    if (order) order->begin(stream);
    try {
      work(*state->plan, stream);
    } catch (...) {
      if (order) order->end(stream);
      throw;
    }
    if (order) order->end(stream);
  }
};

// A run whose arrays differ from those of an earlier one in nothing but where they are: what run() would look at again was looked at then.
struct PyPreparedRun {
  nb::object plan;  // a PyPlan
  AttentionInputs in;
  AttentionOutputs out;
};

struct PyLayer {  // without k
  const OptionalArray &v, &k_scale, &v_scale, &k_rope, &k_rope_scale;
};
KvCache kv_of(const PyPlan& p, const Array& k, const PyLayer& rest) {
  const DType type = codec_of(p.spec).layout(p.spec, KvPart::k)->dtype;
  return {.k = view_of(k, "k_cache", type),
          .v = view_of(rest.v, "v_cache", type),
          .k_scale = view_of(rest.k_scale, "k_scale", DType::f32),
          .v_scale = view_of(rest.v_scale, "v_scale", DType::f32),
          .k_rope = view_of(rest.k_rope, "k_rope", type),
          .k_rope_scale = view_of(rest.k_rope_scale, "k_rope_scale", DType::f32)};
}

void bind_workspace(nb::module_& m) {
  nb::class_<PyWorkspace>(m, "Workspace")
      .def(
          "__init__",
          [](PyWorkspace* self, const DeviceInfo& device) {
            PyWorkspace made;
            {
              const nb::gil_scoped_release release;
              made.shared = make_workspace(device);
            }
            new (self) PyWorkspace(std::move(made));
          },
          nb::arg("device"))
      .def_prop_ro("nbytes", [](const PyWorkspace& w) { return w.shared->bytes(); });
}

void bind_plan_class(nb::module_& m) {
  nb::class_<PyPlan>(m, "Plan")
      .def(
          "__init__",
          [](PyPlan* self, const AttentionSpec& spec, const DeviceInfo& device, const std::string& backend, int max_num_reqs,
             int max_num_tokens, int max_seq_len, int max_query_len, int min_query_len, bool shared_prompts, int num_threads, bool balanced,
             bool validate, bool load_on_demand, bool on_device, bool ordered, std::optional<std::string> out_dtype,
             const PyWorkspace* workspace) {
            const Selection chosen = select(spec, device, {.forced = backend});
            if (chosen.backend == nullptr) throw Error("backend.unsupported", "nothing runs " + spec.str() + "\n" + chosen.str());
            PlanOptions options;
            options.limits = {max_num_reqs, max_num_tokens, max_seq_len, max_query_len, min_query_len, shared_prompts};
            options.balanced = balanced, options.validate = validate, options.load_on_demand = load_on_demand,
            options.on_device = on_device;
            if (out_dtype) options.out_dtype = parse_dtype(*out_dtype);
            if (workspace != nullptr) options.workspace = workspace->shared;
            PyPlan made{spec, device, std::make_shared<PlanState>()};
            if (num_threads > 1 && device.device.type == DeviceType::cpu) {
              made.state->threads = std::make_unique<ThreadPool>(num_threads);
              options.threads = made.state->threads->parallel_for();
            } else if (device.device.type == DeviceType::cpu || num_threads < 0) {
              options.threads = shared_threads(num_threads);
            }
            {
              const nb::gil_scoped_release release;
              made.state->plan = chosen.backend->plan(spec, device, options);
              if (ordered) made.state->order.emplace(device.device);
            }
            new (self) PyPlan(std::move(made));
          },
          nb::arg("spec"), nb::arg("device"), nb::kw_only(), nb::arg("backend") = "", nb::arg("max_num_reqs") = 256,
          nb::arg("max_num_tokens") = 8192, nb::arg("max_seq_len") = 131072, nb::arg("max_query_len") = 0, nb::arg("min_query_len") = 0,
          nb::arg("shared_prompts") = false, nb::arg("num_threads") = 0, nb::arg("balanced") = false, nb::arg("validate") = true,
          nb::arg("load_on_demand") = false, nb::arg("on_device") = false, nb::arg("ordered") = false, nb::arg("out_dtype") = nb::none(),
          nb::arg("workspace").none() = nb::none())
      .def_ro("spec", &PyPlan::spec)
      .def_ro("device", &PyPlan::device)
      .def(
          "update",
          [](PyPlan& p, const Array& query_start_loc, const Array& seq_lens, const OptionalArray& block_table,
             const OptionalArray& kv_indptr, const OptionalArray& kv_indices, const OptionalArray& kv_last_page_len,
             const OptionalArray& kv_start_loc, const OptionalArray& slot_mapping, const OptionalArray& custom_mask,
             const OptionalArray& positions, const OptionalArray& draft_parents, const OptionalArray& num_drafts,
             const NamedArrays& mask_tensors, const OptionalArray& packed_mask, const OptionalArray& mask_indptr, uintptr_t stream) {
            Batch batch;
            const std::vector<NamedTensor> named = named_views(mask_tensors);
            batch.mask_tensors = named;
            batch.query_start_loc = host_numbers(query_start_loc, "query_start_loc");
            batch.seq_lens = host_numbers(seq_lens, "seq_lens");
            batch.block_table = view_of(block_table, "block_table", DType::i32);
            batch.kv_indptr = view_of(kv_indptr, "kv_indptr", DType::i32);
            batch.kv_indices = view_of(kv_indices, "kv_indices", DType::i32);
            batch.kv_last_page_len = view_of(kv_last_page_len, "kv_last_page_len", DType::i32);
            batch.kv_start_loc = view_of(kv_start_loc, "kv_start_loc", DType::i32);
            batch.slot_mapping = view_of(slot_mapping, "slot_mapping", DType::i64);
            batch.custom_mask = view_of(custom_mask, "custom_mask", DType::u8);
            batch.packed_mask = view_of(packed_mask, "packed_mask", DType::u8);
            if (mask_indptr) batch.mask_indptr = host_numbers(*mask_indptr, "mask_indptr");
            if (positions) batch.positions = host_numbers(*positions, "positions");
            if (draft_parents) batch.draft_parents = host_numbers(*draft_parents, "draft_parents");
            if (num_drafts) batch.num_drafts = host_numbers(*num_drafts, "num_drafts");
            p.use(stream, [&](AttentionPlan& plan, Stream on) { plan.update(batch, on); });
            p.hold({&block_table, &kv_indptr, &kv_indices, &kv_last_page_len, &kv_start_loc, &slot_mapping, &custom_mask, &packed_mask});
            for (const auto& [name, array] : mask_tensors) p.state->held.push_back(array);
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("block_table") = nb::none(), nb::arg("kv_indptr") = nb::none(),
          nb::arg("kv_indices") = nb::none(), nb::arg("kv_last_page_len") = nb::none(), nb::arg("kv_start_loc") = nb::none(),
          nb::arg("slot_mapping") = nb::none(), nb::arg("custom_mask") = nb::none(), nb::arg("positions") = nb::none(),
          nb::arg("draft_parents") = nb::none(), nb::arg("num_drafts") = nb::none(), nb::arg("mask_tensors") = NamedArrays(),
          nb::arg("packed_mask") = nb::none(), nb::arg("mask_indptr") = nb::none(), nb::arg("stream") = 0)
      .def(
          "update_on_device",
          [](PyPlan& p, const Array& query_start_loc, const Array& seq_lens, int max_num_tokens, const OptionalArray& block_table,
             const OptionalArray& kv_indptr, const OptionalArray& kv_indices, const OptionalArray& kv_start_loc,
             const OptionalArray& slot_mapping, const OptionalArray& custom_mask, const OptionalArray& positions,
             const OptionalArray& draft_parents, const OptionalArray& num_drafts, const OptionalArray& packed_mask, uintptr_t stream) {
            DeviceBatch batch;
            batch.query_start_loc = view_of(query_start_loc, "query_start_loc", DType::i32);
            batch.seq_lens = view_of(seq_lens, "seq_lens", DType::i32);
            batch.block_table = view_of(block_table, "block_table", DType::i32);
            batch.kv_indptr = view_of(kv_indptr, "kv_indptr", DType::i32);
            batch.kv_indices = view_of(kv_indices, "kv_indices", DType::i32);
            batch.kv_start_loc = view_of(kv_start_loc, "kv_start_loc", DType::i32);
            batch.slot_mapping = view_of(slot_mapping, "slot_mapping", DType::i64);
            batch.custom_mask = view_of(custom_mask, "custom_mask", DType::u8);
            batch.packed_mask = view_of(packed_mask, "packed_mask", DType::u8);
            batch.positions = view_of(positions, "positions", DType::i32);
            batch.draft_parents = view_of(draft_parents, "draft_parents", DType::i32);
            batch.num_drafts = view_of(num_drafts, "num_drafts", DType::i32);
            batch.max_num_tokens = max_num_tokens;
            p.use(stream, [&](AttentionPlan& plan, Stream on) { plan.update_on_device(batch, on); });
            p.hold({&block_table, &kv_indptr, &kv_indices, &kv_start_loc, &slot_mapping, &custom_mask, &positions, &draft_parents,
                    &num_drafts, &packed_mask});
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("max_num_tokens") = 0, nb::arg("block_table") = nb::none(),
          nb::arg("kv_indptr") = nb::none(), nb::arg("kv_indices") = nb::none(), nb::arg("kv_start_loc") = nb::none(),
          nb::arg("slot_mapping") = nb::none(), nb::arg("custom_mask") = nb::none(), nb::arg("positions") = nb::none(),
          nb::arg("draft_parents") = nb::none(), nb::arg("num_drafts") = nb::none(), nb::arg("packed_mask") = nb::none(),
          nb::arg("stream") = 0)
      .def(
          "device_problems",
          [](PyPlan& p, uintptr_t stream) {
            std::vector<Reason> problems;
            p.use(stream, [&](AttentionPlan& plan, Stream on) { problems = plan.device_problems(on); });
            return problems;
          },
          nb::arg("stream") = 0)
      .def(
          "write_kv",
          [](PyPlan& p, nb::handle k_cache, nb::handle v_cache, const OptionalArray& k_scale, const OptionalArray& v_scale,
             nb::handle k_rope, const OptionalArray& k_rope_scale, const Array& k, const OptionalArray& v, uintptr_t stream) {
            const Array k_pages = written(k_cache, "k_cache");
            const OptionalArray v_pages = v_cache.is_none() ? std::nullopt : OptionalArray(written(v_cache, "v_cache"));
            const OptionalArray rope_pages = k_rope.is_none() ? std::nullopt : OptionalArray(written(k_rope, "k_rope"));
            const KvCache kv = kv_of(p, k_pages, {v_pages, k_scale, v_scale, rope_pages, k_rope_scale});
            const DType type = p.spec.new_kv_dtypes().front();
            const TensorView new_k = view_of(k, "k", type), new_v = view_of(v, "v", type);
            for (const auto& [pages, name] : {std::pair(kv.k, "k_cache"), std::pair(kv.v, "v_cache"), std::pair(kv.k_rope, "k_rope")})
              check_apart(pages, name, new_k, "k"), check_apart(pages, name, new_v, "v");
            p.use(stream, [&](const AttentionPlan& plan, Stream on) { plan.write_kv(kv, new_k, new_v, on); });
          },
          nb::arg("k_cache"), nb::arg("v_cache").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(), nb::arg("k_rope").none(),
          nb::arg("k_rope_scale").none(), nb::arg("k"), nb::arg("v").none(), nb::arg("stream") = 0)
      .def(
          "run",
          [](PyPlan& p, const Array& q, const Array& k_cache, const OptionalArray& v_cache, const OptionalArray& k_scale,
             const OptionalArray& v_scale, const OptionalArray& k_rope, const OptionalArray& k_rope_scale, nb::handle out, nb::handle lse,
             const OptionalArray& q_scale, const OptionalArray& sinks, const OptionalArray& alibi_slopes, const OptionalArray& head_scales,
             const OptionalArray& relative_bias, const NamedArrays& score_tensors, uintptr_t stream) {
            const std::vector<NamedTensor> named = named_views(score_tensors);
            const AttentionInputs in{.q = view_of(q, "q", p.spec.q_dtype),
                                     .q_scale = view_of(q_scale, "q_scale", DType::f32),
                                     .kv = kv_of(p, k_cache, {v_cache, k_scale, v_scale, k_rope, k_rope_scale}),
                                     .sinks = view_of(sinks, "sinks", DType::f32),
                                     .alibi_slopes = view_of(alibi_slopes, "alibi_slopes", DType::f32),
                                     .head_scales = view_of(head_scales, "head_scales", DType::f32),
                                     .relative_bias = view_of(relative_bias, "relative_bias", DType::f32),
                                     .score_tensors = named};
            const Array out_array = written(out, "out");
            const OptionalArray lse_array = lse.is_none() ? std::nullopt : OptionalArray(written(lse, "lse"));
            const AttentionOutputs outputs{.out = written_view(out_array, "out", p.spec.out_dtypes().front()),
                                           .lse = lse_array ? written_view(*lse_array, "lse", DType::f32) : TensorView{}};
            check_apart(outputs.lse, "lse", outputs.out, "out");
            for (const auto& [to, name] : {std::pair(&outputs.out, "out"), std::pair(&outputs.lse, "lse")})
              check_apart(*to, name, in.q, "q"), check_apart(*to, name, in.kv.k, "k"), check_apart(*to, name, in.kv.v, "v"),
                  check_apart(*to, name, in.kv.k_rope, "k_rope");
            p.use(stream, [&](const AttentionPlan& plan, Stream on) { plan.run(in, outputs, on); });
          },
          nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
          nb::arg("k_rope").none(), nb::arg("k_rope_scale").none(), nb::arg("out"), nb::arg("lse").none(), nb::arg("q_scale") = nb::none(),
          nb::arg("sinks") = nb::none(), nb::arg("alibi_slopes") = nb::none(), nb::arg("head_scales") = nb::none(),
          nb::arg("relative_bias") = nb::none(), nb::arg("score_tensors") = NamedArrays(), nb::arg("stream") = 0)
      .def(
          "prepare",
          [](nb::handle_t<PyPlan> self, const Array& q, const Array& k_cache, const OptionalArray& v_cache, nb::handle out) {
            const auto& p = nb::cast<const PyPlan&>(self);
            PyPreparedRun made{.plan = nb::borrow(self)};
            made.in.q = view_of(q, "q", p.spec.q_dtype);
            const OptionalArray none;
            made.in.kv = kv_of(p, k_cache, {v_cache, none, none, none, none});
            made.out.out = written_view(written(out, "out"), "out", p.spec.out_dtypes().front());
            return made;
          },
          nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache").none(), nb::arg("out"),
          "run() for arrays elsewhere, of the same shapes and strides.")
      .def(
          "keep_for_capture",
          [](const PyPlan& p, uintptr_t stream) {
            const nb::gil_scoped_release release;
            if (p.state->order) p.state->order->synchronize();  // a replay may begin on any stream
            keep_for_capture(p.device.device, stream_of(stream), p.state);
          },
          nb::arg("stream"), "Makes the graph that the stream is captured into keep the plan for as long as it lives.")
      .def_prop_ro(
          "num_graphs", [](const PyPlan& p) { return p.state.use_count() - 1; },
          "How often graphs keep the plan; those that are gone count until release_captured().")
      .def("__str__", [](const PyPlan& p) { return p.state->plan->str(); });
}

// Memory of a device, shared with every array that was made of it.
struct PyCache {
  DeviceInfo device;
  std::shared_ptr<DeviceStream> stream;  // null on a CPU
  std::shared_ptr<KvAllocation> memory;
  std::shared_ptr<BlockCopier> copier;  // made when it is first needed
};

// Made when a GPU's is first needed, under Python's lock, and never destroyed: the driver may be gone before static objects are.
const PartialMerger& merger_of(int gpu) {
  static auto& mergers = *new std::map<int, std::unique_ptr<PartialMerger>>;
  std::unique_ptr<PartialMerger>& merger = mergers[gpu];
  if (!merger) merger = make_partial_merger(describe_device("cuda:" + std::to_string(gpu)));
  return *merger;
}

}  // namespace

void bind_plan(nb::module_& m) {
  bind_workspace(m);
  bind_plan_class(m);
  nb::class_<PyPreparedRun>(m, "PreparedRun")
      .def(
          "__call__",
          [](const PyPreparedRun& r, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t stream) {
            AttentionInputs in = r.in;
            AttentionOutputs outputs = r.out;
            in.q.data = address(q), in.kv.k.data = address(k), in.kv.v.data = address(v), outputs.out.data = address(out);
            nb::cast<const PyPlan&>(r.plan).use(stream, [&](const AttentionPlan& plan, Stream on) { plan.run(in, outputs, on); });
          },
          nb::arg("q"), nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("out"), nb::arg("stream"),
          "Addresses of arrays that the caller keeps alive; out has memory of its own.")
      .def(
          "update",
          [](const PyPreparedRun& r, int num_reqs, int query_len, int seq_len, uintptr_t stream) {
            auto& plan = nb::cast<PyPlan&>(r.plan);
            EqualLengths lengths(num_reqs, query_len, seq_len);
            plan.use(stream, [&](AttentionPlan& of_all, Stream on) { of_all.update(lengths.batch(), on); });
            plan.hold({});
            plan.state->equal = std::move(lengths);  // the vectors keep their memory, to which the plan points
          },
          nb::arg("num_reqs"), nb::arg("query_len"), nb::arg("seq_len"), nb::arg("stream"),
          "Updates the plan for ragged requests that are alike, with lengths on the host.")
      .def(
          "with_keys",
          [](const PyPreparedRun& r, int64_t num_keys, std::pair<int64_t, int64_t> k_strides, std::pair<int64_t, int64_t> v_strides) {
            PyPreparedRun made = r;
            for (const auto& [rows, strides] : {std::pair(&made.in.kv.k, k_strides), std::pair(&made.in.kv.v, v_strides)})
              rows->sizes[0] = num_keys, rows->strides[0] = strides.first, rows->strides[1] = strides.second;
            return made;
          },
          nb::arg("num_keys"), nb::arg("k_strides"), nb::arg("v_strides"),
          "The same with other rows of keys and values [num_keys, heads, d]: how many, and the strides of a token and a head, in "
          "elements.");
  nb::class_<PyCache>(m, "KvCache")
      .def(
          "__init__",
          [](PyCache* self, const AttentionSpec& spec, int num_layers, int64_t num_blocks, const std::string& order,
             const DeviceInfo& device) {
            PyCache made{.device = device};
            {
              const nb::gil_scoped_release release;
              if (device.device.type != DeviceType::cpu) made.stream = open_stream(device);
              made.memory = std::make_shared<KvAllocation>(spec, num_layers, num_blocks, order, made.stream.get());
              if (made.stream) made.stream->synchronize();
            }
            new (self) PyCache(std::move(made));
          },
          nb::arg("spec"), nb::arg("num_layers"), nb::arg("num_blocks"), nb::arg("order"), nb::arg("device"))
      .def_prop_ro("nbytes", [](const PyCache& c) { return c.memory->bytes(); })
      .def_prop_ro("num_layers", [](const PyCache& c) { return c.memory->num_layers(); })
      .def_prop_ro("num_blocks", [](const PyCache& c) { return c.memory->num_blocks(); })
      .def(
          "layer",
          [](nb::handle_t<PyCache> self, int index) {
            const KvCache kv = nb::cast<const PyCache&>(self).memory->layer(index);
            const auto given = [&](const TensorView& t) { return t.empty() ? nb::none() : nb::cast(array_of(t, self)); };
            return nb::make_tuple(given(kv.k), given(kv.v), given(kv.k_scale), given(kv.v_scale), given(kv.k_rope));
          },
          nb::arg("index"))
      .def(
          "copy_blocks",
          [](PyCache& c, const std::vector<std::pair<int32_t, int32_t>>& copies, uintptr_t stream) {
            std::vector<BlockCopy> list;
            for (const auto& [from, to] : copies) list.push_back({from, to});
            if (!c.copier) c.copier = make_block_copier(c.device, c.stream ? ParallelFor{} : shared_threads(0));
            const nb::gil_scoped_release release;
            for (int layer = 0; layer < c.memory->num_layers(); ++layer)
              c.copier->copy(c.memory->spec(), c.memory->layer(layer), list, stream_of(stream));
          },
          nb::arg("copies"), nb::arg("stream") = 0);
  m.def(
      "capture_of",
      [](uintptr_t stream) {
        return capture_of({DeviceType::cuda, 0}, stream_of(stream));
      },
      nb::arg("stream"), "The number of the capture that a stream of any GPU is part of; 0: none.");
  m.def(
      "release_captured",
      [] {
        const nb::gil_scoped_release release;
        release_captured();
      },
      "Frees what graphs that are gone have kept.");
  m.def(
      "merge_partial_results",
      [](const std::vector<Array>& outs, const std::vector<Array>& lses, nb::handle out, nb::handle lse, int num_threads,
         uintptr_t stream) {
        if (outs.size() != lses.size())
          throw Error("merge.parts", "expected as many outputs as log-sum-exps, got " + std::to_string(outs.size()) + " and " +
                                         std::to_string(lses.size()));
        std::vector<PartialResult> parts;
        const DType type = DType::bf16;  // what uint16 is
        for (size_t i = 0; i < outs.size(); ++i) parts.push_back({view_of(outs[i], "out", type), view_of(lses[i], "lse", DType::f32)});
        const Array out_array = written(out, "out");
        const OptionalArray lse_array = lse.is_none() ? std::nullopt : OptionalArray(written(lse, "lse"));
        const TensorView to = written_view(out_array, "out", type);
        const TensorView to_lse = lse_array ? written_view(*lse_array, "lse", DType::f32) : TensorView{};
        if (to.device.type == DeviceType::cuda) {
          const PartialMerger& merger = merger_of(to.device.index);
          const nb::gil_scoped_release release;
          return merger.merge(parts, to, to_lse, stream_of(stream));
        }
        const ParallelFor threads = shared_threads(num_threads);
        const nb::gil_scoped_release release;
        merge_partial_results(parts, to, to_lse, threads);
      },
      nb::arg("outs"), nb::arg("lses"), nb::arg("out"), nb::arg("lse").none(), nb::arg("num_threads") = 1, nb::arg("stream") = 0);
}

}  // namespace imbrex::python
