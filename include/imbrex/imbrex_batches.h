/* The C ABI of imbrex, for what an engine does with a step before plans see it: the order of its requests, and batches that are parts of
 * another (batch_tools.h). A part of imbrex.h, which is to be included. All lists are in host memory. */
#ifndef IMBREX_BATCHES_H
#define IMBREX_BATCHES_H

#include "imbrex/imbrex.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Puts requests in the order of decodes, short extends, long extends and prompts. Lists have a number for each request: query tokens,
 * tokens before them, and tokens of its prompt, or NULL. order[i] is the request that comes to place i. swaps, if it is not NULL, has room
 * for 2 * num_reqs numbers: pairs of places that bring requests into that order when they are swapped one pair after the other; *num_swaps
 * is the number of pairs. */
IMBREX_API imbrex_status imbrex_reorder_batch(const int32_t* query_lens, const int32_t* context_lens, const int32_t* prompt_lens,
                                              int32_t num_reqs, int32_t decode_threshold, int32_t* order, int32_t* swaps,
                                              int32_t* num_swaps);

typedef struct {
  int32_t decodes, extends, prefills; /* requests */
  int32_t decode_tokens, extend_tokens, prefill_tokens;
} imbrex_phase_counts;
typedef struct {
  size_t struct_size;
  int32_t decode_threshold;          /* 1; query tokens of a decode at most */
  int32_t num_tokens;                /* 0; of the step with its padding; 0: those of query_start_loc */
  int32_t uniform;                   /* 0; 1: decodes have as many query tokens as the first request */
  int32_t short_extends_are_decodes; /* 1; 0: is_prefilling says whose prompt is not yet computed */
  const uint8_t* is_prefilling;      /* NULL, or [num_reqs] */
} imbrex_phase_options;
IMBREX_API void imbrex_phase_options_init(imbrex_phase_options*, size_t struct_size);
/* Counts the requests and tokens of each phase in a batch that is in order. query_start_loc is [num_reqs + 1], options may be NULL. */
IMBREX_API imbrex_status imbrex_split_decodes_and_prefills(const int32_t* query_start_loc, int32_t num_reqs, const imbrex_phase_options*,
                                                           imbrex_phase_counts* out);
IMBREX_API imbrex_status imbrex_split_decodes_prefills_and_extends(const int32_t* query_start_loc, const int32_t* seq_lens,
                                                                   int32_t num_reqs, const imbrex_phase_options*, imbrex_phase_counts* out);
/* Cuts requests into ranges of neighbours whose lengths are together at most `workspace`, or which are one. Range i ends in front of
 * request ends[i], and the next begins there; ends has room for num_reqs numbers, *num_ranges is how many there are. */
IMBREX_API imbrex_status imbrex_split_prefill_chunks(const int32_t* seq_lens, int32_t num_reqs, int64_t workspace, int32_t* ends,
                                                     int32_t* num_ranges);

/* A batch made of another. It shows that batch's arrays, all of which have to stay while it is used, and has memory of its own for what is
 * not in them. */
typedef struct imbrex_derived_batch imbrex_derived_batch;
/* Cuts a batch for layers of a spec in front of the given tokens, in rising order: parts has room for num_cuts + 1 handles. A cut may go
 * through a request, which then is in both parts. Where a spec without `positions` cannot be run so, one that has them can. */
IMBREX_API imbrex_status imbrex_split_batch(const imbrex_spec*, const imbrex_batch*, const int32_t* cuts, int32_t num_cuts,
                                            imbrex_derived_batch** parts);
/* Keeps some query tokens of a batch, in rising order: for layers that are computed for the tokens whose logits are asked for alone. All
 * requests stay. */
IMBREX_API imbrex_status imbrex_keep_tokens(const imbrex_spec*, const imbrex_batch*, const int32_t* tokens, int32_t count,
                                            imbrex_derived_batch** out);
IMBREX_API void imbrex_derived_batch_free(imbrex_derived_batch*);
/* What imbrex_plan_update() takes: pointers that live as long as the handle. out->struct_size must be set. */
IMBREX_API imbrex_status imbrex_derived_batch_get(const imbrex_derived_batch*, imbrex_batch* out);
/* The request, and of a part of imbrex_split_batch() the token, of the whole batch that is the first of this one. */
IMBREX_API int32_t imbrex_derived_batch_first_request(const imbrex_derived_batch*);
IMBREX_API int32_t imbrex_derived_batch_first_token(const imbrex_derived_batch*);

#ifdef __cplusplus
}
#endif

#endif /* IMBREX_BATCHES_H */
