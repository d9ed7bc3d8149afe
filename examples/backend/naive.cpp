// Backends outside of imbrex: a shared object that knows nothing but imbrex.h. This one is of attention, plain loops for f32 decoders on a
// CPU with host block tables; all else it refuses, with the reason. Build: c++ -shared -fPIC *.cpp -o naive.so; use:
// imbrex_load_plugin("./naive.so"), or IMBREX_PLUGINS=./naive.so for the program.
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "naive.h"

namespace naive {
namespace {

struct Request {
  int begin, end, seq_len;  // of its query tokens; keys
  std::vector<int> blocks;
};

struct NaivePlan {
  imbrex_spec_fields spec;
  std::vector<Request> requests;
  std::vector<int64_t> slots;
};

NaivePlan& plan_of(void* plan) { return *static_cast<NaivePlan*>(plan); }

void unsupported(void*, const imbrex_spec_fields* s, const imbrex_device_properties* device, const imbrex_reasons* reasons) {
  refuse(reasons, device->cuda != 0, "device.type", "cpu", device->cuda);
  refuse(reasons, s->kind != IMBREX_DECODER, "spec.kind", "decoder", s->kind);
  refuse(reasons, s->q_dtype != IMBREX_F32 || s->kv_dtype != IMBREX_F32, "spec.q_dtype", "f32 everywhere", s->q_dtype);
  refuse(reasons, s->kv_format != IMBREX_KV_STRIDED, "spec.kv_format", "strided", s->kv_format);
  refuse(reasons, s->block_size == 0, "spec.block_size", "blocks", 0);
  const bool plain = s->causal && s->window_left < 0 && s->window_right < 0 && s->chunk == 0 && !s->custom_mask && !s->positions &&
                     !s->tree && !s->head_scales && !s->alibi && !s->sinks && s->relative_buckets == 0;
  refuse(reasons, !plain, "spec.mask", "causal, and logits as they are or soft-capped", 0);
}

imbrex_status make_plan(void*, const imbrex_spec_fields* spec, const imbrex_device_properties*, const imbrex_plan_options*, void** plan) {
  auto* made = new (std::nothrow) NaivePlan{*spec, {}, {}};
  if (made == nullptr) return fail(IMBREX_OUT_OF_MEMORY, "no memory for a plan");
  *plan = made;
  return IMBREX_OK;
}

void free_plan(void* plan) { delete static_cast<NaivePlan*>(plan); }

imbrex_status update(void* plan, const imbrex_batch* batch, void*) {
  NaivePlan& p = plan_of(plan);
  const imbrex_tensor *table = batch->block_table, *indptr = batch->kv_indptr;
  p.requests.clear();
  for (int r = 0; r < batch->num_reqs; ++r) {
    Request request{batch->query_start_loc[r], batch->query_start_loc[r + 1], batch->seq_lens[r], {}};
    const int* row = nullptr;  // its blocks
    if (table != nullptr) row = static_cast<const int*>(table->data) + r * table->strides[0];
    if (indptr != nullptr) row = static_cast<const int*>(batch->kv_indices->data) + static_cast<const int*>(indptr->data)[r];
    if (row != nullptr) request.blocks.assign(row, row + (request.seq_len + p.spec.block_size - 1) / p.spec.block_size);
    p.requests.push_back(request);
  }
  p.slots.clear();
  if (batch->slot_mapping != nullptr) {
    const auto* slots = static_cast<const int64_t*>(batch->slot_mapping->data);
    p.slots.assign(slots, slots + batch->query_start_loc[batch->num_reqs]);  // what comes then is padding
  }
  return IMBREX_OK;
}

float* element(const imbrex_tensor& t, int64_t a, int64_t b, int64_t c) {
  return static_cast<float*>(t.data) + a * t.strides[0] + b * t.strides[1] + c * t.strides[2];
}
// Of a page's tensor: block, token, head.
float* in_page(const imbrex_tensor& t, int block_size, int64_t slot, int64_t head) {
  return element(t, slot / block_size, slot % block_size, head);
}

imbrex_status write_kv(void* plan, const imbrex_kv_cache* cache, const imbrex_tensor* k, const imbrex_tensor* v, void*) {
  const NaivePlan& p = plan_of(plan);
  for (size_t token = 0; token < p.slots.size(); ++token) {
    if (p.slots[token] < 0) continue;
    for (int head = 0; head < p.spec.num_kv_heads; ++head) {
      for (int d = 0; d < p.spec.head_dim_qk; ++d)
        in_page(*cache->k, p.spec.block_size, p.slots[token], head)[d * cache->k->strides[3]] = element(*k, int64_t(token), head, d)[0];
      for (int d = 0; d < p.spec.head_dim_v; ++d)
        in_page(*cache->v, p.spec.block_size, p.slots[token], head)[d * cache->v->strides[3]] = element(*v, int64_t(token), head, d)[0];
    }
  }
  return IMBREX_OK;
}

imbrex_status run(void* plan, const imbrex_inputs* in, const imbrex_outputs* out, void*) {
  const NaivePlan& p = plan_of(plan);
  const imbrex_spec_fields& s = p.spec;
  const double scale = s.scale != 0.f ? s.scale : 1 / std::sqrt(double(s.head_dim_qk));
  std::vector<double> sums(size_t(s.head_dim_v));
  for (const Request& r : p.requests) {
    for (int token = r.begin; token < r.end; ++token) {
      const int last = r.seq_len - (r.end - token);  // key that the query sees last: its own
      for (int head = 0; head < s.num_q_heads; ++head) {
        const int kv_head = head / (s.num_q_heads / s.num_kv_heads);
        const float* q = element(*in->q, token, head, 0);
        double top = -INFINITY, sum = 0;
        std::fill(sums.begin(), sums.end(), 0.0);
        for (int j = 0; j <= last; ++j) {
          const int64_t slot = int64_t(r.blocks[size_t(j / s.block_size)]) * s.block_size + j % s.block_size;
          const float* k = in_page(*in->kv->k, s.block_size, slot, kv_head);
          const float* v = in_page(*in->kv->v, s.block_size, slot, kv_head);
          double logit = 0;
          for (int d = 0; d < s.head_dim_qk; ++d) logit += double(q[d]) * k[d * in->kv->k->strides[3]];
          logit *= scale;
          if (s.soft_cap > 0.f) logit = s.soft_cap * std::tanh(logit / s.soft_cap);
          const double now = std::fmax(top, logit), old = std::exp(top - now), weight = std::exp(logit - now);
          sum = sum * old + weight;
          for (int d = 0; d < s.head_dim_v; ++d) sums[size_t(d)] = sums[size_t(d)] * old + weight * v[d * in->kv->v->strides[3]];
          top = now;
        }
        for (int d = 0; d < s.head_dim_v; ++d) element(*out->out, token, head, d)[0] = sum > 0 ? float(sums[size_t(d)] / sum) : 0.f;
        if (out->lse != nullptr)
          static_cast<float*>(out->lse->data)[token * out->lse->strides[0] + head * out->lse->strides[1]] = float(std::log(sum) + top);
      }
    }
  }
  return IMBREX_OK;
}

const char* name_of(void*) { return "outside_naive: one query after the other"; }

}  // namespace

imbrex_status register_attention(const imbrex_host* host) {
  imbrex_backend backend{};
  backend.struct_size = sizeof backend, backend.spec_size = sizeof(imbrex_spec_fields);
  backend.name = "outside_naive";
  backend.description = "an example of a backend from outside: plain loops";
  backend.unsupported = unsupported;
  backend.plan = make_plan, backend.plan_free = free_plan;
  backend.update = update, backend.write_kv = write_kv, backend.run = run;
  backend.str = name_of, backend.error = why;
  return host->register_backend(&backend);
}

}  // namespace naive

// A host that is older than a function of the struct gives a smaller one.
extern "C" IMBREX_API imbrex_status imbrex_plugin(const imbrex_host* host) {
  if (host->abi_version != IMBREX_ABI_VERSION) return IMBREX_INVALID;
  if (const imbrex_status status = naive::register_attention(host); status != IMBREX_OK) return status;
  if (host->struct_size < sizeof(imbrex_host)) return IMBREX_OK;
  return naive::register_short_conv(host);
}
