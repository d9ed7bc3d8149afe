// See problem.h.
#include "fuzz/metadata/problem.h"

#include <algorithm>
#include <numeric>

#include "core/float_types.h"
#include "cuda/fake/host_kernels.h"

#include "api/structs.h"

namespace imbrex::test {
namespace {

constexpr imbrex_dl_type kTypes[] = {{2, 32, 1}, {2, 16, 1}, {4, 16, 1}, {10, 8, 1}, {12, 8, 1}, {1, 8, 1}, {0, 32, 1}, {0, 64, 1}};
imbrex_dl_type dl_type(int32_t dtype) { return kTypes[dtype]; }

std::vector<unsigned char> floats(Random& random, int32_t dtype, int64_t count) {
  std::vector<unsigned char> bytes(size_t(count) * kTypes[dtype].bits / 8);
  for (int64_t i = 0; i < count; ++i) store_from_double(bytes.data(), DType(dtype), i, double(random.between(-40, 40)) / 16);
  return bytes;
}

void set_floats(Argument& to, Random& random, int32_t dtype, std::vector<int64_t> shape) {
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
  to.set(dl_type(dtype), std::move(shape), floats(random, dtype, count));
}

bool has_latents(const imbrex_spec_fields& f) {
  return f.kv_format == IMBREX_KV_LATENT || f.kv_format == IMBREX_KV_LATENT_ROPE || f.kv_format == IMBREX_KV_FP8_DS_MLA;
}

// A latent, where the dimensions are those of one, in one of its three formats.
void choose_latent(imbrex_spec_fields& f, Random& random) {
  if (random.one_in(6)) {
    f.num_q_heads /= f.num_kv_heads, f.num_kv_heads = 1, f.head_dim_qk = 576, f.head_dim_v = 512;
    f.kv_dtype = IMBREX_FP8_E4M3, f.kv_format = IMBREX_KV_FP8_DS_MLA, f.block_size = std::max(f.block_size, 1);
  } else if (f.head_dim_v <= f.head_dim_qk) {
    f.kv_format = f.head_dim_v < f.head_dim_qk && random.one_in(2) ? IMBREX_KV_LATENT_ROPE : IMBREX_KV_LATENT;
  }
}

// A spec that the target runs. Each feature is in it now and then.
imbrex_spec_fields random_spec(const Target& target, Random& random) {
  imbrex_spec_fields f = init(imbrex_spec_fields_init);
  const bool amx = target.prefill == "cpu_amx" || target.decode == "cpu_amx";
  const int64_t groups[] = {1, 2, 3}, dims[] = {16, 32, 64}, sizes[] = {0, 1, 8, 16, 16, 32};
  f.kind = int32_t(random.one_in(3) ? random.between(0, 3) : 0);
  f.num_kv_heads = int32_t(random.between(1, 3)), f.num_q_heads = f.num_kv_heads * int32_t(random.pick(groups));
  f.head_dim_qk = int32_t(random.pick(dims)), f.head_dim_v = random.one_in(3) ? int32_t(random.pick(dims)) : f.head_dim_qk;
  f.q_dtype = amx ? IMBREX_BF16 : int32_t(random.between(IMBREX_F32, IMBREX_BF16));
  f.kv_dtype = random.one_in(3) ? int32_t(random.between(IMBREX_F32, IMBREX_FP8_E5M2)) : f.q_dtype;
  f.block_size = int32_t(random.pick(sizes));
  if (amx && random.one_in(2)) f.kv_format = IMBREX_KV_AMX_PACKED, f.block_size = random.one_in(2) ? 16 : 32;
  if (f.kv_format == IMBREX_KV_STRIDED && random.one_in(3)) choose_latent(f, random);
  f.causal = f.kind == IMBREX_DECODER ? 1 : int32_t(random.between(0, 1));
  if (random.one_in(4)) f.window_left = int32_t(random.between(0, 20));
  if (random.one_in(8)) f.custom_mask = 1;
  if (target.prefill != "cuda_sm90" && target.decode != "cuda_sm90" && random.one_in(8)) f.positions = 1;
  if (random.one_in(8)) f.soft_cap = 20;
  f.sinks = random.one_in(6), f.head_scales = random.one_in(6), f.alibi = random.one_in(6);
  if (!f.alibi && random.one_in(6)) f.relative_buckets = 8, f.relative_max_distance = 20;
  return f;
}

// Lengths and where keys lie. Entries of tables that no request needs name nothing, blocks are in no order.
void add_batch(Problem& p, Random& random, int64_t& num_blocks) {
  const imbrex_spec_fields& f = p.spec.value;
  const auto reqs = size_t(random.between(1, 4));
  p.batch.value.num_reqs = int32_t(reqs);
  p.starts.values.assign(1, 0), p.lens.values.clear();
  std::vector<int32_t> indptr{0}, last, rows{int32_t(random.between(0, 3))};
  int64_t mask_bytes = 0, widest = 1;
  const bool packs = f.custom_mask && random.one_in(2);
  p.bits = {};
  p.bits.starts.given = packs && random.one_in(2);
  for (size_t r = 0; r < reqs; ++r) {
    const auto q_len = int32_t(random.one_in(3) ? random.between(0, 12) : 1);
    const auto len = int32_t(q_len + (random.one_in(2) ? random.between(0, 60) : 0));
    p.starts.values.push_back(p.starts.values.back() + q_len), p.lens.values.push_back(len);
    rows.push_back(rows.back() + len);
    mask_bytes += int64_t(q_len) * len;
    if (packs) p.bits.add(q_len, len, random);
    if (f.block_size == 0) continue;
    indptr.push_back(indptr.back() + (len + f.block_size - 1) / f.block_size);
    last.push_back(len == 0 ? 0 : (len - 1) % f.block_size + 1);
    widest = std::max<int64_t>(widest, indptr.back() - indptr[r]);
  }
  const int64_t tokens = p.starts.values.back();
  const auto signed_reqs = int64_t(reqs);
  if (packs) p.bits.end(p.packed_mask);
  if (f.custom_mask && !packs) {
    std::vector<unsigned char> mask(static_cast<size_t>(mask_bytes));
    for (auto& m : mask) m = random.one_in(3) ? 0 : 1;
    p.custom_mask.set({1, 8, 1}, {mask_bytes}, mask);
  }
  if (f.block_size == 0) {
    num_blocks = rows.back();
    p.kv_start_loc.set_numbers(kInt, {signed_reqs + 1}, rows);
    return;
  }
  num_blocks = indptr.back() + random.between(1, 3);
  std::vector<int32_t> blocks(static_cast<size_t>(num_blocks));
  std::iota(blocks.begin(), blocks.end(), 0);
  for (size_t i = blocks.size(); i-- > 1;) std::swap(blocks[i], blocks[size_t(random.between(0, int64_t(i)))]);
  if (random.one_in(2)) {
    p.kv_indptr.set_numbers(kInt, {signed_reqs + 1}, indptr);
    p.kv_indices.set_numbers(kInt, {indptr.back()}, std::vector<int32_t>(blocks.begin(), blocks.begin() + indptr.back()));
    if (random.one_in(2)) p.kv_last_page_len.set_numbers(kInt, {signed_reqs}, last);
    if (indptr.back() == 0) p.kv_indices.given = false;
  } else {
    const int64_t columns = widest + random.between(0, 2);
    std::vector<int32_t> table(reqs * size_t(columns), 0x7fffffff);
    for (size_t r = 0; r < reqs; ++r) std::copy(&blocks[size_t(indptr[r])], &blocks[size_t(indptr[r + 1])], &table[r * size_t(columns)]);
    p.block_table.set_numbers(kInt, {signed_reqs, columns}, table);
  }
  if (f.kind == IMBREX_ENCODER_DECODER || random.one_in(4)) return;
  std::vector<int64_t> slots;
  for (size_t r = 0; r < reqs; ++r) {
    const int32_t q_len = p.starts.values[r + 1] - p.starts.values[r];
    for (int32_t j = p.lens.values[r] - q_len; j < p.lens.values[r]; ++j)
      slots.push_back(random.one_in(9) ? -1 : int64_t(blocks[size_t(indptr[r] + j / f.block_size)]) * f.block_size + j % f.block_size);
  }
  p.slot_mapping.set_numbers(kLong, {tokens}, slots);
  set_floats(p.new_k, random, f.q_dtype, {tokens, f.num_kv_heads, f.head_dim_qk});
  if (!has_latents(f)) set_floats(p.new_v, random, f.q_dtype, {tokens, f.num_kv_heads, f.head_dim_v});
  p.calls.insert(p.calls.begin() + 1, Call::write_kv);
}

void add_tensors(Problem& p, Random& random, int64_t num_blocks) {
  const imbrex_spec_fields& f = p.spec.value;
  const int64_t tokens = p.starts.values.back(), heads = f.num_q_heads, kv_heads = f.num_kv_heads;
  for (const bool keys : {true, false}) {
    Argument& side = keys ? p.k_cache : p.v_cache;
    const bool apart = f.kv_format == IMBREX_KV_LATENT_ROPE;
    const int64_t dim = keys && !apart ? f.head_dim_qk : f.head_dim_v;
    if (!keys && has_latents(f)) continue;
    if (f.kv_format == IMBREX_KV_FP8_DS_MLA) {
      side.set({1, 8, 1}, {num_blocks, f.block_size, 656}, std::vector<unsigned char>(size_t(num_blocks * f.block_size * 656)));
      continue;  // without scales
    }
    if (f.kv_format == IMBREX_KV_AMX_PACKED) {
      const int64_t bytes = f.block_size * ((dim + 31) / 32 * 32) * (f.kv_dtype == IMBREX_BF16 ? 2 : 1);
      side.set({1, 8, 1}, {num_blocks, kv_heads, bytes}, std::vector<unsigned char>(size_t(num_blocks * kv_heads * bytes)));
    } else if (f.block_size == 0) {
      set_floats(side, random, f.kv_dtype, {num_blocks, kv_heads, dim});
    } else {
      set_floats(side, random, f.kv_dtype, {num_blocks, f.block_size, kv_heads, dim});
    }
    if (f.kv_dtype >= IMBREX_FP8_E4M3 && random.one_in(2))
      (keys ? p.k_scale : p.v_scale).set_numbers(kFloat, {random.one_in(2) ? 1 : kv_heads}, std::vector<float>(size_t(kv_heads), 0.5f));
    if (!apart) continue;
    const int64_t behind = f.head_dim_qk - f.head_dim_v;
    if (f.block_size == 0)
      set_floats(p.k_rope, random, f.kv_dtype, {num_blocks, kv_heads, behind});
    else
      set_floats(p.k_rope, random, f.kv_dtype, {num_blocks, f.block_size, kv_heads, behind});
    if (p.k_scale.given) p.k_rope_scale.set_numbers(kFloat, {kv_heads}, std::vector<float>(size_t(kv_heads), 0.25f));
  }
  set_floats(p.q, random, f.q_dtype, {tokens, heads, f.head_dim_qk});
  set_floats(p.out, random, random.one_in(4) ? IMBREX_F32 : f.q_dtype, {tokens, heads, f.head_dim_v});
  if (random.one_in(2)) set_floats(p.lse, random, IMBREX_F32, {tokens, heads});
  if (f.sinks) set_floats(p.sinks, random, IMBREX_F32, {heads});
  if (f.alibi) set_floats(p.alibi_slopes, random, IMBREX_F32, {heads});
  if (f.head_scales) set_floats(p.head_scales, random, IMBREX_F32, {heads});
  if (f.relative_buckets > 0) set_floats(p.relative_bias, random, IMBREX_F32, {f.relative_buckets, heads});
  if (!p.target->cuda) return;
  for (Argument* a : {&p.k_cache, &p.v_cache, &p.k_rope, &p.new_k, &p.new_v, &p.q, &p.sinks, &p.alibi_slopes, &p.head_scales,
                      &p.relative_bias, &p.out, &p.lse})
    a->device = {2, 0};
  for (Argument* scale : {&p.k_scale, &p.v_scale, &p.k_rope_scale})
    if (!scale->shape.empty() && scale->shape[0] > 1) scale->device = {2, 0};  // one for all heads may stay on the host
}

}  // namespace

const std::array<Problem::Named, 24>& Problem::arguments() {
  static const std::array<Named, 24> all{{{"block_table", &Problem::block_table, true, true},
                                          {"kv_indptr", &Problem::kv_indptr, true, true},
                                          {"kv_indices", &Problem::kv_indices, true, true},
                                          {"kv_last_page_len", &Problem::kv_last_page_len, true, true},
                                          {"kv_start_loc", &Problem::kv_start_loc, true, true},
                                          {"slot_mapping", &Problem::slot_mapping, true, true},
                                          {"custom_mask", &Problem::custom_mask, false, true},
                                          {"packed_mask", &Problem::packed_mask, false, true},
                                          {"kv.k", &Problem::k_cache, false, false},
                                          {"kv.v", &Problem::v_cache, false, false},
                                          {"kv.k_scale", &Problem::k_scale, false, false},
                                          {"kv.v_scale", &Problem::v_scale, false, false},
                                          {"kv.k_rope", &Problem::k_rope, false, false},
                                          {"kv.k_rope_scale", &Problem::k_rope_scale, false, false},
                                          {"k", &Problem::new_k, false, false},
                                          {"v", &Problem::new_v, false, false},
                                          {"q", &Problem::q, false, false},
                                          {"q_scale", &Problem::q_scale, false, false},
                                          {"sinks", &Problem::sinks, false, false},
                                          {"alibi_slopes", &Problem::alibi_slopes, false, false},
                                          {"head_scales", &Problem::head_scales, false, false},
                                          {"relative_bias", &Problem::relative_bias, false, false},
                                          {"out", &Problem::out, false, false},
                                          {"lse", &Problem::lse, false, false}}};
  return all;
}

void Problem::make_memory(bool of_batch) {
  for (const Named& n : arguments())
    if (of_batch || !n.of_batch) (this->*n.argument).make();
}

imbrex_status Problem::update(imbrex_plan* plan) {
  imbrex_batch& b = batch.value;
  b.query_start_loc = starts.make(), b.seq_lens = lens.make();
  b.block_table = block_table.tensor(), b.kv_indptr = kv_indptr.tensor(), b.kv_indices = kv_indices.tensor();
  b.kv_last_page_len = kv_last_page_len.tensor(), b.kv_start_loc = kv_start_loc.tensor();
  b.slot_mapping = slot_mapping.tensor(), b.custom_mask = custom_mask.tensor();
  b.packed_mask = packed_mask.tensor(), b.mask_indptr = bits.make_starts(b.num_reqs);
  // As long as the last start says, whatever that is; a step of so many tokens is refused before they are looked at.
  constexpr int32_t kMost = 1 << 20;
  const int32_t tokens = starts.values.empty() ? 0 : std::clamp(starts.values.back(), 0, kMost);
  positions.values.assign(size_t(tokens), 3);
  if (tokens > 0) positions.values[0] = first_position;
  b.positions = spec.value.positions != 0 ? positions.make() : nullptr;
  return imbrex_plan_update(plan, batch.make(), nullptr);
}

const imbrex_kv_cache* Problem::c_cache() {
  kv.value.k = k_cache.tensor(), kv.value.v = v_cache.tensor();
  kv.value.k_scale = k_scale.tensor(), kv.value.v_scale = v_scale.tensor();
  kv.value.k_rope = k_rope.tensor(), kv.value.k_rope_scale = k_rope_scale.tensor();
  return kv.make();
}

imbrex_status Problem::write_kv(imbrex_plan* plan) {
  return imbrex_plan_write_kv(plan, c_cache(), new_k.tensor(), new_v.tensor(), nullptr);
}

imbrex_status Problem::run(imbrex_plan* plan) {
  imbrex_inputs& in = inputs.value;
  in.q = q.tensor(), in.q_scale = q_scale.tensor(), in.kv = c_cache(), in.sinks = sinks.tensor();
  in.alibi_slopes = alibi_slopes.tensor(), in.head_scales = head_scales.tensor(), in.relative_bias = relative_bias.tensor();
  outputs.value.out = out.tensor(), outputs.value.lse = lse.tensor();
  return imbrex_plan_run(plan, inputs.make(), outputs.make(), nullptr);
}

imbrex_status Problem::call(Call what, imbrex_plan* plan) {
  return what == Call::update ? update(plan) : what == Call::write_kv ? write_kv(plan) : run(plan);
}

std::vector<unsigned char> Problem::written() const {
  std::vector<unsigned char> bytes = out.elements(), more = lse.elements();
  bytes.insert(bytes.end(), more.begin(), more.end());
  return bytes;
}
std::vector<unsigned char> Problem::cached() const {
  std::vector<unsigned char> bytes = k_cache.elements();
  for (const Argument* part : {&v_cache, &k_rope}) {
    const std::vector<unsigned char> more = part->elements();
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  return bytes;
}

PlanHandle plan_of(Problem& p) {
  const SpecHandle spec = make_handle<SpecHandle>([&](auto** out) { return imbrex_spec_create(p.spec.make(), out); });
  if (spec == nullptr) return nullptr;
  if (p.target->cuda) cuda::fake::run_on_host(std::get<AttentionSpec>(spec->spec));
  const SelectionHandle prefill = select_for(spec.get(), p.target->device, p.target->prefill.c_str());
  if (prefill == nullptr) return nullptr;
  const imbrex_plan_options* options = p.options.make();
  if (!p.target->by_phase()) return make_handle<PlanHandle>([&](auto** out) { return imbrex_plan_create(prefill.get(), options, out); });
  const SelectionHandle decode = select_for(spec.get(), p.target->device, p.target->decode.c_str());
  if (decode == nullptr) return nullptr;
  return make_handle<PlanHandle>(
      [&](auto** out) { return imbrex_plan_create_by_phase(prefill.get(), decode.get(), options, p.decode_max_q, out); });
}

Problem right_problem(const Target& target, Random& random) {
  for (;;) {
    Problem p;
    p.target = &target;
    p.spec.value = random_spec(target, random);
    p.options.value = init(imbrex_plan_options_init);
    p.options.value.max_num_reqs = 8, p.options.value.max_num_tokens = 128, p.options.value.max_seq_len = 1000;
    p.options.value.balanced = random.one_in(6);
    p.decode_max_q = int32_t(random.between(1, 3));
    if (plan_of(p) == nullptr) continue;
    int64_t num_blocks = 0;
    add_batch(p, random, num_blocks);
    add_tensors(p, random, num_blocks);
    return p;
  }
}

}  // namespace imbrex::test
