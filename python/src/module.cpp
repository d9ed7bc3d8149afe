// imbrex._core: the C++ interface for Python, one to one. What is shaped for Python is in python/imbrex/*.py.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>

#include "batches.h"
#include "expressions.h"
#include "imbrex/imbrex.hpp"
#include "mla.h"
#include "one_of.h"
#include "plan.h"
#include "recurrent.h"
#include "selection.h"
#include "short_conv.h"
#include "spec.h"
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
        for (const BackendOf<AttentionFamily>* b : backends()) all.emplace_back(b->name(), b->description());
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
  bind_mla(m);
  bind_recurrent(m);
  bind_batches(m);
  bind_expressions(m);
}

}  // namespace imbrex::python
