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
typedef enum { IMBREX_CONV_NONE, IMBREX_CONV_QKV, IMBREX_CONV_VKQ } imbrex_recurrent_conv;
typedef enum { IMBREX_OUT_GATE_NONE, IMBREX_OUT_GATE_SILU, IMBREX_OUT_GATE_SIGMOID } imbrex_output_gate;
typedef enum { IMBREX_OUT_NORM_NONE, IMBREX_OUT_NORM_BEFORE_GATE, IMBREX_OUT_NORM_AFTER_GATE } imbrex_output_norm;

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
  int32_t out_gate;           /* imbrex_output_gate; IMBREX_OUT_GATE_NONE */
  int32_t out_norm;           /* imbrex_output_norm; IMBREX_OUT_NORM_NONE */
  int32_t norm_groups;        /* 0: the norm is over each value head; else groups of heads that it is over */
  float norm_eps;             /* 1e-6 */
  int32_t conv;               /* imbrex_recurrent_conv; IMBREX_CONV_NONE */
  int32_t conv_width;         /* 4; tokens of the convolution */
  int32_t conv_bias;          /* 0; 1: it has a bias */
  int32_t conv_silu;          /* 1: SiLU follows it */
  int32_t tree_drafts;        /* 0; 1: drafts of a step may be a tree */
  int32_t reserved;           /* not read */
} imbrex_recurrent_fields;
IMBREX_API void imbrex_recurrent_fields_init(imbrex_recurrent_fields*, size_t struct_size);
IMBREX_API imbrex_status imbrex_spec_create_recurrent(const imbrex_recurrent_fields*, imbrex_spec** out);

/* What a recurrent layer reads and writes. NULL where the spec has no such tensor: with conv there are no q, k and v. */
typedef struct {
  size_t struct_size;
  const imbrex_tensor *q, *k;       /* [>= num_tokens, num_k_heads, head_dim_k] */
  const imbrex_tensor* v;           /* [>= num_tokens, num_v_heads, head_dim_v] */
  const imbrex_tensor* gate;        /* [>= num_tokens, num_v_heads], or [.., num_v_heads, head_dim_k] with channel_gate */
  const imbrex_tensor* beta;        /* [>= num_tokens, num_v_heads] */
  const imbrex_tensor* rates;       /* f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_rates */
  const imbrex_tensor* gate_bias;   /* NULL, or f32 [num_v_heads], or [num_v_heads, head_dim_k] with channel_gate */
  const imbrex_tensor* skip;        /* f32 [num_v_heads] */
  const imbrex_tensor* state;       /* [slots, 1 + num_drafts, num_v_heads, head_dim_k, head_dim_v], or with head_dim_v in front of
                                       head_dim_k: read and written */
  const imbrex_tensor* z;           /* [>= num_tokens, num_v_heads, head_dim_v]; with out_gate */
  const imbrex_tensor* norm_weight; /* [num_v_heads, head_dim_v] or [head_dim_v], of dtype or f32; with out_norm */
  const imbrex_tensor* input;       /* [>= num_tokens, channels], channels being those of q, k and v; with conv, and so are the others */
  const imbrex_tensor* conv_weight; /* [channels, conv_width] */
  const imbrex_tensor* conv_bias;   /* [channels] */
  const imbrex_tensor*
      conv_state; /* [slots, conv_width - 1 + num_drafts, channels], or with tree_drafts (conv_width - 1) * (1 + num_drafts) rows */
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
