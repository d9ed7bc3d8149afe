// See tree_tails.h.
#include "cpu/tree_tails.h"

#include <algorithm>

namespace imbrex::cpu {

void TreeTails::find(const Batch& batch, const Mask& mask) {
  tails_.clear(), shown_.clear(), key_positions_.clear(), positions_.clear();
  const auto is_tree = [&](int r) { return !is_chain(batch, r); };
  bool any = false;
  for (int r = 0; r < batch.num_reqs() && !any; ++r) any = is_tree(r);
  if (!any) return;
  for (int r = 0; r < batch.num_reqs(); ++r) {
    find_nodes(batch, mask, r, nodes_);
    for (const TreeNode& node : nodes_) positions_.push_back(node.position);
    TreeTail& tail = tails_.emplace_back(TreeTail{.begin = -1, .width = 0, .shown = 0, .key_positions = 0});
    if (!is_tree(r)) continue;
    const int context = batch.context_len(r), seq_len = batch.seq_lens[size_t(r)];
    tail.begin = context / kBlockKeys * kBlockKeys;
    tail.width = (seq_len - tail.begin + kBlockKeys - 1) / kBlockKeys * kBlockKeys;
    tail.shown = long(shown_.size()), tail.key_positions = long(key_positions_.size());
    const int in_front = context - tail.begin, queries = seq_len - context;  // keys of the tail
    for (const TreeNode& node : nodes_) {
      shown_.insert(shown_.end(), size_t(in_front), 1);
      for (int key = 0; key < queries; ++key) shown_.push_back(node.seen >> key & 1);
      shown_.insert(shown_.end(), size_t(tail.width - in_front - queries), 0);
    }
    for (int i = 0; i < tail.width; ++i) {
      const int key = i - in_front;
      key_positions_.push_back(key >= 0 && key < queries ? nodes_[size_t(key)].position : tail.begin + i);
    }
  }
}

void TreeTails::add_stretches(Schedule& list) {
  if (tails_.empty()) return;
  ListDetails& details = list.details;
  for (WorkItem& item : list.work) {
    begins_.clear();
    bool any = false;
    const auto look_at = [&](int request) {
      const int begin = tails_[size_t(request)].begin;
      any = any || begin >= 0;
      if (begin >= 0 && begin < item.kv_end) begins_.push_back(std::max(begin, item.kv_begin));
    };
    if (details.tokens.empty()) look_at(item.table);
    for (int i = item.q_begin; !details.tokens.empty() && i < item.q_end; ++i)
      look_at(details.request_of[size_t(details.tokens[size_t(i)])]);
    if (!any || item.piece != 0) continue;
    std::ranges::sort(begins_);
    begins_.erase(std::unique(begins_.begin(), begins_.end()), begins_.end());
    begins_.push_back(item.kv_end);
    const size_t first = details.stretches.size();
    if (begins_.front() > item.kv_begin) details.stretches.push_back({item.kv_begin, begins_.front(), 1});
    for (size_t i = 0; i + 1 < begins_.size(); ++i) details.stretches.push_back({begins_[i], begins_[i + 1], 0});
    item.piece = ~int(details.items.size());
    details.items.push_back({.kv_head = -1, .first_stretch = int(first), .num_stretches = int(details.stretches.size() - first)});
  }
}

void TreeTails::set(AttentionParams& a) const {
  if (tails_.empty()) return;
  a.tree_tails = tails_.data(), a.tree_shown = shown_.data(), a.tree_positions = key_positions_.data();
  a.positions = positions_.data();
}

}  // namespace imbrex::cpu
