// imbrex._core: the C++ interface for Python, one to one. What is shaped for Python is in python/imbrex/*.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "imbrex/imbrex.hpp"
#include "one_of.h"
#include "plan.h"
#include "selection.h"
#include "short_conv.h"
#include "tensors.h"

namespace imbrex::python {
namespace {

void bind_error(nb::module_& m) {
  static PyObject* error_class = nullptr;
  error_class = PyErr_NewExceptionWithDoc(
      "imbrex.Error", "A broken rule or a failed machine. `code` is stable across releases and listed in docs/errors.md.",
      PyExc_RuntimeError, nullptr);
  m.attr("Error") = nb::borrow(error_class);
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& error) {
      nb::object instance = nb::borrow(error_class)(error.what());
      instance.attr("code") = error.code();
      PyErr_SetObject(error_class, instance.ptr());
    }
  });
}

void bind_spec(nb::module_& m) {
  nb::class_<AttentionSpec>(
      m, "AttentionSpec",
      "What one softmax-attention layer computes. Fixed for the life of a model.\n\n"
      "A query at index i of a request with q_len queries and seq_len keys has position seq_len - q_len + i. A window of W\n"
      "keys, the query's own included, is window_left = W - 1; -1 is no limit. block_size 0: ragged keys without a cache.")
      .def(
          "__init__",
          [](AttentionSpec* self, int num_q_heads, int num_kv_heads, int head_dim_qk, std::optional<int> head_dim_v,
             const std::string& kind, const std::string& q_dtype, const std::optional<std::string>& kv_dtype, const std::string& kv_format,
             int block_size, bool causal, int window_left, int window_right, int chunk, bool custom_mask, float scale, float soft_cap,
             bool head_scales, bool alibi, bool sinks, int relative_buckets, int relative_max_distance, bool relative_bidirectional) {
            AttentionSpec spec;
            spec.kind =
                one_of(kind, {AttentionKind::decoder, AttentionKind::encoder, AttentionKind::encoder_only, AttentionKind::encoder_decoder},
                       "kind");
            spec.num_q_heads = num_q_heads, spec.num_kv_heads = num_kv_heads;
            spec.head_dim_qk = head_dim_qk, spec.head_dim_v = head_dim_v.value_or(head_dim_qk);
            spec.q_dtype = parse_dtype(q_dtype), spec.kv_dtype = kv_dtype ? parse_dtype(*kv_dtype) : spec.q_dtype;
            spec.kv_format = one_of(kv_format, {KvFormat::strided, KvFormat::amx_packed}, "kv_format");
            spec.block_size = block_size;
            spec.mask = {.causal = causal, .window_left = window_left, .window_right = window_right, .chunk = chunk, .custom = custom_mask};
            spec.score = {.scale = scale,
                          .head_scales = head_scales,
                          .soft_cap = soft_cap,
                          .alibi = alibi,
                          .relative_buckets = relative_buckets,
                          .relative_max_distance = relative_max_distance,
                          .relative_bidirectional = relative_bidirectional,
                          .sinks = sinks};
            spec.validate();
            new (self) AttentionSpec(spec);
          },
          nb::arg("num_q_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim_qk"), nb::arg("head_dim_v") = nb::none(), nb::kw_only(),
          nb::arg("kind") = "decoder", nb::arg("q_dtype") = "bf16", nb::arg("kv_dtype") = nb::none(), nb::arg("kv_format") = "strided",
          nb::arg("block_size") = 16, nb::arg("causal") = true, nb::arg("window_left") = -1, nb::arg("window_right") = -1,
          nb::arg("chunk") = 0, nb::arg("custom_mask") = false, nb::arg("scale") = 0.f, nb::arg("soft_cap") = 0.f,
          nb::arg("head_scales") = false, nb::arg("alibi") = false, nb::arg("sinks") = false, nb::arg("relative_buckets") = 0,
          nb::arg("relative_max_distance") = 0, nb::arg("relative_bidirectional") = false)
      .def_ro("num_q_heads", &AttentionSpec::num_q_heads)
      .def_ro("num_kv_heads", &AttentionSpec::num_kv_heads)
      .def_ro("head_dim_qk", &AttentionSpec::head_dim_qk)
      .def_ro("head_dim_v", &AttentionSpec::head_dim_v)
      .def_ro("block_size", &AttentionSpec::block_size)
      .def_prop_ro("kind", [](const AttentionSpec& s) { return to_string(s.kind); })
      .def_prop_ro("q_dtype", [](const AttentionSpec& s) { return to_string(s.q_dtype); })
      .def_prop_ro("kv_dtype", [](const AttentionSpec& s) { return to_string(s.kv_dtype); })
      .def_prop_ro("kv_format", [](const AttentionSpec& s) { return to_string(s.kv_format); })
      .def_prop_ro(
          "out_dtypes",
          [](const AttentionSpec& s) {
            std::vector<std::string> names;
            for (const DType t : s.out_dtypes()) names.emplace_back(to_string(t));
            return names;
          },
          "Types that an output may have, the usual one first.")
      .def_prop_ro("scale", &AttentionSpec::scale, "What multiplies q.k.")
      .def_prop_ro("kv_bytes_per_token", &AttentionSpec::kv_bytes_per_token)
      .def(
          "__eq__", [](const AttentionSpec& a, const AttentionSpec& b) { return a == b; }, nb::is_operator())
      .def("__repr__", [](const AttentionSpec& s) { return "<AttentionSpec " + s.str() + ">"; })
      .def("__str__", &AttentionSpec::str);
}

