/* The C ABI of imbrex, for those who bring something: backends and devices from outside, and the shared objects that they come in. A part
 * of imbrex.h, which is to be included. */
#ifndef IMBREX_PLUGIN_H
#define IMBREX_PLUGIN_H

#include "imbrex/imbrex.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- backends from outside ---- */

typedef struct {
  void* context;
  void (*add)(void* context, const char* code, const char* wanted, const char* actual);
} imbrex_reasons;

/* Functions of a backend. `context` is the backend's, `plan` its own. Batches, inputs and outputs are checked before they come. A function
 * that fails returns a status and has changed nothing, and `error` says why to the thread that asks. Everything lives until
 * imbrex_unregister_backend() has returned IMBREX_OK; none of it is used afterwards. */
typedef struct {
  size_t struct_size;
  const char *name, *description;
  void* context;
  void (*unsupported)(void* context, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_reasons*); /* all of them */
  imbrex_status (*plan)(void* context, const imbrex_spec_fields*, const imbrex_device_properties*, const imbrex_plan_options*, void** plan);
  void (*plan_free)(void* plan);
  imbrex_status (*update)(void* plan, const imbrex_batch*, void* stream);
  imbrex_status (*write_kv)(void* plan, const imbrex_kv_cache*, const imbrex_tensor* k, const imbrex_tensor* v, void* stream);
  imbrex_status (*run)(void* plan, const imbrex_inputs*, const imbrex_outputs*, void* stream);
  const char* (*str)(void* plan);
  const char* (*error)(void* context);
  size_t spec_size; /* sizeof(imbrex_spec_fields) as the backend knows it; 0: 96. A layer that has anything behind is refused in its name */
  size_t device_size; /* sizeof(imbrex_device_properties) as the backend knows it; 0: 56. Less than 72: devices of plug-ins are refused in
                       * its name, for it cannot tell them from others */
  int32_t capturable; /* 0; 1: what write_kv and run give to a stream may be captured into a graph of a device that has them. Replayed, it
                       * computes the step that update has last made, of no more tokens than its tensors have */
} imbrex_backend;
/* In front of the built-in ones of its family. Thread-safe. The struct is copied. */
IMBREX_API imbrex_status imbrex_register_backend(const imbrex_backend*);
/* Waits for calls of `unsupported` and `plan` in other threads. IMBREX_INVALID (registry.in_use), and nothing has changed, while there are
 * plans of it: free them first. Selections may outlive it: what it refused and why stays readable, and making a plan of it is
 * IMBREX_UNSUPPORTED. */
IMBREX_API imbrex_status imbrex_unregister_backend(const char* name);

/* The same for short convolutions. Of a batch there are num_reqs, query_start_loc, seq_lens and state_slots, and num_drafts,
 * accepted_drafts, source_slots and draft_parents where the step has them; of a request without tokens those of requests say nothing. Steps
 * with a pad_slot are refused in a backend's name, and those with source_slots where it does not know tree_drafts. The name may be that of
 * a backend of another family. */
typedef struct {
  size_t struct_size;
  const char *name, *description;
  void* context;
  void (*unsupported)(void* context, const imbrex_short_conv_fields*, const imbrex_device_properties*, const imbrex_reasons*);
  imbrex_status (*plan)(void* context, const imbrex_short_conv_fields*, const imbrex_device_properties*, const imbrex_plan_options*,
                        void** plan);
  void (*plan_free)(void* plan);
  imbrex_status (*update)(void* plan, const imbrex_batch*, void* stream);
  imbrex_status (*run)(void* plan, const imbrex_short_conv_inputs*, const imbrex_short_conv_outputs*, void* stream);
  const char* (*str)(void* plan);
  const char* (*error)(void* context);
  size_t spec_size, device_size; /* sizeof(imbrex_short_conv_fields), sizeof(imbrex_device_properties); 0: 32, 56 */
  int32_t capturable;
} imbrex_short_conv_backend;
IMBREX_API imbrex_status imbrex_register_short_conv_backend(const imbrex_short_conv_backend*);
IMBREX_API imbrex_status imbrex_unregister_short_conv_backend(const char* name);

