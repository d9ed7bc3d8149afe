#pragma once
// A plan for attention whose kernels are texts that run lane by lane on the host, and the backend that makes it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "attention/mask_mod_stretches.h"
#include "attention/packed_mask.h"
#include "attention/position_bias.h"
#include "attention/reference.h"
#include "attention/shared_keys.h"
#include "cuda/attention/kv_side.h"
#include "cuda/driver/tensor_map.h"
#include "cuda/expression_arrays.h"
#include "cuda/lanes/library.h"
#include "cuda/lanes/variants.h"
#include "cuda/plan/shared_items.h"
#include "cuda/tree_arrays.h"
#include "imbrex/schedule.h"

namespace imbrex::test {

using cuda::AttentionParams, cuda::AttentionTiles;

struct How {  // none of it may change a bit, `split` apart
  Launch launch;
  int heads_together = 1;
  int split = 1 << 20;  // tiles of keys
  bool share = false;   // items of requests with the same blocks, for kernels that take them
  int workers = 1;      // for kernels that take runs: with many of them, each piece is an item of its own
};

class LanesPlan final : public AttentionPlan {
 public:
  static inline int shared_items = 0;  // of all updates

  LanesPlan(const Variant& variant, const How& how, const AttentionSpec& spec, const PlanOptions& options)
      : variant_(variant), how_(how), spec_(spec), tiles_(variant.tiles()) {
    writer_ = reference_backend().plan(spec, probe_cpu(), options);
  }

  void update(const Batch& batch, Stream stream) override {
    writer_->update(batch, stream);
    batch_ = batch;
    query_start_.assign(batch.query_start_loc.begin(), batch.query_start_loc.end());
    seq_lens_.assign(batch.seq_lens.begin(), batch.seq_lens.end());
    positions_.assign(batch.positions.begin(), batch.positions.end());
    block_start_.assign(size_t(batch.num_reqs()), 0);
    for (int r = 0; r < batch.num_reqs(); ++r)
      block_start_[size_t(r)] = spec_.block_size == 0 ? batch.kv_start_loc.as<const int>()[r] : r * batch.block_table.stride(0);
    find_mask_starts(batch, custom_start_);
    SchedulePolicy policy;
    policy.tile_q = std::max(1, tiles_.rows / spec_.group_size());
    policy.tile_kv = tiles_.keys;
    policy.split_kv = tiles_.keys * how_.split;
    if (variant_.takes_runs())
      policy.max_splits = 1 << 10, policy.max_split_rows = 1 << 20, policy.share_splits = 1 << 20, policy.runs = true,
      policy.num_workers = how_.workers;
    if (variant_.has_wgmma()) policy.most_in_run = cuda::kMostInPrefillRun, policy.max_splits = policy.most_in_run;
    schedule(batch, spec_.mask, policy, schedule_);
    if (how_.share) share(policy);
    if (!spec_.mask_mod.empty() && variant_.has_stretches())
      find_mask_mod_stretches(BoundExpression(spec_.mask_mod, batch.mask_tensors), spec_, batch, policy.tile_q, policy.tile_kv, 1 << 20,
                              schedule_);
  }

  void write_kv(const KvCache& cache, const TensorView& k, const TensorView& v, Stream stream) const override {
    writer_->write_kv(cache, k, v, stream);
  }

