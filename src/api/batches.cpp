// What an engine does with a step before plans see it, through the C ABI: see imbrex_batches.h.
#include <algorithm>

#include "api/structs.h"
#include "imbrex/batch_tools.h"

using namespace imbrex;
using namespace imbrex::api;

struct imbrex_derived_batch {
  explicit imbrex_derived_batch(DerivedBatch made) : derived(std::move(made)) {
    const Batch& b = derived.batch;
    const auto list = [](std::span<const int32_t> of) { return of.empty() ? nullptr : of.data(); };
    block_table.set(b.block_table), kv_indptr.set(b.kv_indptr), kv_indices.set(b.kv_indices), kv_last_page_len.set(b.kv_last_page_len);
    kv_start_loc.set(b.kv_start_loc), slot_mapping.set(b.slot_mapping), custom_mask.set(b.custom_mask);
    packed_mask.set(b.packed_mask);
    batch = {.struct_size = sizeof batch,
             .num_reqs = b.num_reqs(),
             .query_start_loc = list(b.query_start_loc),
             .seq_lens = list(b.seq_lens),
             .block_table = block_table.get(),
             .kv_indptr = kv_indptr.get(),
             .kv_indices = kv_indices.get(),
             .kv_last_page_len = kv_last_page_len.get(),
             .kv_start_loc = kv_start_loc.get(),
             .slot_mapping = slot_mapping.get(),
             .custom_mask = custom_mask.get(),
             .state_slots = list(b.state_slots),
             .num_drafts = list(b.num_drafts),
             .accepted_drafts = list(b.accepted_drafts),
             .positions = list(b.positions),
             .source_slots = list(b.source_slots),
             .draft_parents = list(b.draft_parents),
             .packed_mask = packed_mask.get(),
             .mask_indptr = list(b.mask_indptr),
             .has_pad_slot = b.pad_slot.has_value(),
             .pad_slot = b.pad_slot.value_or(0)};
  }
  DerivedBatch derived;
  CTensor block_table, kv_indptr, kv_indices, kv_last_page_len, kv_start_loc, slot_mapping, custom_mask, packed_mask;
  imbrex_batch batch{};
};

namespace {

// `count` numbers of a caller, behind a pointer that may be NULL where there are none.
std::span<const int32_t> numbers(const int32_t* pointer, int32_t count, const char* name) {
  check(count >= 0, "api.count", "{}: expected a count of 0 or more, got {}", name, count);
  return count == 0 ? std::span<const int32_t>() : std::span(&deref(pointer, name), size_t(count));
}

std::span<const int32_t> starts_of(const int32_t* pointer, int32_t num_reqs) {
  check(num_reqs >= 0, "api.count", "num_reqs: expected 0 or more, got {}", num_reqs);
  return {&deref(pointer, "query_start_loc"), size_t(num_reqs) + 1};
}

PhaseOptions phase_options_of(const imbrex_phase_options* pointer, int32_t num_reqs) {
  if (pointer == nullptr) return {};
  const imbrex_phase_options given = read(pointer, "options");
  for (const int32_t flag : {given.uniform, given.short_extends_are_decodes})
    check(flag == 0 || flag == 1, "api.enum", "options: expected flags of 0 or 1, got {}", flag);
  PhaseOptions options{.decode_threshold = given.decode_threshold,
                       .num_tokens = given.num_tokens,
                       .uniform = given.uniform == 1,
                       .short_extends_are_decodes = given.short_extends_are_decodes == 1};
  if (given.is_prefilling != nullptr) options.is_prefilling = {given.is_prefilling, size_t(num_reqs)};
  return options;
}

imbrex_phase_counts c_counts(const PhaseCounts& c) {
  return {c.decodes, c.extends, c.prefills, c.decode_tokens, c.extend_tokens, c.prefill_tokens};
}

PartKeys part_keys_of(const imbrex_spec* spec) {
  const LayerSpec& layer = deref(spec, "spec").spec;
  if (const auto* attention = std::get_if<AttentionSpec>(&layer)) return part_keys(*attention);
  if (const auto* mla = std::get_if<MlaSpec>(&layer)) return part_keys(mla->latent_spec());
  return PartKeys::up_to_queries;
}

}  // namespace

namespace imbrex::api {
template <>
imbrex_phase_options defaults() {
  const PhaseOptions options;
  imbrex_phase_options o{};
  o.decode_threshold = options.decode_threshold;
  o.num_tokens = options.num_tokens;
  o.uniform = options.uniform;
  o.short_extends_are_decodes = options.short_extends_are_decodes;
  return o;
}
}  // namespace imbrex::api