/* The same for recurrent layers. */
typedef struct {
  size_t struct_size;
  const char *name, *description;
  void* context;
  void (*unsupported)(void* context, const imbrex_recurrent_fields*, const imbrex_device_properties*, const imbrex_reasons*);
  imbrex_status (*plan)(void* context, const imbrex_recurrent_fields*, const imbrex_device_properties*, const imbrex_plan_options*,
                        void** plan);
  void (*plan_free)(void* plan);
  imbrex_status (*update)(void* plan, const imbrex_batch*, void* stream);
  imbrex_status (*run)(void* plan, const imbrex_recurrent_inputs*, const imbrex_recurrent_outputs*, void* stream);
  const char* (*str)(void* plan);
  const char* (*error)(void* context);
  size_t spec_size, device_size; /* sizeof(imbrex_recurrent_fields), sizeof(imbrex_device_properties); 0: 88, 56 */
  int32_t capturable;
} imbrex_recurrent_backend;
IMBREX_API imbrex_status imbrex_register_recurrent_backend(const imbrex_recurrent_backend*);
IMBREX_API imbrex_status imbrex_unregister_recurrent_backend(const char* name);

/* ---- devices from outside ---- */

/* What a device is. struct_size is set by who asks; the plug-in writes fields that lie within it. */
typedef struct {
  size_t struct_size;
  const char* name;                    /* "Toy accelerator"; NULL: the table's */
  int32_t num_workers;                 /* that compute side by side; 1 */
  int64_t l2_bytes, memory_bytes;      /* 0 */
  double peak_flops, peak_bytes_per_s; /* by the data sheet: of dense bf16 products, of its memory; 0: not known */
} imbrex_device_description;

/* A kind of devices: memory, copies, streams, events and graphs, which the library uses as it uses those of CUDA. `context` is the table's,
 * `device` what open gave out. Functions may be called by any number of threads at a time, but those that take a stream by one for each
 * stream. What has a stream is carried out in its order and may return before: host memory that it names stays as it is until the stream
 * has come there. What fails returns a status and has changed nothing, and `error` says why to the thread that asks; work that fails after
 * its call has returned is the status of the next stream_synchronize or event_synchronize. Everything lives until
 * imbrex_unregister_device() has returned IMBREX_OK; none of it is used afterwards. */
