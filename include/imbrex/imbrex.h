/* The C ABI of imbrex: all that a program in C, Rust, Go or Python needs to select a backend, plan steps, own a paged KV cache and run
 * attention. Link libimbrex.so, or open it at run time. The C++ headers beside this one say more about shapes, units and errors; names
 * are the same. docs/c.md has a walk through it; imbrex_recurrent.h, imbrex_batches.h and plugin.h come with this file: recurrent layers,
 * parts of batches, backends and devices from outside.
 *
 *   Errors    A function that can fail returns a status. Text and code of the calling thread's last failure are imbrex_last_error() and
 *             imbrex_last_error_code(); codes are listed in docs/errors.md. What failed has changed nothing, and no `out` was written.
 *   Handles   are opaque, made by a function that gives them out and freed by the function of that name; freeing NULL does nothing.
 *             A handle made from others keeps what it needs of them. One thread at a time may use a handle, unless it says otherwise.
 *   Strings   are UTF-8, zero-terminated, and belong to the handle they are asked of; they live until it is asked again or freed.
 *   Structs   begin with their size as the caller knows it: imbrex_X_init(&x, sizeof x) sets it, and every field to what it means when
 *             nobody asks for anything else. Later versions add fields at the end, and take those of earlier ones.
 *   Tensors   have the layout of DLPack's DLTensor. Include dlpack.h before this file and they are the same type.
 *   Streams   are CUstream (cudaStream_t) on an NVIDIA GPU, where NULL is the default one, what stream_create gave out on a device of a
 *             plug-in, and NULL on CPUs.
 */
#ifndef IMBREX_H
#define IMBREX_H

#include <stddef.h>
#include <stdint.h>
#define IMBREX_ABI_VERSION 1 /* grows when a caller of an earlier version would no longer work */
#if defined(__GNUC__)
#define IMBREX_API __attribute__((visibility("default")))
#else
#define IMBREX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- versions and errors ---- */

typedef int32_t imbrex_status;
enum {
  IMBREX_OK = 0,
  IMBREX_INVALID = 1,       /* an argument breaks a rule */
  IMBREX_UNSUPPORTED = 2,   /* no backend, or not the one that was asked for, does this */
  IMBREX_DEVICE = 3,        /* a device is absent, or it or its driver has failed */
  IMBREX_OUT_OF_MEMORY = 4, /* of the host or a device */
  IMBREX_INTERNAL = 5       /* a defect of the library or of a backend from outside */
};
IMBREX_API const char* imbrex_version(void);    /* "0.1.0" */
IMBREX_API uint32_t imbrex_abi_version(void);   /* of the library; compare with IMBREX_ABI_VERSION of the header */
IMBREX_API const char* imbrex_last_error(void); /* never NULL; empty when nothing has failed */
IMBREX_API const char* imbrex_last_error_code(void);

/* ---- tensors ---- */

#ifdef DLPACK_DLPACK_H_
typedef DLTensor imbrex_tensor;
#else
typedef struct {
  int32_t type; /* 1: host, 2: CUDA, 3: host memory that CUDA has pinned, 13: managed by CUDA, 12: a device of a plug-in */
  int32_t index;
} imbrex_dl_device;
typedef struct {
  uint8_t code;   /* 0: int, 1: unsigned, 2: float, 4: bfloat, 10: float8_e4m3fn, 12: float8_e5m2 */
  uint8_t bits;   /* of an element */
  uint16_t lanes; /* 1 */
} imbrex_dl_type;
typedef struct {
  void* data; /* NULL only where there are no elements */
  imbrex_dl_device device;
  int32_t ndim; /* at most 5 */
  imbrex_dl_type dtype;
  int64_t* shape;
  int64_t* strides; /* in elements; NULL: contiguous, last dimension innermost */
  uint64_t byte_offset;
} imbrex_tensor;
#endif

#include "imbrex/imbrex_named_tensors.h"
typedef enum { IMBREX_F32, IMBREX_F16, IMBREX_BF16, IMBREX_FP8_E4M3, IMBREX_FP8_E5M2, IMBREX_U8, IMBREX_I32, IMBREX_I64 } imbrex_dtype;

/* ---- devices and threads ---- */

typedef struct imbrex_device imbrex_device;
/* `text` names a device: "cpu", "cuda:1" of this machine, "toy:0" of a plug-in, or one that is only described: "h200", "avx512,32 threads".
 * Any number of threads may use a device at a time. */
