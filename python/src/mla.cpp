// See mla.h. Arrays are looked at with Python's lock held, and the work is done without it.
#include "mla.h"

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/kv_codec.h"
#include "imbrex/mla.h"
#include "mla/spec_fields.h"
#include "plan.h"
#include "selection.h"
#include "spec_fields.h"
#include "tensors.h"
#include "threads.h"

namespace imbrex::python {
namespace {

struct PyMlaPlan {
  MlaSpec spec;
  std::unique_ptr<MlaPlan> plan;
  std::vector<Array> held;  // what tensors of the last update show
  void hold(std::initializer_list<const OptionalArray*> arrays) {
    held.clear();
    for (const OptionalArray* a : arrays)
      if (*a) held.push_back(**a);
  }
};

void set_mla_shape(MlaSpec& spec, int num_heads) { spec.num_heads = num_heads; }

void bind_mla_spec(nb::module_& m) {
  auto spec = nb::class_<MlaSpec>(
      m, "MlaSpec",
      "Multi-head latent attention (DeepSeek, Kimi K2): a token's latent of kv_lora_rank elements, and a key part of qk_rope_dim with a\n"
      "position, are cached; keys and values of all heads follow from them by the weight of kv_b_proj.");
  bind_constructor(spec, set_mla_shape, nb::arg("num_heads"), nb::kw_only());
  spec.def_prop_ro("latent_dim", &MlaSpec::latent_dim, "Elements of a cached row: the latent and the part with a position.")
      .def_prop_ro("q_dim", &MlaSpec::q_dim)
      .def_prop_ro("out_dim", &MlaSpec::out_dim)
      .def_prop_ro("scale", &MlaSpec::logit_scale, "What multiplies q.k.")
      .def_prop_ro("latent_spec", &MlaSpec::latent_spec, "Attention in latent space, of whose spec KvCache makes the cache.")
      .def_prop_ro("kv_bytes_per_token", &MlaSpec::kv_bytes_per_token);
  bind_fields(spec, "MlaSpec");
}

// What a cache of latents has beside k.
struct LatentParts {
  const OptionalArray &k_scale, &k_rope, &k_rope_scale;
};

KvCache kv_of(const PyMlaPlan& p, const Array& k, const LatentParts& rest) {
  const AttentionSpec latent = p.spec.latent_spec();
  return {.k = view_of(k, "k_cache", codec_of(latent).layout(latent, KvPart::k)->dtype),
          .v = {},
          .k_scale = view_of(rest.k_scale, "k_scale", DType::f32),
          .v_scale = {},
          .k_rope = view_of(rest.k_rope, "k_rope", p.spec.kv_dtype),
          .k_rope_scale = view_of(rest.k_rope_scale, "k_rope_scale", DType::f32)};
}

}  // namespace

void bind_mla(nb::module_& m) {
  bind_mla_spec(m);
  bind_selection_of<MlaFamily>(m, "MlaSelection");
  nb::class_<PyMlaPlan>(m, "MlaPlan")
      .def(
          "__init__",
          [](PyMlaPlan* self, const MlaSpec& spec, const DeviceInfo& device, const std::string& backend, int max_num_reqs,
             int max_num_tokens, int max_seq_len, int max_query_len, int min_query_len, int num_threads, bool validate, bool on_device,
             std::optional<std::string> out_dtype, const PyWorkspace* workspace) {
            const auto chosen = select<MlaFamily>(spec, device, {.forced = backend});
            if (chosen.backend == nullptr) throw Error("backend.unsupported", "nothing runs " + spec.str() + "\n" + chosen.str());
            PlanOptions options;
            options.limits = {max_num_reqs, max_num_tokens, max_seq_len, max_query_len, min_query_len};
            options.validate = validate, options.on_device = on_device;
            if (out_dtype) options.out_dtype = parse_dtype(*out_dtype);
            if (workspace != nullptr) options.workspace = workspace->shared;
            if (device.device.type == DeviceType::cpu) options.threads = shared_threads(num_threads);
            PyMlaPlan made{spec, {}, {}};
            {
              const nb::gil_scoped_release release;
              made.plan = chosen.backend->plan(spec, device, options);
            }
            new (self) PyMlaPlan(std::move(made));
          },
          nb::arg("spec"), nb::arg("device"), nb::kw_only(), nb::arg("backend") = "", nb::arg("max_num_reqs") = 256,
          nb::arg("max_num_tokens") = 8192, nb::arg("max_seq_len") = 131072, nb::arg("max_query_len") = 0, nb::arg("min_query_len") = 0,
          nb::arg("num_threads") = 0, nb::arg("validate") = true, nb::arg("on_device") = false, nb::arg("out_dtype") = nb::none(),
          nb::arg("workspace").none() = nb::none())
      .def_ro("spec", &PyMlaPlan::spec)
      .def(
          "update",
          [](PyMlaPlan& p, const Array& query_start_loc, const Array& seq_lens, const OptionalArray& block_table,
             const OptionalArray& kv_indptr, const OptionalArray& kv_indices, const OptionalArray& slot_mapping,
             const OptionalArray& custom_mask, const OptionalArray& positions, const OptionalArray& draft_parents,
             const OptionalArray& num_drafts, const OptionalArray& packed_mask, const OptionalArray& mask_indptr, uintptr_t stream) {
            Batch batch;
            batch.query_start_loc = host_numbers(query_start_loc, "query_start_loc");
            batch.seq_lens = host_numbers(seq_lens, "seq_lens");
            batch.block_table = view_of(block_table, "block_table", DType::i32);
            batch.kv_indptr = view_of(kv_indptr, "kv_indptr", DType::i32);
            batch.kv_indices = view_of(kv_indices, "kv_indices", DType::i32);
            batch.slot_mapping = view_of(slot_mapping, "slot_mapping", DType::i64);
            batch.custom_mask = view_of(custom_mask, "custom_mask", DType::u8);
            batch.packed_mask = view_of(packed_mask, "packed_mask", DType::u8);
            if (positions) batch.positions = host_numbers(*positions, "positions");
            if (draft_parents) batch.draft_parents = host_numbers(*draft_parents, "draft_parents");
            if (num_drafts) batch.num_drafts = host_numbers(*num_drafts, "num_drafts");
            if (mask_indptr) batch.mask_indptr = host_numbers(*mask_indptr, "mask_indptr");
            {
              const nb::gil_scoped_release release;
              p.plan->update(batch, stream_of(stream));
            }
            p.hold({&block_table, &kv_indptr, &kv_indices, &slot_mapping, &custom_mask, &packed_mask});
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("block_table") = nb::none(), nb::arg("kv_indptr") = nb::none(),
          nb::arg("kv_indices") = nb::none(), nb::arg("slot_mapping") = nb::none(), nb::arg("custom_mask") = nb::none(),
          nb::arg("positions") = nb::none(), nb::arg("draft_parents") = nb::none(), nb::arg("num_drafts") = nb::none(),
          nb::arg("packed_mask") = nb::none(), nb::arg("mask_indptr") = nb::none(), nb::arg("stream") = 0)
      .def(
          "update_on_device",
          [](PyMlaPlan& p, const Array& query_start_loc, const Array& seq_lens, int max_num_tokens, const OptionalArray& block_table,
             const OptionalArray& kv_indptr, const OptionalArray& kv_indices, const OptionalArray& slot_mapping,
             const OptionalArray& custom_mask, const OptionalArray& positions, const OptionalArray& draft_parents,
             const OptionalArray& num_drafts, const OptionalArray& packed_mask, uintptr_t stream) {
            DeviceBatch batch;
            batch.query_start_loc = view_of(query_start_loc, "query_start_loc", DType::i32);
            batch.seq_lens = view_of(seq_lens, "seq_lens", DType::i32);
            batch.block_table = view_of(block_table, "block_table", DType::i32);
            batch.kv_indptr = view_of(kv_indptr, "kv_indptr", DType::i32);
            batch.kv_indices = view_of(kv_indices, "kv_indices", DType::i32);
            batch.slot_mapping = view_of(slot_mapping, "slot_mapping", DType::i64);
            batch.custom_mask = view_of(custom_mask, "custom_mask", DType::u8);
            batch.positions = view_of(positions, "positions", DType::i32);
            batch.draft_parents = view_of(draft_parents, "draft_parents", DType::i32);
            batch.num_drafts = view_of(num_drafts, "num_drafts", DType::i32);
            batch.packed_mask = view_of(packed_mask, "packed_mask", DType::u8);
            batch.max_num_tokens = max_num_tokens;
            {
              const nb::gil_scoped_release release;
              p.plan->update_on_device(batch, stream_of(stream));
            }
            p.hold({&block_table, &kv_indptr, &kv_indices, &slot_mapping, &custom_mask, &positions, &draft_parents, &num_drafts,
                    &packed_mask});
          },
          nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("max_num_tokens") = 0, nb::arg("block_table") = nb::none(),
          nb::arg("kv_indptr") = nb::none(), nb::arg("kv_indices") = nb::none(), nb::arg("slot_mapping") = nb::none(),
          nb::arg("custom_mask") = nb::none(), nb::arg("positions") = nb::none(), nb::arg("draft_parents") = nb::none(),
          nb::arg("num_drafts") = nb::none(), nb::arg("packed_mask") = nb::none(), nb::arg("stream") = 0)
      .def(
          "device_problems",
          [](PyMlaPlan& p, uintptr_t stream) {
            const nb::gil_scoped_release release;
            return p.plan->device_problems(stream_of(stream));
          },
          nb::arg("stream") = 0)
      .def(
          "write_kv",
          [](PyMlaPlan& p, nb::handle k_cache, const OptionalArray& k_scale, nb::handle k_rope, const OptionalArray& k_rope_scale,
             const Array& latent, const OptionalArray& rope, uintptr_t stream) {
            const Array pages = written(k_cache, "k_cache");
            const OptionalArray rope_pages = k_rope.is_none() ? std::nullopt : OptionalArray(written(k_rope, "k_rope"));
            const KvCache kv = kv_of(p, pages, {k_scale, rope_pages, k_rope_scale});
            const TensorView new_latent = view_of(latent, "latent", p.spec.dtype), new_rope = view_of(rope, "rope", p.spec.dtype);
            for (const auto& [to, name] : {std::pair(&kv.k, "k_cache"), std::pair(&kv.k_rope, "k_rope")})
              check_apart(*to, name, new_latent, "latent"), check_apart(*to, name, new_rope, "rope");
            const nb::gil_scoped_release release;
            p.plan->write_kv(kv, new_latent, new_rope, stream_of(stream));
          },
          nb::arg("k_cache"), nb::arg("k_scale").none(), nb::arg("k_rope").none(), nb::arg("k_rope_scale").none(), nb::arg("latent"),
          nb::arg("rope").none(), nb::arg("stream") = 0)
      .def(
          "run",
          [](PyMlaPlan& p, const Array& q, const OptionalArray& kv_b, const Array& k_cache, const OptionalArray& k_scale,
             const OptionalArray& k_rope, const OptionalArray& k_rope_scale, nb::handle out, nb::handle lse, const OptionalArray& sinks,
             uintptr_t stream) {
            const Array out_array = written(out, "out");
            const OptionalArray lse_array = lse.is_none() ? std::nullopt : OptionalArray(written(lse, "lse"));
            const MlaInputs in{.q = view_of(q, "q", p.spec.dtype),
                               .kv_b = view_of(kv_b, "kv_b", p.spec.dtype),
                               .kv = kv_of(p, k_cache, {k_scale, k_rope, k_rope_scale}),
                               .sinks = view_of(sinks, "sinks", DType::f32)};
            const MlaOutputs outputs{.out = written_view(out_array, "out", p.spec.dtype),
                                     .lse = lse_array ? written_view(*lse_array, "lse", DType::f32) : TensorView{}};
            for (const auto& [to, name] : {std::pair(&outputs.out, "out"), std::pair(&outputs.lse, "lse")})
              check_apart(*to, name, in.q, "q"), check_apart(*to, name, in.kv_b, "kv_b"), check_apart(*to, name, in.kv.k, "k_cache"),
                  check_apart(*to, name, in.kv.k_rope, "k_rope");
            check_apart(outputs.lse, "lse", outputs.out, "out");
            const nb::gil_scoped_release release;
            p.plan->run(in, outputs, stream_of(stream));
          },
          nb::arg("q"), nb::arg("kv_b").none(), nb::arg("k_cache"), nb::arg("k_scale").none(), nb::arg("k_rope").none(),
          nb::arg("k_rope_scale").none(), nb::arg("out"), nb::arg("lse").none(), nb::arg("sinks") = nb::none(), nb::arg("stream") = 0)
      .def("__str__", [](const PyMlaPlan& p) { return p.plan->str(); });
}

}  // namespace imbrex::python
