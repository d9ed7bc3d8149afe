// See batches.h.
#include "batches.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "imbrex/imbrex.hpp"
#include "tensors.h"

namespace imbrex::python {
namespace {

// A batch made of another, with the arrays that it has views of.
struct PyDerivedBatch {
  DerivedBatch derived;
  std::vector<Array> held;
};

// The arrays of a batch, by the names that plans know them by.
class GivenBatch {
 public:
  explicit GivenBatch(const nb::dict& arrays) {
    for (const auto& [key, value] : arrays) {
      if (value.is_none()) continue;
      const auto name = nb::cast<std::string>(key);
      if (name == "pad_slot") {
        batch.pad_slot = nb::cast<int32_t>(value);
        continue;
      }
      held_.push_back(nb::cast<Array>(value));
      const Array& array = held_.back();
      if (const auto list = lists_.find(name); list != lists_.end()) {
        batch.*list->second = host_numbers(array, list->first.c_str());
      } else if (const auto tensor = tensors_.find(name); tensor != tensors_.end()) {
        const DType type = name == "slot_mapping" ? DType::i64 : name.ends_with("_mask") ? DType::u8 : DType::i32;
        batch.*tensor->second = view_of(array, tensor->first.c_str(), type);
      } else {
        throw nb::type_error(("expected an array of a batch, got " + name).c_str());
      }
    }
  }
  PyDerivedBatch with(DerivedBatch derived) const { return {std::move(derived), held_}; }

  // What a batch has, but for what it lacks. `owner` keeps the memory.
  static nb::dict arrays_of(const Batch& of, nb::handle owner) {
    nb::dict arrays;
    for (const auto& [name, member] : lists_) {
      const std::span<const int32_t> list = of.*member;
      if (list.empty() && name != "query_start_loc" && name != "seq_lens") continue;
      arrays[name.c_str()] =
          nb::cast(array_of(TensorView::contiguous(const_cast<int32_t*>(list.data()), DType::i32, {int64_t(list.size())}), owner));
    }
    for (const auto& [name, member] : tensors_)
      if (!(of.*member).empty()) arrays[name.c_str()] = nb::cast(array_of(of.*member, owner));
    if (of.pad_slot) arrays["pad_slot"] = *of.pad_slot;
    return arrays;
  }

  Batch batch;

