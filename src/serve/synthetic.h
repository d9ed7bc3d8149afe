#pragma once
// Synthetic inputs of layers: a function of (seed, layer, token identity, position, head) and nothing else, so that shared prefixes really
// share, a recomputed request sees the same numbers, and a check can make any token's again without looking into the cache.
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "imbrex/layer_spec.h"
#include "serve/hash.h"

namespace imbrex::serve {

enum class Side : uint8_t { q, k, v, conv, gate, beta, z };  // conv: input of a short convolution; gate, beta, z: of recurrent layers

// The number that the inputs of a token in all heads and layers are derived from.
constexpr uint64_t token_key(uint64_t token_id, int position) { return hash_numbers(token_id, uint64_t(position)); }

// A pool of bf16 numbers with mean 0 and variance 1. A head's row is a stretch of it that begins where a hash says: as cheap as a
// copy, and two different rows are equal with a chance of one in kOffsets.
class Synthetic {
 public:
  static constexpr int kOffsets = 1 << 18;
  static constexpr int kMaxDim = AttentionSpec::kMaxHeadDim;

  explicit Synthetic(uint64_t seed);

  // The offset of a row's first number in the pool.
  int64_t offset(Side side, int layer, int head, uint64_t key) const {
    const uint64_t base =
        seed_ + uint64_t(side) * 0x9e3779b97f4a7c15u + uint64_t(layer) * 0xd1342543de82ef95u + uint64_t(head) * 0xf1357aea2e62a9c5u;
    return int64_t(mix_bits(key ^ mix_bits(base)) & (kOffsets - 1));
  }
  std::span<const uint16_t> pool() const { return pool_; }  // [kOffsets + kMaxDim]
  // A row of more numbers than kMaxDim, such as all heads of a token, is made of rows of so many: the most that `numbers` is a multiple of.
  static int piece(int numbers);
  // Numbers [first, first + to.size()) of such a row of so many numbers.
  void copy(Side, int layer, int numbers, int first, uint64_t key, std::span<uint16_t> to) const;
  // Writes the offsets of the rows of every head of these tokens: to [keys.size(), num_heads].
  void offsets(Side, int layer, std::span<const uint64_t> keys, int num_heads, int32_t* to) const;

 private:
  uint64_t seed_;
  std::vector<uint16_t> pool_;
};

// The parameters of a layer besides q, k and v, where its spec has them.
struct LayerParameters {
  int num_q_heads = 0;
  std::vector<float> sinks, alibi_slopes, head_scales;  // [num_q_heads]
  std::vector<float> relative_bias;                     // [relative_buckets, num_q_heads]

  LayerParameters(const AttentionSpec&, uint64_t seed, int layer);
  // Sets the parameters of AttentionInputs for q heads [first, first + count).
  void view(AttentionInputs&, int first, int count) const;
};

// Weights of a short convolution, bf16.
struct ShortConvParameters {
  int dim = 0, width = 0;
  std::vector<uint16_t> weight, bias;  // [dim, width], [dim]

  ShortConvParameters(const ShortConvSpec&, uint64_t seed, int layer);
  void view(ShortConvInputs&) const;  // on the host
};

// What a token has in a recurrent layer: what is convolved or q, k and v, and then gate, beta and z, as far as the layer has them, each a
// row of so many numbers (Synthetic::piece()).
struct RecurrentRow {
  Side side = Side::q;
  int numbers = 0;
};
std::vector<RecurrentRow> recurrent_rows(const RecurrentSpec&);

// Channels [first, first + count) of the rows that a convolution in front of a recurrence reads.
struct ConvStretch {
  int first = 0, count = 0;
};
// Those that make q, k and v of value heads [first, first + heads) and of their key heads, in the order of the rows.
std::array<ConvStretch, 3> conv_stretches(const RecurrentSpec&, int first, int heads);

// Parameters of a recurrent layer. Rates are such that heads, or channels, remember between a few and some hundred tokens.
struct RecurrentParameters {
  int heads = 0, dim_k = 0;
  bool channel_gate = false, channel_rates = false;
  int dim_v = 0;
  std::vector<float> rates, gate_bias, skip, norm_weight;  // as in RecurrentInputs, where the spec has them
  std::optional<ShortConvParameters> conv;                 // of the convolution in front

  RecurrentParameters(const RecurrentSpec&, uint64_t seed, int layer);
  // Sets the parameters of RecurrentInputs for value heads [first, first + count), on the host; those of the convolution of all channels.
  void view(RecurrentInputs&, int first, int count) const;
};

// Parameters of latent attention: the weight of kv_b_proj, bf16, and sinks where there are any.
struct MlaParameters {
  // The factor of weights that have a standard deviation of 1: keys and values are then about as large as latents of 512 elements.
  static constexpr float kGain = 0x1p-5f;
  int heads = 0, rows = 0, rank = 0;
  std::vector<uint16_t> kv_b;  // [heads, rows, rank]
  std::vector<float> sinks;    // [heads]

  MlaParameters(const MlaSpec&, uint64_t seed, int layer);
  void view(MlaInputs&) const;  // on the host
};

// The scale of fp8 elements: a power of two, so that dividing by it loses nothing.
constexpr float kFp8Scale = 0.0625f;

}  // namespace imbrex::serve
