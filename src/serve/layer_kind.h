#pragma once
// Layers of one spec in a replay: their plans, parameters and caches, and how their inputs are made, their calls run and their outputs
// fetched in a step. Each family derives a class from it (attention_kind.cpp, short_conv_kind.cpp, mla_kind.cpp, recurrent_kind.cpp);
// StepRunner knows no
// family.
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/check.h"
#include "imbrex/device_stream.h"
#include "imbrex/model.h"
#include "serve/group_cache.h"
#include "serve/replay.h"
#include "serve/replay_account.h"
#include "serve/synthetic.h"
#include "serve/verify.h"

namespace imbrex::serve {

// A tensor that a layer reads, bf16 [tokens, heads, dim] and made by synthesis: a row for each head, of at most Synthetic::kMaxDim.
struct InputPart {
  Side side = Side::q;
  int heads = 0, dim = 0;
};
constexpr size_t kMostInputs = 6;

// The tensors of one layer in one step.
struct StepTensors {
  std::array<TensorView, kMostInputs> in;  // the parts, in their order
  TensorView out;                          // bf16 [tokens * out_rows, out_length]
};

// What the kinds of a model are made from.
struct KindSetup {
  const ModelSpec& model;
  const DeviceInfo& device;
  const ReplayOptions& options;
  const DeviceStream& stream;
  PlanOptions plan;              // for every step
  PlanOptions decode_plan;       // for steps with one token a request
  bool has_decode_plan = false;  // they have plans of their own, which a graph may hold
};

class LayerKind {
 public:
  virtual ~LayerKind() = default;

  const LayerSpec& spec() const { return spec_; }
  int group() const { return group_; }  // of the model's cache groups
  std::span<const InputPart> parts() const { return parts_; }
  int out_rows() const { return out_rows_; }          // of a token: rows of the output that are fetched by themselves
  int64_t out_length() const { return out_length_; }  // elements of such a row

  // Layers are counted within the kind. Their group's memory must be there before the first run().
  virtual void place_cache(size_t layer, const GroupCache&, int layer_of_group) = 0;
  void update(const Batch&, bool decode);
  // With trees of drafts: takes StepPlan::kept_batch() of the step, and writes the keys and values of kept paths once more, where they are
  // to stay, behind run(). Layers with states have nothing to move.
  virtual void update_kept(const Batch&) {}
  virtual bool write_kept(size_t /*layer*/, const StepTensors&) const { return false; }
  // Prompts may be cut into steps at multiples of so many of a request's tokens without changing a bit; 0: nowhere.
  virtual int step_tokens() const { return 1; }
  bool capturable() const { return plan_now().capturable(); }  // into a graph of this step's plan
  // Writes keys and values before run(), which is timed by itself. Returns false where the family has no such call.
  virtual bool write_cache(size_t layer, const StepTensors&) const = 0;
  virtual void run(size_t layer, const StepTensors&) const = 0;

  // What a layer computes in the step of the last update(), whose arrays are these.
  virtual LayerWork work(const StepPlan&) const = 0;

  virtual VerifyTarget target(size_t layer, int out_row) const = 0;
  // What that target computes again of the state in a slot, in contiguous parts; none where it checks none.
  // `row`: behind which draft of the step, counted from 1; 0: in front of the first.
  virtual std::vector<TensorView> states_of(size_t /*layer*/, int /*out_row*/, int /*slot*/, int /*row*/) const { return {}; }
  ReplayKind report() const;  // what runs and why, with the plan of the last step

 protected:
  LayerKind(const ModelSpec::Kind&, const KindSetup&);
  virtual BasicPlan& basic_plan(bool decode) const = 0;
  bool decode() const { return decode_; }
  Stream stream() const { return stream_.get(); }

  std::vector<InputPart> parts_;
  int out_rows_ = 0;
  int64_t out_length_ = 0;
  ReplayKind report_;  // what selection decides: backend, rule, selection

 private:
  BasicPlan& plan_now() const { return basic_plan(decode_); }

  LayerSpec spec_;
  int group_;
  const DeviceStream& stream_;
  bool decode_ = false;  // the step is one for the decode plan
};

// A kind with the plans of its family.
template <class Family>
class KindOf : public LayerKind {
 protected:
  KindOf(const ModelSpec::Kind& kind, const KindSetup& setup) : LayerKind(kind, setup) {}
  const typename Family::Spec& spec() const { return std::get<typename Family::Spec>(LayerKind::spec()); }
  const typename Family::Plan& plan() const { return *(decode() ? decode_plan_ : plan_); }
  const typename Family::Plan& prompt_plan() const { return *plan_; }

  // One backend for both phases, for families whose plans take any step. Where two are forced, the one of prefill runs both, and says so.
  void make_plans(const KindSetup&);

  std::unique_ptr<typename Family::Plan> plan_, decode_plan_;

 private:
  BasicPlan& basic_plan(bool decode) const override { return *(decode ? decode_plan_ : plan_); }
};

template <class Family>
void KindOf<Family>::make_plans(const KindSetup& setup) {
  SelectOptions select_options = setup.options.select;
  select_options.phase = Phase::prefill;
  const auto selection = select<Family>(spec(), setup.device, select_options);
  select_options.phase = Phase::decode;
  const auto decode = select<Family>(spec(), setup.device, select_options);
  check(selection.backend != nullptr, "replay.backend.none", "no backend runs {}:\n{}", spec().str(), selection.str());
  plan_ = selection.backend->plan(spec(), setup.device, setup.plan);
  if (setup.has_decode_plan) decode_plan_ = selection.backend->plan(spec(), setup.device, setup.decode_plan);
  report_.backend = selection.backend->name();
  report_.rule = selection.rule;
  if (decode.backend != selection.backend) report_.rule += "; runs decode too, plans of this family are not split by phase";
  report_.selection = selection.str();
}

// Selects backends and makes plans. Error replay.backend.none, select.forced.
std::unique_ptr<LayerKind> make_kind(const AttentionSpec&, const ModelSpec::Kind&, const KindSetup&);
std::unique_ptr<LayerKind> make_kind(const ShortConvSpec&, const ModelSpec::Kind&, const KindSetup&);
std::unique_ptr<LayerKind> make_kind(const MlaSpec&, const ModelSpec::Kind&, const KindSetup&);
std::unique_ptr<LayerKind> make_kind(const RecurrentSpec&, const ModelSpec::Kind&, const KindSetup&);

}  // namespace imbrex::serve