 private:
  static inline const std::map<std::string, std::span<const int32_t> Batch::*> lists_ = {
      {"query_start_loc", &Batch::query_start_loc}, {"seq_lens", &Batch::seq_lens},           {"positions", &Batch::positions},
      {"state_slots", &Batch::state_slots},         {"num_drafts", &Batch::num_drafts},       {"accepted_drafts", &Batch::accepted_drafts},
      {"source_slots", &Batch::source_slots},       {"draft_parents", &Batch::draft_parents}, {"mask_indptr", &Batch::mask_indptr}};
  static inline const std::map<std::string, TensorView Batch::*> tensors_ = {
      {"block_table", &Batch::block_table},           {"kv_indptr", &Batch::kv_indptr},       {"kv_indices", &Batch::kv_indices},
      {"kv_last_page_len", &Batch::kv_last_page_len}, {"kv_start_loc", &Batch::kv_start_loc}, {"slot_mapping", &Batch::slot_mapping},
      {"custom_mask", &Batch::custom_mask},           {"packed_mask", &Batch::packed_mask}};
  std::vector<Array> held_;
};

PartKeys keys_of(const AttentionSpec& spec) { return part_keys(spec); }
PartKeys keys_of(const MlaSpec& spec) { return part_keys(spec.latent_spec()); }
PartKeys keys_of(const ShortConvSpec&) { return PartKeys::up_to_queries; }
PartKeys keys_of(const RecurrentSpec&) { return PartKeys::up_to_queries; }

template <class Spec>
void bind_parts_of(nb::module_& m) {
  m.def(
      "split_batch",
      [](const Spec& spec, const nb::dict& arrays, const std::vector<int32_t>& cuts) {
        const GivenBatch given(arrays);
        std::vector<PyDerivedBatch> parts;
        for (DerivedBatch& part : split_batch(given.batch, keys_of(spec), cuts)) parts.push_back(given.with(std::move(part)));
        return parts;
      },
      nb::arg("spec"), nb::arg("arrays"), nb::arg("cuts"));
  m.def(
      "keep_tokens",
      [](const Spec& spec, const nb::dict& arrays, const Array& tokens) {
        const GivenBatch given(arrays);
        return given.with(keep_tokens(given.batch, keys_of(spec), host_numbers(tokens, "tokens")));
      },
      nb::arg("spec"), nb::arg("arrays"), nb::arg("tokens"));
}

using PyPhases = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>;
PyPhases phases_of(const PhaseCounts& c) { return {c.decodes, c.extends, c.prefills, c.decode_tokens, c.extend_tokens, c.prefill_tokens}; }

std::span<const int32_t> numbers_or_none(const OptionalArray& array, const char* name) {
  return array ? host_numbers(*array, name) : std::span<const int32_t>();
}

}  // namespace

void bind_batches(nb::module_& m) {
  nb::class_<PyDerivedBatch>(m, "DerivedBatch")
      .def_prop_ro("arrays",
                   [](nb::handle_t<PyDerivedBatch> self) {
                     return GivenBatch::arrays_of(nb::cast<const PyDerivedBatch&>(self).derived.batch, self);
                   })
      .def_prop_ro("first_request", [](const PyDerivedBatch& b) { return b.derived.first_request; })
      .def_prop_ro("first_token", [](const PyDerivedBatch& b) { return b.derived.first_token; })
      .def_prop_ro("num_tokens", [](const PyDerivedBatch& b) { return b.derived.batch.num_tokens(); });
  bind_parts_of<AttentionSpec>(m);
  bind_parts_of<MlaSpec>(m);
  bind_parts_of<ShortConvSpec>(m);
  bind_parts_of<RecurrentSpec>(m);
  m.def(
      "reorder_batch",
      [](const Array& query_lens, const Array& context_lens, const OptionalArray& prompt_lens, int decode_threshold) {
        BatchOrder made = reorder_batch(host_numbers(query_lens, "query_lens"), host_numbers(context_lens, "context_lens"),
                                        numbers_or_none(prompt_lens, "prompt_lens"), decode_threshold);
        return std::pair(std::move(made.order), std::move(made.swaps));
      },
      nb::arg("query_lens"), nb::arg("context_lens"), nb::arg("prompt_lens").none(), nb::arg("decode_threshold"));
  m.def(
      "split_decodes_and_prefills",
      [](const Array& query_start_loc, int decode_threshold, int num_tokens, bool uniform, const OptionalArray& is_prefilling) {
        PhaseOptions options{.decode_threshold = decode_threshold, .num_tokens = num_tokens, .uniform = uniform};
        options.short_extends_are_decodes = !is_prefilling;
        if (is_prefilling) {
          const TensorView flags = view_of(*is_prefilling, "is_prefilling", DType::u8);
          if (flags.dtype != DType::u8 || flags.rank != 1 || flags.device.type != DeviceType::cpu ||
              (flags.size(0) > 1 && flags.stride(0) != 1))
            throw Error("python.tensor", "is_prefilling: expected contiguous bool or uint8 [n] on the host, got " + flags.str());
          options.is_prefilling = {flags.as<const uint8_t>(), size_t(flags.size(0))};
        }
        return phases_of(split_decodes_and_prefills(host_numbers(query_start_loc, "query_start_loc"), options));
      },
      nb::arg("query_start_loc"), nb::arg("decode_threshold"), nb::arg("num_tokens"), nb::arg("uniform"), nb::arg("is_prefilling").none());
  m.def(
      "split_decodes_prefills_and_extends",
      [](const Array& query_start_loc, const Array& seq_lens, int decode_threshold, int num_tokens) {
        return phases_of(split_decodes_prefills_and_extends(host_numbers(query_start_loc, "query_start_loc"),
                                                            host_numbers(seq_lens, "seq_lens"),
                                                            {.decode_threshold = decode_threshold, .num_tokens = num_tokens}));
      },
      nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("decode_threshold"), nb::arg("num_tokens"));
  m.def(
      "split_prefill_chunks",
      [](const Array& seq_lens, int64_t workspace, int32_t first_request) {
        return split_prefill_chunks(host_numbers(seq_lens, "seq_lens"), workspace, first_request);
      },
      nb::arg("seq_lens"), nb::arg("workspace"), nb::arg("first_request"));
}

}  // namespace imbrex::python
