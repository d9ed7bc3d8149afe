// Wrong metadata through the plans of latent attention, as plans_test.cpp has it for attention: on every CPU backend, requests in latent
// space and with expanded keys.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "api/structs.h"
#include "fuzz/metadata/breakage.h"
#include "fuzz/metadata/cases.h"

namespace imbrex::test {
namespace {

constexpr int kLatentCases = 500, kLatentBlock = 8;

struct LatentProblem {
  Struct<imbrex_mla_fields> spec;
  Struct<imbrex_plan_options> options;
  Struct<imbrex_batch> batch;
  Numbers starts, lens;
  Numbers parents{false}, drafts{false};  // of a tree
  Argument block_table, slot_mapping, custom_mask, packed_mask;
  PackedMask bits;  // of packed_mask
  Struct<imbrex_kv_cache> kv;
  Argument k_cache, k_rope, k_scale, k_rope_scale, latents, rope;
  Struct<imbrex_mla_inputs> inputs;
  Argument q, kv_b, sinks;
  Struct<imbrex_mla_outputs> outputs;
  Argument out, lse;
  std::vector<Call> calls{Call::update, Call::write_kv, Call::run};

  struct Named {
    const char* name;
    Argument LatentProblem::*argument;
    bool of_batch;  // what it shows has to stay until the next update
  };
  static const std::array<Named, 15>& arguments() {
    static const std::array<Named, 15> all{{{"block_table", &LatentProblem::block_table, true},
                                            {"slot_mapping", &LatentProblem::slot_mapping, true},
                                            {"custom_mask", &LatentProblem::custom_mask, true},
                                            {"packed_mask", &LatentProblem::packed_mask, true},
                                            {"kv.k", &LatentProblem::k_cache, false},
                                            {"kv.k_rope", &LatentProblem::k_rope, false},
                                            {"kv.k_scale", &LatentProblem::k_scale, false},
                                            {"kv.k_rope_scale", &LatentProblem::k_rope_scale, false},
                                            {"latents", &LatentProblem::latents, false},
                                            {"rope", &LatentProblem::rope, false},
                                            {"q", &LatentProblem::q, false},
                                            {"kv_b", &LatentProblem::kv_b, false},
                                            {"sinks", &LatentProblem::sinks, false},
                                            {"out", &LatentProblem::out, false},
                                            {"lse", &LatentProblem::lse, false}}};
    return all;
  }

