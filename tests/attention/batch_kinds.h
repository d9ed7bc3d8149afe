#pragma once
// A step for each way to say where keys are and which are seen.
#include <algorithm>
#include <string>
#include <vector>

#include "imbrex/backend.h"
#include "imbrex/batch_tools.h"
#include "mixed_step.h"

namespace imbrex::test {

inline const Requests kPartRequests{{0, 0}, {3, 3}, {1, 40}, {5, 21}, {0, 9}, {6, 16}, {0, 0}, {4, 37}, {0, 0}};

// Every way to say where keys are and which are seen. `tables`: 0 block tables, 1 CSR, 2 ragged.
struct Kind {
  std::string name;
  AttentionSpec spec;
  int tables = 0;
  bool packed = false;  // the mask has bits; with CSR there are gaps between requests
};
inline std::vector<Kind> kinds() {
  std::vector<Kind> all;
  for (const int tables : {0, 1, 2}) {
    const AttentionSpec causal = mixed_spec(tables == 2 ? 0 : 8);
    AttentionSpec window = causal, both = causal, encoder = causal, custom = causal, positions = causal, tree = causal, seen = causal;
    window.mask.window_left = 6;
    both.mask.chunk = 8;
    encoder.mask.causal = false, encoder.kind = AttentionKind::encoder_only;
    custom.mask.custom = true;
    positions.mask = {.causal = false, .window_left = 9, .window_right = 2, .positions = true};
    tree.mask.positions = tree.mask.custom = true;
    seen.mask.causal = false, seen.mask.custom = true;
    all.push_back({"causal", causal, tables});
    all.push_back({"window", window, tables});
    all.push_back({"chunk", both, tables});
    if (tables == 2) all.push_back({"encoder", encoder, tables});
    all.push_back({"custom", custom, tables});
    all.push_back({"positions", positions, tables});
    all.push_back({"custom with positions", tree, tables});
    all.push_back({"custom alone", seen, tables});
    all.push_back({"packed", custom, tables, true});
    all.push_back({"packed alone", seen, tables, true});
  }
  for (Kind& kind : all) kind.name += kind.tables == 0 ? " by block tables" : kind.tables == 1 ? " by CSR" : " ragged";
  return all;
}

// A step with tables of a kind, and positions where its spec has them.
struct KindStep : MixedStep {
  std::vector<int32_t> indptr{0}, indices, last_page, given, mask_indptr;
  std::vector<uint8_t> bits;
  explicit KindStep(const Kind& kind, bool with_positions = true) : MixedStep(kind.spec, kPartRequests) {
    const int block = spec.block_size;
    if (kind.tables == 1) {
      const auto width = size_t(batch.block_table.stride(0));
      for (size_t r = 0; r < lens.size(); ++r) {
        for (int b = 0; b * block < lens[r]; ++b) indices.push_back(table[r * width + size_t(b)]);
        indptr.push_back(int(indices.size()));
        last_page.push_back(lens[r] == 0 ? 0 : (lens[r] - 1) % block + 1);
      }
      batch.block_table = {};
      batch.kv_indptr = TensorView::contiguous(indptr.data(), DType::i32, {int64_t(indptr.size())});
      batch.kv_indices = TensorView::contiguous(indices.data(), DType::i32, {int64_t(indices.size())});
      batch.kv_last_page_len = TensorView::contiguous(last_page.data(), DType::i32, {int64_t(last_page.size())});
    }
    if (kind.packed) pack_mask(kind.tables == 1);
    if (!spec.mask.positions || !with_positions) return;
    for (int r = 0; r < batch.num_reqs(); ++r)
      for (int i = 0; i < batch.query_len(r); ++i) given.push_back((i * 5 + r) % std::max(1, lens[size_t(r)]));
    batch.positions = given;
  }

 private:
  void pack_mask(bool with_gaps) {
    size_t next = 0;
    for (int r = 0; r < batch.num_reqs(); ++r) {
      if (with_gaps) bits.push_back(0xff);
      mask_indptr.push_back(int(bits.size()));
      for (int i = 0; i < batch.query_len(r) * batch.seq_lens[size_t(r)]; ++i, ++next) {
        if (i % 8 == 0) bits.push_back(0xff);
        if (mask[next] == 0) bits.back() &= uint8_t(~(1 << i % 8));
      }
    }
    mask_indptr.push_back(int(bits.size()));
    batch.custom_mask = {}, batch.packed_mask = TensorView::contiguous(bits.data(), DType::u8, {int64_t(bits.size())});
    if (with_gaps) batch.mask_indptr = mask_indptr;
  }
};

// Calls visit(kind, backend, step, plan) for each kind and each backend of CPUs that runs it, with a plan that has the step.
template <class Visit>
void for_each_plan(const Visit& visit) {
  for (const Kind& kind : kinds())
    for (const BackendOf<AttentionFamily>* backend : backends<AttentionFamily>()) {
      const DeviceInfo device = probe_cpu();
      if (!backend->unsupported(kind.spec, device).empty()) continue;
      KindStep step(kind);
      const auto plan = backend->plan(kind.spec, device, {.limits = {.max_num_reqs = 16, .max_num_tokens = 64, .max_seq_len = 64}});
      plan->update(step.batch);
      visit(kind, *backend, step, *plan);
    }
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace imbrex::test
