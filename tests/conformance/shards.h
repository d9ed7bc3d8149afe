#pragma once
// How combinations of a case and a target are dealt out to the parts of a long test program.
#include <algorithm>
#include <array>
#include <vector>

namespace imbrex::test {

// The combinations, those of a case together, in another order: GoogleTest deals tests out to its shards one by one, and with up to
// kMostShards of them (a power of two) a shard is dealt whole cases, whose inputs and expected results are made once.
constexpr size_t kMostShards = 16;
template <class Combination>
std::vector<Combination> by_shard(const std::vector<Combination>& all) {
  std::array<std::vector<Combination>, kMostShards> hands;
  for (auto begin = all.begin(); begin != all.end();) {
    const auto end = std::find_if(begin, all.end(), [&](const Combination& other) { return other.c != begin->c; });
    const auto hand = std::ranges::min_element(hands, {}, &std::vector<Combination>::size);
    hand->insert(hand->end(), begin, end);
    begin = end;
  }
  std::vector<Combination> dealt;
  for (size_t round = 0; dealt.size() < all.size(); ++round)
    for (const auto& hand : hands)
      if (round < hand.size()) dealt.push_back(hand[round]);
  return dealt;
}

}  // namespace imbrex::test