  void run(const AttentionInputs& in, const AttentionOutputs& out, Stream) const override {
    AttentionParams p{};
    const long q_size = size_of(in.q.dtype), out_size = size_of(out.out.dtype);
    p.q = in.q.as<const char>(), p.q_token_stride = in.q.stride(0) * q_size, p.q_head_stride = in.q.stride(1) * q_size;
    p.out = out.out.as<char>(), p.out_token_stride = out.out.stride(0) * out_size, p.out_head_stride = out.out.stride(1) * out_size;
    p.lse = out.lse.as<float>(), p.lse_token_stride = out.lse.stride(0), p.lse_head_stride = out.lse.stride(1);
    const KvCache kv = with_values(spec_, in.kv);
    if (spec_.kv_format == KvFormat::fp8_ds_mla)
      cuda::set_sides(spec_, kv, p);
    else if (spec_.kv_format == KvFormat::latent_rope)
      p.k = side(kv.k, kv.k_scale), p.v = side(kv.k_rope, kv.k_rope_scale);
    else
      p.k = side(kv.k, kv.k_scale), p.v = side(kv.v, kv.v_scale);
    p.query_start = query_start_.data(), p.seq_lens = seq_lens_.data();
    p.block_ids = batch_.block_table.as<const int>(), p.block_start = block_start_.data();
    p.mask_is_packed = !batch_.packed_mask.empty();
    p.custom_mask = (p.mask_is_packed ? batch_.packed_mask : batch_.custom_mask).as<const unsigned char>();
    p.custom_start = custom_start_.data(), p.positions = positions_.data();
    const cuda::TreeArrays trees(batch_, spec_.mask, p);
    const cuda::ExpressionArrays expressions(spec_, batch_, in, schedule_, p);
    const cuda::PlanCounts counts{int(schedule_.work.size()), int(schedule_.merges.size()), batch_.num_tokens(), batch_.num_reqs(),
                                  how_.heads_together};
    std::vector<WorkItem> work(schedule_.work.size());
    std::vector<MergeItem> merges(schedule_.merges.size());
    std::vector<cuda::SharedToken> shared_tokens(schedule_.details.merge_of.size());
    cuda::write_items(schedule_, work.data());
    cuda::write_merges(schedule_, merges.data());
    cuda::write_shared_tokens(schedule_.details, shared_tokens.data());
    p.work = work.data(), p.merges = merges.data(), p.counts = &counts;
    const std::vector<int> shared_positions(cuda::kMostSharedTokens, kMostPosition);
    p.shared_positions = shared_positions.data();
    p.shared_tokens = shared_tokens.data(), p.merge_parts = schedule_.details.parts.data();
    p.merge_lists[1] = {p.merges, p.counts, 16, variant_.has_short_sums()};
    int next_task = 0;
    std::vector<int> arrivals(schedule_.merges.size() * size_t(spec_.num_q_heads), 0);
    p.next_task = &next_task, p.arrivals = arrivals.data();
    p.num_kv_heads = p.kv_heads_now = spec_.num_kv_heads;
    p.lists_are_there = p.keys_are_there = how_.launch.late_copies;
    p.q_scales = in.q_scale.as<const float>(), p.q_scale_stride = in.q_scale.size(0) > 1 ? int(in.q_scale.stride(0)) : 0;
    p.scale = spec_.scale(), p.soft_cap = spec_.score.soft_cap;
    p.window_left = spec_.mask.window_left, p.window_right = spec_.mask.window_right, p.chunk = spec_.mask.chunk;
    p.chunk_before = lookback_tokens(spec_.mask);
    p.head_scales = in.head_scales.as<const float>(), p.alibi_slopes = in.alibi_slopes.as<const float>(),
    p.sinks = in.sinks.as<const float>();
    std::vector<float> bias;
    if (spec_.score.relative_buckets > 0) {
      bias.resize(size_t(spec_.num_q_heads) * size_t(relative_bias_width(spec_.score)));
      expand_relative_bias(spec_, in.relative_bias, bias);
      p.bias_by_distance = bias.data(), p.bias_reach = relative_bias_width(spec_.score) / 2;
    }
    const size_t rows = size_t(schedule_.num_partial_rows) * size_t(spec_.num_q_heads);
    std::vector<float> partial_out(rows * size_t(spec_.head_dim_v), NAN), partial_state(rows * 2, NAN);
    p.partial_out = partial_out.data(), p.partial_state = partial_state.data();
    const int teams = variant_.has_wgmma() ? variant_.wgmma_tiles().teams * variant_.wgmma_tiles().cluster : 0;
    const int64_t blocks_of_latent_decode = variant_.is_latent_decode_spread() ? variant_.latent_decode_spread().cluster : 1;
    const int64_t run_sums_each =
        variant_.is_verify()          ? cuda::attention_sm90_verify_run_sums(spec_)
        : variant_.is_latent()        ? cuda::attention_sm90_latent_cluster(spec_, variant_.regime) * sums_of_latents()
        : variant_.is_latent_spread() ? variant_.latent_spread().cluster * sums_of_latents()
        : variant_.is_latent_pair()   ? cuda::kSm90LatentPairCluster * cuda::attention_sm90_latent_pair_run_sums(spec_)
        : variant_.is_latent_decode()
            ? blocks_of_latent_decode * cuda::attention_sm90_latent_decode_run_sums(spec_, variant_.latent_decode_tiles())
            : teams * cuda::kRunLevels * cuda::run_node_floats(spec_.head_dim_v);
    std::vector<float> run_sums(size_t(how_.launch.blocks) * size_t(run_sums_each), NAN);
    p.run_sums = run_sums.data();

    std::vector<unsigned> mask_bits, seen_tiles;
    if (variant_.packs_mask()) {
      const int tiles = (*std::ranges::max_element(seq_lens_) + tiles_.keys - 1) / tiles_.keys, tokens = batch_.num_tokens();
      p.mask_words = tiles * tiles_.keys / 32, p.seen_tile_words = (tiles + 31) / 32, p.least_masked_q = 1;
      mask_bits.assign(size_t(tokens) * size_t(p.mask_words), 0xdeadbeef);
      seen_tiles.assign(size_t(tokens) * size_t(p.seen_tile_words) * size_t(1 + variant_.wgmma_tiles().teams), 0xdeadbeef);
      p.mask_bits = mask_bits.data(), p.seen_tiles = seen_tiles.data();
      open_library(std::string("pack_mask_") + variant_.name).run(&p, nullptr, how_.launch);
    }
    const Library attention = open_library(std::string("attention_") + variant_.name);
    if (variant_.text == Text::sm80) {
      EXPECT_EQ(int(attention.smem_bytes()), cuda::attention_sm80_smem_bytes(spec_, tiles_));
    } else {
      EXPECT_LE(int(attention.smem_bytes()), kSharedMemory);
    }
    const bool maps_queries = variant_.has_wgmma() || variant_.is_verify() || variant_.is_latent() || variant_.is_latent_spread() ||
                              variant_.is_latent_pair() || variant_.is_latent_decode();
    const TensorMap maps[3] = {maps_queries ? map_of_queries(in.q) : TensorMap{}, map_of(kv.k), map_of(kv.v)};
    attention.run(&p, maps, how_.launch);
    EXPECT_EQ(next_task, 0);
    EXPECT_EQ(std::count(arrivals.begin(), arrivals.end(), 0), std::ssize(arrivals));
    if (spec_.kv_format == KvFormat::latent_rope) p.v = p.k;  // merge.cu wants the scale of values
    if (counts.num_merges > 0 && tiles_.key_warps == 1) open_library(std::string("merge_") + variant_.name).run(&p, nullptr, how_.launch);
  }

