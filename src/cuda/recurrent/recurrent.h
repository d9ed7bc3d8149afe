#pragma once
// Recurrent layers on NVIDIA GPUs: which kernels run a spec, with which constants, and how a launch is shared out. Host side of the kernels
// in this folder.
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "cuda/driver/driver.h"
#include "cuda/driver/jit.h"
#include "cuda/recurrent_params.h"
#include "imbrex/recurrent.h"

namespace imbrex::cuda {

// The kernel that computes requests of a spec token by token.
struct RecurrentKernel {
  KernelKey key;
  const char *aligned, *unaligned;  // entries
  int threads = 0;                  // of a block
  int tile = 0;                     // values of a head that a block has at most; of narrow heads, heads
  int units = 0;                    // thread blocks that a request needs
  bool finishes = false;            // `aligned` gates and norms outputs too, where have_aligned_outputs(); and so does StreamKernel
};
// It finishes outputs from Hopper on, where a norm is over a head, all values of which a thread block has; not those of narrow heads.
RecurrentKernel recurrent_kernel(std::string_view arch, const RecurrentSpec&);

// The kernel of prompts of heads with values of one dimension (Mamba1).
struct NarrowPromptKernel {
  KernelKey key;
  int tile = 0, units = 0;  // as in RecurrentKernel
};
// None for other heads, and where those of a thread block have several key heads, keys are no multiples of 4 channels, or gates sigmoids.
std::optional<NarrowPromptKernel> narrow_prompt_kernel(std::string_view arch, const RecurrentSpec&);

// The kernel that does the same where a step has more states than multiprocessors have room for.
struct StreamKernel {
  KernelKey key;
  int blocks_together = 0;  // of a multiprocessor, which stay
};
// None before Hopper or with little shared memory, for trees of drafts, for states whose rows are no multiples of 16 bytes, for small
// heads, and for decays of channels that leave too few registers.
std::optional<StreamKernel> stream_kernel(std::string_view arch, const RecurrentSpec&, const DeviceInfo&);

// Of a launch, in plans that are made from then on. Tests take fewer, so that few units stream, and thread blocks of recurrent_narrow.cu
// have several requests.
inline int64_t most_stream_blocks = INT64_MAX;

// Whether kernels that are chosen from then on may finish outputs. Tests have some that do not, for the same bits.
inline bool may_finish_outputs = true;

// Chunks of a segment at least, in plans that are made from then on. Tests take fewer: the host is slow at computing what a GPU computes.
inline int least_segment = 32;

// The kernels that compute prompts in chunks.
struct ChunkKernels {
  KernelKey weights, chunks;
  KernelKey ends, segments;  // of requests in segments
  const char* weights_entry = "recurrent_weights";
  int weights_threads = kRecurrentWeightsThreads;  // of a block there
  bool maps = false;                               // `chunks` takes ChunkMaps too
  unsigned cluster = 1;                            // thread blocks of `chunks` that take the same chunks together
  int weights_units = 0;                           // thread blocks that a chunk needs there
  int tile = 0;                                    // values that a thread block of `chunks` has
  int threads = 0;                                 // of it
  int units = 0;                                   // thread blocks that a request needs there
  int blocks_together = 0;                         // that a multiprocessor is to hold
  int stage_bytes = 0, ends_stage_bytes = 0;       // of shared memory, of a chunk, where a launch says how many there are; else 0
  int64_t weights_bytes = 0, carried_bytes = 0;    // of a chunk; of a state that goes on from one round to the next
  int64_t scratch_room = 0;                        // bytes that the chunks of a round may take
  // Where heads are too few for all multiprocessors: how many segments a long request has at most, else 1. Thread blocks that a segment
  // needs of `ends`, and a request of `segments`; bytes of a segment's place; and chunks of a segment at least.
  int most_segments = 1, least_segment = 1, ends_units = 0, segments_units = 0;
  int64_t segment_bytes = 0;
};
// None for a spec or a device that they are not for: rates of channels, types of more than 16 bits, other dimensions of keys than 64 and
// 128 and of values than multiples of 64, or little shared memory.
std::optional<ChunkKernels> chunk_kernels(std::string_view arch, const RecurrentSpec&, const DeviceInfo&);
// The kernel that gates and norms outputs. None for a spec without such a stage.
struct OutputKernel {
  KernelKey key;
  int groups_together = 0;  // groups of tokens that a thread block takes at a time
  int group_numbers = 0;
  int64_t groups = 0;  // of a token
};
std::optional<OutputKernel> output_kernel(std::string_view arch, const RecurrentSpec&);
constexpr int kLeastChunked = 16;  // RecurrentParams::least_chunked

// Queries, keys, values and outputs for TMA.
struct ChunkMaps {
  CUtensorMap q, k, v, out;
};
bool encode_chunk_maps(ChunkMaps&, const RecurrentInputs&, const RecurrentOutputs&);  // false where TMA cannot read or write one

// What is made of chunks lies in scratch, of as many chunks at a time as there is room for: the others are other rounds.
struct ChunkRounds {
  ChunkRounds(const ChunkKernels&, const PlanLimits&);
  // How many numbers chunks of a step may have, as recurrent_chunks_parts.cuh numbers them.
  static int64_t numbers(int64_t num_tokens, int64_t num_reqs) { return num_reqs == 0 ? 0 : num_tokens / kRecurrentChunk + num_reqs; }
  // Numbers of a round where a step has so many: as few rounds as there can be, of one length, which then end where requests do more often.
  int64_t each_of(int64_t step_numbers) const {
    const int64_t rounds = (step_numbers + each - 1) / each;
    return (step_numbers + rounds - 1) / rounds;
  }
  int64_t each = 0;       // numbers that there is room for
  int64_t carried = 0;    // where in scratch two places for states that go on begin, or those of segments
  int most_segments = 1;  // of a request; more only where there is one round
  int64_t bytes = 0;      // of scratch
};

std::vector<KernelKey> recurrent_kernels(std::string_view arch, const RecurrentSpec&, const DeviceInfo&);  // those of a plan

// Whether chunks can be computed: every row of q, k, v, outputs and states begins at a multiple of 16 bytes.
bool has_aligned_rows(const RecurrentInputs&, const RecurrentOutputs&);
// Whether the entry for aligned tensors can run it: every state and row of outputs begins at a multiple of 16 bytes.
bool are_aligned(const RecurrentInputs&, const RecurrentOutputs&);
// Whether the entry for aligned tensors of recurrent_narrow.cu can run it, and recurrent_narrow_prompts.cu where there is one: rows of
// keys, queries and states begin at multiples of four numbers, heads of a state are neighbours, strides have 31 bits, and the spec is one
// of narrow_prompt_kernel().
bool has_aligned_quads(const RecurrentSpec&, const RecurrentInputs&, const RecurrentOutputs&);
// Whether the entry for aligned tensors of OutputKernel can run it.
bool have_aligned_outputs(const RecurrentSpec&, const RecurrentInputs&, const RecurrentOutputs&);
RecurrentOutputParams output_params(const RecurrentSpec&, const OutputKernel&, const RecurrentInputs&, const RecurrentOutputs&,
                                    const RecurrentParams&);
RecurrentParams recurrent_params(const RecurrentSpec&, const RecurrentInputs&, const RecurrentOutputs&);  // all but lists and scratch

}  // namespace imbrex::cuda
