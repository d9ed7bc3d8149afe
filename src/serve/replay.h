#pragma once
// Replays a trace through the layers of a model: scheduler, plans, caches and kernels are real, the inputs of layers are synthetic.
// What `imbrex run` is made of; the report is printed from ReplayResult alone.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "imbrex/model.h"
#include "imbrex/select.h"
#include "serve/drafts.h"
#include "serve/percentiles.h"
#include "serve/trace.h"

namespace imbrex::serve {

enum class Pacing : uint8_t {
  arrival,  // a request can be scheduled from its arrival on; idle time is skipped, not slept
  saturate  // every request is there at time 0
};
const char* to_string(Pacing);

// The state of a replay that is under way. Times in seconds.
struct ReplayProgress {
  int64_t finished_requests = 0, total_requests = 0;
  int64_t finished_tokens = 0, total_tokens = 0;  // prompt and output tokens: how far the replay is, for the bar
  int64_t steps = 0;
  int running = 0, waiting = 0;
  double wall_s = 0;   // since the replay began, synthesis and verification included
  double clock_s = 0;  // the replay's clock
};

struct ReplayOptions {
  int num_layers = 0;      // the model's first layers, as it counts them; 0: all
  int layers_of_kind = 0;  // of these, the first so many of each kind; 0: all
  uint64_t seed = 1;
  int max_num_batched_tokens = 2048;
  int max_num_seqs = 128;
  bool prefix_sharing = true;  // of models that keep states where the trace has prefixes
  Pacing pacing = Pacing::arrival;
  DraftOptions drafts;      // speculative decoding; no trees for latent attention
  double rate_scale = 1.0;  // with Pacing::arrival: 2 means that requests come twice as fast
  double fixed_step_s = 0;  // > 0: every step takes this long on the replay's clock (for repeatable schedules); 0: measured

  std::string device = "cpu";      // as describe_device() takes it; it must be there
  int64_t kv_bytes = 0;            // memory of pages and states; 0: a quarter of the CPU's memory, or nine tenths of what a GPU has left
  int64_t num_blocks = 0;          // > 0: blocks of every group of pages instead, and a state slot for each of max_num_seqs
  bool skip_too_long = false;      // leave out requests that the cache could never hold, instead of an error
  int block_size = 32;             // the packed format is read in place from 32 on
  DType q_dtype = DType::bf16;     // bf16 is the only one that synthesis makes; Error replay.q_dtype for others
  DType kv_dtype = DType::bf16;    // f32, bf16, f16, fp8_e4m3, fp8_e5m2
  std::string kv_format = "auto";  // the name of one, or "auto": the first that KvCodec::preferred recommends and a fast backend runs

  SelectOptions select;  // forced backends; `phase` is set by the replay
  int num_threads = 0;   // 0: every core this process may use
  bool validate = true;  // PlanOptions::validate

  double verify_fraction = 0;   // of (computed token, layer) pairs; in each, one kv head with its q heads is recomputed, or all channels
  double verify_last = 0;       // likewise, of (request, layer) pairs: the last output of the request, with its final state
  double time_limit_s = 0;      // wall time after which the replay stops between two steps; 0: none
  int max_series_points = 512;  // steps are merged until the time series has no more points than this
  double progress_interval_s = 0.2;
  std::function<bool(const ReplayProgress&)> progress;  // false stops the replay between two steps
};

// One kind of layer: same spec, same cache group, same plan.
struct ReplayKind {
  std::string spec;                              // str() of it
  std::string family;                            // "attention", "short_conv", "mla"
  std::string group;                             // CacheGroup::name
  bool bits_follow_steps = false;                // how a prompt is cut into steps may change bits
  std::vector<int> layers;                       // ModelLayer::number of each
  std::string backend;                           // "cpu_amx", or "cpu_amx + cpu_avx512" when phases differ
  std::string rule;                              // why: Selection::rule
  std::string selection;                         // Selection::str(): every candidate with its reasons
  std::string plan;                              // BasicPlan::str() of the last step
  double run_s = 0, kv_write_s = 0, plan_s = 0;  // GPU: KV writes are part of run_s
  double flops = 0;                              // useful ones, as LayerWork has them
  double bytes = 0;                              // attention: visible keys and values, once a step; else inputs, outputs and states
};

struct ReplayGroup {
  std::string name;  // CacheGroup::name
  int num_layers = 0;
  int64_t num_blocks = 0;     // of pages
  int64_t bytes = 0;          // of the allocation
  double mean_occupancy = 0;  // blocks (or slots) in use / all, weighted by step time
  double peak_occupancy = 0;
  int64_t evictions = 0;  // cached blocks given to somebody else
  int64_t num_slots = 0;  // of states; 0: the group is of pages
};

// Several consecutive steps; times in seconds, sums over the steps where not said otherwise.
struct ReplayPoint {
  double clock_s = 0;  // end of the last step on the replay's clock
  int64_t steps = 0;
  double step_s = 0;  // scheduling + planning + KV writes + attention + layers with states
  double attention_s = 0;
  int64_t prefill_tokens = 0, decode_tokens = 0;
  double running = 0, waiting = 0;  // means over the steps
  std::vector<double> occupancy;    // per group, mean over the steps, 0..1
};

struct ReplayTimes {
  double schedule_s = 0;  // scheduler: admission, blocks, tables
  double plan_s = 0;      // BasicPlan::update of every kind
  double kv_write_s = 0;
  double attention_s = 0;
  double synth_s = 0;   // making inputs of layers: not part of a step
  double verify_s = 0;  // digest and recomputation: not part of a step
  double state_s = 0;   // layers with states
  double step_s() const { return schedule_s + plan_s + kv_write_s + attention_s + state_s; }
};

// Work of attention, or of layers with states, in the steps of one sort.
struct ReplayWork {
  int64_t steps = 0;
  int64_t tokens = 0;  // query tokens
  double run_s = 0;
  double flops = 0;  // useful ones, all layers
  double bytes = 0;  // as ReplayKind has them
  double flop_per_s() const { return run_s > 0 ? flops / run_s : 0; }
  double bytes_per_s() const { return run_s > 0 ? bytes / run_s : 0; }
};

struct ReplayResult {
  // The configuration
  std::string model, family, trace, trace_format, device;
  std::vector<std::string> notes;        // of the model, and what the replay assumed ("kv_format strided: ...")
  int num_layers = 0, model_layers = 0;  // as the model counts them
  uint64_t seed = 0;
  int num_threads = 0, max_num_batched_tokens = 0, max_num_seqs = 0, block_size = 0;
  std::string q_dtype, kv_dtype, kv_format, pacing;
  double rate_scale = 1;
  bool prefix_sharing = true;
  std::vector<ReplayKind> kinds;
  std::vector<ReplayGroup> groups;
  int64_t kv_bytes = 0;       // of the caches: pages and states
  int64_t padding_bytes = 0;  // of these: where no state, key or value can lie
  int64_t rest_bytes = 0;     // of the memory that caches may have, beyond kv_bytes: too few for one more block of each group
  double wasted_share() const { return kv_bytes > 0 ? double(padding_bytes + rest_bytes) / double(kv_bytes + rest_bytes) : 0; }

