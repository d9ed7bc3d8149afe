/* The C ABI of imbrex, for recurrent layers: Mamba, gated delta nets, KDA and lightning attention (recurrent.h). A part of imbrex.h, which
 * is to be included. Selections and plans of them are made and asked as those of attention are; what a layer calls is
 * imbrex_plan_run_recurrent(). */
#ifndef IMBREX_RECURRENT_H
#define IMBREX_RECURRENT_H

#include "imbrex/imbrex.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { IMBREX_GATE_FIXED, IMBREX_GATE_LOG, IMBREX_GATE_SOFTPLUS, IMBREX_GATE_SIGMOID } imbrex_recurrent_gate;
typedef enum { IMBREX_STATE_K_FIRST, IMBREX_STATE_V_FIRST } imbrex_state_layout;

typedef struct {
  size_t struct_size;
  int32_t num_k_heads, num_v_heads, head_dim_k, head_dim_v;
  int32_t gate;                        /* imbrex_recurrent_gate; IMBREX_GATE_SOFTPLUS */
  int32_t channel_gate, channel_rates; /* 0; 1: gate and gate_bias, or rates, have a number for each key channel */
  float gate_min, gate_max;            /* 0, 0: limits of the gate */
  int32_t delta, sigmoid_beta;         /* 0; 1: the delta rule, with beta, which is given before its sigmoid */
  float beta_scale;                    /* 1 */
  int32_t scaled_values, qk_norm, skip;
  float scale;                /* 0: 1 / sqrt(head_dim_k) */
  int32_t dtype, state_dtype; /* imbrex_dtype; IMBREX_BF16, IMBREX_F32 */
  int32_t layout;             /* imbrex_state_layout; IMBREX_STATE_V_FIRST */
  int32_t num_drafts;         /* 0; drafts of a step that a later one may take back */
  int32_t tree_drafts;        /* 0; 1: drafts of a step may be a tree */
  int32_t reserved;           /* not read */
} imbrex_recurrent_fields;
IMBREX_API void imbrex_recurrent_fields_init(imbrex_recurrent_fields*, size_t struct_size);
IMBREX_API imbrex_status imbrex_spec_create_recurrent(const imbrex_recurrent_fields*, imbrex_spec** out);

/* What a recurrent layer reads and writes. NULL where the spec has no such tensor. */
typedef struct {
  size_t struct_size;
  const imbrex_tensor *q, *k;     /* [>= num_tokens, num_k_heads, head_dim_k] */
  const imbrex_tensor* v;         /* [>= num_tokens, num_v_heads, head_dim_v] */
  const imbrex_tensor* gate;      /* [>= num_tokens, num_v_heads], or [.., num_v_heads, head_dim_k] with channel_gate */
  const imbrex_tensor* beta;      /* [>= num_tokens, num_v_heads] */
  const imbrex_tensor* rates;     /* f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_rates */
  const imbrex_tensor* gate_bias; /* NULL, or f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_gate */
  const imbrex_tensor* skip;      /* f32 [num_v_heads] */
  const imbrex_tensor* state;     /* [slots, 1 + num_drafts, num_v_heads, head_dim_k, head_dim_v], or with head_dim_v in front of
                                     head_dim_k: read and written */
} imbrex_recurrent_inputs;
IMBREX_API void imbrex_recurrent_inputs_init(imbrex_recurrent_inputs*, size_t struct_size);
typedef struct {
  size_t struct_size;
  const imbrex_tensor* out; /* [>= num_tokens, num_v_heads, head_dim_v] */
} imbrex_recurrent_outputs;
IMBREX_API void imbrex_recurrent_outputs_init(imbrex_recurrent_outputs*, size_t struct_size);
IMBREX_API imbrex_status imbrex_plan_run_recurrent(imbrex_plan*, const imbrex_recurrent_inputs*, const imbrex_recurrent_outputs*,
                                                   void* stream);

#ifdef __cplusplus
}
#endif

#endif /* IMBREX_RECURRENT_H */