void bind_device(nb::module_& m) {
  nb::class_<DeviceInfo>(m, "Device", "A CPU or GPU: \"cpu\", \"cuda:0\", or one that is only described, \"h200\", \"avx512,32 threads\".")
      .def(
          "__init__", [](DeviceInfo* self, const std::string& text) { new (self) DeviceInfo(describe_device(text)); }, nb::arg("text"))
      .def_ro("name", &DeviceInfo::name)
      .def_ro("present", &DeviceInfo::present, "False: only described; selection answers for it, plans do not exist.")
      .def_ro("sm", &DeviceInfo::sm, "90 for compute capability 9.0; 0 for a CPU.")
      .def_ro("num_workers", &DeviceInfo::num_workers, "Threads, or multiprocessors.")
      .def_prop_ro("type", [](const DeviceInfo& d) { return to_string(d.device.type); })
      .def_prop_ro("index", [](const DeviceInfo& d) { return d.device.index; })
      .def("__str__", &DeviceInfo::str)
      .def("__repr__", [](const DeviceInfo& d) { return "<Device " + d.str() + ">"; });
  m.def(
      "num_cuda_devices", [] { return probe_cuda().size(); }, "GPUs that the NVIDIA driver has; 0 without one.");
}

void bind_selection(nb::module_& m) {
  nb::class_<Reason>(m, "Reason", "One thing that keeps a backend from running a spec.")
      .def_ro("code", &Reason::code)
      .def_ro("wanted", &Reason::wanted)
      .def_ro("actual", &Reason::actual)
      .def("__str__", &Reason::str)
      .def("__repr__", [](const Reason& r) { return "<Reason " + r.str() + ">"; });
  bind_selection_of<AttentionFamily>(m, "Selection");
  m.def(
      "backends",
      [] {
        std::vector<std::pair<std::string, std::string>> all;
        for (const Backend* b : backends()) all.emplace_back(b->name(), b->description());
        return all;
      },
      "Name and description of every backend, in order of preference.");
}

void bind_pool(nb::module_& m) {
  nb::class_<BlockPool>(m, "BlockPool",
                        "Who owns which block of a KV cache: reference counts, prefix hashes and sharing, eviction. Not thread-safe.")
      .def(nb::init<int>(), nb::arg("num_blocks"))
      .def_prop_ro("num_blocks", &BlockPool::num_blocks)
      .def_prop_ro("num_free", &BlockPool::num_free, "Blocks without references, cached ones included.")
      .def_prop_ro("num_cached", &BlockPool::num_cached)
      .def("ref_count", &BlockPool::ref_count, nb::arg("block"))
      .def(
          "allocate",
          [](BlockPool& pool, int count) {
            std::vector<int32_t> blocks;
            return pool.allocate(count, blocks) ? std::optional(blocks) : std::nullopt;
          },
          nb::arg("count"), "Blocks with one reference each; None, and nothing changed, when there are not so many.")
      .def(
          "retain", [](BlockPool& pool, const std::vector<int32_t>& blocks) { pool.retain(blocks); }, nb::arg("blocks"))
      .def(
          "release", [](BlockPool& pool, const std::vector<int32_t>& blocks) { pool.release(blocks); }, nb::arg("blocks"))
      .def(
          "lookup",
          [](BlockPool& pool, const std::vector<BlockHash>& hashes) {
            std::vector<int32_t> blocks;
            pool.lookup(hashes, blocks);
            return blocks;
          },
          nb::arg("hashes"), "Blocks of the longest cached prefix, each with one more reference.")
      .def("publish", &BlockPool::publish, nb::arg("block"), nb::arg("hash"))
      .def("make_writable", &BlockPool::make_writable, nb::arg("block"),
           "The block, or a new one for a copy of it; None when no block is free.")
      .def("clear_cache", &BlockPool::clear_cache);
  m.def(
      "hash_block",
      [](BlockHash parent, const std::vector<uint64_t>& token_ids, const std::optional<nb::bytes>& key) {
        if (!key) return hash_block(parent, token_ids);
        HashKey words;
        if (key->size() != sizeof words)
          throw Error("python.hash_key",
                      "expected a key of " + std::to_string(sizeof words) + " bytes, got " + std::to_string(key->size()));
        std::memcpy(&words, key->c_str(), sizeof words);
        return hash_block(words, parent, token_ids);
      },
      nb::arg("parent"), nb::arg("token_ids"), nb::kw_only(), nb::arg("key") = nb::none(),
      "Hash of a full block of tokens and of all before it; parent 0 for the first. Of this process alone, or of all that have the key: 16 "
      "random bytes, which no tenant knows.");
}

}  // namespace

NB_MODULE(_core, m) {
  bind_error(m);
  bind_spec(m);
  bind_device(m);
  bind_selection(m);
  bind_pool(m);
  bind_plan(m);
  bind_short_conv(m);
}

}  // namespace imbrex::python