  void make_memory(bool of_batch = true) {
    for (const Named& n : arguments())
      if (of_batch || !n.of_batch) (this->*n.argument).make();
  }
  const imbrex_kv_cache* c_cache() {
    kv.value.k = k_cache.tensor(), kv.value.k_scale = k_scale.tensor();
    kv.value.k_rope = k_rope.tensor(), kv.value.k_rope_scale = k_rope_scale.tensor();
    return kv.make();
  }
  imbrex_status call(Call what, imbrex_plan* plan) {
    if (what == Call::write_kv) return imbrex_plan_write_latents(plan, c_cache(), latents.tensor(), rope.tensor(), nullptr);
    if (what == Call::run) {
      imbrex_mla_inputs& in = inputs.value;
      in.q = q.tensor(), in.kv_b = kv_b.tensor(), in.kv = c_cache(), in.sinks = sinks.tensor();
      outputs.value.out = out.tensor(), outputs.value.lse = lse.tensor();
      return imbrex_plan_run_mla(plan, inputs.make(), outputs.make(), nullptr);
    }
    imbrex_batch& b = batch.value;
    b.query_start_loc = starts.make(), b.seq_lens = lens.make();
    b.block_table = block_table.tensor(), b.slot_mapping = slot_mapping.tensor(), b.custom_mask = custom_mask.tensor();
    b.packed_mask = packed_mask.tensor(), b.mask_indptr = bits.make_starts(b.num_reqs);
    // As long as the last start and the number of requests say; a longer step is refused before they are looked at.
    constexpr int32_t kMost = 1 << 12;
    const int32_t tokens = starts.values.empty() ? 0 : starts.values.back();
    if (parents.given) parents.values.resize(size_t(std::clamp(tokens, 0, kMost)), -1);
    if (drafts.given) drafts.values.resize(size_t(std::clamp(b.num_reqs, 0, kMost)), 0);
    b.draft_parents = parents.make(), b.num_drafts = drafts.make();
    return imbrex_plan_update(plan, batch.make(), nullptr);
  }
  std::vector<unsigned char> written() const {
    std::vector<unsigned char> all;
    for (const Argument* a : {&out, &lse, &k_cache, &k_rope}) {
      const std::vector<unsigned char> more = a->elements();
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
};

PlanHandle plan_of(LatentProblem& p, const imbrex_device& device, const char* backend) {
  const SpecHandle spec = make_handle<SpecHandle>([&](auto** to) { return imbrex_spec_create_mla(p.spec.make(), to); });
  const SelectionHandle selection = spec == nullptr ? nullptr : select_for(spec.get(), &device, backend);
  if (selection == nullptr) return nullptr;
  return make_handle<PlanHandle>([&](auto** to) { return imbrex_plan_create(selection.get(), p.options.make(), to); });
}

// Requests of a few queries stay in latent space; those of many have their keys expanded where the mask allows that and latents are long.
LatentProblem right_latents(Random& random) {
  LatentProblem p;
  p.spec.value = init(imbrex_mla_fields_init);
  p.options.value = init(imbrex_plan_options_init);
  p.batch.value = init(imbrex_batch_init);
  p.kv.value = init(imbrex_kv_cache_init);
  p.inputs.value = init(imbrex_mla_inputs_init);
  p.outputs.value = init(imbrex_mla_outputs_init);
  imbrex_mla_fields& f = p.spec.value;
  f.num_heads = int32_t(random.between(1, 3)), f.kv_lora_rank = int32_t(8 * random.between(1, 4));
  f.qk_nope_dim = int32_t(8 * random.between(1, 2)), f.qk_rope_dim = int32_t(8 * random.between(0, 2));
  f.v_dim = int32_t(8 * random.between(1, 2)), f.dtype = f.kv_dtype = IMBREX_F32, f.block_size = kLatentBlock;
  if (random.one_in(2)) f.kv_lora_rank = 128, f.qk_nope_dim = f.v_dim = 8;  // which many queries have expanded
  f.sinks = random.one_in(3), f.absorbed = random.one_in(4), f.custom_mask = random.one_in(5);
  f.tree = !f.custom_mask && random.one_in(4);
  if (f.qk_rope_dim > 0 && random.one_in(3)) f.kv_format = IMBREX_KV_LATENT_ROPE;
  if (random.one_in(5)) f.window_left = int32_t(random.between(0, 20));
  p.options.value.max_num_reqs = 6, p.options.value.max_num_tokens = 192, p.options.value.max_seq_len = 200;

  constexpr int kMostQueries = 48;
  const int reqs = int(random.between(1, 4)), columns = 12;
  std::vector<int32_t> table(size_t(reqs * columns), 0);
  std::vector<int64_t> slots;
  std::vector<int32_t> order(size_t(reqs * columns));
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(random.between(0, int64_t(i) - 1))]);
  int64_t mask_bytes = 0;
  const bool packs = f.custom_mask && random.one_in(2);
  p.bits.starts.given = packs && random.one_in(2);
  p.parents.given = f.tree && !random.one_in(4), p.drafts.given = p.parents.given && random.one_in(2);
  p.starts.values = {0};
  for (int r = 0; r < reqs; ++r) {
    const int q_len = int(random.one_in(3) ? random.between(8, kMostQueries) : random.between(0, 3)),
              past = int(random.between(q_len == 0, columns * kLatentBlock - kMostQueries));
    for (int c = 0; c < columns; ++c) table[size_t(r * columns + c)] = order[size_t(r * columns + c)];
    for (int j = past; j < past + q_len; ++j)
      slots.push_back(random.one_in(9) ? -1 : int64_t(table[size_t(r * columns + j / kLatentBlock)]) * kLatentBlock + j % kLatentBlock);
    p.starts.values.push_back(p.starts.values.back() + q_len), p.lens.values.push_back(past + q_len);
    mask_bytes += int64_t(q_len) * (past + q_len);
    if (packs) p.bits.add(q_len, past + q_len, random);
    p.drafts.values.push_back(int32_t(random.between(0, q_len)));
    for (int t = 0, certain = p.drafts.given ? q_len - p.drafts.values.back() : 0; t < q_len; ++t)
      p.parents.values.push_back(int32_t(random.between(t < certain ? -5 : std::max(certain - 1, -1), t < certain ? 5 : t - 1)));
  }
  p.batch.value.num_reqs = reqs;
  p.block_table.set_numbers(kInt, {reqs, columns}, table);
  p.slot_mapping.set_numbers(kLong, {int64_t(slots.size())}, slots);
  if (packs) p.bits.end(p.packed_mask);
  if (f.custom_mask && !packs) p.custom_mask.set({1, 8, 1}, {mask_bytes}, std::vector<unsigned char>(size_t(mask_bytes), 1));

