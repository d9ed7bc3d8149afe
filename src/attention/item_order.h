#pragma once
// The order of a list after its items have changed: longest first, as write_work() writes it.
#include "imbrex/schedule.h"

namespace imbrex {

// Sorts the items of a list by their cost, those of one cost as they were.
void order_items(Schedule&);

}  // namespace imbrex
