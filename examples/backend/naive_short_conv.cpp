// The plug-in's backend of the short convolution: plain loops for f32 on a CPU.
#include <algorithm>
#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "naive.h"

namespace naive {
namespace {

struct Request {
  int begin, end;  // of its tokens
  int slot, source, first_row, drafts;
  bool fresh;  // no tokens have gone before
};

struct ConvPlan {
  imbrex_short_conv_fields spec;
  std::vector<Request> requests;
};

ConvPlan& plan_of(void* plan) { return *static_cast<ConvPlan*>(plan); }

void unsupported(void*, const imbrex_short_conv_fields* s, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
  refuse(reasons, device->cuda != 0, "device.type", "cpu", device->cuda);
  refuse(reasons, s->dtype != IMBREX_F32, "short_conv.dtype", "f32", s->dtype);
  refuse(reasons, s->tree_drafts != 0, "short_conv.tree_drafts", "0", s->tree_drafts);
}

imbrex_status make_plan(void*, const imbrex_short_conv_fields* spec, const imbrex_device_properties*, const imbrex_plan_options*,
                        void** plan) {
  auto* made = new (std::nothrow) ConvPlan{*spec, {}};
  if (made == nullptr) return fail(IMBREX_OUT_OF_MEMORY, "no memory for a plan");
  *plan = made;
  return IMBREX_OK;
}

void free_plan(void* plan) { delete static_cast<ConvPlan*>(plan); }

imbrex_status update(void* plan, const imbrex_batch* b, void*) {
  ConvPlan& p = plan_of(plan);
  p.requests.clear();
  for (int r = 0; r < b->num_reqs; ++r) {
    const int begin = b->query_start_loc[r], end = b->query_start_loc[r + 1];
    if (begin == end) continue;
    const int source = (b->source_slots != nullptr ? b->source_slots : b->state_slots)[r];
    p.requests.push_back({begin, end, b->state_slots[r], source, b->accepted_drafts != nullptr ? b->accepted_drafts[r] : 0,
                          b->num_drafts != nullptr ? b->num_drafts[r] : 0, b->seq_lens[r] == end - begin});
  }
  return IMBREX_OK;
}

// Any strides.
float& element(const imbrex_tensor& t, int64_t a, int64_t b) { return static_cast<float*>(t.data)[a * t.strides[0] + b * t.strides[1]]; }

imbrex_status run(void* plan, const imbrex_short_conv_inputs* in, const imbrex_short_conv_outputs* out, void*) {
  const ConvPlan& p = plan_of(plan);
  const int dim = p.spec.dim, before = p.spec.width - 1;
  const bool gated = p.spec.form == IMBREX_CONV_GATED, silu = p.spec.activation == IMBREX_CONV_SILU;
  std::vector<float> h;  // of the tokens in front of the step, and of its own
  for (const Request& r : p.requests) {
    float* const states = static_cast<float*>(in->state->data);
    float* const state = states + r.slot * in->state->strides[0];
    const float* const source = r.fresh ? nullptr : states + r.source * in->state->strides[0];
    const int64_t row = in->state->strides[1];
    const int q_len = r.end - r.begin;
    for (int d = 0; d < dim; ++d) {
      h.clear();
      for (int i = 0; i < before; ++i) h.push_back(r.fresh ? 0.f : source[(r.first_row + i) * row + d]);
      for (int t = r.begin; t < r.end; ++t)
        h.push_back(element(*in->bcx, t, d) * (gated ? element(*in->bcx, t, 2 * int64_t(dim) + d) : 1.f));
      for (int t = 0; t < q_len; ++t) {
        double sum = in->bias != nullptr ? static_cast<const float*>(in->bias->data)[d] : 0.;
        for (int i = 0; i <= before; ++i) sum += double(element(*in->weight, d, i)) * h[size_t(t + i)];
        const double c = gated ? element(*in->bcx, r.begin + t, int64_t(dim) + d) : silu ? 1 / (1 + std::exp(-sum)) : 1.;
        element(*out->out, r.begin + t, d) = float(sum * c);
      }
      for (int i = 0; i < before + r.drafts; ++i) state[i * row + d] = h[size_t(q_len - r.drafts + i)];
    }
  }
  return IMBREX_OK;
}

const char* name_of(void*) { return "outside_naive: one channel after the other"; }

}  // namespace

imbrex_status register_short_conv(const imbrex_host* host) {
  imbrex_short_conv_backend backend{};
  backend.struct_size = sizeof backend;
  backend.spec_size = sizeof(imbrex_short_conv_fields), backend.device_size = sizeof(imbrex_device_properties);
  backend.name = "outside_naive";
  backend.description = "an example of a backend from outside: plain loops";
  backend.unsupported = unsupported;
  backend.plan = make_plan, backend.plan_free = free_plan;
  backend.update = update, backend.run = run;
  backend.str = name_of, backend.error = why;
  return host->register_short_conv_backend(&backend);
}

}  // namespace naive