IMBREX_API imbrex_status imbrex_device_create(const char* text, imbrex_device** out);
IMBREX_API void imbrex_device_free(imbrex_device*);
IMBREX_API const char* imbrex_device_str(const imbrex_device*);
/* How many NVIDIA GPUs this machine has. *why, if why is not NULL: the reason of none, a text that lives until this thread's next call */
IMBREX_API int32_t imbrex_num_cuda_devices(const char** why);

typedef struct {
  size_t struct_size;
  int32_t cuda;        /* 0: a CPU; 1: an NVIDIA GPU; 2: a device of a plug-in */
  int32_t index;       /* as tensors on it say it */
  int32_t present;     /* 0: only described, plans do not exist for it */
  int32_t sm;          /* CUDA: 90 for compute capability 9.0 */
  int32_t num_workers; /* threads, multiprocessors, or what a plug-in's device has */
  int32_t cpu_isa;     /* 0: generic, 1: AVX2, 2: AVX-512, 5: 2 with products of bf16 pairs, 3: 5 with AMX emulated, 4: AMX */
  int64_t l2_bytes, l3_bytes, memory_bytes;
  const char* platform;    /* "cpu", "cuda", or the name of a plug-in's table; lives as long as the process */
  int32_t platform_number; /* of the device among those of its platform: `index`, but for plug-ins */
} imbrex_device_properties;
IMBREX_API imbrex_status imbrex_device_get_properties(const imbrex_device*, imbrex_device_properties* out); /* struct_size set */

/* Threads of the CPU backends. One plan computes with them at a time, others wait. Plans and copiers that are given them must be freed
 * before they are. */
typedef struct imbrex_threads imbrex_threads;
IMBREX_API imbrex_status imbrex_threads_create(int32_t count, imbrex_threads** out); /* 0: one for each core */
IMBREX_API void imbrex_threads_free(imbrex_threads*);
/* A function of the host that stands in for such threads: it calls body(argument, worker) for every worker in [0, num_workers), on any
 * threads, and returns when all calls have. */
typedef void (*imbrex_parallel_for)(void* context, int num_workers, void (*body)(void* argument, int worker), void* argument);

/* ---- what a layer computes: spec.h ---- */

typedef enum { IMBREX_DECODER, IMBREX_ENCODER, IMBREX_ENCODER_ONLY, IMBREX_ENCODER_DECODER } imbrex_kind;
typedef enum { IMBREX_KV_STRIDED, IMBREX_KV_AMX_PACKED, IMBREX_KV_LATENT, IMBREX_KV_FP8_DS_MLA, IMBREX_KV_LATENT_ROPE } imbrex_kv_format;

typedef struct {
  size_t struct_size;
  int32_t kind; /* imbrex_kind */
  int32_t num_q_heads, num_kv_heads;
  int32_t head_dim_qk, head_dim_v;
  int32_t q_dtype, kv_dtype;         /* imbrex_dtype; IMBREX_BF16 */
  int32_t kv_format;                 /* imbrex_kv_format */
  int32_t block_size;                /* tokens in a block (page): 16; 0: ragged keys and values */
  int32_t causal;                    /* 1; queries and keys are aligned at the bottom right */
  int32_t window_left;               /* -1: no limit; a window of W keys, the query's own included, is W - 1 */
  int32_t window_right;              /* -1 */
  int32_t chunk;                     /* 0: off */
  int32_t custom_mask;               /* 0; 1: a batch has a byte for every query and key */
  float scale;                       /* 0: 1 / sqrt(head_dim_qk) */
  float soft_cap;                    /* 0: off */
  int32_t head_scales, alibi, sinks; /* 0; 1: imbrex_inputs has them */
  int32_t relative_buckets, relative_max_distance, relative_bidirectional; /* T5; 0: off */
  int32_t chunk_lookback, alibi_sqrt; /* 0; with chunk: chunks before the query's own; 1, with alibi: by the square root of the distance */
  int32_t positions, reserved, tree, reserved_2; /* 0; 1: a batch has the position of every query; not read; queries are trees; not read */
  const char *score_mod, *mask_mod; /* NULL; texts of expressions with their tensors: "int doc[]; doc[q] == doc[kv]" (expression.h) */
} imbrex_spec_fields;
IMBREX_API void imbrex_spec_fields_init(imbrex_spec_fields*, size_t struct_size);

