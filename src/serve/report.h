#pragma once
// The report of a replay: terminal tables, JSON, and one self-contained HTML page. Used by `imbrex run`.
#include <string>

#include "serve/ceilings.h"
#include "serve/replay.h"

namespace imbrex::serve {

struct ReportContext {
  std::string version;  // of imbrex
  std::string command;  // as typed
  std::string date;     // "2026-11-20 17:45 UTC"; empty: left out
  Ceilings ceilings;    // all 0: not measured, shares are left out
};

std::string report_text(const ReplayResult&, const ReportContext&);
std::string report_json(const ReplayResult&, const ReportContext&);  // every field of the result, times in seconds
std::string report_html(const ReplayResult&, const ReportContext&);  // no external resources

}  // namespace imbrex::serve
