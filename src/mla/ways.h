#pragma once
// Which of the two ways each request of a step takes, decided by the cost of each, by itself; and what plans say of it.
#include <optional>
#include <string>
#include <vector>

#include "imbrex/mla.h"
#include "mla/cost.h"

namespace imbrex {

// What became of a request: shown by str().
struct DecidedWay {
  int request = -1, q_len = 0, seq_len = 0;
  MlaCost cost;
  bool fixed = false;  // the cost was not asked
  std::string str()
      const;  // ", request 3 of 70 queries and 300 keys is 2.1 ms in latent space, 0.9 ms expanded"; nothing where it is fixed
};

struct MlaWays {
  std::vector<char> expand;  // of each request; 0 for one without queries
  DecidedWay largest[2];     // the largest request in latent space, and with expanded keys
  bool expands(int request) const { return request >= 0 && size_t(request) < expand.size() && expand[size_t(request)] != 0; }
};

// What the choice depends on, beside the request.
struct WayRules {
  MlaRates rates;
  bool may_expand = false;     // false: all requests are computed in latent space
  std::optional<bool> expand;  // which way all requests take, where tests say it
};

// A request that is a tree of drafts stays in latent space: it has few queries.
void decide_ways(const MlaSpec&, const WayRules&, const Batch&, MlaWays&);
// Whether some request within the limits would be computed with expanded keys.
bool ever_expands(const MlaSpec&, const WayRules&, const PlanLimits&);

}  // namespace imbrex