/* What a layer computes. The fields are checked when it is made, and never change. Any number of threads may use it at a time. */
typedef struct imbrex_spec imbrex_spec;
IMBREX_API imbrex_status imbrex_spec_create(const imbrex_spec_fields*, imbrex_spec** out);
IMBREX_API void imbrex_spec_free(imbrex_spec*);
IMBREX_API const char* imbrex_spec_str(const imbrex_spec*); /* "decoder q32/kv8 d128 bf16 block16 causal" */
IMBREX_API imbrex_status imbrex_spec_get_fields(const imbrex_spec*, imbrex_spec_fields* out); /* struct_size set */

typedef enum { IMBREX_CONV_GATED, IMBREX_CONV_PLAIN } imbrex_conv_form;
typedef enum { IMBREX_CONV_NO_ACTIVATION, IMBREX_CONV_SILU } imbrex_conv_activation;
/* A layer of another family, a short convolution (short_conv.h). Selections and plans of it are made and asked as those of attention are;
 * what a layer calls is imbrex_plan_run_short_conv(). Functions for one family alone are IMBREX_INVALID (api.family) with another. */
typedef struct {
  size_t struct_size;
  int32_t dim;                     /* channels */
  int32_t width;                   /* 3; tokens that a sum is over, its own included */
  int32_t bias;                    /* 0; 1: imbrex_short_conv_inputs has one */
  int32_t dtype;                   /* imbrex_dtype; IMBREX_BF16 */
  int32_t num_drafts;              /* 0; drafts of a step that a later one may take back */
  int32_t reserved;                /* not read: where the struct of the first version ended with four bytes of padding */
  int32_t form, activation;        /* imbrex_conv_form, imbrex_conv_activation; IMBREX_CONV_GATED, IMBREX_CONV_NO_ACTIVATION */
  int32_t tree_drafts, reserved_2; /* 0; 1: drafts of a step may be a tree. reserved_2 is not read */
} imbrex_short_conv_fields;
IMBREX_API void imbrex_short_conv_fields_init(imbrex_short_conv_fields*, size_t struct_size);
IMBREX_API imbrex_status imbrex_spec_create_short_conv(const imbrex_short_conv_fields*, imbrex_spec** out);

/* Another family, multi-head latent attention (mla.h). A layer calls imbrex_plan_write_latents() and imbrex_plan_run_mla(). */
typedef struct {
  size_t struct_size;
  int32_t num_heads, kv_lora_rank, qk_nope_dim, qk_rope_dim, v_dim;                         /* the last four: 512, 128, 64, 128 */
  int32_t dtype, kv_dtype, kv_format;                                                       /* IMBREX_BF16, IMBREX_KV_LATENT */
  int32_t block_size;                                                                       /* 16 */
  int32_t causal, window_left, window_right, chunk, chunk_lookback, custom_mask, positions; /* as in imbrex_spec_fields */
  float scale;                                                                              /* 0: 1 / sqrt(qk_nope_dim + qk_rope_dim) */
  int32_t sinks, absorbed;            /* 0; 1: imbrex_mla_inputs has sinks; 1: queries and outputs are in latent space */
  int32_t reserved, tree, reserved_2; /* not read; 0; 1: queries are trees of drafts; not read */
} imbrex_mla_fields;
IMBREX_API void imbrex_mla_fields_init(imbrex_mla_fields*, size_t struct_size);
IMBREX_API imbrex_status imbrex_spec_create_mla(const imbrex_mla_fields*, imbrex_spec** out);

/* ---- which backend runs it, and why: select.h ---- */

typedef struct imbrex_selection imbrex_selection;
typedef enum { IMBREX_ANY_PHASE, IMBREX_PREFILL, IMBREX_DECODE } imbrex_phase;
typedef struct {
  size_t struct_size;
  const char *forced, *forced_prefill, *forced_decode; /* NULL; a backend, or a name that users of vLLM or SGLang know */
  int32_t phase;                                       /* imbrex_phase */
} imbrex_select_options;
IMBREX_API void imbrex_select_options_init(imbrex_select_options*, size_t struct_size);
/* Chooses the backend that runs a spec on a device. options may be NULL. That nothing runs the spec is not an error:
 * imbrex_selection_backend() is NULL then. */
