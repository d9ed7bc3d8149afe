#pragma once
// The specialisations of recurrent.cu, recurrent_narrow.cu and recurrent_narrow_prompts.cu, and of the kernels of chunks, whose text runs
// on the host, each with a layer that it serves: both layouts, decays of heads and of channels, types of tensors and of states, 8 and 16
// lanes that share a value, dimensions that fill no vector, heads that share a thread block, products of a warpgroup and of a warp, shared
// memory for two chunks and for one, and what may be behind outputs: those have the texts of a layer without it, and one more, or two
// where a kernel finishes outputs; and drafts that may be a tree.
#include <optional>
#include <string>
#include <vector>

#include "cuda/recurrent/recurrent.h"

namespace imbrex::test {

struct RecurrentVariant {
  const char* name;
  RecurrentSpec layer;
  int sm = 90;
  const char* outputs = "";  // the specialisation of recurrent_outputs.cu
  // The specialisation of the kernels that compute token by token: one more where these finish outputs.
  std::string tokens() const { return finishes() ? std::string(name) + "_" + outputs : name; }
  bool finishes() const { return cuda::recurrent_kernel(arch(), layer).finishes; }
  std::string arch() const { return sm == 90 ? "sm_90a" : "sm_" + std::to_string(sm); }
  bool runs_tokens(const RecurrentSpec& spec) const { return cuda::recurrent_kernel(arch(), spec).key == key(); }
  bool runs(const RecurrentSpec& spec) const {
    return cuda::recurrent_kernels(arch(), spec, {}) == cuda::recurrent_kernels(arch(), layer, {});
  }
  cuda::KernelKey key() const { return cuda::recurrent_kernel(arch(), layer).key; }
  std::optional<cuda::StreamKernel> stream_kernel() const { return cuda::stream_kernel(arch(), layer, {}); }
  std::optional<cuda::NarrowPromptKernel> prompt_kernel() const { return cuda::narrow_prompt_kernel(arch(), layer); }
  std::optional<cuda::OutputKernel> output_kernel() const { return cuda::output_kernel(arch(), layer); }
  // Of its prompts, on a GPU that has multiprocessors for segments.
  std::optional<cuda::ChunkKernels> chunks() const { return cuda::chunk_kernels(arch(), layer, {.num_workers = 132}); }
  // The layer with so many drafts, one at least where they may be a tree: the kernel is the same.
  RecurrentSpec with_drafts(int num_drafts) const {
    RecurrentSpec spec = layer;
    return spec.num_drafts = layer.tree_drafts && num_drafts == 0 ? 1 : num_drafts, spec;
  }
};

inline RecurrentSpec with_outputs(RecurrentSpec spec, OutputGate gate, OutputNorm norm, int groups = 0) {
  spec.out_gate = gate, spec.out_norm = norm, spec.norm_groups = groups;
  return spec;
}

inline std::vector<RecurrentVariant> recurrent_variants() {
  RecurrentSpec gdn{.num_k_heads = 2, .num_v_heads = 4, .head_dim_k = 64, .head_dim_v = 64, .delta = true, .sigmoid_beta = true};
  gdn.qk_norm = true;
  RecurrentSpec kda = gdn;
  kda.num_v_heads = 2, kda.channel_gate = true, kda.layout = StateLayout::k_first;
  RecurrentSpec gdn_wide = gdn, kda_wide = kda;
  gdn_wide.head_dim_k = kda_wide.head_dim_k = 128, gdn_wide.dtype = DType::f16;
  RecurrentSpec mamba2{.num_k_heads = 1, .num_v_heads = 3, .head_dim_k = 64, .head_dim_v = 64, .scaled_values = true, .skip = true};
  mamba2.dtype = DType::f16, mamba2.state_dtype = DType::bf16, mamba2.scale = 1;
  RecurrentSpec odd{.num_k_heads = 3, .num_v_heads = 3, .head_dim_k = 33, .head_dim_v = 31, .channel_rates = true, .delta = true};
  odd.gate = RecurrentGate::fixed, odd.dtype = DType::f32;
  RecurrentSpec tall{.num_k_heads = 1, .num_v_heads = 2, .head_dim_k = 136, .head_dim_v = 10, .channel_gate = true};
  tall.gate = RecurrentGate::sigmoid, tall.gate_min = -5, tall.dtype = tall.state_dtype = DType::f16, tall.layout = StateLayout::k_first;
  // With values innermost, many of which stream: floats one state ahead, and 16 bits two, of heads that two blocks share.
  RecurrentSpec rows = gdn, ragged = gdn;
  rows.layout = ragged.layout = StateLayout::k_first;
  rows.head_dim_k = 128, rows.dtype = DType::f32;
  ragged.head_dim_k = 72, ragged.head_dim_v = 136, ragged.state_dtype = DType::f16;
  RecurrentSpec mamba1{.num_k_heads = 1, .num_v_heads = 24, .head_dim_k = 16, .head_dim_v = 1, .channel_rates = true};
  mamba1.scaled_values = mamba1.skip = true, mamba1.scale = 1;
  RecurrentSpec tree = gdn, tree_rounded = kda, mamba1_tree = mamba1;
  for (RecurrentSpec* spec : {&tree, &tree_rounded, &mamba1_tree}) spec->num_drafts = 2, spec->tree_drafts = true;
  tree.dtype = tree_rounded.dtype = DType::f32, tree_rounded.state_dtype = DType::bf16, mamba1_tree.state_dtype = DType::f16;
  tree.head_dim_v = 33, tree_rounded.head_dim_k = 40;
  return {{"states_gdn", gdn},
          {"states_gdn_sm80", gdn, 80},
          {"states_gdn_sm86", gdn_wide, 86},
          {"states_kda", kda},
          {"states_kda_sm80", kda_wide, 80},
          {"states_mamba2", mamba2},
          {"states_odd", odd},
          {"states_tall", tall},
          {"states_rows", rows},
          {"states_ragged", ragged},
          {"states_gdn", with_outputs(gdn, OutputGate::silu, OutputNorm::before_gate), 90, "outputs_gdn"},
          {"states_kda", with_outputs(kda, OutputGate::sigmoid, OutputNorm::before_gate, 1), 90, "outputs_kda"},
          {"states_mamba2", with_outputs(mamba2, OutputGate::silu, OutputNorm::after_gate, 1), 90, "outputs_mamba2"},
          {"states_kda", with_outputs(kda, OutputGate::sigmoid, OutputNorm::before_gate), 90, "outputs_kda_heads"},
          {"states_mamba2", with_outputs(mamba2, OutputGate::silu, OutputNorm::after_gate, 3), 90, "outputs_mamba2_heads"},
          {"states_ragged", with_outputs(ragged, OutputGate::sigmoid, OutputNorm::none), 90, "outputs_gate"},
          {"states_odd", with_outputs(odd, OutputGate::none, OutputNorm::before_gate), 90, "outputs_odd"},
          {"states_mamba1", with_outputs(mamba1, OutputGate::silu, OutputNorm::none), 90, "outputs_mamba1"},
          {"states_tree", tree},
          {"states_tree_rounded", tree_rounded},
          {"states_mamba1_tree", mamba1_tree},
          {"states_mamba1", mamba1}};
}

// A norm of so many numbers that warps share it, behind heads of one value.
inline RecurrentVariant wide_outputs_variant() {
  RecurrentSpec layer = with_outputs(recurrent_variants().back().layer, OutputGate::silu, OutputNorm::after_gate, 1);
  layer.num_v_heads = 1104;
  return {"states_mamba1", layer, 90, "outputs_wide"};
}

}  // namespace imbrex::test