  std::string str() const override { return std::string("lanes: ") + variant_.name; }

 private:
  static constexpr int kSharedMemory = 227 << 10;  // of a thread block of an H200

  int64_t sums_of_latents() const { return cuda::attention_sm90_latent_run_sums(spec_, variant_.regime); }

  // As the CUDA plan does, for a batch with block tables, but wherever it can.
  void share(const SchedulePolicy& policy) {
    KeySource keys;
    find_keys(batch_, keys);
    const SharePolicy share{.block_size = spec_.block_size,
                            .most_tokens = policy.tile_q,
                            .overhead_keys = kShareWherever,
                            .seen_by_all = true,
                            .windows = windows_of(spec_.mask)};
    ShareScratch scratch;
    if (!shorten_runs(batch_, keys, share, policy, schedule_, scratch)) return;
    schedule_.work.resize(size_t(schedule_.num_work));
    write_work(schedule_, schedule_.work.data());
    share_keys(batch_, keys, share, schedule_, scratch);
    shared_items += int(schedule_.details.merge_of.empty() ? 0 : std::ranges::count(schedule_.work, true, [&](const WorkItem& item) {
      return item.q_begin >= batch_.num_tokens();
    }));
  }

  int box_bytes() const { return variant_.text == Text::wgmma_e4m3 ? cuda::sm90_fp8_chunk(spec_.head_dim_v) : cuda::kTensorMapLine; }
  bool widens() const { return variant_.text == Text::wgmma && spec_.kv_dtype != spec_.q_dtype; }

