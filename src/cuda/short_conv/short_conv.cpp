// See short_conv.h.
#include "cuda/short_conv/short_conv.h"

#include <algorithm>

#include "core/tensor_layout.h"
#include "cuda/attention/kv_side.h"
#include "cuda/state/state_lists.h"

namespace imbrex::cuda {
namespace {

constexpr int kWarps = kShortConvThreads / 32;

}  // namespace

// Wider sums, and those of trees, keep more in registers. A token of the plain form has one row instead of three: more of them are on their
// way.
ShortConvTuning short_conv_tuning(const ShortConvSpec& spec) {
  if (spec.form == ShortConvForm::plain) return {.stages = 8, .blocks = spec.width > 4 ? 3 : 4};
  return {.stages = 4, .blocks = spec.width > 3 ? 3 : spec.bias || spec.tree_drafts ? 4 : 5};
}

KernelKey short_conv_key(std::string_view arch, const ShortConvSpec& spec, const ShortConvTuning& tuning) {
  return {"short_conv.cu",
          std::string(arch),
          {{"kType", int(spec.dtype)},
           {"kWidth", spec.width},
           {"kHasBias", spec.bias},
           {"kGated", spec.form == ShortConvForm::gated},
           {"kSilu", spec.activation == ShortConvActivation::silu},
           {"kTree", spec.tree_drafts},
           {"kStages", tuning.stages},
           {"kBlocks", tuning.blocks}}};
}

std::vector<KernelKey> short_conv_kernels(std::string_view arch, const ShortConvSpec& spec) {
  return {short_conv_key(arch, spec, short_conv_tuning(spec)), plan_state_batch_key(arch)};
}

ShortConvGrid::ShortConvGrid(const ShortConvSpec& spec, int64_t resident) : resident(resident) {
  const int64_t tile = 32 * kShortConvLaneBytes / size_of(spec.dtype);
  tiles = int((spec.dim + tile - 1) / tile);
  chunks_at_once = int(std::max<int64_t>(resident * kWarps / tiles, 1));
  most_chunks = INT32_MAX / 2 / tiles;
}

int64_t ShortConvGrid::blocks_for(const StateCounts& step) const {
  const int chunk = short_conv_chunk(step, chunks_at_once, most_chunks);
  return ((int64_t(step.num_tokens) + chunk - 1) / chunk * tiles + kWarps - 1) / kWarps;
}

bool are_aligned(const ShortConvSpec& spec, const ShortConvInputs& in, const ShortConvOutputs& out) {
  constexpr int64_t kBytes = kShortConvLaneBytes;
  const auto begins = [](const TensorView& t) { return reinterpret_cast<uintptr_t>(t.data) % uintptr_t(kBytes) == 0; };
  return spec.dim * size_of(spec.dtype) % kBytes == 0 && is_aligned(in.input, kBytes) && is_aligned(in.state, kBytes) &&
         is_aligned(out.out, kBytes) && in.weight.stride(0) == spec.width && begins(in.weight) && begins(in.bias);
}

ShortConvParams short_conv_params(const ShortConvSpec& spec, const ShortConvInputs& in, const ShortConvOutputs& out) {
  ShortConvParams p{};
  p.input = in.input.as<const char>();
  p.weight = in.weight.as<const char>();
  p.bias = in.bias.as<const char>();
  p.state = in.state.as<char>();
  p.out = out.out.as<char>();
  p.input_stride = byte_stride(in.input, 0);
  p.weight_dim_stride = byte_stride(in.weight, 0);
  p.weight_tap_stride = byte_stride(in.weight, 1);
  p.state_slot_stride = byte_stride(in.state, 0);
  p.state_row_stride = byte_stride(in.state, 1);
  p.out_stride = byte_stride(out.out, 0);
  p.dim = spec.dim;
  p.num_tokens = int(std::min<int64_t>({in.input.size(0), out.out.size(0), INT32_MAX}));
  p.num_slots = int(std::min<int64_t>(in.state.size(0), INT32_MAX));
  return p;
}

}  // namespace imbrex::cuda
