// Work lists that say more than items of one request each, on every CPU kernel: requests that share blocks, tiles that a custom mask hides,
// items for one kv head, and lists made by hand. Not a bit depends on how a list is cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cpu/plan.h"
#include "cpu/run_list.h"
#include "imbrex/select.h"

namespace imbrex::list_details {
namespace {

constexpr int kBlock = 32;

struct Target {
  const char* backend;
  CpuIsa isa;
  KvFormat format = KvFormat::strided;
};
const Target kTargets[] = {{"cpu_generic", CpuIsa::generic},  {"cpu_generic", CpuIsa::avx2},
                           {"cpu_avx512", CpuIsa::avx512},    {"cpu_avx512", CpuIsa::avx512_bf16},
                           {"cpu_amx", CpuIsa::amx_emulated}, {"cpu_amx", CpuIsa::amx_emulated, KvFormat::amx_packed},
                           {"cpu_amx", CpuIsa::amx}};

AttentionSpec spec_of(KvFormat format, DType kv = DType::bf16) {
  return {.num_q_heads = 4,
          .num_kv_heads = 2,
          .head_dim_qk = 64,
          .head_dim_v = 32,
          .kv_dtype = kv,
          .kv_format = format,
          .block_size = kBlock,
          .mask = {},
          .score = {}};
}

// A request of a step: its tables may have blocks of another one.
struct Member {
  int q_len, seq_len;
  std::vector<int32_t> blocks;
};

// Steps over one cache of random numbers.
class Layer {
 public:
  Layer(const AttentionSpec& spec, int num_blocks) : spec_(spec), allocation_(spec, 1, num_blocks) {
    std::mt19937 random(11);
    const KvCache cache = allocation_.layer(0);
    for (const TensorView* t : {&cache.k, &cache.v}) {
      auto* bytes = t->as<uint8_t>();
      const int64_t size = t->num_elements() * size_of(t->dtype);
      for (int64_t i = 0; i < size; i += 2) {
        const uint16_t x = uint16_t((random() & 0x8000) | 0x3e00 | (random() & 0x1ff));
        std::memcpy(bytes + i, &x, 2);
      }
    }
  }
  KvCache cache() const { return allocation_.layer(0); }
  bool by_phase = false;  // plans are composite ones: decode apart from the rest, both by the target's backend

  // Outputs and LSE of each member; queries and positions are its own, whoever else is in the step.
  std::vector<std::vector<float>> run(const Target& target, const std::vector<Member>& members, std::string* says = nullptr,
                                      const std::vector<std::vector<uint8_t>>& masks = {}) const {
    std::vector<int32_t> starts{0}, lens, indptr{0}, indices, positions;
    std::vector<uint16_t> q;
    std::vector<uint8_t> mask;
    for (size_t m = 0; m < members.size(); ++m) {
      const Member& member = members[m];
      std::mt19937 random(unsigned(member.seq_len * 31 + member.q_len));
      starts.push_back(starts.back() + member.q_len);
      lens.push_back(member.seq_len);
      indices.insert(indices.end(), member.blocks.begin(), member.blocks.end());
      indptr.push_back(int32_t(indices.size()));
      for (int i = 0; i < member.q_len * spec_.num_q_heads * spec_.head_dim_qk; ++i)
        q.push_back(uint16_t((random() & 0x8000) | 0x3e80 | (random() & 0xff)));
      for (int i = 0; i < member.q_len; ++i) positions.push_back(member.seq_len - 1 - i);
      if (!masks.empty()) mask.insert(mask.end(), masks[m].begin(), masks[m].end());
    }
    const int64_t tokens = starts.back(), heads = spec_.num_q_heads, dim = spec_.head_dim_v;
    std::vector<float> out(size_t(tokens * heads * dim)), lse(size_t(tokens * heads));
    DeviceInfo device = probe_cpu();
    device.isa = target.isa;
    ThreadPool pool(3);
    const auto& backend = *find_backend(target.backend);
    const PlanOptions options{.limits = {}, .threads = pool.parallel_for()};
    const auto plan = by_phase ? plan_by_phase(backend, backend, spec_, device, options) : backend.plan(spec_, device, options);
    Batch batch;
    batch.query_start_loc = starts, batch.seq_lens = lens;
    batch.kv_indptr = TensorView::contiguous(indptr.data(), DType::i32, {int64_t(indptr.size())});
    batch.kv_indices = TensorView::contiguous(indices.data(), DType::i32, {int64_t(indices.size())});
    if (spec_.mask.positions) batch.positions = positions;
    if (spec_.mask.custom) batch.custom_mask = TensorView::contiguous(mask.data(), DType::u8, {int64_t(mask.size())});
    plan->update(batch);
    if (says != nullptr) *says = plan->str();
    plan->run({.q = TensorView::contiguous(q.data(), DType::bf16, {tokens, heads, spec_.head_dim_qk}), .kv = cache()},
              {.out = TensorView::contiguous(out.data(), DType::f32, {tokens, heads, dim}),
               .lse = TensorView::contiguous(lse.data(), DType::f32, {tokens, heads})});
    std::vector<std::vector<float>> each;
    for (size_t m = 0; m < members.size(); ++m) {
      const int64_t begin = starts[m], end = starts[m + 1];
      auto& result = each.emplace_back(out.begin() + begin * heads * dim, out.begin() + end * heads * dim);
      result.insert(result.end(), lse.begin() + begin * heads, lse.begin() + end * heads);
    }
    return each;
  }

