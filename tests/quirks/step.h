#pragma once
// A small step of paged attention and what it has to give, computed by loops that share nothing with the library: for tests of mistakes
// that other engines had. The cache is full of NaN wherever no test has written.
#include <functional>
#include <initializer_list>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "core/float_types.h"
#include "imbrex/backend.h"
#include "targets.h"

namespace imbrex::test {

// Eighths from -1 to 1, times a factor: with a power of two, numbers that every type holds.
inline std::vector<float> eighths(std::mt19937& random, size_t count, float factor = 1) {
  std::vector<float> x(count);
  for (float& f : x) f = (float(random() % 17) - 8) / 8 * factor;
  return x;
}

// A tensor of any type, made of floats.
struct Elements {
  std::vector<unsigned char> bytes;
  TensorView view;

  Elements(DType dtype, const std::vector<float>& x, std::initializer_list<int64_t> sizes) : bytes(x.size() * size_t(size_of(dtype)) + 8) {
    for (size_t i = 0; i < x.size(); ++i) store_from_float(bytes.data(), dtype, int64_t(i), x[i]);
    view = TensorView::contiguous(bytes.data(), dtype, sizes);
  }
  Elements(const Elements&) = delete;
  Elements& operator=(const Elements&) = delete;
  double at(size_t i) const { return double(load_as_float(bytes.data(), view.dtype, int64_t(i))); }
};

// Calls f(backend, device) for every backend that runs the spec, on every instruction set of this CPU; returns how often.
template <class Family, class F>
int for_each_cpu_target(const typename Family::Spec& spec, F f) {
  int calls = 0;
  bool reference_done = false;  // it has one set of loops for all instruction sets
  for (const DeviceInfo& device : test_devices())
    for (const BackendOf<Family>* backend : backends<Family>()) {
      const bool reference = backend->name() == "reference";
      if (device.device.type != DeviceType::cpu || (reference && reference_done) || !backend->unsupported(spec, device).empty()) continue;
      reference_done |= reference;
      f(*backend, device);
      ++calls;
    }
  return calls;
}

struct QuirkResult {
  std::vector<double> out, lse;
};

struct QuirkStep {
  using Requests = std::vector<std::pair<int, int>>;  // query tokens and keys of each
  using MakePlan = std::function<std::unique_ptr<Plan>(const Backend&, const AttentionSpec&, const DeviceInfo&, const PlanOptions&)>;

  AttentionSpec spec;
  Requests requests;
  std::vector<std::vector<int32_t>> pages;                                  // of each request
  std::vector<std::vector<float>> keys;                                     // of each request [seq_len, num_kv_heads, head_dim_qk]
  std::vector<std::vector<float>> values;                                   // likewise
  std::vector<float> q;                                                     // [tokens, num_q_heads, head_dim_qk]
  std::vector<float> sinks, slopes;                                         // of heads; empty: none
  std::vector<uint8_t> mask;                                                // Batch::custom_mask
  std::vector<int32_t> positions;                                           // Batch::positions
  float k_scale = 1, v_scale = 1;                                           // of fp8 caches
  PlanOptions options;                                                      // as plans are given them
  MakePlan make_plan;                                                       // empty: Backend::plan()
  std::function<bool(int r, int i, int j)> sees;                            // whether query i of request r sees key j; empty: causal
  std::function<double(double logit, int head, int r, int i, int j)> bend;  // what becomes of a scaled logit; empty: nothing

  // Heads of 32 dims in pages of 4 tokens; numbers are eighths from -1 to 1, which every type holds. Pages follow each other.
  explicit QuirkStep(Requests, int num_q_heads = 4, int num_kv_heads = 2, int head_dim = 32);
  void equal_logits();  // all queries are zero: the log-sum-exp of a row is the logarithm of how many keys it sees
  int context(int r) const { return requests[size_t(r)].second - requests[size_t(r)].first; }
  QuirkResult expected() const;
  // Writes what came before the step, then the step's own keys and values, and runs.
  QuirkResult run(const Backend&, const DeviceInfo&) const;
  // Runs on every CPU backend and instruction set of this machine, in f32 and in bf16 where the backend has them, and compares.
  void check() const;
};

}  // namespace imbrex::test
