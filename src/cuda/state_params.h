#pragma once
// The list of a step's requests for CUDA kernels of layers that keep a state of each request in a slot, and the parameters of the kernel
// that makes it on the device: plain structs. Filled by cuda/state/state_lists.cpp.

namespace imbrex::cuda {

constexpr int kLeftOut = -1, kIsPadding = -2;  // of StateRequest::slot

// A request of the step, in device memory: its tokens are [begin, begin of the next). One that is not there has none.
struct StateRequest {
  int begin;
  int slot;         // that is written; negative: the request is left out, and if it is padding, its tokens' outputs are zeros
  int source;       // the slot that is read
  short first_row;  // of the source, that the state before the step begins at; negative: nothing has gone by
  short drafts;     // how many of the last tokens may be taken back: what the state's rows are then, a family says
};
struct StateCounts {
  int num_tokens, num_reqs;
  int taken;  // units that thread blocks of a launch of recurrent_stream.cu have taken; 0 between launches
  int padding;
};

// Requests that a device has found to break a rule: PlanStateBatchParams::broken.
enum StateRule : int {
  kStateStartsRise,
  kStateTokensFit,
  kStateQueryFits,
  kStateLengthFits,
  kStateQueriesAreKeys,
  kStateSlotIsOne,
  kStateDraftsFit,
  kStateAcceptedFit,
  kStateSourceIsOne,
  kStateParentsFit,
  kStateSlotIsOwn,
  kStateSourceIsOthers,
  kStateSlotIsThere,
  kNumStateRules
};

constexpr int kPlanStateBatchThreads = 256;

struct PlanStateBatchParams {
  const int *starts, *lengths;           // the caller's query_start_loc [num_reqs + 1] and seq_lens [num_reqs]
  const int *slots, *drafts, *accepted;  // [num_reqs]; the last two null: none
  const int* sources;                    // [num_reqs]; null: the slots
  const int* parents;                    // [max_tokens], of trees of drafts; null: each follows the one in front of it
  int num_reqs, max_tokens, min_query_len, max_query_len, max_seq_len, max_drafts;
  bool has_pad_slot;
  int pad_slot;
  StateRequest* requests;
  int* parent_rows;  // [max_tokens], of layers with trees of drafts: the row that a draft begins from; null: no such layer
  StateCounts* counts;
  int* broken;  // [kNumStateRules]: the last request that broke the rule, plus 1; grows until the host clears it
};

constexpr int kZeroPaddingThreads = 128;

struct ZeroPaddingParams {
  const StateRequest* requests;
  const StateCounts* counts;
  char* out;                      // [tokens, rows of a token], numbers of 2 or 4 bytes
  long token_stride, row_stride;  // bytes
  int rows_of_token, row_bytes;
};

}  // namespace imbrex::cuda
