#pragma once
// How a plan for a GPU cuts its batches: which requests go to which shape of the attention kernel, and into how many pieces. Pure
// arithmetic on the spec, the device and the tiles, never on the batch.
#include <array>

#include "imbrex/device.h"
#include "imbrex/schedule.h"

namespace imbrex::gpu {

// What a shape of the kernel does at a time.
struct Tile {
  int rows = 0;  // (query token, q head of a kv head's group)
  int keys = 0;
  bool runs = false;  // whether an item may be a run of several pieces: WorkItem::piece
  int most_in_run = kMostInRun;
  int blocks = 2;       // thread blocks, or crews of one, that a multiprocessor runs at a time
  int cluster = 1;      // of these blocks, those that take an item together
  int blocks_each = 1;  // of these, that share its pace: one of so many is as fast as all when it is alone
  int tiles_each = 1;   // verify: of a request at most; with more of them it is prefill
  bool merged = false;  // whether a launch of its own joins the pieces that runs leave
};

// A request goes to the first shape of which one tile holds its rows. Decode and verify stream keys, prefill multiplies.
enum Shape : int { kDecode, kVerify, kPrefill, kNumShapes };
constexpr Shape kShapes[] = {kDecode, kVerify, kPrefill};

// A policy for each shape: together they cut every request, each once. A shape may have no requests at all: a group of many q heads has
// no use for a second size of tile. The lists of a step share the partial rows: SchedulePolicy::first_partial is the caller's to set.
//
// The trade: more pieces fill the GPU when a request is alone, but each writes and reads a partial result. A piece has 576 keys or more,
// also more where its partial result would be above 5 % of the traffic of its keys and values (q heads of a group share the keys but not
// the partial results). There are at most as many pieces as give a lone request a task on most of the multiprocessors, unless they had
// more than 4096 keys each; a request of more query tokens gets fewer and longer ones, since its partial results grow with them.
//
// Kernels that take runs are spared the trade: one thread block computes several pieces of a request as soon as others keep all blocks
// busy. They are the same pieces, and their sums are folded in the same groups, so that results depend on each request alone. Then a piece
// has 128 keys or more, and up to 15 % may be traffic of partial results. Of prefill's items, which are bound by products, it has 512 keys,
// and an item as many pieces as give a lone request a task on each multiprocessor, up to a run's. So it is with verify's where a launch of
// its own joins what runs leave (Tile::merged): a piece has 256 keys or more, and no fewer bytes of them than its partial result has, and
// more than four pieces are a power of two.
using CutPolicy = std::array<SchedulePolicy, kNumShapes>;
CutPolicy cut_policy(const AttentionSpec&, const DeviceInfo&, const std::array<Tile, kNumShapes>&, bool balanced);

// Fewer pieces for a request where the partial results of all that the limits allow would take more than a quarter of a GiB. Only for
// values of more dims than kernels that take runs have, which keep them few by themselves: results depend on the limits then, and on the
// request.
void bound_partials(CutPolicy&, const AttentionSpec&, const PlanLimits&);

// Keys of one kv head, and their values, that L2 has room for: heads_in_l2() then says whose tasks stand together. 0: heads follow each
// other.
//
// Tasks of several heads, the longest first, end together, and read each other's keys from L2. Where tasks are of one length, without a
// causal mask, they end together anyway, and a head at a time reads less.
long keys_in_l2(const AttentionSpec&, const DeviceInfo&, Shape);

}  // namespace imbrex::gpu
