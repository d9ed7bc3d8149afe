#pragma once
// What a batch says of each of its query tokens, in words: which keys it sees from where, where its own key goes, and what its state has
// seen. Parts of a batch have to say of a token what the whole says, however they say it.
#include <map>
#include <string>
#include <vector>

#include "attention/mask.h"
#include "imbrex/batch_tools.h"
#include "imbrex/spec.h"

namespace imbrex::test {

// Whether the batch's custom mask, of bytes or bits, shows key j to query i of request r.
inline bool custom_shows(const Batch& batch, int r, int i, int j) {
  int64_t byte = 0, bits_begin = 0;
  for (int before = 0; before < r; ++before) {
    const int64_t pairs = int64_t(batch.query_len(before)) * batch.seq_lens[size_t(before)];
    byte += pairs, bits_begin += (pairs + 7) / 8;
  }
  const int64_t pair = int64_t(i) * batch.seq_lens[size_t(r)] + j;
  if (batch.packed_mask.empty()) return batch.custom_mask.as<const uint8_t>()[byte + pair] != 0;
  if (!batch.mask_indptr.empty()) bits_begin = batch.mask_indptr[size_t(r)];
  return (batch.packed_mask.as<const uint8_t>()[bits_begin + pair / 8] >> pair % 8 & 1) != 0;
}

// Texts of the tokens in order; `by_position`: with the distance to each key.
inline std::vector<std::string> meanings(const Batch& batch, const AttentionSpec& spec, bool by_position) {
  std::vector<std::string> texts;
  for (int r = 0; r < batch.num_reqs(); ++r)
    for (int i = 0; i < batch.query_len(r); ++i) {
      const size_t t = size_t(batch.query_start_loc[size_t(r)] + i);
      const int seq_len = batch.seq_lens[size_t(r)];
      const int64_t p = spec.mask.positions ? batch.positions[t] : seq_len - batch.query_len(r) + i;
      std::string text = "keys";
      for (int j = 0; j < seq_len; ++j) {
        if (!mask_allows(spec.mask, p, j)) continue;
        if (spec.mask.custom && !custom_shows(batch, r, i, j)) continue;
        int64_t key = 0;
        if (!batch.kv_start_loc.empty()) {
          key = batch.kv_start_loc.as<const int32_t>()[r] + j;
        } else {
          const int page = j / spec.block_size;
          const int32_t block = !batch.block_table.empty()
                                    ? batch.block_table.as<const int32_t>()[r * batch.block_table.stride(0) + page]
                                    : batch.kv_indices.as<const int32_t>()[batch.kv_indptr.as<const int32_t>()[r] + page];
          key = int64_t(block) * spec.block_size + j % spec.block_size;
        }
        text += " " + std::to_string(key) + (by_position ? "@" + std::to_string(p - j) : "");
      }
      if (!batch.slot_mapping.empty())
        text += " to " + std::to_string(batch.slot_mapping.as<const int64_t>()[int64_t(t) * batch.slot_mapping.stride(0)]);
      texts.push_back(text);
    }
  return texts;
}

// A layer whose state is the text of the tokens it has seen: rows of a slot as recurrent layers have them. `inputs` are tokens of the
// batch.
using TextStates = std::map<int, std::map<int, std::string>>;
inline std::vector<std::string> run_text_layer(const Batch& batch, const std::vector<std::string>& inputs, TextStates& states) {
  std::vector<std::string> outputs;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    const size_t i = size_t(r);
    const int q_len = batch.query_len(r);
    if (q_len == 0) continue;
    const int slot = batch.state_slots[i], source = batch.source_slots.empty() ? slot : batch.source_slots[i];
    const int drafts = batch.num_drafts.empty() ? 0 : batch.num_drafts[i], certain = q_len - drafts;
    const int row = batch.accepted_drafts.empty() ? 0 : batch.accepted_drafts[i];
    std::string before = batch.context_len(r) == 0 ? "" : states[source][row];
    std::map<int, std::string> rows;  // row d: the state behind draft d
    for (int t = 0; t < q_len; ++t) {
      const size_t token = size_t(batch.query_start_loc[i] + t);
      int parent = t - 1;
      if (t >= certain && !batch.draft_parents.empty()) parent = batch.draft_parents[token];
      if (t == certain) rows[0] = before;
      std::string state = (t < certain ? before : rows[parent + 1 - certain]) + inputs[token] + ".";
      outputs.push_back(state);
      if (t < certain)
        before = state;
      else
        rows[t + 1 - certain] = state;
    }
    if (drafts == 0) rows[0] = before;
    for (const auto& [d, state] : rows) states[slot][d] = state;
  }
  return outputs;
}

}  // namespace imbrex::test
