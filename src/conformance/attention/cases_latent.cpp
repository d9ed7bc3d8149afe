// Values that are the first elements of their keys (KvFormat::latent): the shapes of latent attention, each kind of step, whatever hides or
// weighs logits, pages, and element types. Formats that store values by themselves run these cases too.
#include "conformance/attention/case_table.h"

namespace imbrex {
namespace {

Case& add_latent(CaseTable& table, std::string name, int group, int kv_heads, Dims dims, DTypes types, const Requests& requests) {
  Case& c = table.add("latent_" + std::move(name), group, kv_heads, dims, types, requests);
  c.spec.kv_format = KvFormat::latent;
  return c;
}

}  // namespace

void add_latent_cases(CaseTable& table) {
  struct Shape {
    Dims dims;
    int group, kv_heads;
  };
  const Shape shapes[] = {{{576, 512}, 12, 1}, {{320, 256}, 5, 2}, {{128, 64}, 4, 2}, {{96, 96}, 3, 1}, {{72, 40}, 1, 3}};
  for (const Shape& s : shapes)
    for (const NamedRequests& step : kSteps)
      add_latent(table, fmt::format("{}_{}", dims_name(s.dims), step.name), s.group, s.kv_heads, s.dims, table.types(), step.requests);
  for (const DTypes types : {kDTypes[0], kDTypes[3], DTypes{DType::f16, DType::f16}})  // as DeepSeek's layers are, in pages of engines
    for (const NamedRequests& step : {kSteps[0], kSteps[3]})
      add_latent(table, fmt::format("d576_512_g32_{}_{}", to_string(types.kv), step.name), 32, 1, {576, 512}, types, step.requests)
          .spec.block_size = 64;
  // Tokens with rows for two tiles, and for four.
  add_latent(table, "d576_512_g128_mixed", 128, 1, {576, 512}, kDTypes[0], {{1, 330}, {2, 50}}).spec.block_size = 64;
  add_latent(table, "d320_256_g256_mixed", 256, 1, {320, 256}, {DType::f16, DType::f16}, {{1, 70}, {2, 140}}).spec.block_size = 16;

  const NamedFeature features[] = {
      {"window", 1, kDTypes[0], [](Case& c) { c.spec.mask.window_left = 30; }},
      {"chunk", 2, kDTypes[0], [](Case& c) { c.spec.mask.chunk = 48; }},
      {"cap", 2, kDTypes[2], [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"sinks", 1, kDTypes[0], [](Case& c) { c.spec.score.sinks = true; }},
      {"alibi", 1, kDTypes[1], [](Case& c) { c.spec.score.alibi = true; }},
      {"custom", 1, kDTypes[0], [](Case& c) { c.spec.mask.custom = true, c.custom = CustomPattern::random; }},
      {"e4m3", 2, kDTypes[3], [](Case& c) { c.scale_per_head = true; }},
      {"e5m2", 2, kDTypes[5], [](Case&) {}},
      {"f32", 2, kDTypes[1], [](Case&) {}},
      {"f32_bf16", 1, kDTypes[4], [](Case&) {}},
      {"queries", 1, {DType::fp8_e4m3, DType::fp8_e4m3}, [](Case&) {}},
      {"rising", 1, kDTypes[0], [](Case& c) { c.values = ValuePattern::rising; }},
      {"spike", 1, kDTypes[0], [](Case& c) { c.values = ValuePattern::spike; }},
  };
  for (const NamedFeature& f : features)
    for (const NamedRequests& step : {kSteps[0], kSteps[2], kSteps[4]})
      f.set(add_latent(table, fmt::format("{}_{}", f.name, step.name), 4, f.kv_heads, {128, 64}, f.types, step.requests));

  for (const int block_size : {0, 1, 16, 64})
    for (const char* order : {"lbhtd", "lbthd", "lbhdt"}) {
      if (block_size == 0 && std::string_view(order) != "lbhtd") continue;
      Case& c = add_latent(table, fmt::format("b{}_{}", block_size, order), 2, 2, {64, 32}, table.types(), kMixed);
      c.spec.block_size = block_size;
      c.csr = block_size == 16;
      c.order = order;
    }

  const Requests several{{150, 220}, {1, 40}}, fewer{{90, 130}, {1, 40}};  // work is limited
  for (const Dims dims : {Dims{64, 64}, {128, 64}, {576, 512}})
    for (const DTypes types : {kDTypes[0], kDTypes[3], DTypes{DType::fp8_e4m3, DType::fp8_e4m3}})
      add_latent(table, fmt::format("tiles_{}_{}_{}", dims_name(dims), to_string(types.q), to_string(types.kv)), dims.qk > 128 ? 2 : 4, 1,
                 dims, types, dims.qk > 128 ? fewer : several);
  for (const int q_len : {1, 5})  // across the 4096 keys at which CPU plans split
    add_latent(table, fmt::format("split_q{}", q_len), 4, 1, {128, 64}, kDTypes[0], {{q_len, 4200}, {1, 50}}).spec.block_size = 64;
}

// What hides or weighs logits in the dims of models, with the heads that a rank may have: few rows, a pair of blocks, and many rows of a
// GPU.
void add_latent_masks(CaseTable& table) {
  const NamedFeature features[] = {
      {"window", 1, kDTypes[0], [](Case& c) { c.spec.mask.window_left = 90; }},
      {"sinks", 1, {DType::f16, DType::f16}, [](Case& c) { c.spec.score.sinks = true; }},
      {"cap", 1, kDTypes[0], [](Case& c) { c.spec.score.soft_cap = 20.f; }},
      {"custom", 1, kDTypes[0], [](Case& c) { c.spec.mask.custom = true, c.custom = CustomPattern::random; }},
      {"no_rope", 1, {DType::f16, DType::f16}, [](Case& c) { c.spec.head_dim_qk = c.spec.head_dim_v; }},
  };
  const Requests requests{{1, 150}, {2, 70}, {1, 9}};
  int turn = 0;
  for (const int heads : {8, 20, 40, 96, 128})
    for (const NamedFeature& f : features) {
      constexpr int kBlockSizes[] = {64, 16, 1};
      Case& c = add_latent(table, fmt::format("masks_{}_{}", heads, f.name), heads, f.kv_heads, {576, 512}, f.types, requests);
      c.spec.block_size = kBlockSizes[turn++ % 3];
      f.set(c);
    }
}

// Formats that hold nothing but their own numbers: records with scales inside, and parts with a scale each.
void add_record_cases(CaseTable& table) {
  Case& records = add_latent(table, "ds_mla_mixed", 16, 1, {576, 512}, {DType::bf16, DType::fp8_e4m3}, kMixed);
  records.spec.kv_format = KvFormat::fp8_ds_mla, records.spec.block_size = 64;
  Case& record = add_latent(table, "ds_mla_f32_page1", 3, 1, {576, 512}, {DType::f32, DType::fp8_e4m3}, {{70, 90}, {1, 140}});
  record.spec.kv_format = KvFormat::fp8_ds_mla, record.spec.block_size = 1, record.spec.score.sinks = true, record.order = "lbtd";
  Case& many = add_latent(table, "ds_mla_g32", 32, 1, {576, 512}, {DType::bf16, DType::fp8_e4m3}, {{4, 150}, {1, 33}});
  many.spec.kv_format = KvFormat::fp8_ds_mla, many.csr = true;
  for (const DTypes types : {DTypes{DType::bf16, DType::fp8_e4m3}, {DType::f32, DType::fp8_e5m2}}) {
    Case& parts = add_latent(table, fmt::format("parts_{}", to_string(types.kv)), 4, 2, {128, 64}, types, kMixed);
    parts.spec.kv_format = KvFormat::latent_rope, parts.scale_per_head = true, parts.rope_factor = 3.7f;
  }
  Case& parts = add_latent(table, "parts_f16_576", 8, 1, {576, 512}, {DType::f16, DType::fp8_e4m3}, {{40, 90}, {1, 140}});
  parts.spec.kv_format = KvFormat::latent_rope, parts.rope_factor = 0.3f, parts.spec.block_size = 64;
}

}  // namespace imbrex
