#pragma once
// The transformer: tokens of several requests in, logits out, a step at a time; keys and values stay in a paged cache of imbrex.
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "imbrex/imbrex.hpp"
#include "ops.h"
#include "weights.h"

namespace llama {

constexpr int kBlockSize = 16;  // tokens of a page of the cache

struct Request {
  std::vector<int32_t> tokens;  // prompt and answer so far
  int computed = 0;             // of them: their keys and values are in the cache
  std::vector<int32_t> blocks;  // of the cache, in order

  int pending() const { return int(tokens.size()) - computed; }
};

// What step() computes of a request: its next `count` tokens, pending() at most.
struct Piece {
  Request* request;
  int count;
};

struct Limits {
  int requests = 0;  // of a step
  int tokens = 0;    // of a step, all requests
  int seq_len = 0;   // of a request
  int blocks = 0;    // of the cache
};

class Model {
 public:
  Model(const std::filesystem::path& folder, const imbrex::DeviceInfo&, imbrex::DType, const Limits&, const imbrex::ParallelFor&);

  const Config& config() const { return config_; }
  // Computes the pieces in one batch, with blocks from the model's pool. Logits [rows, vocab]: of every token, in the order of pieces, or
  // only of the last one of each piece.
  std::vector<float> step(std::span<const Piece>, bool every_token);
  void release(Request&);   // gives its blocks back
  std::string str() const;  // backend and cache, for people

 private:
  // Of one step, on the device: the first rows of the buffers below.
  struct Activations {
    imbrex::TensorView hidden, normed, q, k, v, attended, gate, up, rotation;  // with latent attention k is the latent, v its rope part
    imbrex::TensorView q_low, mixed;                                           // with q_lora_rank, and with experts
  };

  // Where a step's keys are, for imbrex: stays as it is until the next one.
  struct Tables {
    std::vector<int32_t> query_start_loc, seq_lens, kv_indptr, kv_indices;
    std::vector<int64_t> slots;
  };

  void update_plans(std::span<const Piece>);
  Activations embed(std::span<const Piece>);
  void run_layer(int layer, const Activations&);
  void attend(int layer, const Activations&);         // normed: in, and what is added to hidden
  void attend_latent(int layer, const Activations&);  // the same
  void run_network(const Network&, const imbrex::TensorView& x, const imbrex::TensorView& y);
  void run_experts(const LayerWeights&, const Activations&);
  std::vector<float> logits(std::span<const Piece>, const Activations&, bool every_token);

  Config config_;
  std::unique_ptr<imbrex::DeviceStream> stream_;
  std::unique_ptr<Ops> ops_;
  Weights weights_;
  // Of the layers with one spec. One of the two is there.
  struct Kind {
    std::unique_ptr<imbrex::AttentionPlan> attention;
    std::unique_ptr<imbrex::MlaPlan> latent;
    imbrex::BasicPlan& plan() const { return attention ? static_cast<imbrex::BasicPlan&>(*attention) : *latent; }
  };
  std::vector<Kind> kinds_;      // one in most models; one more where some layers have a window
  std::vector<size_t> kind_of_;  // which of them a layer has
  imbrex::BlockPool pool_;
  imbrex::KvAllocation cache_;
  Tables tables_;
  imbrex::DeviceTensor hidden_, normed_, q_, k_, v_, attended_, gate_, up_, rotation_, q_low_, mixed_;
};

}  // namespace llama
