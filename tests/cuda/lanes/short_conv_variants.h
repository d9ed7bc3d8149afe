#pragma once
// The specialisations of short_conv.cu whose text runs on the host: each type, sums of two tokens to eight, with a bias and without; the
// plain form without SiLU and with it; and drafts that may be a tree.
#include <string>
#include <vector>

#include "cuda/short_conv/short_conv.h"

namespace imbrex::test {

struct ShortConvVariant {
  const char* name;
  DType dtype;
  int width;
  bool bias;
  ShortConvForm form = ShortConvForm::gated;
  ShortConvActivation activation = ShortConvActivation::none;
  bool tree = false;
  // The kernel is the same for all numbers of channels and drafts; of these there is one at least where they may be a tree.
  ShortConvSpec spec(int dim, int num_drafts = 0) const {
    return {.dim = dim,
            .width = width,
            .bias = bias,
            .dtype = dtype,
            .num_drafts = tree && num_drafts == 0 ? 1 : num_drafts,
            .form = form,
            .activation = activation,
            .tree_drafts = tree};
  }
  bool is_of(const ShortConvSpec& s) const { return s == spec(s.dim, s.num_drafts); }
  cuda::KernelKey key() const { return cuda::short_conv_key("sm_90a", spec(1), cuda::short_conv_tuning(spec(1))); }
};

inline std::vector<ShortConvVariant> short_conv_variants() {
  return {{"conv_lfm2", DType::bf16, 3, false},
          {"conv_bias", DType::f16, 4, true},
          {"conv_short", DType::f32, 2, false},
          {"conv_long", DType::bf16, 8, true},
          {"conv_plain", DType::f16, 4, true, ShortConvForm::plain},
          {"conv_silu", DType::bf16, 4, false, ShortConvForm::plain, ShortConvActivation::silu},
          {"conv_silu_f32", DType::f32, 4, true, ShortConvForm::plain, ShortConvActivation::silu},
          {"conv_tree", DType::bf16, 3, false, ShortConvForm::gated, ShortConvActivation::none, true},
          {"conv_tree_silu", DType::f16, 4, true, ShortConvForm::plain, ShortConvActivation::silu, true}};
}

}  // namespace imbrex::test
