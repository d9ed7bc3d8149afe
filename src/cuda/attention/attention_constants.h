#pragma once
// The constants that every attention kernel takes from the layer's spec; attention_sm80.cpp and attention_sm90.cpp add those of their
// tiles.
#include <initializer_list>
#include <vector>

#include "attention/kv_codec.h"
#include "cuda/attention/expressions.h"
#include "cuda/driver/jit.h"
#include "imbrex/spec.h"

namespace imbrex::cuda {

// q.k times one positive scale; kPlainLogits of the kernels, which have registers to spare then.
inline bool has_plain_logits(const AttentionSpec& spec) {
  const ScoreMod& score = spec.score;
  return spec.score_mod.empty() && !score.head_scales && spec.scale() > 0 && score.soft_cap == 0 && !score.alibi &&
         score.relative_buckets == 0;
}

inline bool has_window(const Mask& mask) { return mask.window_left >= 0 || mask.window_right >= 0 || mask.chunk > 0; }

inline std::vector<Constant> attention_constants(const AttentionSpec& spec, DType out, std::initializer_list<Constant> tiles,
                                                 int cluster = 1, bool whole_items = false) {
  const Mask& mask = spec.mask;
  const ScoreMod& score = spec.score;
  std::vector<Constant> constants{{"kHeadDimQk", spec.head_dim_qk},
                                  {"kHeadDimV", spec.head_dim_v},
                                  {"kQType", int(spec.q_dtype)},
                                  {"kKvType", int(spec.kv_dtype)},
                                  {"kOutType", int(out)},
                                  {"kGroup", spec.group_size()},
                                  {"kCluster", cluster},
                                  {"kBlockSize", spec.block_size},
                                  {"kCausal", mask.causal},
                                  {"kWindow", has_window(mask)},
                                  {"kCustomMask", mask.custom},
                                  {"kPositions", mask.positions},
                                  {"kTree", mask.tree},
                                  {"kHeadScales", score.head_scales || spec.scale() < 0},
                                  {"kSoftCap", score.soft_cap > 0},
                                  {"kAlibi", score.alibi},
                                  {"kAlibiSqrt", score.alibi_sqrt},
                                  {"kRelative", score.relative_buckets > 0},
                                  {"kSinks", score.sinks},
                                  {"kScoreMod", !spec.score_mod.empty()},
                                  {"kMaskMod", !spec.mask_mod.empty()},
                                  {"kScoreAffine", is_affine_score(spec)},
                                  {"kWholeItems", whole_items},
                                  {"kShares", false},
                                  {"kValuesInKeys", codec_of(spec).values_in_keys},
                                  {"kRopeApart", spec.kv_format == KvFormat::latent_rope},
                                  {"kDsMla", spec.kv_format == KvFormat::fp8_ds_mla}};
  constants.insert(constants.end(), tiles);
  return constants;
}

}  // namespace imbrex::cuda