  const auto set = [&](Argument& a, std::vector<int64_t> shape) {
    std::vector<float> numbers(size_t(std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>())));
    for (float& x : numbers) x = float(random.between(-60, 60)) / 32;
    a.set_numbers(kFloat, std::move(shape), numbers);
  };
  const int64_t tokens = std::max<int64_t>(p.starts.values.back() + random.between(0, 2), 1), heads = f.num_heads, rank = f.kv_lora_rank,
                behind = f.qk_rope_dim, blocks = int64_t(reqs) * columns;
  const bool apart = f.kv_format == IMBREX_KV_LATENT_ROPE;
  set(p.k_cache, {blocks, kLatentBlock, 1, rank + (apart ? 0 : behind)});
  if (apart) set(p.k_rope, {blocks, kLatentBlock, 1, behind});
  set(p.latents, {tokens, rank});
  if (behind > 0) set(p.rope, {tokens, behind});
  set(p.q, {tokens, heads, (f.absorbed ? rank : f.qk_nope_dim) + behind});
  if (!f.absorbed) set(p.kv_b, {heads, int64_t(f.qk_nope_dim) + f.v_dim, rank});
  if (f.sinks) set(p.sinks, {heads});
  set(p.out, {tokens, heads, f.absorbed ? rank : f.v_dim});
  if (random.one_in(2)) set(p.lse, {tokens, heads});
  return p;
}

struct BrokenLatents {
  LatentProblem problem;
  std::string what;
  bool new_plan = false;
};

std::string break_once(BrokenLatents& b, Random& random) {
  LatentProblem& p = b.problem;
  switch (random.between(0, 9)) {
    case 0: {
      b.new_plan = true;
      imbrex_mla_fields& f = p.spec.value;
      int32_t* const fields[] = {&f.num_heads,   &f.kv_lora_rank, &f.qk_nope_dim, &f.qk_rope_dim,    &f.v_dim,       &f.dtype,
                                 &f.kv_dtype,    &f.kv_format,    &f.block_size,  &f.causal,         &f.window_left, &f.window_right,
                                 &f.custom_mask, &f.positions,    &f.chunk,       &f.chunk_lookback, &f.sinks,       &f.absorbed};
      int32_t& field = *random.pick(fields);
      field = wrong_int(random, field);
      return fmt::format("field {} of the spec = {}", &field - &f.num_heads, field);
    }
    case 1: b.new_plan = true; return break_limits(p.options.value, random);
    case 2:
      switch (random.between(0, 3)) {
        case 0: return break_size("batch", p.batch, random);
        case 1: return break_size("inputs", p.inputs, random);
        case 2: return break_size("kv", p.kv, random);
        default: return break_size("outputs", p.outputs, random);
      }
    case 3: {
      const int32_t reqs = p.batch.value.num_reqs =
          random.one_in(3) ? wrong_int(random, p.batch.value.num_reqs) % 400 : p.batch.value.num_reqs + int32_t(random.between(-1, 1));
      for (Numbers* list : {&p.starts, &p.lens})  // as long as their number says
        list->values.resize(size_t(std::clamp(reqs, 0, 400) + (list == &p.starts)), list->values.empty() ? 0 : 1);
      return fmt::format("num_reqs = {}", reqs);
    }
    case 4: {
      Numbers* const lists[] = {&p.starts, &p.lens, &p.parents, &p.drafts, &p.bits.starts};
      Numbers& list = *random.pick(lists);
      if (random.one_in(8)) return list.given = !list.given, fmt::format("a list is {}", list.given ? "given" : "NULL");
      if (list.values.empty()) return "";
      int32_t& number = list.values[size_t(random.between(0, int64_t(list.values.size()) - 1))];
      number = wrong_int(random, number);
      constexpr const char* kNames[] = {"starts", "lens", "parents", "drafts", "mask_indptr"};
      return fmt::format("{} has {}", kNames[std::ranges::find(lists, &list) - lists], number);
    }
    case 5: {
      p.calls.resize(size_t(random.between(1, 5)));
      for (Call& call : p.calls) call = Call(random.between(0, 2));
      return "other calls";
    }
    case 6: {  // a number of the table or of the slots
      const bool of_table = random.one_in(2);
      Argument& a = of_table ? p.block_table : p.slot_mapping;
      const size_t size = of_table ? sizeof(int32_t) : sizeof(int64_t);
      if (a.content.size() < size) return "";
      unsigned char* const at = a.content.data() + size_t(random.between(0, int64_t(a.content.size() / size) - 1)) * size;
      const int64_t number = wrong_int(random, 3);
      std::memcpy(at, &number, size);
      return fmt::format("{} has {}", of_table ? "block_table" : "slot_mapping", number);
    }
    default: {
      const LatentProblem::Named& named = random.pick(LatentProblem::arguments());
      Argument& a = p.*named.argument;
      std::string change;
      if (!a.given) return a = p.latents, fmt::format("{} is given", named.name);
      return break_argument(a, random, change) ? fmt::format("{}: {}", named.name, change) : "";
    }
  }
}

// The calls of a broken problem. What fails has changed nothing. True: the plan has taken the batch.
bool call_broken(LatentProblem& p, imbrex_plan* plan, bool verbose) {
  bool taken = false;
  for (const Call call : p.calls) {
    const auto before = p.written();
    const imbrex_status status = p.call(call, plan);
    const char* const name = call == Call::update ? "update" : call == Call::run ? "run" : "write_latents";
    if (verbose) std::printf("%s: %s\n", name, status == IMBREX_OK ? "done" : imbrex_last_error());
    if (status == IMBREX_OK) {
      taken = taken || call == Call::update;
      continue;
    }
    expect_explained(status, name);
    EXPECT_TRUE(p.written() == before) << name << " failed, but has written";
  }
  EXPECT_STRNE(imbrex_plan_str(plan), "");
  return taken;
}

// True: a right request had its keys expanded.
bool run_case(const imbrex_device& device, const char* backend, int number, bool verbose) {
  Random random{uint64_t(number) + 99000};
  LatentProblem right = right_latents(random);
  const PlanHandle plan = plan_of(right, device, backend);
  if (plan == nullptr) return ADD_FAILURE() << imbrex_last_error(), false;
  const auto results = [&](bool update) {
    right.make_memory(update);
    for (const Call call : {Call::update, Call::write_kv, Call::run}) {
      if (call == Call::update && !update) continue;
      EXPECT_EQ(right.call(call, plan.get()), IMBREX_OK) << imbrex_last_error();
    }
    return right.written();
  };
  const auto expected = results(true);
  const bool expanded = std::string_view(imbrex_plan_str(plan.get())).find("with expanded keys") != std::string_view::npos;
  BrokenLatents broken{right, {}};
  for (int64_t left = random.between(1, 3); left > 0;)
    if (const std::string what = break_once(broken, random); !what.empty()) broken.what += what + "; ", --left;
  SCOPED_TRACE(broken.what);
  if (verbose) std::printf("%s\n  broken: %s\n", backend, broken.what.c_str());
  broken.problem.make_memory();
  if (broken.new_plan) {
    const PlanHandle other = plan_of(broken.problem, device, backend);
    if (other == nullptr) {
      expect_explained(IMBREX_INVALID, "plan");
    } else {
      call_broken(broken.problem, other.get(), verbose);
    }
  } else if (!call_broken(broken.problem, plan.get(), verbose)) {
    EXPECT_TRUE(results(false) == expected) << "after calls that have failed";
  }
  EXPECT_TRUE(results(true) == expected) << "after calls with mistakes";
  return expanded;
}

TEST(Metadata, WrongLatentsGetAnErrorOrAResult) {
  static const imbrex_device cpu{probe_cpu(), "cpu"};
  std::vector<const char*> names;
  for (const char* name : {"reference", "cpu_generic", "cpu_avx512"})
    if (find_backend<MlaFamily>(name)->unsupported({.num_heads = 1}, cpu.info).empty()) names.push_back(name);
  int cases = 0, expanded = 0;
  for_each_case(kLatentCases, [&](int number, bool verbose) {
    const char* const backend = names[size_t(number) % names.size()];
    SCOPED_TRACE(backend);
    expanded += run_case(cpu, backend, number, verbose);
    ++cases;
  });
  EXPECT_TRUE(cases < 100 || (expanded > cases / 20 && expanded < cases / 2)) << expanded << " of " << cases;
}

}  // namespace
}  // namespace imbrex::test
