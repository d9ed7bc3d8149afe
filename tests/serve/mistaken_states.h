#pragma once
// A backend of a family with states that runs like the reference, but now and then in a step that continues a request makes the mistake
// that it is told to make: verification must notice.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "imbrex/select.h"

namespace imbrex::serve {

enum class StateMistake : uint8_t { none, forgets, shares, stale, spoils, chains, forgets_drafts };

template <class Family, class Inputs, class Outputs>
struct MistakenStates final : BackendOf<Family> {
  using Spec = typename Family::Spec;
  using Plan = typename Family::Plan;
  StateMistake mistake = StateMistake::none;

  struct MistakenPlan final : Plan {
    std::unique_ptr<Plan> inner;
    StateMistake mistake = StateMistake::none;
    int steps = 0;
    std::vector<int32_t> seq_lens, slots, sources, accepted;
    void update(const Batch& batch, Stream stream) override {
      Batch changed = batch;
      seq_lens.assign(batch.seq_lens.begin(), batch.seq_lens.end());
      slots.assign(batch.state_slots.begin(), batch.state_slots.end());
      sources.assign(batch.source_slots.begin(), batch.source_slots.end());
      if (++steps % 5 == 0 && mistake == StateMistake::forgets) {
        for (int r = 0; r < batch.num_reqs(); ++r) seq_lens[size_t(r)] = batch.query_len(r);  // as if nothing had gone by
      } else if (steps % 5 == 0 && mistake == StateMistake::shares && slots.size() > 1) {
        std::swap(slots[0], slots[1]), std::swap(sources[0], sources[1]);
      } else if (mistake == StateMistake::stale) {
        for (int r = 0; r < batch.num_reqs(); ++r) seq_lens[size_t(r)] = batch.seq_lens[size_t(r)] + 1;  // a new one reads what was left
      }
      if (mistake == StateMistake::chains) changed.draft_parents = {};
      accepted.assign(batch.accepted_drafts.size(), 0);
      if (mistake == StateMistake::forgets_drafts) changed.accepted_drafts = accepted;
      changed.seq_lens = seq_lens;
      changed.state_slots = slots;
      changed.source_slots = sources;
      inner->update(changed, stream);
    }
    void run(const Inputs& in, const Outputs& out, Stream stream) const override {
      inner->run(in, out, stream);
      if (mistake != StateMistake::spoils) return;
      auto* const first = in.state.template as<char>() + slots[0] * in.state.stride(0) * size_of(in.state.dtype);
      std::memset(first, 0, size_t(in.state.stride(0) * size_of(in.state.dtype)));  // behind the outputs, which are right
    }
    std::string str() const override { return "mistaken"; }
  };

  std::string_view name() const override { return "mistaken"; }
  std::string_view description() const override { return "makes mistakes with states"; }
  std::vector<Reason> unsupported(const Spec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<Plan> plan(const Spec& spec, const DeviceInfo& device, const PlanOptions& options) const override {
    auto made = std::make_unique<MistakenPlan>();
    PlanOptions wider = options;
    ++wider.limits.max_seq_len;
    made->inner = find_backend<Family>("reference")->plan(spec, device, wider);
    made->mistake = mistake;
    return made;
  }
};

}  // namespace imbrex::serve
