#pragma once
// Batches of a few requests, and the lists that they are cut into, tile by tile.
#include <algorithm>
#include <map>
#include <vector>

#include "attention/random_lengths.h"
#include "imbrex/schedule.h"

namespace imbrex::test {

struct Request {
  int q_len, seq_len;
};

struct HostBatch : Lengths {
  explicit HostBatch(const std::vector<Request>& requests) {
    for (const Request& r : requests) add(r.q_len, r.seq_len);
  }
};

// A tile of queries with its pieces of the keys, in order; most have one.
using Tile = std::vector<WorkItem>;
inline std::vector<Tile> tiles_of(const Schedule& s) {
  std::map<int, Tile> by_token;
  for (const WorkItem& w : s.work) by_token[w.q_begin].push_back(w);
  std::vector<Tile> tiles;
  for (auto& [token, tile] : by_token) {
    std::sort(tile.begin(), tile.end(), [](const WorkItem& a, const WorkItem& b) { return a.kv_begin < b.kv_begin; });
    tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace imbrex::test
