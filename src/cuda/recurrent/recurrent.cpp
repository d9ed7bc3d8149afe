// See recurrent.h.
#include "cuda/recurrent/recurrent.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

#include "core/tensor_layout.h"
#include "cuda/attention/kv_side.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/state/state_lists.h"

namespace imbrex::cuda {
namespace {

// Heads with values of one dimension, of which a thread block takes many (Mamba1).
bool is_narrow(const RecurrentSpec& spec) { return spec.head_dim_v == 1 && spec.head_dim_k <= 128 && !spec.delta && !spec.channel_gate; }

constexpr int64_t kAlignedBytes = 16;
// What the chunks of a round may take of scratch: this, or a part of the device's memory. Each round ends with idle multiprocessors.
constexpr int64_t kLeastRoom = 192 << 20, kRoomShare = 256;

constexpr auto parts_of(auto whole, int each) { return (whole + each - 1) / each; }

// Whether heads are neighbours, whose numbers are then one row.
bool are_one_row(const RecurrentSpec& spec, const TensorView& t) { return t.stride(1) == spec.head_dim_v || t.size(1) == 1; }
bool is_one_row(const RecurrentSpec& spec, const RecurrentInputs& in, const RecurrentOutputs& out) {
  const TensorView& weight = in.norm_weight;
  const bool weights_too = weight.empty() || spec.num_v_heads == 1 || (weight.rank == 2 && weight.stride(0) == spec.head_dim_v);
  return weights_too && (in.z.empty() || are_one_row(spec, in.z)) && are_one_row(spec, out.out);
}

// Bytes of shared memory that a thread block may have. What is compiled in advance is for an architecture, of which no device is there.
int smem_of(int sm, const DeviceInfo& device) {
  constexpr int kKiB = 1024, kLarge = 227 * kKiB, kAmpere = 163 * kKiB, kSmall = 99 * kKiB;
  const int all = sm == 86 || sm == 89 || sm >= 120 ? kSmall : sm < 90 ? kAmpere : kLarge;
  return device.max_smem_bytes > 0 ? std::min(device.max_smem_bytes, all) : all;
}

// With more segments than multiprocessors for them, and with fewer than three, the work that they add is more than what they save.
int most_segments(const DeviceInfo& device, int units) {
  constexpr int kMost = 8;
  const int most = std::min(kMost, device.num_workers / units);
  return most < kLeastSegments ? 1 : most;
}

// Whether kernels that compute token by token finish outputs.
bool finishes_outputs(std::string_view arch, const RecurrentSpec& spec) {
  constexpr int kEight = 8;
  if (!may_finish_outputs || arch_number(arch) < 900 || !spec.has_output_stage() || spec.head_dim_v % kEight != 0) return false;
  if (recurrent_key_lanes(spec.head_dim_k) < kRecurrentLaneValues) return false;
  const int values = recurrent_warps(spec.head_dim_k, spec.head_dim_v) * recurrent_warp_values(spec.head_dim_k);
  return spec.out_norm == OutputNorm::none || (spec.norm_heads() == 1 && spec.head_dim_v <= values);
}

std::vector<gpu::Constant> token_constants(std::string_view arch, const RecurrentSpec& spec) {
  const bool finishes = finishes_outputs(arch, spec);
  return {{"kType", int(spec.dtype)},
          {"kStateType", int(spec.state_dtype)},
          {"kDimK", spec.head_dim_k},
          {"kDimV", spec.head_dim_v},
          {"kKeysFirst", spec.layout == StateLayout::k_first},
          {"kChannelGate", spec.channel_gate},
          {"kChannelRates", spec.channel_rates},
          {"kTree", spec.tree_drafts},
          {"kOutGate", finishes ? int(spec.out_gate) : int(OutputGate::none)},
          {"kOutNorm", finishes ? int(spec.out_norm) : int(OutputNorm::none)}};
}

std::vector<gpu::Constant> narrow_constants(const RecurrentSpec& spec, int heads_of_lane) {
  return {{"kType", int(spec.dtype)}, {"kStateType", int(spec.state_dtype)}, {"kDimK", spec.head_dim_k}, {"kOfLane", heads_of_lane}};
}

// Whether thread blocks of so many heads have one key head each, and so on, as recurrent_narrow_aligned needs it.
bool is_simple_narrow(const RecurrentSpec& spec, int heads) {
  const bool one_key_head = spec.num_k_heads == 1 || spec.num_v_heads / spec.num_k_heads % heads == 0;
  return is_narrow(spec) && one_key_head && spec.head_dim_k % 4 == 0 && spec.gate != RecurrentGate::sigmoid;
}

}  // namespace

RecurrentKernel recurrent_kernel(std::string_view arch, const RecurrentSpec& spec) {
  const int dim_k = spec.head_dim_k, dim_v = spec.head_dim_v;
  if (is_narrow(spec)) {
    const int heads = recurrent_narrow_heads(dim_k);
    auto constants = narrow_constants(spec, narrow_heads_of_lane(dim_k));
    constants.push_back({"kTree", spec.tree_drafts});
    return {.key = {"recurrent_narrow.cu", std::string(arch), std::move(constants)},
            .aligned = "recurrent_narrow_aligned",
            .unaligned = "recurrent_narrow_unaligned",
            .threads = kRecurrentNarrowThreads,
            .tile = std::min(heads, spec.num_v_heads),
            .units = parts_of(spec.num_v_heads, heads)};
  }
  const int warps = recurrent_warps(dim_k, dim_v), values = warps * recurrent_warp_values(dim_k);
  return {.key = {"recurrent.cu", std::string(arch), token_constants(arch, spec)},
          .aligned = "recurrent_aligned",
          .unaligned = "recurrent_unaligned",
          .threads = 32 * warps,
          .tile = std::min(values, dim_v),
          .units = spec.num_v_heads * parts_of(dim_v, values),
          .finishes = finishes_outputs(arch, spec)};
}

std::optional<NarrowPromptKernel> narrow_prompt_kernel(std::string_view arch, const RecurrentSpec& spec) {
  const int heads = narrow_prompt_heads(spec.head_dim_k);
  if (!is_simple_narrow(spec, std::max(heads, recurrent_narrow_heads(spec.head_dim_k)))) return {};
  return NarrowPromptKernel{
      .key = {"recurrent_narrow_prompts.cu", std::string(arch), narrow_constants(spec, narrow_prompt_heads_of_lane(spec.head_dim_k))},
      .tile = std::min(heads, spec.num_v_heads),
      .units = parts_of(spec.num_v_heads, heads)};
}

std::optional<StreamKernel> stream_kernel(std::string_view arch, const RecurrentSpec& spec, const DeviceInfo& device) {
  constexpr int kLeastDimK = 64, kLeastWarps = 4, kMostDimKOfChannels = 128, kLeastWarpsOfChannels = 8;
  const int dim_k = spec.head_dim_k, dim_v = spec.head_dim_v, state_size = int(size_of(spec.state_dtype));
  const bool channels = spec.channel_gate || spec.channel_rates;
  const int sm = arch_number(arch) / 10;
  const bool keys_first = spec.layout == StateLayout::k_first;
  if (sm < 90 || is_narrow(spec) || spec.tree_drafts || (keys_first ? dim_v : dim_k) * state_size % kAlignedBytes != 0) return {};
  if (dim_k < kLeastDimK || recurrent_warps(dim_k, dim_v) < kLeastWarps) return {};
  if (channels && (dim_k > kMostDimKOfChannels || recurrent_warps(dim_k, dim_v) < kLeastWarpsOfChannels)) return {};
  if (channels && spec.dtype == DType::f32 && finishes_outputs(arch, spec)) return {};
  const int blocks = recurrent_stream_blocks(dim_k, dim_v);
  const int bytes = recurrent_stream_bytes(dim_k, dim_v, state_size, channels, keys_first, finishes_outputs(arch, spec));
  if (blocks * bytes > smem_of(sm, device)) return {};
  return StreamKernel{.key = {"recurrent_stream.cu", std::string(arch), token_constants(arch, spec)}, .blocks_together = blocks};
}

std::optional<ChunkKernels> chunk_kernels(std::string_view arch, const RecurrentSpec& spec, const DeviceInfo& device) {
  constexpr int kTile = kRecurrentTileValues;
  const bool sm90 = arch == "sm_90a", channels = spec.channel_gate;
  const int blocks_together = channels && sm90 ? 1 : 2;
  const int dim_k = spec.head_dim_k, dim_v = spec.head_dim_v, group = spec.num_v_heads / spec.num_k_heads;
  if (spec.channel_rates || spec.dtype == DType::f32) return {};
  if ((dim_k != 64 && dim_k != 128) || dim_v % kTile != 0) return {};
  const int sm = arch_number(arch) / 10, room = smem_of(sm, device);
  // Chunks in shared memory, at most: for Hopper as many as one thread block has room for; else two, or one where two have no room, or
  // would leave none for a second thread block.
  const int stage_bytes = recurrent_stage_bytes(dim_k, spec.delta, channels, sm90, false);
  const int most_stages = sm90 ? recurrent_chunk_sm90_stages(stage_bytes, 1) : kRecurrentChunkStages;
  const int stages = sm90 || (!channels && most_stages * stage_bytes <= room) ? most_stages : 1;
  if (stages * stage_bytes > room || (channels && recurrent_channel_weights_smem(dim_k) > room)) return {};
  const gpu::Constant type{"kType", int(spec.dtype)}, state_type{"kStateType", int(spec.state_dtype)}, keys{"kDimK", dim_k},
      delta{"kDelta", spec.delta}, gate{"kChannelGate", channels};
  const int shared_heads =
      std::min(group, spec.delta ? 4 : 8);  // value heads of a key head that a thread block of recurrent_weights.cu takes
  ChunkKernels k{.maps = sm90, .tile = kTile, .blocks_together = blocks_together};
  const int tiles = dim_v / kTile;
  if (sm90 && (tiles % 2 == 0 || (tiles == 1 && group % 2 == 0))) k.cluster = 2;
  k.weights_units = spec.num_k_heads * parts_of(group, shared_heads);
  k.threads = sm90 ? kRecurrentChunkSm90Threads : kRecurrentChunkThreads;
  k.units = spec.num_v_heads * tiles;
  k.weights_bytes = spec.num_v_heads * int64_t(recurrent_weights_bytes(dim_k, spec.delta, channels));
  k.carried_bytes = int64_t(spec.num_v_heads) * dim_k * dim_v * int64_t(sizeof(float));
  k.scratch_room = std::max<int64_t>(kLeastRoom, device.memory_bytes / kRoomShare);
  const gpu::Constant norms{"kNorms", spec.qk_norm};
  k.weights = {"recurrent_weights.cu", std::string(arch), {type, state_type, keys, delta, gate, norms, {"kShared", shared_heads}}};
  if (channels) {
    k.weights = {"recurrent_channel_weights.cu", std::string(arch), {type, state_type, keys, delta, gate, norms}};
    k.weights_entry = "recurrent_channel_weights", k.weights_threads = recurrent_channel_threads(dim_k), k.weights_units = spec.num_v_heads;
  }
  const auto chunks = [&](bool ends) {
    KernelKey key{sm90 ? "recurrent_chunks_sm90.cu" : "recurrent_chunks.cu",
                  std::string(arch),
                  {type,
                   state_type,
                   keys,
                   delta,
                   gate,
                   {"kDimV", dim_v},
                   {"kKeysFirst", spec.layout == StateLayout::k_first},
                   {"kSkip", spec.skip},
                   {"kBlocksTogether", blocks_together},
                   {"kEnds", ends}}};
    if (sm90) key.config.push_back({"kCluster", ends ? 1 : int(k.cluster)});
    if (!sm90) key.config.push_back({"kStages", stages});
    return key;
  };
  k.chunks = chunks(false);
  if (sm90) k.stage_bytes = stage_bytes, k.ends_stage_bytes = recurrent_stage_bytes(dim_k, spec.delta, channels, sm90, true);
  if (recurrent_join_bytes(dim_k, spec.delta) <= room) k.most_segments = most_segments(device, k.units);
  k.least_segment = least_segment;
  if (k.most_segments > 1) {
    k.ends = chunks(true);
    k.segments = {"recurrent_segments.cu", std::string(arch), {type, state_type, keys, delta, gate, {"kDimV", dim_v}, {"kEnds", true}}};
    k.ends_units = k.units + spec.num_v_heads * (spec.delta ? dim_k / kTile : 1);
    k.segments_units = spec.num_v_heads * (dim_v / kRecurrentJoinValues);
    k.segment_bytes = int64_t(spec.num_v_heads) * recurrent_segment_rows(dim_k, dim_v, spec.delta) * dim_k * int64_t(sizeof(float));
  }
  return k;
}

std::optional<OutputKernel> output_kernel(std::string_view arch, const RecurrentSpec& spec) {
  if (!spec.has_output_stage()) return {};
  constexpr int kEight = 8, kWarp = 32, kMostKept = 4, kGateNumbers = 2048;
  const bool normed = spec.out_norm != OutputNorm::none;
  const int64_t numbers = int64_t(spec.num_v_heads) * spec.head_dim_v;
  OutputKernel kernel;
  kernel.group_numbers = normed ? spec.norm_heads() * spec.head_dim_v : int(std::min<int64_t>(numbers, kGateNumbers));
  kernel.groups = parts_of(numbers, kernel.group_numbers);
  // As few lanes as can keep a group; those of a warp first keep up to kMostKept eights each.
  int lanes = recurrent_output_lanes(kernel.group_numbers);
  while (lanes >= kWarp && lanes < kRecurrentOutputThreads && lanes * kEight * kMostKept < kernel.group_numbers) lanes *= 2;
  const int64_t kept = parts_of(kernel.group_numbers, lanes * kEight);
  kernel.groups_together = kRecurrentOutputThreads / lanes;
  kernel.key = {"recurrent_outputs.cu",
                std::string(arch),
                {{"kType", int(spec.dtype)},
                 {"kOutGate", int(spec.out_gate)},
                 {"kOutNorm", int(spec.out_norm)},
                 {"kOutputLanes", lanes},
                 {"kKept", kept <= kMostKept ? int(kept) : 0}}};
  return kernel;
}

bool encode_chunk_maps(ChunkMaps& maps, const RecurrentInputs& in, const RecurrentOutputs& out) {
  const auto encode = [](CUtensorMap& map, const TensorView& t) {
    const uint64_t size = uint64_t(size_of(t.dtype));
    const uint64_t sizes[3] = {uint64_t(t.size(2)), uint64_t(t.size(1)), uint64_t(t.size(0))};
    const uint64_t strides[2] = {uint64_t(t.stride(1)) * size, uint64_t(t.stride(0)) * size};
    const uint32_t box[3] = {uint32_t(kTensorMapLine / size), 1, kRecurrentChunk};
    return encode_tensor_map(map, t.dtype, t.data, 3, sizes, strides, box);
  };
  return encode(maps.q, in.q) && encode(maps.k, in.k) && encode(maps.v, in.v) && encode(maps.out, out.out);
}

ChunkRounds::ChunkRounds(const ChunkKernels& kernels, const PlanLimits& limits) {
  constexpr int64_t kAlignment = 256;
  const int64_t most = std::max<int64_t>(numbers(limits.max_num_tokens, limits.max_num_reqs), 1);
  each = std::clamp<int64_t>(kernels.scratch_room / kernels.weights_bytes, 1, most);
  carried = (each * kernels.weights_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t longest = limits.max_query_len > 0 ? limits.max_query_len : limits.max_num_tokens;
  const bool are_long = longest > (kLeastSegments * kernels.least_segment - 1) * int64_t(kRecurrentChunk);
  const bool are_few = int64_t(limits.max_num_reqs) * kernels.most_segments * std::max(kernels.ends_units, 1) <= INT32_MAX;
  if (each == most && are_long && are_few) most_segments = kernels.most_segments;
  bytes = carried + (each < most ? 2 * kernels.carried_bytes : 0);
  if (most_segments > 1) bytes += (most / kernels.least_segment + 1) * kernels.segment_bytes;
}

std::vector<KernelKey> recurrent_kernels(std::string_view arch, const RecurrentSpec& spec, const DeviceInfo& device) {
  std::vector<KernelKey> keys{recurrent_kernel(arch, spec).key, plan_state_batch_key(arch)};
  if (const auto stream = stream_kernel(arch, spec, device)) keys.push_back(stream->key);
  if (const auto prompts = narrow_prompt_kernel(arch, spec)) keys.push_back(prompts->key);
  if (const auto outputs = output_kernel(arch, spec)) keys.push_back(outputs->key);
  if (const auto chunks = chunk_kernels(arch, spec, device)) {
    keys.push_back(chunks->weights), keys.push_back(chunks->chunks);
    if (chunks->most_segments > 1) keys.push_back(chunks->ends), keys.push_back(chunks->segments);
  }
  return keys;
}

bool has_aligned_rows(const RecurrentInputs& in, const RecurrentOutputs& out) {
  return are_aligned(in, out) && is_aligned(in.q, kAlignedBytes) && is_aligned(in.k, kAlignedBytes) && is_aligned(in.v, kAlignedBytes);
}

bool are_aligned(const RecurrentInputs& in, const RecurrentOutputs& out) {
  return is_aligned(in.state, kAlignedBytes) && is_aligned(out.out, kAlignedBytes);
}

bool has_aligned_quads(const RecurrentSpec& spec, const RecurrentInputs& in, const RecurrentOutputs& out) {
  const auto are_small = [](const TensorView& t) { return t.empty() || std::abs(byte_stride(t, 0)) <= INT32_MAX; };
  const bool neighbours = in.state.size(2) == 1 || in.state.stride(2) == spec.head_dim_k;
  return is_simple_narrow(spec, recurrent_narrow_heads(spec.head_dim_k)) && neighbours &&
         is_aligned(in.state, 4 * int64_t(size_of(spec.state_dtype))) && is_aligned(in.q, 4 * int64_t(size_of(spec.dtype))) &&
         is_aligned(in.k, 4 * int64_t(size_of(spec.dtype))) && are_small(in.q) && are_small(in.k) && are_small(in.v) &&
         are_small(in.gate) && are_small(out.out);
}

bool have_aligned_outputs(const RecurrentSpec& spec, const RecurrentInputs& in, const RecurrentOutputs& out) {
  constexpr int64_t kEight = 8;
  const int64_t row = is_one_row(spec, in, out) ? int64_t(spec.num_v_heads) * spec.head_dim_v : spec.head_dim_v;
  const auto aligned = [](const TensorView& t) { return t.empty() || is_aligned(t, kAlignedBytes); };
  return row % kEight == 0 && aligned(out.out) && aligned(in.z) && aligned(in.norm_weight);
}

RecurrentOutputParams output_params(const RecurrentSpec& spec, const OutputKernel& kernel, const RecurrentInputs& in,
                                    const RecurrentOutputs& out, const RecurrentParams& p) {
  const int numbers = spec.num_v_heads * spec.head_dim_v;
  return {.out = p.out,
          .z = p.z,
          .weight = p.norm_weight,
          .out_token_stride = p.out_token_stride,
          .out_row_stride = p.out_head_stride,
          .z_token_stride = p.z_token_stride,
          .z_row_stride = p.z_head_stride,
          .weight_row_stride = p.weight_head_stride,
          .requests = p.requests,
          .counts = p.counts,
          .num_slots = p.num_slots,
          .num_tokens = p.num_tokens,
          .groups = int(kernel.groups),
          .group_numbers = kernel.group_numbers,
          .token_numbers = numbers,
          .row_numbers = is_one_row(spec, in, out) ? numbers : spec.head_dim_v,
          .inverse_numbers = 1 / float(kernel.group_numbers),
          .eps = p.norm_eps,
          .weight_is_f32 = p.weight_is_f32};
}

RecurrentParams recurrent_params(const RecurrentSpec& spec, const RecurrentInputs& in, const RecurrentOutputs& out) {
  const auto stride = [](const TensorView& t, int dim) { return t.rank > dim ? byte_stride(t, dim) : 0; };
  const auto float_stride = [&](const TensorView& t) { return stride(t, 0) / int64_t(sizeof(float)); };
  RecurrentParams p{};
  p.q = in.q.as<const char>();
  p.k = in.k.as<const char>();
  p.v = in.v.as<const char>();
  p.gate = in.gate.as<const char>();
  p.beta = in.beta.as<const char>();
  p.rates = in.rates.as<const float>();
  p.gate_bias = in.gate_bias.as<const float>();
  p.skip = in.skip.as<const float>();
  p.state = in.state.as<char>();
  p.out = out.out.as<char>();
  p.q_token_stride = stride(in.q, 0), p.q_head_stride = stride(in.q, 1);
  p.k_token_stride = stride(in.k, 0), p.k_head_stride = stride(in.k, 1);
  p.v_token_stride = stride(in.v, 0), p.v_head_stride = stride(in.v, 1);
  p.out_token_stride = stride(out.out, 0), p.out_head_stride = stride(out.out, 1);
  p.gate_token_stride = stride(in.gate, 0), p.gate_head_stride = stride(in.gate, 1);
  p.beta_token_stride = stride(in.beta, 0), p.beta_head_stride = stride(in.beta, 1);
  p.rates_stride = float_stride(in.rates), p.bias_stride = float_stride(in.gate_bias);
  p.state_slot_stride = stride(in.state, 0), p.state_row_stride = stride(in.state, 1), p.state_head_stride = stride(in.state, 2);
  int64_t rows = std::min({in.q.size(0), in.k.size(0), in.v.size(0), out.out.size(0), int64_t(INT32_MAX)});
  for (const TensorView* t : {&in.gate, &in.beta, &in.z})
    if (!t->empty()) rows = std::min(rows, t->size(0));
  p.num_tokens = int(rows);
  p.num_slots = int(std::min<int64_t>(in.state.size(0), INT32_MAX));
  p.num_v_heads = spec.num_v_heads, p.group = spec.num_v_heads / spec.num_k_heads;
  p.gate_kind = int(spec.gate);
  p.gate_min = spec.gate_min;
  p.gate_max = spec.gate == RecurrentGate::softplus && spec.gate_max == 0 ? std::numeric_limits<float>::infinity() : spec.gate_max;
  p.scale = spec.query_scale(), p.beta_scale = spec.beta_scale;
  p.gate_is_f32 = in.gate.dtype == DType::f32, p.beta_is_f32 = in.beta.dtype == DType::f32;
  p.delta = spec.delta, p.sigmoid_beta = spec.sigmoid_beta, p.scaled_values = spec.scaled_values, p.qk_norm = spec.qk_norm;
  p.channel_rates = spec.channel_rates;
  p.most_segments = p.least_segment = 1;
  p.z = in.z.as<const char>();
  p.norm_weight = in.norm_weight.as<const char>();
  p.z_token_stride = stride(in.z, 0), p.z_head_stride = stride(in.z, 1);
  p.weight_head_stride = in.norm_weight.rank > 1 ? stride(in.norm_weight, 0) : 0;
  p.norm_eps = spec.norm_eps;
  p.weight_is_f32 = in.norm_weight.dtype == DType::f32;
  return p;
}

}  // namespace imbrex::cuda