IMBREX_API imbrex_status imbrex_select(const imbrex_spec*, const imbrex_device*, const imbrex_select_options* options,
                                       imbrex_selection** out);
IMBREX_API void imbrex_selection_free(imbrex_selection*);
IMBREX_API const char* imbrex_selection_backend(const imbrex_selection*); /* "cuda_sm90", or NULL */
IMBREX_API const char* imbrex_selection_rule(const imbrex_selection*);    /* "first of 2 that run it" */
IMBREX_API const char* imbrex_selection_explain(const imbrex_selection*); /* the table that `imbrex select` prints */

typedef struct {
  const char *code, *wanted, *actual; /* "spec.head_dim_qk", "a multiple of 16, at most 256", "80" */
} imbrex_reason;
/* The candidates are all backends, in order of preference; the reasons of one say why it does not run the spec. With an index that is out
 * of range these functions return NULL, 0 and IMBREX_INVALID. */
IMBREX_API int32_t imbrex_selection_num_candidates(const imbrex_selection*);
IMBREX_API const char* imbrex_selection_candidate(const imbrex_selection*, int32_t index);
IMBREX_API int32_t imbrex_selection_num_reasons(const imbrex_selection*, int32_t index); /* 0: it runs the spec */
IMBREX_API imbrex_status imbrex_selection_reason(const imbrex_selection*, int32_t index, int32_t reason, imbrex_reason* out);
/* Proposals are changes of the spec after which some backend runs it, as text; the one behind the last is NULL. */
IMBREX_API const char* imbrex_selection_proposal(const imbrex_selection*, int32_t index);

/* ---- one layer's pages: kv_cache.h ---- */

typedef struct {
  size_t struct_size;
  const imbrex_tensor *k, *v;             /* [num_blocks, block_size, num_kv_heads, head_dim], any strides; ragged: [rows, heads, dim].
                                             Of IMBREX_KV_LATENT v and v_scale are NULL: values are the first head_dim_v elements of k.
                                             Of IMBREX_KV_FP8_DS_MLA k is u8 [num_blocks, block_size, 656], and all else is NULL */
  const imbrex_tensor *k_scale, *v_scale; /* NULL, or f32 [1] or [num_kv_heads]; an fp8 element e stands for e * scale */
  /* Of IMBREX_KV_LATENT_ROPE: k has head_dim_v elements of each key, which are its value too, and k_rope those behind them, strided as k
   * is; k_rope_scale is given where k_scale is. NULL elsewhere. */
  const imbrex_tensor *k_rope, *k_rope_scale;
} imbrex_kv_cache;
IMBREX_API void imbrex_kv_cache_init(imbrex_kv_cache*, size_t struct_size);

/* Owned, zeroed memory on a device for all layers of one spec, of attention or of latent attention, whose pages these functions are for.
 * `order` names the physical order of the dimensions, outermost first: "lbhtd" (layer, block, head, token, dim) when it is NULL. */
typedef struct imbrex_kv_allocation imbrex_kv_allocation;
IMBREX_API imbrex_status imbrex_kv_allocation_create(const imbrex_spec*, const imbrex_device*, int32_t num_layers, int64_t num_blocks,
                                                     const char* order, imbrex_kv_allocation** out);
IMBREX_API void imbrex_kv_allocation_free(imbrex_kv_allocation*);
IMBREX_API int64_t imbrex_kv_allocation_bytes(const imbrex_kv_allocation*);
/* Gives the tensors of one layer; the allocation owns their memory. out->struct_size must be set. */
IMBREX_API imbrex_status imbrex_kv_allocation_layer(const imbrex_kv_allocation*, int32_t layer, imbrex_kv_cache* out);

/* Copies whole blocks of one layer in host memory, each block from[i] to the block to[i]. threads may be NULL. */
IMBREX_API imbrex_status imbrex_copy_blocks(const imbrex_spec*, const imbrex_kv_cache*, const int32_t* from, const int32_t* to,
                                            int64_t count, imbrex_threads* threads);

/* A copier copies blocks in the memory of any device, for copy on write. A GPU's kernels are loaded when it is made; after that it takes
 * caches of any spec, and copies in the order of the stream. A graph that captures its copies repeats them. Any number of threads may use
 * it at a time. threads are for the copier of a CPU, and may be NULL. */