 private:
  AttentionSpec spec_;
  KvAllocation allocation_;
};

// Calls test(target, device) for every kernel that runs here and takes the spec.
template <class Test>
void for_targets(const Test& test) {
  const DeviceInfo probed = probe_cpu();
  int runs = 0;
  for (const Target& target : kTargets) {
    DeviceInfo device = probed;
    device.isa = target.isa;
    if (target.isa > probed.isa || !find_backend(target.backend)->unsupported(spec_of(target.format), device).empty()) continue;
    SCOPED_TRACE(std::string(target.backend) + " on " + to_string(target.isa) + ", " + to_string(target.format));
    test(target);
    ++runs;
  }
  EXPECT_GE(runs, 1);
}

std::vector<int32_t> blocks_of(int first, int keys) {
  std::vector<int32_t> ids(size_t((keys + kBlock - 1) / kBlock));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// Requests behind one prompt of `prompt` keys, and one that has nothing in common with them.
std::vector<Member> behind_prompt(int prompt, const std::vector<std::pair<int, int>>& lengths) {
  std::vector<Member> members;
  int next = prompt / kBlock;
  for (const auto& [q_len, own] : lengths) {
    Member member{q_len, prompt + own, blocks_of(0, prompt)};
    for (const int32_t id : blocks_of(next, own)) member.blocks.push_back(id);
    next = member.blocks.back() + 1;
    members.push_back(std::move(member));
  }
  members.push_back({1, 200, blocks_of(next, 200)});
  return members;
}

TEST(ListDetails, RequestsThatShareBlocksGiveTheSameBitsAsAlone) {
  const auto members = behind_prompt(8192, {{1, 5}, {3, 300}, {8, 64}, {1, 4200}, {1, 1}});
  for_targets([&](const Target& target) {
    for (const bool positions : {false, true}) {
      AttentionSpec spec = spec_of(target.format);
      spec.mask.positions = positions;
      if (positions) spec.mask.window_left = 6000;
      const Layer layer(spec, 600);
      std::string says;
      const auto together = layer.run(target, members, &says);
      EXPECT_NE(says.find("2 items shared"), std::string::npos) << says;
      for (size_t m = 0; m < members.size(); ++m) {
        const auto alone = layer.run(target, {members[m]});
        EXPECT_EQ(together[m], alone[0]) << "request " << m;
        for (const float x : alone[0]) ASSERT_TRUE(std::isfinite(x));
      }
    }
  });
}

// Tokens of one phase do not lie together here, so that a composite plan gathers their positions.
TEST(ListDetails, PlansByPhaseHandPositionsOn) {
  const auto members = behind_prompt(4096, {{1, 5}, {40, 300}, {1, 64}, {17, 70}, {1, 1}});
  for_targets([&](const Target& target) {
    AttentionSpec spec = spec_of(target.format);
    spec.mask.positions = true, spec.mask.window_left = 900;
    Layer layer(spec, 400);
    const auto expected = layer.run(target, members);
    layer.by_phase = true;
    EXPECT_EQ(layer.run(target, members), expected);
  });
}

TEST(ListDetails, TilesHiddenByTheCustomMaskAreNotRead) {
  for_targets([&](const Target& target) {
    AttentionSpec spec = spec_of(target.format);
    spec.mask.custom = true;
    const std::vector<Member> members{{3, 9000, blocks_of(0, 9000)}, {40, 700, blocks_of(300, 700)}};
    std::vector<std::vector<uint8_t>> masks;
    const auto hidden = [](int key) { return (key >= 128 && key < 384) || (key >= 4096 && key < 8320); };
    for (const Member& member : members) {
      auto& mask = masks.emplace_back(size_t(member.q_len) * size_t(member.seq_len), uint8_t(1));
      for (int i = 0; i < member.q_len; ++i)
        for (int j = 0; j < member.seq_len; ++j)
          if (hidden(j) || (j < 60 && (i + j) % 3 == 0)) mask[size_t(i) * size_t(member.seq_len) + size_t(j)] = 0;
    }
    const Layer layer(spec, 400);
    const auto before = layer.run(target, members, nullptr, masks);
    // Zeroes, then NaN, in blocks that lie in hidden tiles.
    const KvCache cache = layer.cache();
    const auto fill = [&](uint16_t bits) {
      for (const TensorView* t : {&cache.k, &cache.v}) {
        const int64_t bytes = t->num_elements() * size_of(t->dtype) / t->size(0);
        for (const auto [first, from, to] : {std::array{0, 128, 384}, {0, 4096, 8320}, {300, 128, 384}})
          for (int block = first + from / kBlock; block < first + to / kBlock; ++block)
            for (int64_t i = 0; i < bytes; i += 2) std::memcpy(t->as<uint8_t>() + block * bytes + i, &bits, 2);
      }
    };
    for (const uint16_t bits : {uint16_t(0), uint16_t(0x7fc0)}) {
      fill(bits);
      EXPECT_EQ(layer.run(target, members, nullptr, masks), before);
    }
    for (const auto& result : before)
      for (const float x : result) ASSERT_TRUE(std::isfinite(x));
  });
}

// A list by hand: items for one kv head each, tokens of two requests in any order, keys in stretches, parts of merges here and there.
TEST(ListDetails, ListsMadeByHandGiveTheSameBits) {
  const int kPrompt = 4096, kTokens = 3;
  const std::vector<Member> members = behind_prompt(kPrompt, {{1, 50}, {1, 90}});
  const AttentionSpec spec = spec_of(KvFormat::strided);
  const Layer layer(spec, 300);
  const DeviceInfo probed = probe_cpu();
  const std::pair<CpuIsa, const cpu::Kernels*> kernels[] = {
    {CpuIsa::generic, &cpu::kernels_generic},
#if defined(__x86_64__)
    {CpuIsa::avx2, &cpu::kernels_avx2},
    {CpuIsa::avx512, &cpu::kernels_avx512},
    {CpuIsa::amx_emulated, &cpu::kernels_amx_emulated}
#endif
  };
  for (const auto& [isa, table] : kernels) {
    if (isa > probed.isa) continue;
    SCOPED_TRACE(table->isa);
    const char* backend = isa <= CpuIsa::avx2 ? "cpu_generic" : isa == CpuIsa::avx512 ? "cpu_avx512" : "cpu_amx";
    const auto expected = layer.run({backend, isa}, members);

    // The batch of Layer::run, as the kernels are given it.
    std::vector<int> starts{0, 1, 2, 3}, lens, ids;
    std::vector<long> block_start;
    std::vector<uint16_t> q;
    for (const Member& member : members) {
      std::mt19937 random(unsigned(member.seq_len * 31 + member.q_len));
      lens.push_back(member.seq_len);
      block_start.push_back(long(ids.size()));
      ids.insert(ids.end(), member.blocks.begin(), member.blocks.end());
      for (int i = 0; i < spec.num_q_heads * spec.head_dim_qk; ++i) q.push_back(uint16_t((random() & 0x8000) | 0x3e80 | (random() & 0xff)));
    }
    const int heads = spec.num_q_heads, dim = spec.head_dim_v;
    std::vector<float> out(size_t(kTokens * heads * dim)), lse(size_t(kTokens * heads)), partial_out(16 * size_t(heads * dim)),
        partial_state(16 * size_t(heads) * 2);
    const KvCache cache = layer.cache();
    const auto side = [](const TensorView& t, int width) {
      return cpu::KvSide{.data = t.as<const char>(),
                         .block_stride = t.stride(0) * 2,
                         .token_stride = t.stride(1) * 2,
                         .head_stride = t.stride(2) * 2,
                         .dim_stride = 2,
                         .scales = nullptr,
                         .scale_stride = 0,
                         .type = cpu::kBf16,
                         .dim = width};
    };
    Schedule list;
    // Token 2 writes its output. Tokens 1 and 0 share the prompt, in this order, in pieces for one head each; the piece of head 1 says its
    // keys as two stretches. Their own ends are behind that, the later token first.
    list.details.tokens = {0, 1, 2, 1, 0};
    list.details.request_of = {0, 1, 2};
    list.details.stretches = {{0, 1280, 0}, {1280, kPrompt, 1}};
    list.details.items = {{.kv_head = 0, .first_stretch = 0, .num_stretches = -1}, {.kv_head = 1, .first_stretch = 0, .num_stretches = 2}};
    list.work = {{.table = 0, .q_begin = 3, .q_end = 5, .kv_begin = 0, .kv_end = kPrompt, .partial = 4, .piece = ~0},
                 {.table = 1, .q_begin = 3, .q_end = 5, .kv_begin = 0, .kv_end = kPrompt, .partial = 4, .piece = ~1},
                 {.table = 2, .q_begin = 2, .q_end = 3, .kv_begin = 0, .kv_end = 200, .partial = -1},
                 {.table = 1, .q_begin = 1, .q_end = 2, .kv_begin = kPrompt, .kv_end = lens[1], .partial = 9},
                 {.table = 0, .q_begin = 0, .q_end = 1, .kv_begin = kPrompt, .kv_end = lens[0], .partial = 0}};
    list.details.parts = {5, 0, 4, 9};  // of token 0, then of token 1
    list.merges = {{.q_begin = 0, .q_end = 1, .first_partial = 0, .num_splits = 2},
                   {.q_begin = 1, .q_end = 2, .first_partial = 2, .num_splits = 2}};

    cpu::AttentionParams a{};
    a.q = reinterpret_cast<const char*>(q.data());
    a.q_token_stride = 2L * heads * spec.head_dim_qk, a.q_head_stride = 2L * spec.head_dim_qk;
    a.out = reinterpret_cast<char*>(out.data());
    a.out_token_stride = 4L * heads * dim, a.out_head_stride = 4L * dim;
    a.lse = lse.data();
    a.lse_token_stride = heads, a.lse_head_stride = 1;
    a.q_type = cpu::kBf16, a.out_type = cpu::kF32;
    a.k = side(cache.k, spec.head_dim_qk), a.v = side(cache.v, dim);
    a.block_size = kBlock;
    a.split_keys = cpu::kSplitKeys;
    a.query_start = starts.data(), a.seq_lens = lens.data(), a.block_ids = ids.data(), a.block_start = block_start.data();
    a.num_q_heads = heads, a.num_kv_heads = spec.num_kv_heads, a.group = spec.group_size(), a.heads_together = 1;
    a.scale = spec.scale();
    a.causal = true, a.window_left = a.window_right = -1;
    a.partial_out = partial_out.data(), a.partial_state = partial_state.data();
    cpu::set_details(list.details, a);
    const long bytes = (table->scratch_bytes(a, 2 * a.group) + 4095) / 4096 * 4096;
    std::vector<char> memory(size_t(3 * bytes + 4096));
    char* const aligned = memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096);
    ThreadPool pool(2);
    for (const ParallelFor& threads : {ParallelFor{}, pool.parallel_for()}) {
      std::fill(out.begin(), out.end(), -3.f);
      cpu::run_list(a, *table, list, {aligned, bytes}, threads);
      for (int t = 0; t < kTokens; ++t) {
        std::vector<float> row(out.begin() + t * heads * dim, out.begin() + (t + 1) * heads * dim);
        row.insert(row.end(), lse.begin() + t * heads, lse.begin() + (t + 1) * heads);
        EXPECT_EQ(row, expected[size_t(t)]) << "token " << t;
      }
    }
  }
}

}  // namespace
}  // namespace imbrex::list_details
