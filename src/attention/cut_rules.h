#pragma once
// A policy and a mask as the plain numbers of cut_item.h, for those who hand them to a kernel.
#include "attention/cut_item.h"
#include "imbrex/schedule.h"

namespace imbrex {

CutRules cut_rules(const Mask&, const SchedulePolicy&);

}  // namespace imbrex
