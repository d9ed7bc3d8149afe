#pragma once
// Plans of latent attention on the fake driver, and tensors of a layer for them.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "conformance/mla/cases.h"
#include "cuda/fake/mla_texts.h"
#include "mla/backend.h"

namespace imbrex::cuda {

class FakeMla : public testing::Test {
 protected:
  void SetUp() override {
    if (!fake::has_mla_texts()) GTEST_SKIP() << "builds with sanitizers have no libraries of kernels for the host";
  }
  ~FakeMla() override {
    drop_mla_mirrors();
    fake::forget_texts();
  }

  // In slices of so many tokens, and with so many heads at a time; 0: as many as there is room for.
  static MlaPlanMaker forced(bool expand, int chunk, int slice = 0, int heads = 0) {
    return [=](const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
      fake::use_mla_texts(spec);
      MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(spec, device, options);
      parts.expand = expand, parts.chunk_keys = chunk, parts.slice_tokens = slice, parts.group_heads = heads;
      return make_mla_plan(spec, device, options, std::move(parts));
    };
  }

  // Requests with more queries than a tenth of their keys are expanded.
  static MlaPlanMaker both_ways(int chunk, int slice = 0) {
    return [=](const BackendOf<MlaFamily>& backend, const MlaSpec& spec, const DeviceInfo& device, const PlanOptions& options) {
      fake::use_mla_texts(spec);
      MlaParts parts = dynamic_cast<const MlaCompositeBackend&>(backend).parts(spec, device, options);
      parts.rates = {.products = 1, .expansion = 10, .latent = 1e30, .expanded = 1e30, .bytes = 1e30};
      parts.chunk_keys = chunk, parts.slice_tokens = slice;
      return make_mla_plan(spec, device, options, std::move(parts));
    };
  }

  DeviceInfo device = probe_cuda().at(0);
  const BackendOf<MlaFamily>& sm90 = *find_backend<MlaFamily>("cuda_sm90");
  const BackendOf<MlaFamily>& sm80 = *find_backend<MlaFamily>("cuda_sm80");
};

// A step and the tensors of a layer, in memory that the fake driver takes for its own.
class FakeMlaCalls : public FakeMla {
 protected:
  static constexpr Device kGpu{DeviceType::cuda, 0};
  void SetUp() override {
    FakeMla::SetUp();
    if (IsSkipped()) return;
    fake::use_mla_texts(spec);
    for (std::vector<uint16_t>* values : {&q, &kv_b, &cache, &out})
      for (size_t i = 0; i < values->size(); ++i) (*values)[i] = uint16_t(0x3c00 + (i * 37 + values->size()) % 0x180);
    in = {.q = view(q, {40, 4, 48}), .kv_b = view(kv_b, {4, 72, 64}), .kv = {.k = view(cache, {12, 16, 1, 80})}, .sinks = {}};
    to = {.out = view(out, {40, 4, 40}), .lse = TensorView::contiguous(lse.data(), DType::f32, {40, 4}, kGpu)};
  }
  static TensorView view(std::vector<uint16_t>& values, std::initializer_list<int64_t> sizes) {
    return TensorView::contiguous(values.data(), DType::bf16, sizes, kGpu);
  }
  struct Lengths {
    std::vector<int32_t> starts, lens;
  };
  Batch batch_of(const Lengths& l) {
    Batch batch;
    batch.query_start_loc = l.starts, batch.seq_lens = l.lens;
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(l.lens.size()), 4});
    return batch;
  }
  std::unique_ptr<MlaPlan> plan(const MlaPlanMaker& make, const PlanOptions& options) { return make(sm80, spec, device, options); }
  std::vector<std::string> launched(const MlaPlan& p, Stream stream) {
    fake::state().launches.clear();
    p.run(in, to, stream);
    std::vector<std::string> entries;
    for (const fake::Launch& launch : fake::state().launches) entries.push_back(launch.entry);
    return entries;
  }
  std::string results(const MlaPlan& p, DeviceStream& stream) {
    std::fill(out.begin(), out.end(), uint16_t(0x2222));
    p.run(in, to, stream.get());
    stream.synchronize();
    return std::string(reinterpret_cast<const char*>(out.data()), out.size() * 2);
  }

  MlaSpec spec{.num_heads = 4, .kv_lora_rank = 64, .qk_nope_dim = 32, .qk_rope_dim = 16, .v_dim = 40};
  PlanOptions options{.limits = {.max_num_reqs = 3, .max_num_tokens = 40, .max_seq_len = 64}};
  std::vector<uint16_t> q = std::vector<uint16_t>(40 * 4 * 48), kv_b = std::vector<uint16_t>(4 * 72 * 64),
                        cache = std::vector<uint16_t>(12 * 16 * 80), out = std::vector<uint16_t>(40 * 4 * 40);
  std::vector<float> lse = std::vector<float>(160);
  std::vector<int32_t> table{4, 1, 7, 3, 0, 2, 5, 6, 8, 9, 10, 11};
  const Lengths prompts{{0, 20, 21, 40}, {50, 33, 19}}, decode{{0, 1, 2, 3}, {40, 9, 64}};
  MlaInputs in;
  MlaOutputs to;
};

}  // namespace imbrex::cuda