typedef struct imbrex_block_copier imbrex_block_copier;
IMBREX_API imbrex_status imbrex_block_copier_create(const imbrex_device*, imbrex_threads* threads, imbrex_block_copier** out);
IMBREX_API void imbrex_block_copier_free(imbrex_block_copier*);
IMBREX_API imbrex_status imbrex_block_copier_copy(const imbrex_block_copier*, const imbrex_spec*, const imbrex_kv_cache*,
                                                  const int32_t* from, const int32_t* to, int64_t count, void* stream);

/* ---- plans: batch.h, backend.h ---- */

/* A workspace is scratch that plans share whose work is on one device, in the order of one stream. It has as many bytes as the plan that
 * needs most. Two plans that share it must not compute at the same time; they may be made, updated and freed on any thread. It may be freed
 * before its plans. workspace.h says more. */
typedef struct imbrex_workspace imbrex_workspace;
IMBREX_API imbrex_status imbrex_workspace_create(const imbrex_device*, imbrex_workspace** out);
/* A workspace in memory of the device that the caller owns, and keeps until the last plan and graph that use it are gone. A plan that needs
 * more than these bytes is refused. */
IMBREX_API imbrex_status imbrex_workspace_create_in(const imbrex_device*, void* memory, int64_t bytes, imbrex_workspace** out);
IMBREX_API void imbrex_workspace_free(imbrex_workspace*);
IMBREX_API int64_t imbrex_workspace_bytes(const imbrex_workspace*); /* held now; 0 on a CPU, whose plans have their own */

typedef struct imbrex_plan imbrex_plan;
typedef struct {
  size_t struct_size;
  int32_t max_num_reqs, max_num_tokens, max_seq_len; /* of every later batch: 256, 8192, 131072 */
  int32_t max_query_len;                             /* of one request; 0: no limit of its own; 1: a plan for decode */
  imbrex_threads* threads;                           /* CPU backends: these, */
  imbrex_parallel_for parallel_for;                  /* or the host's, */
  void* parallel_for_context;
  int32_t num_workers;         /* so many; neither: the calling thread */
  int32_t balanced;            /* 0; 1: split by load, results then depend on the batch */
  int32_t validate;            /* 1: check every batch */
  int32_t load_on_demand;      /* 0; 1: GPU kernels are compiled by the first run that needs them */
  int32_t on_device;           /* 0; 1: imbrex_plan_update_on_device() will be called */
  const int32_t* out_dtype;    /* an imbrex_dtype that every output will have: GPU kernels for no others are made; NULL: any */
  imbrex_workspace* workspace; /* scratch that the plan shares with others; NULL: of its own, and what backends from outside get */
  int32_t min_query_len;       /* of a request that has query tokens; 0: any; more: a plan for graphs of verify */
  int32_t shared_prompts;      /* not 0: requests may begin with the same blocks, and a GPU's kernels of decode share reads of these */
} imbrex_plan_options;
IMBREX_API void imbrex_plan_options_init(imbrex_plan_options*, size_t struct_size);

/* One scheduler step. query_start_loc and seq_lens are read during the call; what tensors show must stay until the next update. */
typedef struct {
  size_t struct_size;
  int32_t num_reqs;
  const int32_t* query_start_loc; /* [num_reqs + 1], host: 0, then where each request's query tokens end */
  const int32_t* seq_lens;        /* [num_reqs], host: keys of each request, this step's included */
  /* Where keys are: one of the three. NULL where not used. */
  const imbrex_tensor* block_table;                               /* i32 [num_reqs, max_blocks] */
  const imbrex_tensor *kv_indptr, *kv_indices, *kv_last_page_len; /* i32 [num_reqs + 1], [any], optional [num_reqs] */
  const imbrex_tensor* kv_start_loc;                              /* i32 [num_reqs + 1], block_size 0 */
  const imbrex_tensor* slot_mapping; /* i64 [>= num_tokens]: block * block_size + offset, -1: not written; for imbrex_plan_write_kv() */
  const imbrex_tensor* custom_mask;  /* u8 [sum of q_len * seq_len] */
  /* For layers that keep a state of each request: [num_reqs], host. NULL where not used. */
  const int32_t *state_slots, *num_drafts; /* the state's place; of the step's tokens the last that may be taken back, NULL: none */
  const int32_t* accepted_drafts;          /* the last draft of the request's step before that was kept, counted from 1; NULL: none */
  const int32_t* positions; /* [num_tokens], host: of queries among their request's keys; NULL: aligned at the bottom right */
  const int32_t *source_slots, *draft_parents; /* [num_reqs], NULL: state_slots; [num_tokens], NULL: chains (batch.h) */
  imbrex_named_tensors mask_tensors;           /* that the mask_mod reads, host, until the next update */
  const imbrex_tensor* packed_mask;            /* u8, in place of custom_mask: bits (batch.h); NULL where not used */
  const int32_t* mask_indptr;     /* [num_reqs + 1], host: bytes of packed_mask where requests begin; NULL: one after the other */
  int32_t has_pad_slot, pad_slot; /* 1: requests with tokens and this state slot are padding, whose outputs are zeros (batch.h) */
} imbrex_batch;
IMBREX_API void imbrex_batch_init(imbrex_batch*, size_t struct_size);

