// The tests of MLA find mistakes: a plan that makes one fails a case of each kind that it should fail, and the plan without it passes.
#include <gtest/gtest.h>

#include <cstring>

#include "mla/reference.h"
#include "mla_targets.h"

namespace imbrex::test {
namespace {

enum class MlaMistake {
  none,
  other_head,       // the weight of the head before
  keys_as_values,   // W_UK where W_UV belongs: the weight begins a row too early
  no_rope_in_q,     // queries without their rotated part
  no_rope_in_keys,  // keys without theirs
  no_sinks,         // sinks of minus infinity
  late_write,       // the cache is written after the run
  lse_of_two,       // in base 2
  beyond_tokens     // a row of padding is written
};

class MistakenPlan final : public MlaPlan {
 public:
  MistakenPlan(const MlaSpec& spec, std::unique_ptr<MlaPlan> inner, MlaMistake mistake)
      : spec_(spec), inner_(std::move(inner)), mistake_(mistake) {}
  void update(const Batch& batch, Stream stream) override {
    tokens_ = batch.num_tokens();
    inner_->update(batch, stream);
  }
  void write_kv(const KvCache& cache, const TensorView& latent, const TensorView& rope, Stream stream) const override {
    if (mistake_ == MlaMistake::late_write && tokens_ == 1) return;  // of a step of one token
    if (mistake_ != MlaMistake::no_rope_in_keys) return inner_->write_kv(cache, latent, rope, stream);
    const HostTensor zero = HostTensor::make(rope.dtype, {rope.size(0), rope.size(1)});
    inner_->write_kv(cache, latent, zero.view(), stream);
  }
  void run(const MlaInputs& given, const MlaOutputs& out, Stream stream) const override {
    MlaInputs in = given;
    HostTensor kv_b, q, sinks;
    const int64_t size = size_of(spec_.dtype);
    if (mistake_ == MlaMistake::other_head || mistake_ == MlaMistake::keys_as_values) {
      kv_b = HostTensor::make(spec_.dtype, {in.kv_b.size(0), in.kv_b.size(1), in.kv_b.size(2)});
      const int64_t shift = mistake_ == MlaMistake::other_head ? in.kv_b.stride(0) * size : in.kv_b.stride(1) * size;
      std::memcpy(kv_b.bytes.data() + shift, in.kv_b.data, kv_b.bytes.size() - size_t(shift));
      in.kv_b = kv_b.view();
    }
    if (mistake_ == MlaMistake::no_rope_in_q) {
      q = HostTensor::make(spec_.dtype, {in.q.size(0), in.q.size(1), in.q.size(2)});
      for (int64_t t = 0; t < tokens_; ++t)
        for (int64_t h = 0; h < in.q.size(1); ++h)
          std::memcpy(q.bytes.data() + (t * in.q.size(1) + h) * in.q.size(2) * size,
                      in.q.as<char>() + (t * in.q.stride(0) + h * in.q.stride(1)) * size, size_t(spec_.qk_nope_dim * size));
      in.q = q.view();
    }
    if (mistake_ == MlaMistake::no_sinks && spec_.sinks) {
      sinks = HostTensor::make(DType::f32, {spec_.num_heads});
      for (int h = 0; h < spec_.num_heads; ++h) sinks.set(h, -1e30);
      in.sinks = sinks.view();
    }
    inner_->run(in, out, stream);
    for (int64_t t = 0; mistake_ == MlaMistake::lse_of_two && t < tokens_; ++t)
      for (int64_t h = 0; h < spec_.num_heads; ++h) out.lse.as<float>()[t * out.lse.stride(0) + h * out.lse.stride(1)] *= 1.442695f;
    if (mistake_ == MlaMistake::beyond_tokens && out.out.size(0) > tokens_)
      std::memset(out.out.as<char>() + tokens_ * out.out.stride(0) * size_of(out.out.dtype), 0, size_t(size_of(out.out.dtype)));
  }
  std::string str() const override { return inner_->str(); }

 private:
  MlaSpec spec_;
  std::unique_ptr<MlaPlan> inner_;
  MlaMistake mistake_;
  int tokens_ = 0;
};

Judgement judge_with(MlaMistake mistake, const MlaSpec& spec, const std::vector<CaseRequest>& requests) {
  MlaCase c{.spec = spec, .attention = {}};
  c.attention.spec = spec.latent_spec();
  c.attention.requests = requests;
  c.attention.padding_tokens = 2;
  c.attention.seed = 9;
  const MlaCaseInputs in = make_inputs(c);
  RunOptions options = default_options(c.attention);
  options.check_cache = false;
  const MlaPlanMaker make = [&](const BackendOf<MlaFamily>& backend, const MlaSpec& of, const DeviceInfo& device,
                                const PlanOptions& given) {
    return std::make_unique<MistakenPlan>(of, backend.plan(of, device, given), mistake);
  };
  return judge(expect(in), run_case(mla_reference(), probe_cpu(), in, options, make));
}

TEST(MlaHarness, FindsEveryMistake) {
  MlaSpec spec{.num_heads = 3, .kv_lora_rank = 40, .qk_nope_dim = 24, .qk_rope_dim = 16, .v_dim = 24, .sinks = true};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    spec.dtype = spec.kv_dtype = dtype;
    for (const std::vector<CaseRequest>& requests : {std::vector<CaseRequest>{{1, 30, 0}}, {{20, 45, 0}, {1, 7, 1}}}) {
      const bool decode = requests.size() == 1;
      EXPECT_TRUE(judge_with(MlaMistake::none, spec, requests).pass());
      for (const MlaMistake mistake :
           {MlaMistake::other_head, MlaMistake::keys_as_values, MlaMistake::no_rope_in_q, MlaMistake::no_rope_in_keys, MlaMistake::no_sinks,
            MlaMistake::lse_of_two, MlaMistake::beyond_tokens})
        EXPECT_FALSE(judge_with(mistake, spec, requests).pass()) << int(mistake) << " of " << spec.str();
      if (decode) {
        EXPECT_FALSE(judge_with(MlaMistake::late_write, spec, requests).pass());
      }
    }
  }
}

}  // namespace
}  // namespace imbrex::test
