#pragma once
// A specialisation of an attention kernel whose text runs on the host.
#include <ostream>
#include <utility>

#include "conformance/attention/cases.h"
#include "cuda/attention/attention_kernels.h"
#include "cuda/attention/attention_sm80.h"
#include "cuda/attention/attention_sm90_decode.h"
#include "cuda/attention/attention_sm90_fp8.h"
#include "cuda/attention/attention_sm90_latent.h"
#include "cuda/attention/attention_sm90_latent_decode.h"
#include "cuda/attention/attention_sm90_latent_decode_spread.h"
#include "cuda/attention/attention_sm90_latent_pair.h"
#include "cuda/attention/attention_sm90_latent_spread.h"
#include "cuda/attention/attention_sm90_verify.h"
#include "cuda/params.h"

namespace imbrex::test {

// attention_sm80.cu, attention_sm90_decode.cu, attention_sm90_verify.cu, attention_sm90_latent.cu, attention_sm90_latent_spread.cu,
// attention_sm90_latent_pair.cu, attention_sm90_latent_decode.cu, attention_sm90_latent_decode_spread.cu, attention_sm90.cu,
// attention_sm90_fp8.cu
enum class Text {
  sm80,
  decode,
  decode_without_maps,
  verify,
  verify_without_maps,
  latent,
  latent_without_maps,
  latent_spread,
  latent_spread_fewest,
  latent_pair,
  latent_pair_without_maps,
  latent_decode,
  latent_decode_without_maps,
  latent_decode_spread,
  latent_decode_spread_fewest,
  wgmma,
  wgmma_e4m3
};

constexpr int kSharingRows = -1;

struct Variant {
  const char* name;
  const char* arch;
  gpu::Regime regime;
  int rows;  // wanted of decode; kSharingRows: those of items that requests share
  Case c;
  Text text = Text::sm80;

  bool is_verify() const { return text == Text::verify || text == Text::verify_without_maps; }
  bool is_latent() const { return text == Text::latent || text == Text::latent_without_maps; }
  bool is_latent_spread() const { return text == Text::latent_spread || text == Text::latent_spread_fewest; }
  bool is_latent_pair() const { return text == Text::latent_pair || text == Text::latent_pair_without_maps; }
  bool is_latent_decode_spread() const { return text == Text::latent_decode_spread || text == Text::latent_decode_spread_fewest; }
  bool is_latent_decode() const {
    return text == Text::latent_decode || text == Text::latent_decode_without_maps || is_latent_decode_spread();
  }
  bool packs_mask() const { return text == Text::wgmma && cuda::reads_mask_bits(c.spec); }
  bool has_wgmma() const { return text == Text::wgmma || text == Text::wgmma_e4m3; }
  bool has_stretches() const { return !c.spec.mask_mod.empty() && !packs_mask(); }
  bool takes_runs() const { return text != Text::sm80; }
  cuda::Sm90Tiles wgmma_tiles() const {
    return text == Text::wgmma ? cuda::attention_sm90_tiles(c.spec) : cuda::attention_sm90_fp8_tiles(c.spec);
  }
  cuda::Sm90VerifyTiles verify_tiles() const { return cuda::attention_sm90_verify_tiles(arch, c.spec).value(); }
  // Of attention_sm90_latent_spread.cu: with the items of attention_sm90_latent_pair.cu.
  bool is_paired() const { return is_latent_spread() && cuda::attention_sm90_latent_pair_tiles(arch, c.spec, regime).has_value(); }
  cuda::Sm90LatentTiles latent_tiles() const { return cuda::attention_sm90_latent_tiles(arch, c.spec, regime).value(); }
  cuda::Sm90LatentSpread latent_spread() const {
    return cuda::attention_sm90_latent_spread(arch, c.spec, regime, text == Text::latent_spread_fewest).value();
  }
  cuda::Sm90LatentSpread latent_decode_spread() const {
    return cuda::attention_sm90_latent_decode_spread(arch, c.spec, regime, text == Text::latent_decode_spread_fewest).value();
  }
  cuda::Sm90LatentTiles latent_pair_tiles() const { return cuda::attention_sm90_latent_pair_tiles(arch, c.spec, regime).value(); }
  cuda::Sm90LatentDecodeTiles latent_decode_tiles() const { return cuda::attention_sm90_latent_decode_tiles(arch, c.spec, regime).value(); }
  cuda::AttentionTiles tiles() const {
    if (is_latent_decode()) return {.rows = latent_decode_tiles().rows, .keys = latent_decode_tiles().keys, .key_warps = 1};
    if (is_latent_pair() || is_paired()) return {.rows = latent_pair_tiles().rows, .keys = latent_pair_tiles().keys, .key_warps = 1};
    if (is_latent() || is_latent_spread()) return {.rows = latent_tiles().rows, .keys = latent_tiles().keys, .key_warps = 1};
    if (is_verify()) return {.rows = verify_tiles().rows, .keys = verify_tiles().keys, .key_warps = 1};
    if (has_wgmma()) return {.rows = wgmma_tiles().item_rows(), .keys = wgmma_tiles().keys, .key_warps = 1};
    if (rows == kSharingRows) return cuda::attention_sm80_sharing_tiles(arch, c.spec).value();
    return text == Text::sm80 ? cuda::attention_sm80_tiles(arch, c.spec, regime, rows).value()
                              : cuda::attention_sm90_decode_tiles(arch, c.spec, rows).value();
  }
  bool has_short_sums() const { return is_latent() || (is_latent_spread() && !is_paired()); }
  // With what merge.cu is told beside the constants of the attention kernel.
  cuda::KernelKey key() const {
    cuda::KernelKey made = attention_key();
    made.config.push_back({"kShortSums", has_short_sums()});
    return made;
  }
  cuda::KernelKey attention_key() const {
    if (text == Text::wgmma) return cuda::attention_sm90_key(arch, c.spec, c.out_dtype);
    if (text == Text::wgmma_e4m3) return cuda::attention_sm90_fp8_key(arch, c.spec, c.out_dtype);
    if (is_latent()) return cuda::attention_sm90_latent_key(arch, c.spec, c.out_dtype, latent_tiles(), text == Text::latent);
    if (is_latent_spread()) return cuda::attention_sm90_latent_spread_key(arch, c.spec, regime, c.out_dtype, latent_spread());
    if (is_latent_pair())
      return cuda::attention_sm90_latent_pair_key(arch, c.spec, c.out_dtype, latent_pair_tiles(), text == Text::latent_pair);
    if (is_latent_decode_spread())
      return cuda::attention_sm90_latent_decode_spread_key(arch, c.spec, c.out_dtype, latent_decode_tiles(), latent_decode_spread());
    if (is_latent_decode())
      return cuda::attention_sm90_latent_decode_key(arch, c.spec, c.out_dtype, latent_decode_tiles(), text == Text::latent_decode);
    if (is_verify()) return cuda::attention_sm90_verify_key(arch, c.spec, c.out_dtype, verify_tiles(), text == Text::verify);
    cuda::KernelKey made = text == Text::sm80 ? cuda::attention_sm80_key(arch, c.spec, c.out_dtype, tiles())
                                              : cuda::attention_sm90_decode_key(arch, c.spec, c.out_dtype, tiles(), text == Text::decode);
    return tiles().may_share ? cuda::sharing(std::move(made)) : made;
  }
};

inline void PrintTo(const Variant& v, std::ostream* to) { *to << v.name; }

}  // namespace imbrex::test