/* A step whose lengths an engine's kernels have left in device memory, where all arrays are. They mean what they do in imbrex_batch. */
typedef struct {
  size_t struct_size;
  int32_t max_num_tokens;                          /* what the host knows of query_start_loc's last; 0: the plan's limit */
  const imbrex_tensor *query_start_loc, *seq_lens; /* i32 [num_reqs + 1], [num_reqs] */
  const imbrex_tensor *block_table, *kv_indptr, *kv_indices, *kv_start_loc, *slot_mapping, *custom_mask;
  const imbrex_tensor *state_slots, *num_drafts, *accepted_drafts; /* i32 [num_reqs], as in imbrex_batch */
  const imbrex_tensor *positions, *source_slots, *draft_parents;   /* i32 [>= max_num_tokens], [num_reqs], [>= max_num_tokens] */
  const imbrex_tensor* packed_mask;                                /* u8: one request after the other */
  int32_t has_pad_slot, pad_slot;
} imbrex_device_batch;
IMBREX_API void imbrex_device_batch_init(imbrex_device_batch*, size_t struct_size);

typedef struct {
  size_t struct_size;
  const imbrex_tensor* q;                                  /* [>= num_tokens, num_q_heads, head_dim_qk] */
  const imbrex_tensor* q_scale;                            /* NULL, or f32 [1] or [num_kv_heads]: of fp8 queries */
  const imbrex_kv_cache* kv;                               /* this layer's pages */
  const imbrex_tensor *sinks, *alibi_slopes, *head_scales; /* f32 [num_q_heads], where the spec has them */
  const imbrex_tensor* relative_bias;                      /* f32 [relative_buckets, num_q_heads] */
  imbrex_named_tensors score_tensors;                      /* that the score_mod reads */
} imbrex_inputs;
IMBREX_API void imbrex_inputs_init(imbrex_inputs*, size_t struct_size);

typedef struct {
  size_t struct_size;
  const imbrex_tensor* out; /* [>= num_tokens, num_q_heads, head_dim_v] */
  const imbrex_tensor* lse; /* NULL, or f32 [>= num_tokens, num_q_heads]: natural logarithm of the denominator */
} imbrex_outputs;
IMBREX_API void imbrex_outputs_init(imbrex_outputs*, size_t struct_size);

/* Makes a plan for the spec and the device of a selection, by the backend that it has chosen. IMBREX_UNSUPPORTED when nothing runs the
 * spec, with imbrex_selection_explain() as text. */
IMBREX_API imbrex_status imbrex_plan_create(const imbrex_selection*, const imbrex_plan_options*, imbrex_plan** out);
/* Makes a plan of two backends: requests with at most decode_max_q query tokens go to that of `decode`, the others to that of `prefill`.
 * Both selections are for one spec and one device. */
IMBREX_API imbrex_status imbrex_plan_create_by_phase(const imbrex_selection* prefill, const imbrex_selection* decode,
                                                     const imbrex_plan_options*, int32_t decode_max_q, imbrex_plan** out);
/* Tells how many bytes of a workspace a plan of this selection with these options will take. Nothing is made, and the device may be one
 * that is only described. Plans that share a workspace take what the largest of them does. 0: the plan has scratch of its own, or none. */
IMBREX_API imbrex_status imbrex_selection_workspace_bytes(const imbrex_selection*, const imbrex_plan_options*, int64_t* out);
IMBREX_API void imbrex_plan_free(imbrex_plan*);
IMBREX_API const char* imbrex_plan_str(imbrex_plan*); /* "cpu_amx: 264 work items, 12 merges" */
/* 1 where the plan's imbrex_plan_write_kv() and imbrex_plan_run() may be captured into a CUDA graph, which then replays later steps too. 0
 * where the plan refuses a stream that is being captured, or the device has no graphs. */