  // The outcome
  bool complete = false;  // every request finished
  std::string stopped;    // why not: "time limit", "cancelled"
  int64_t requests = 0, finished_requests = 0, skipped_requests = 0;
  int64_t steps = 0, preemptions = 0;
  int64_t prompt_tokens = 0;            // of admitted requests
  int64_t prefix_hit_tokens = 0;        // of those, found in the cache at first admission
  int64_t prefill_tokens = 0;           // computed in chunks, recomputation included
  int64_t decode_tokens = 0;            // computed one a step
  int64_t recomputed_tokens = 0;        // computed again after a preemption
  int64_t output_tokens = 0;            // made
  int64_t kept_states = 0;              // behind prefixes, for requests that begin alike
  int64_t drafts = 0, kept_drafts = 0;  // made, and kept as tokens
  double wall_s = 0;                    // of the whole replay
  double clock_s = 0;                   // the replay's clock at the end; idle time included
  double idle_s = 0;                    // clock time without anything to do
  ReplayTimes times;
  double prefix_hit_rate() const { return prompt_tokens > 0 ? double(prefix_hit_tokens) / double(prompt_tokens) : 0; }
  double busy_s() const { return clock_s - idle_s; }

  // Latencies on the replay's clock, in seconds, of finished requests
  Percentiles ttft;   // arrival to first token
  Percentiles tpot;   // (last token - first token) / (output - 1), requests with two tokens or more
  Percentiles e2e;    // arrival to last token
  Percentiles queue;  // arrival to first scheduled
  Percentiles step;   // ReplayTimes::step_s() of each step
  Percentiles batch;  // requests a step

  // Work
  ReplayWork decode_steps;    // attention in steps with one query token a request
  ReplayWork prefill_steps;   // in all others: chunks of prompts, with or without decodes
  ReplayWork state_layers;    // layers with states, in all steps
  double unfilled_share = 0;  // of the bytes that running requests hold, a mean by time: behind the last tokens of their last blocks
  double kv_written_bytes = 0;

  // Proof
  uint64_t digest = 0;         // of the outputs of every token that an output token was made from, in every layer;
                               // does not depend on batching, chunking, preemption or threads
  uint64_t decode_digest = 0;  // the same without the prompts' last tokens
  double verify_fraction = 0;
  int64_t verified_outputs = 0;  // (token, layer, q head) outputs recomputed; (token, layer) where a layer has no heads
  int64_t verified_values = 0;
  int64_t verified_states = 0;  // behind a request's last token in a step: of a value head, or all channels of a convolution
  double verify_max_error = 0;  // largest |actual - expected|
  double verify_max_ratio = 0;  // largest |actual - expected| / bound; a ratio above 1 ends the replay with Error replay.verify

  std::vector<ReplayPoint> series;
};

// Error replay.model.* for models it cannot drive (encoders, cross attention), replay.* for bad options, select.forced, and
// replay.verify when a recomputed output differs by more than the bound (the message says where and by how much).
ReplayResult replay(const ModelSpec&, const Trace&, const ReplayOptions&);

}  // namespace imbrex::serve
