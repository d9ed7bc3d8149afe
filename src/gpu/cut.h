#pragma once
// How a plan for a GPU cuts its batches: which requests go to the kernel of which regime, and into how many pieces. Pure arithmetic on the
// spec, the device and the tiles, never on the batch.
#include <array>

#include "imbrex/device.h"
#include "imbrex/schedule.h"

namespace imbrex::gpu {

// The tile of a regime's kernel, and how many run at a time.
struct Tile {
  int rows = 0;  // (query token, q head of a kv head's group)
  int keys = 0;
  bool runs = false;  // whether an item may be a run of several pieces: WorkItem::piece
  int most_in_run = kMostInRun;
  int blocks = 2;         // thread blocks, or crews of one, that a multiprocessor runs at a time
  int cluster = 1;        // of these blocks, those that take an item together
  bool together = false;  // whether they do so with every item; otherwise each takes one of few rows alone
  int blocks_each = 1;    // of these, that share its pace: one of so many is as fast as all when it is alone
  int tiles_each = 1;     // verify: of a request at most; with more of them it is prefill
  bool merged = false;    // whether a launch of its own joins the pieces that runs leave
  int least_piece = 0;    // merged: keys of a piece at least; 0: as cut_policy() has it
  int split_cost = 0;     // as in SchedulePolicy
};

// The regimes of attention, each with a kernel and a tile of its own. A request goes to the first regime of which one tile holds its rows.
// Decode and verify are bound by memory, prefill by products; long verify is for kernels that verify more rows with another tile than few.
// Phase is another word: it is what a caller asks selection for, whatever the tiles are.
enum Regime : int { kDecode, kVerify, kLongVerify, kPrefill, kNumRegimes };
constexpr Regime kRegimes[] = {kDecode, kVerify, kLongVerify, kPrefill};
constexpr const char* kRegimeNames[kNumRegimes] = {"decode", "verify", "long verify", "prefill"};

// A policy for each regime: together they cut every request, each once. A regime may have no requests at all: a group of many q heads has
// no use for a second size of tile. The lists of a step share the partial rows: the caller sets SchedulePolicy::first_partial.
//
// How many pieces a request has is a compromise: many pieces keep the whole GPU busy when a request is alone, but each piece writes a
// partial result, which is read again. For kernels without runs, the keys of a piece and the pieces of a request are
//   keys   >= 576, and >= q_len * bytes of a query token's partial result, written and read / (share * bytes of a key and its value), where
//             share is 5 % in decode, 10 % in verify and prefill;
//   pieces <= multiprocessors / kv heads, or 5/8 of that with 16-bit keys; up to twice multiprocessors / kv heads where a piece would have
//             more than 4096 keys (2048 in verify and prefill); and pieces * q_len is bounded, because partial results grow with q_len.
// (The q heads of a group share the keys, but each has a partial result of its own.)
//
// For kernels that take runs of pieces, small pieces cost less: one thread block computes several pieces of a request as soon as other
// requests keep all blocks busy. They are the same pieces, and their sums are folded in the same groups, so that results depend on each
// request alone. There a piece has 128 keys or more, and up to 15 % of the traffic may be partial results. In prefill, which is bound by
// products, a piece has 512 keys or more, and an item has as many pieces as give a lone request a task on each multiprocessor, at most
// those of a run. In verify where a launch of its own merges the partial results of runs (Tile::merged), a piece has 256 keys or more, and
// no fewer bytes of keys than of partial results; a number of pieces above four is a power of two.
using CutPolicy = std::array<SchedulePolicy, kNumRegimes>;
CutPolicy cut_policy(const AttentionSpec&, const DeviceInfo&, const std::array<Tile, kNumRegimes>&, bool balanced);

// Reduces the number of pieces of a request where the partial results of the largest batch within the limits, with `run_sums` bytes between
// the pieces of runs, would take more than a quarter of a GiB. Only for values of more dims than kernels with runs have, since those bound
// their partial results themselves. Results then depend on the limits too.
void bound_partials(CutPolicy&, const AttentionSpec&, const PlanLimits&, int64_t run_sums);

// How many keys of one kv head, with their values, L2 holds: heads_in_l2() computes from it how many heads have their tasks interleaved. 0:
// tasks are ordered head by head.
//
// Interleaved tasks of several heads, the longest first, end at about the same time, and find their keys in L2. Without a causal mask all
// tasks are equally long, so that they end at the same time anyway, and one head after the other reads less.
long keys_in_l2(const AttentionSpec&, const DeviceInfo&, Regime);

}  // namespace imbrex::gpu