  TensorMap map_of_queries(const TensorView& q) const {
    const int size = int(size_of(q.dtype)), rows = variant_.is_verify() || variant_.is_latent_decode() ? tiles_.rows : 64,
              heads = std::min(spec_.group_size(), rows);
    return {.data = q.as<const char>(),
            .element_bytes = size,
            .sizes = {q.size(2), q.size(1), q.size(0), 1},
            .strides = {size, long(q.stride(1)) * size, long(q.stride(0)) * size, 0},
            .box = {box_bytes() / size, heads, rows / heads, 1}};
  }

  // Boxes of so many bytes of a row, or of as many as the kernel takes.
  TensorMap map_of(const TensorView& kv, int bytes = 0) const {
    const int rank = kv.rank, size = int(size_of(kv.dtype));  // 3 without pages
    const auto stride = [&](int dim) { return long(kv.stride(dim)) * size; };
    const int keys = variant_.is_latent_pair() || variant_.is_paired() ? tiles_.keys / int(cuda::kSm90LatentPairCluster)
                                                                       : tiles_.keys;  // that a thread block loads
    const int common = rank == 4 ? std::gcd(int(kv.size(1)), keys) : keys;
    const int page = variant_.has_wgmma() ? std::min(common, tiles_.keys / (widens() ? 4 : variant_.wgmma_tiles().cluster)) : common;
    const int dims = int(kv.size(rank - 1));
    int width = widens() && dims <= 64 ? 64 : box_bytes();
    if (variant_.is_latent_decode() && kv.rank == 3 && spec_.block_size > 0) {  // records have no dimension of heads
      TensorView one = kv;
      one.rank = 4, one.sizes[3] = kv.size(2), one.strides[3] = kv.stride(2), one.sizes[2] = 1;
      return map_of(one);
    }
    if (variant_.is_latent_decode() && spec_.kv_dtype != spec_.q_dtype) {
      const int row = cuda::attention_sm90_latent_decode_width(spec_);  // in words of four bytes
      return {.data = kv.as<const char>(),
              .element_bytes = 4,
              .sizes = {dims / 4, kv.size(rank - 3), kv.size(rank - 2), rank == 4 ? kv.size(0) : 1},
              .strides = {4, stride(rank - 3), stride(rank - 2), rank == 4 ? stride(0) : 0},
              .box = {row / 4, page, 1, 1}};
    }
    if (variant_.text == Text::decode) width = cuda::attention_sm90_decode_width(spec_, dims);
    if (bytes > 0) width = bytes;
    return {.data = kv.as<const char>(),
            .element_bytes = size,
            .sizes = {kv.size(rank - 1), kv.size(rank - 3), kv.size(rank - 2), rank == 4 ? kv.size(0) : 1},
            .strides = {size, stride(rank - 3), stride(rank - 2), rank == 4 ? stride(0) : 0},
            .box = {width / size, page, 1, 1}};
  }

  // Scales lie on the host here, and kv_side() reads only one of those.
  cuda::KvSide side(const TensorView& kv, const TensorView& scale) const {
    cuda::KvSide s = cuda::kv_side(kv, {}, spec_);
    if (!scale.empty()) s.scales = scale.as<const float>(), s.scale_stride = scale.size(0) > 1 ? int(scale.stride(0)) : 0;
    return s;
  }

  const Variant& variant_;
  const How how_;
  const AttentionSpec spec_;
  const AttentionTiles tiles_;
  std::unique_ptr<AttentionPlan> writer_;
  Batch batch_;
  std::vector<int> query_start_, seq_lens_, positions_;
  std::vector<long> block_start_, custom_start_;
  Schedule schedule_;
};

class LanesBackend final : public BackendOf<AttentionFamily> {
 public:
  LanesBackend(const Variant& variant, const How& how) : variant_(variant), how_(how) {}
  std::string_view name() const override { return "lanes"; }
  std::string_view description() const override { return "kernel texts for GPUs, lane by lane on the host"; }
  std::vector<Reason> unsupported(const AttentionSpec&, const DeviceInfo&) const override { return {}; }
  std::unique_ptr<AttentionPlan> plan(const AttentionSpec& spec, const DeviceInfo&, const PlanOptions& options) const override {
    return std::make_unique<LanesPlan>(variant_, how_, spec, options);
  }

 private:
  const Variant& variant_;
  const How how_;
};

}  // namespace imbrex::test