IMBREX_API int32_t imbrex_plan_capturable(const imbrex_plan*);

IMBREX_API imbrex_status imbrex_plan_update(imbrex_plan*, const imbrex_batch*, void* stream); /* once a step */
IMBREX_API imbrex_status imbrex_plan_update_on_device(imbrex_plan*, const imbrex_device_batch*, void* stream);
/* Waits for the stream, and counts the rules that requests have broken in imbrex_plan_update_on_device() since the last call: the plan
 * leaves such requests out. imbrex_plan_device_problem() gives the reason of each rule. */
IMBREX_API imbrex_status imbrex_plan_device_problems(imbrex_plan*, void* stream, int32_t* count);
IMBREX_API imbrex_status imbrex_plan_device_problem(const imbrex_plan*, int32_t index, imbrex_reason* out);

/* Called once a layer, in this order. imbrex_plan_write_kv() writes k and v [num_tokens, num_kv_heads, head_dim] to the slots of the batch
 * (of IMBREX_KV_LATENT v is NULL); imbrex_plan_run() computes attention. */
IMBREX_API imbrex_status imbrex_plan_write_kv(imbrex_plan*, const imbrex_kv_cache*, const imbrex_tensor* k, const imbrex_tensor* v,
                                              void* stream);
IMBREX_API imbrex_status imbrex_plan_run(imbrex_plan*, const imbrex_inputs*, const imbrex_outputs*, void* stream);

/* What a short convolution reads and writes; imbrex_plan_run_short_conv() is called once a layer. */
typedef struct {
  size_t struct_size;
  const imbrex_tensor* bcx;    /* [>= num_tokens, 3 * dim]: B, C and x of a token after one another; plain form: [>= num_tokens, dim], x */
  const imbrex_tensor* weight; /* [dim, width] */
  const imbrex_tensor* bias;   /* NULL, or [dim] */
  const imbrex_tensor* state;  /* [slots, width - 1 + num_drafts, dim]: read and written; tree_drafts: (width - 1) * (1 + num_drafts) */
} imbrex_short_conv_inputs;
IMBREX_API void imbrex_short_conv_inputs_init(imbrex_short_conv_inputs*, size_t struct_size);
typedef struct {
  size_t struct_size;
  const imbrex_tensor* out; /* [>= num_tokens, dim]; not in the place of the input */
} imbrex_short_conv_outputs;
IMBREX_API void imbrex_short_conv_outputs_init(imbrex_short_conv_outputs*, size_t struct_size);
IMBREX_API imbrex_status imbrex_plan_run_short_conv(imbrex_plan*, const imbrex_short_conv_inputs*, const imbrex_short_conv_outputs*,
                                                    void* stream);

/* What a layer of latent attention reads and writes, after imbrex_plan_write_latents(). */
typedef struct {
  size_t struct_size;
  const imbrex_tensor* q;    /* [>= num_tokens, num_heads, qk_nope_dim + qk_rope_dim]; absorbed: kv_lora_rank + qk_rope_dim */
  const imbrex_tensor* kv_b; /* [num_heads, qk_nope_dim + v_dim, kv_lora_rank]; absorbed: NULL */
  const imbrex_kv_cache* kv;
  const imbrex_tensor* sinks; /* NULL, or f32 [num_heads] */
} imbrex_mla_inputs;
IMBREX_API void imbrex_mla_inputs_init(imbrex_mla_inputs*, size_t struct_size);
typedef struct {
  size_t struct_size;
  const imbrex_tensor *out,
      *lse; /* [>= num_tokens, num_heads, v_dim]; absorbed: kv_lora_rank. lse: NULL, or f32 [>= num_tokens, num_heads] */
} imbrex_mla_outputs;
IMBREX_API void imbrex_mla_outputs_init(imbrex_mla_outputs*, size_t struct_size);
/* Writes latents [num_tokens, kv_lora_rank] and rope [num_tokens, qk_rope_dim], NULL where that is 0, to the slots of the batch. */
IMBREX_API imbrex_status imbrex_plan_write_latents(imbrex_plan*, const imbrex_kv_cache*, const imbrex_tensor* latents,
                                                   const imbrex_tensor* rope, void* stream);