void imbrex_phase_options_init(imbrex_phase_options* s, size_t struct_size) { init(s, struct_size); }

imbrex_status imbrex_reorder_batch(const int32_t* query_lens, const int32_t* context_lens, const int32_t* prompt_lens, int32_t num_reqs,
                                   int32_t decode_threshold, int32_t* order, int32_t* swaps, int32_t* num_swaps) {
  return guarded([&] {
    const auto query = numbers(query_lens, num_reqs, "query_lens"), context = numbers(context_lens, num_reqs, "context_lens");
    const auto prompts = prompt_lens == nullptr ? std::span<const int32_t>() : numbers(prompt_lens, num_reqs, "prompt_lens");
    const BatchOrder result = reorder_batch(query, context, prompts, decode_threshold);
    int32_t& count = deref(num_swaps, "num_swaps");
    if (num_reqs > 0) std::copy(result.order.begin(), result.order.end(), &deref(order, "order"));
    count = int32_t(result.swaps.size());
    for (size_t i = 0; swaps != nullptr && i < result.swaps.size(); ++i)
      swaps[2 * i] = result.swaps[i].first, swaps[2 * i + 1] = result.swaps[i].second;
  });
}

imbrex_status imbrex_split_decodes_and_prefills(const int32_t* query_start_loc, int32_t num_reqs, const imbrex_phase_options* options,
                                                imbrex_phase_counts* out) {
  return guarded([&] {
    const auto starts = starts_of(query_start_loc, num_reqs);
    imbrex_phase_counts& place = deref(out, "out");
    place = c_counts(split_decodes_and_prefills(starts, phase_options_of(options, num_reqs)));
  });
}

imbrex_status imbrex_split_decodes_prefills_and_extends(const int32_t* query_start_loc, const int32_t* seq_lens, int32_t num_reqs,
                                                        const imbrex_phase_options* options, imbrex_phase_counts* out) {
  return guarded([&] {
    const auto starts = starts_of(query_start_loc, num_reqs), lens = numbers(seq_lens, num_reqs, "seq_lens");
    imbrex_phase_counts& place = deref(out, "out");
    place = c_counts(split_decodes_prefills_and_extends(starts, lens, phase_options_of(options, num_reqs)));
  });
}

imbrex_status imbrex_split_prefill_chunks(const int32_t* seq_lens, int32_t num_reqs, int64_t workspace, int32_t* ends,
                                          int32_t* num_ranges) {
  return guarded([&] {
    const auto chunks = split_prefill_chunks(numbers(seq_lens, num_reqs, "seq_lens"), workspace);
    int32_t& count = deref(num_ranges, "num_ranges");
    if (!chunks.empty()) std::ranges::transform(chunks, &deref(ends, "ends"), [](const auto& chunk) { return chunk.second; });
    count = int32_t(chunks.size());
  });
}

imbrex_status imbrex_split_batch(const imbrex_spec* spec, const imbrex_batch* batch, const int32_t* cuts, int32_t num_cuts,
                                 imbrex_derived_batch** parts) {
  return guarded([&] {
    imbrex_derived_batch** const places = &deref(parts, "parts");
    std::vector<NamedTensor> mask_tensors;
    std::vector<std::unique_ptr<imbrex_derived_batch>> made;
    for (DerivedBatch& part : split_batch(batch_of(batch, mask_tensors), part_keys_of(spec), numbers(cuts, num_cuts, "cuts")))
      made.push_back(std::make_unique<imbrex_derived_batch>(std::move(part)));
    for (size_t i = 0; i < made.size(); ++i) places[i] = made[i].release();
  });
}

imbrex_status imbrex_keep_tokens(const imbrex_spec* spec, const imbrex_batch* batch, const int32_t* tokens, int32_t count,
                                 imbrex_derived_batch** out) {
  return create(out, [&] {
    std::vector<NamedTensor> mask_tensors;
    return std::make_unique<imbrex_derived_batch>(
        keep_tokens(batch_of(batch, mask_tensors), part_keys_of(spec), numbers(tokens, count, "tokens")));
  });
}

void imbrex_derived_batch_free(imbrex_derived_batch* part) { delete part; }

imbrex_status imbrex_derived_batch_get(const imbrex_derived_batch* part, imbrex_batch* out) {
  return guarded([&] { write(out, deref(part, "part").batch, "out"); });
}

int32_t imbrex_derived_batch_first_request(const imbrex_derived_batch* part) { return part == nullptr ? 0 : part->derived.first_request; }
int32_t imbrex_derived_batch_first_token(const imbrex_derived_batch* part) { return part == nullptr ? 0 : part->derived.first_token; }
