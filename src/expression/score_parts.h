#pragma once
// Which parts of a score's expression the keys of a row, or the rows of a key, have in common, so that a kernel can compute them outside of
// its loop over scores; and the texts of the parts.
#include <span>
#include <string>
#include <vector>

#include "imbrex/expression.h"

namespace imbrex {

// Numbers of nodes. Their values do not depend on the score, and each takes more than a few operations.
struct ScoreParts {
  std::vector<int> columns;  // values of a key, the same for all queries
  int head_columns = 0;      // of these, the last so many differ between heads
  std::vector<int> rows;     // values of a query and a head, the same for all keys

  bool empty() const { return columns.empty() && rows.empty(); }
};

constexpr int kMostScoreColumns = 4, kMostScoreRows = 2;

// The parts of a float expression, at most as many as the constants above say; further ones are computed for each score.
ScoreParts score_parts(const Expression&);

// Whether some element of a tensor that is none of the parts' is another one for another key.
bool loads_for_each_key(const Expression&, const ScoreParts&);

// Three functions: `name`_columns and `name`_rows write the bits of the parts' values, of an ExpressionInputs without a score, to an array
// of ints; `name`_of_parts is the expression, given both arrays. Floats as ExpressionFloats::approximate has them. `loads_stay`: a compiler
// does not move the loads of columns to where their values are used.
std::string score_parts_text(const Expression&, const ScoreParts&, std::string_view name, bool loads_stay = false);

}  // namespace imbrex