IMBREX_API imbrex_status imbrex_plan_run_mla(imbrex_plan*, const imbrex_mla_inputs*, const imbrex_mla_outputs*, void* stream);

/* ---- merge of partial results: merge.h ---- */

typedef struct {
  const imbrex_tensor *out, *lse; /* [num_tokens, num_heads, head_dim_v], f32 [num_tokens, num_heads] */
} imbrex_partial_result;
/* Adds up partial results in host memory, in the order in which they are given. threads and lse may be NULL. */
IMBREX_API imbrex_status imbrex_merge_partial_results(const imbrex_partial_result* parts, int32_t count, const imbrex_tensor* out,
                                                      const imbrex_tensor* lse, imbrex_threads* threads);

/* A merger adds up partial results in the memory of any device. A GPU's kernel is loaded when it is made; after that it works in the order
 * of the stream, on at most 48 parts on a GPU. A graph that captures a merge merges what is there when it is replayed. Any number of
 * threads may use it at a time. threads are for the merger of a CPU, and may be NULL. */
typedef struct imbrex_merger imbrex_merger;
IMBREX_API imbrex_status imbrex_merger_create(const imbrex_device*, imbrex_threads* threads, imbrex_merger** out);
IMBREX_API void imbrex_merger_free(imbrex_merger*);
IMBREX_API imbrex_status imbrex_merger_merge(const imbrex_merger*, const imbrex_partial_result* parts, int32_t count,
                                             const imbrex_tensor* out, const imbrex_tensor* lse, void* stream);

/* ---- who owns which block: block_pool.h ---- */

typedef struct imbrex_block_pool imbrex_block_pool;
IMBREX_API imbrex_status imbrex_block_pool_create(int32_t num_blocks, imbrex_block_pool** out);
IMBREX_API void imbrex_block_pool_free(imbrex_block_pool*);
IMBREX_API int32_t imbrex_block_pool_num_free(const imbrex_block_pool*); /* blocks without references, cached ones included */
IMBREX_API int32_t imbrex_block_pool_num_cached(const imbrex_block_pool*);
/* Takes `count` blocks, with one reference each. When there are not so many, nothing changes: IMBREX_OUT_OF_MEMORY. */
IMBREX_API imbrex_status imbrex_block_pool_allocate(imbrex_block_pool*, int32_t count, int32_t* blocks);
IMBREX_API imbrex_status imbrex_block_pool_retain(imbrex_block_pool*, const int32_t* blocks, int32_t count);
IMBREX_API imbrex_status imbrex_block_pool_release(imbrex_block_pool*, const int32_t* blocks, int32_t count);
/* Finds the longest prefix of `hashes` that is cached. `blocks`, which has room for count, is given the blocks of that prefix, each with
 * one more reference, and num_found their number. */
IMBREX_API imbrex_status imbrex_block_pool_lookup(imbrex_block_pool*, const uint64_t* hashes, int32_t count, int32_t* blocks,
                                                  int32_t* num_found);
IMBREX_API imbrex_status imbrex_block_pool_publish(imbrex_block_pool*, int32_t block, uint64_t hash); /* lets lookup find a full block */
/* Gives out a block that may be written in place of `block`: the same one when nobody else has it, else a new one, to which the caller
 * copies the contents (imbrex_block_copier_copy()). IMBREX_OUT_OF_MEMORY, and nothing changes, when there is none. */
IMBREX_API imbrex_status imbrex_block_pool_make_writable(imbrex_block_pool*, int32_t block, int32_t* out);
/* The hash of a full block of tokens and of all blocks before it, whose hash is `parent`; 0 for the first block. It is keyed with random
 * bits of this process, so that no tenant can make two prefixes with one hash; another process has other hashes. On failure 0, no hash. */
IMBREX_API uint64_t imbrex_hash_block(uint64_t parent, const uint64_t* token_ids, int32_t count);
/* The hash of a block by a key of the caller's, 128 random bits: processes that share the secret have the same hashes. */
IMBREX_API imbrex_status imbrex_hash_block_with_key(const uint64_t key[2], uint64_t parent, const uint64_t* token_ids, int64_t count,
                                                    uint64_t* out);
#ifdef __cplusplus
}
#endif
#include "imbrex/imbrex_batches.h"
#include "imbrex/imbrex_recurrent.h"
#include "imbrex/plugin.h"

#endif /* IMBREX_H */