typedef struct {
  size_t struct_size;
  const char* name; /* "toy": its devices are toy:0, toy:1, ... A lower-case letter, then lower-case letters, digits and _ */
  void* context;
  const char* (*error)(void* context); /* may be NULL */

  int32_t (*count)(void* context); /* of its devices: at most 64 */
  imbrex_status (*describe)(void* context, int32_t number, imbrex_device_description* out);
  /* One `device` is used by all until nobody needs it any more; then it is closed. */
  imbrex_status (*open)(void* context, int32_t number, void** device);
  void (*close)(void* device);

  /* Not initialised, aligned to 256 bytes; 0 bytes are asked for as 1. IMBREX_OUT_OF_MEMORY where there is not so much. release waits for
   * what streams of the device were given before. What lies n bytes behind an address is at that address plus n. */
  int64_t (*free_bytes)(void* device);
  imbrex_status (*allocate)(void* device, int64_t bytes, void** out);
  void (*release)(void* device, void* memory);
  /* Memory of the host that copies are fast from and to. Both may be NULL. */
  imbrex_status (*allocate_host)(void* device, int64_t bytes, void** out);
  void (*release_host)(void* device, void* memory);

  imbrex_status (*stream_create)(void* device, void** out);
  void (*stream_free)(void* device, void* stream);                 /* what it was given is carried out all the same */
  imbrex_status (*stream_synchronize)(void* device, void* stream); /* waits for everything so far */
  imbrex_status (*upload)(void* device, void* to, const void* from, int64_t bytes, void* stream);   /* host to device */
  imbrex_status (*download)(void* device, void* to, const void* from, int64_t bytes, void* stream); /* device to host */
  imbrex_status (*copy)(void* device, void* to, const void* from, int64_t bytes, void* stream);     /* on the device; no overlap */
  imbrex_status (*fill)(void* device, void* to, uint8_t value, int64_t bytes, void* stream);

  /* Points of streams. stream_wait: what the stream is given later comes after the event. Neither waits for an event that was not recorded.
   */
  imbrex_status (*event_create)(void* device, int32_t timed, void** out);
  void (*event_free)(void* device, void* event);
  imbrex_status (*event_record)(void* device, void* event, void* stream);
  imbrex_status (*stream_wait)(void* device, void* stream, void* event);
  imbrex_status (*event_synchronize)(void* device, void* event);
  imbrex_status (*event_seconds)(void* device, void* begin, void* end, double* out); /* between two timed ones that are done */

  /* Graphs: all five, or all NULL. Between begin and end the stream records what it is given instead of carrying it out; launching a graph
   * does it once more. capture_end with a NULL `graph` drops what was recorded. capture_of: a number of the capture that the stream is part
   * of, never used twice; 0: it captures nothing. */
  imbrex_status (*capture_begin)(void* device, void* stream);
  imbrex_status (*capture_end)(void* device, void* stream, void** graph);
  imbrex_status (*capture_of)(void* device, void* stream, uint64_t* out);
  imbrex_status (*graph_launch)(void* device, void* graph, void* stream);
  void (*graph_free)(void* device, void* graph);

  /* Kernels around layers; each may be NULL. Tensors have been checked, and are on the device.
   * gather: to[i, :] = from[offsets[i] + :], of contiguous tensors; from [any], offsets i32 [rows] in elements, to [rows, row length].
   * NULL: the host reads the offsets and copies row after row. merge: as imbrex_merger_merge(). NULL: imbrex_merger_create() is Error
   * merge.missing. */
  imbrex_status (*gather)(void* device, const imbrex_tensor* from, const imbrex_tensor* offsets, const imbrex_tensor* to, void* stream);
  imbrex_status (*merge)(void* device, const imbrex_partial_result* parts, int32_t count, const imbrex_tensor* out,
                         const imbrex_tensor* lse, void* stream);
} imbrex_device_table;
/* Thread-safe. The struct is copied. Its devices are imbrex_device_create("toy:0"), and of tensors {12, index}, where index / 64 counts the
 * tables that were registered before and index % 64 is the number that the table knows: imbrex_device_properties has both. */
IMBREX_API imbrex_status imbrex_register_device(const imbrex_device_table*);
/* Waits for calls in other threads. IMBREX_INVALID (registry.in_use), and nothing has changed, while a device of it is open: while there
 * are streams, memory, graphs or plans on it. What names such a device afterwards is IMBREX_DEVICE (device.absent). */
IMBREX_API imbrex_status imbrex_unregister_device(const char* name);

/* A shared object with backends or devices defines imbrex_plugin(), which registers them through `host`, so that it links with nothing. It
 * stays open. IMBREX_INVALID when it cannot be opened, has no such function, is for another ABI, or returns anything but IMBREX_OK. */
typedef struct {
  size_t struct_size;
  uint32_t abi_version;
  imbrex_status (*register_backend)(const imbrex_backend*);
  const char* (*last_error)(void);
  imbrex_status (*register_device)(const imbrex_device_table*); /* where struct_size says that it is there, as all below */
  imbrex_status (*register_short_conv_backend)(const imbrex_short_conv_backend*);
  imbrex_status (*register_recurrent_backend)(const imbrex_recurrent_backend*);
} imbrex_host;
typedef imbrex_status (*imbrex_plugin_function)(const imbrex_host*); /* imbrex_plugin */
IMBREX_API imbrex_status imbrex_load_plugin(const char* path);

#ifdef __cplusplus
}
#endif
#endif /* IMBREX_PLUGIN_H */
