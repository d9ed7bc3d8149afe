#pragma once
// Cuts that follow the load (SchedulePolicy::balanced).
#include "imbrex/schedule.h"

namespace imbrex {

// Cuts the items of a list, which are whole, so that all workers end at the same time, and says in which places of their shares items begin
// (Schedule::places), if they do not all begin one. Items of requests with more than split_max_q query tokens stay whole. The others get at
// most as many splits as there are items and workers together.
void balance(const Batch&, const SchedulePolicy&, Schedule&);

}  // namespace imbrex
