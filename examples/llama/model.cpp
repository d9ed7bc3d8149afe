// See model.h. step() is a model's forward pass over imbrex: update the plans once, then write_kv and run in every layer.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "check.h"

namespace llama {
namespace {

using imbrex::AttentionSpec;
using imbrex::DeviceTensor;
using imbrex::DType;
using imbrex::TensorView;

constexpr float kLatentEps = 1e-6f;  // of the norms within latent attention, whatever the config has for the others

Config prepared(const std::filesystem::path& folder, DType dtype, const Limits& limits) {
  Config config = load_config(folder);
  check(limits.seq_len <= config.max_positions, "expected at most max_position_embeddings = ", config.max_positions,
        " tokens of prompt and answer, got ", limits.seq_len);
  check(config.vocab * config.hidden <= INT32_MAX, "expected an embedding of at most ", INT32_MAX, " elements, got ", config.vocab, " x ",
        config.hidden);
  config.model = config.model.with_kv(dtype, dtype, imbrex::KvFormat::strided, kBlockSize);
  return config;
}

template <class T>
TensorView array(std::vector<T>& values, DType dtype) {
  return TensorView::contiguous(values.data(), dtype, {int64_t(values.size())});
}

// The same memory, its last dimension cut into heads.
TensorView by_head(const TensorView& x, int64_t heads, int64_t dim) {
  return TensorView::contiguous(x.data, x.dtype, {x.size(0), heads, dim}, x.device);
}

template <class Family>
auto plan_of(const typename Family::Spec& spec, const imbrex::DeviceInfo& device, const imbrex::PlanOptions& options) {
  const auto selection = imbrex::select<Family>(spec, device, {});
  check(selection.backend != nullptr, "no backend runs ", spec.str(), ":\n", selection.str());
  return selection.backend->plan(spec, device, options);
}

}  // namespace

Model::Model(const std::filesystem::path& folder, const imbrex::DeviceInfo& device, DType dtype, const Limits& limits,
             const imbrex::ParallelFor& threads)
    : config_(prepared(folder, dtype, limits)),
      stream_(imbrex::open_stream(device, threads)),
      ops_(device.device.type == imbrex::DeviceType::cpu ? make_cpu_ops(threads) : make_cuda_ops(device, dtype, *stream_)),
      weights_(load_weights(folder, config_, dtype, *stream_)),
      pool_(limits.blocks),
      // Layers differ in nothing but their masks, so one allocation serves them all.
      cache_(config_.latent() ? config_.mla(0).latent_spec() : config_.spec(0), config_.layers(), limits.blocks, "lbhtd", stream_.get()) {
  kind_of_.resize(size_t(config_.layers()));
  const imbrex::PlanLimits plan_limits{.max_num_reqs = limits.requests, .max_num_tokens = limits.tokens, .max_seq_len = limits.seq_len};
  const imbrex::PlanOptions options{.limits = plan_limits, .threads = threads};
  for (const imbrex::ModelSpec::Kind& kind : config_.model.kinds()) {
    const int first = kind.layers.front();
    for (int layer : kind.layers) kind_of_[size_t(layer)] = kinds_.size();
    Kind& made = kinds_.emplace_back();
    if (config_.latent()) {
      made.latent = plan_of<imbrex::MlaFamily>(config_.mla(first), device, options);
    } else {
      made.attention = plan_of<imbrex::AttentionFamily>(config_.spec(first), device, options);
    }
  }
  const int64_t n = limits.tokens;
  const auto rows = [&](int64_t width) { return stream_->tensor(dtype, {n, width}); };
  int64_t rotated = 0;
  if (config_.latent()) {
    const imbrex::MlaSpec& spec = config_.mla(0);
    q_ = rows(int64_t(spec.num_heads) * spec.qk_dim());
    k_ = rows(spec.kv_lora_rank);
    v_ = rows(spec.qk_rope_dim);
    attended_ = rows(int64_t(spec.num_heads) * spec.v_dim);
    if (config_.q_lora_rank > 0) q_low_ = rows(config_.q_lora_rank);
    rotated = spec.qk_rope_dim;
  } else {
    const AttentionSpec& spec = config_.spec(0);
    q_ = rows(int64_t(spec.num_q_heads) * spec.head_dim_qk);
    k_ = rows(int64_t(spec.num_kv_heads) * spec.head_dim_qk);
    v_ = rows(int64_t(spec.num_kv_heads) * spec.head_dim_qk);
    attended_ = rows(int64_t(spec.num_q_heads) * spec.head_dim_qk);
    rotated = spec.head_dim_qk;
  }
  hidden_ = rows(config_.hidden);
  normed_ = rows(config_.hidden);
  const int64_t widest = std::max({config_.intermediate, config_.experts.shared_intermediate, config_.experts.intermediate});
  gate_ = rows(widest);
  up_ = rows(widest);
  if (config_.experts.count > 0) mixed_ = rows(config_.hidden);
  rotation_ = stream_->tensor(DType::f32, {n, 2, rotated / 2});
}

std::vector<float> Model::step(std::span<const Piece> pieces, bool every_token) {
  update_plans(pieces);
  const Activations a = embed(pieces);
  for (int layer = 0; layer < config_.layers(); ++layer) run_layer(layer, a);
  std::vector<float> result = logits(pieces, a, every_token);
  for (const Piece& piece : pieces) piece.request->computed += piece.count;
  return result;
}

void Model::release(Request& request) {
  pool_.release(request.blocks);
  request.blocks.clear();
}

void Model::update_plans(std::span<const Piece> pieces) {
  tables_ = {.query_start_loc = {0}, .seq_lens = {}, .kv_indptr = {0}, .kv_indices = {}, .slots = {}};
  for (const auto& [request, count] : pieces) {
    check(count > 0 && count <= request->pending(), "expected 1 to ", request->pending(), " tokens of a request, got ", count);
    const int seq_len = request->computed + count;
    const int needed = std::max(0, (seq_len + kBlockSize - 1) / kBlockSize - int(request->blocks.size()));
    check(pool_.allocate(needed, request->blocks), "expected ", needed, " free blocks, there are ", pool_.num_free());
    imbrex::append_slots(request->blocks, kBlockSize, request->computed, seq_len, tables_.slots);
    tables_.query_start_loc.push_back(tables_.query_start_loc.back() + count);
    tables_.seq_lens.push_back(seq_len);
    tables_.kv_indices.insert(tables_.kv_indices.end(), request->blocks.begin(), request->blocks.end());
    tables_.kv_indptr.push_back(int32_t(tables_.kv_indices.size()));
  }
  const imbrex::Batch batch{.query_start_loc = tables_.query_start_loc,
                            .seq_lens = tables_.seq_lens,
                            .kv_indptr = array(tables_.kv_indptr, DType::i32),
                            .kv_indices = array(tables_.kv_indices, DType::i32),
                            .slot_mapping = array(tables_.slots, DType::i64)};
  for (const Kind& kind : kinds_) kind.plan().update(batch, stream_->get());
}

// Looks the tokens up, and the cosines and sines of their positions.
Model::Activations Model::embed(std::span<const Piece> pieces) {
  const int tokens = tables_.query_start_loc.back();
  std::vector<int32_t> offsets;
  std::vector<float> rotation;
  for (const auto& [request, count] : pieces) {
    for (int position = request->computed; position < request->computed + count; ++position) {
      const int32_t token = request->tokens[size_t(position)];
      check(token >= 0 && token < config_.vocab, "expected a token below the vocabulary's ", config_.vocab, ", got ", token);
      offsets.push_back(int32_t(token * config_.hidden));
      for (double frequency : config_.rope_frequency) rotation.push_back(float(config_.rope_scale * std::cos(position * frequency)));
      for (double frequency : config_.rope_frequency) rotation.push_back(float(config_.rope_scale * std::sin(position * frequency)));
    }
  }
  const auto first = [&](const DeviceTensor& buffer) { return buffer.view.empty() ? TensorView{} : buffer.view.slice(0, 0, tokens); };
  const Activations a{.hidden = first(hidden_),
                      .normed = first(normed_),
                      .q = first(q_),
                      .k = first(k_),
                      .v = first(v_),
                      .attended = first(attended_),
                      .gate = first(gate_),
                      .up = first(up_),
                      .rotation = first(rotation_),
                      .q_low = first(q_low_),
                      .mixed = first(mixed_)};
  const TensorView& table = weights_.embedding.view;
  const DeviceTensor rows = stream_->copy_of(array(offsets, DType::i32));
  stream_->gather(TensorView::contiguous(table.data, table.dtype, {table.num_elements()}, table.device), rows.view, a.hidden);
  stream_->upload(a.rotation.data, rotation.data(), int64_t(rotation.size() * sizeof(float)));
  stream_->synchronize();  // the arrays above end here
  return a;
}

void Model::run_layer(int layer, const Activations& a) {
  const LayerWeights& w = weights_.layers[size_t(layer)];
  ops_->rms_norm(a.hidden, w.input_norm.view, config_.rms_norm_eps, a.normed);
  config_.latent() ? attend_latent(layer, a) : attend(layer, a);
  ops_->add(a.hidden, a.normed);
  ops_->rms_norm(a.hidden, w.post_attention_norm.view, config_.rms_norm_eps, a.normed);
  w.experts.empty() ? run_network(w.network, a.normed, a.normed) : run_experts(w, a);
  ops_->add(a.hidden, a.normed);
}

void Model::attend(int layer, const Activations& a) {
  const LayerWeights& w = weights_.layers[size_t(layer)];
  const AttentionSpec& spec = config_.spec(layer);
  const imbrex::AttentionPlan& plan = *kinds_[kind_of_[size_t(layer)]].attention;
  const imbrex::KvCache pages = cache_.layer(layer);
  const float eps = config_.rms_norm_eps;
  const TensorView q = by_head(a.q, spec.num_q_heads, spec.head_dim_qk), k = by_head(a.k, spec.num_kv_heads, spec.head_dim_qk);
  const TensorView v = by_head(a.v, spec.num_kv_heads, spec.head_dim_v), attended = by_head(a.attended, spec.num_q_heads, spec.head_dim_v);

  ops_->linear(a.normed, w.q, a.q);
  ops_->linear(a.normed, w.k, a.k);
  ops_->linear(a.normed, w.v, a.v);
  if (config_.qk_norm) {
    ops_->rms_norm(q, w.q_norm.view, eps, q);
    ops_->rms_norm(k, w.k_norm.view, eps, k);
  }
  ops_->rope(q, a.rotation);
  ops_->rope(k, a.rotation);
  plan.write_kv(pages, k, v, stream_->get());
  plan.run({.q = q, .kv = pages}, {.out = attended}, stream_->get());
  ops_->linear(a.attended, w.o, a.normed);
}

void Model::attend_latent(int layer, const Activations& a) {
  const LayerWeights& w = weights_.layers[size_t(layer)];
  const imbrex::MlaSpec& spec = config_.mla(layer);
  const imbrex::MlaPlan& plan = *kinds_[kind_of_[size_t(layer)]].latent;
  const imbrex::KvCache pages = cache_.layer(layer);
  const TensorView q = by_head(a.q, spec.num_heads, spec.qk_dim()), attended = by_head(a.attended, spec.num_heads, spec.v_dim);

  if (config_.q_lora_rank > 0) {
    ops_->linear(a.normed, w.latent.q_low, a.q_low);
    ops_->rms_norm(a.q_low, w.latent.q_norm.view, kLatentEps, a.q_low);
    ops_->linear(a.q_low, w.q, a.q);
  } else {
    ops_->linear(a.normed, w.q, a.q);
  }
  ops_->linear(a.normed, w.latent.latent, a.k);
  ops_->linear(a.normed, w.latent.k_rope, a.v);
  ops_->rms_norm(a.k, w.latent.latent_norm.view, kLatentEps, a.k);
  ops_->rope(q, a.rotation);
  ops_->rope(by_head(a.v, 1, spec.qk_rope_dim), a.rotation);
  plan.write_kv(pages, a.k, a.v, stream_->get());
  plan.run({.q = q, .kv_b = w.latent.kv_b.view, .kv = pages}, {.out = attended}, stream_->get());
  ops_->linear(a.attended, w.o, a.normed);
}

// y may be x.
void Model::run_network(const Network& network, const TensorView& x, const TensorView& y) {
  const int64_t width = network.gate.weight.view.size(0);
  const auto part = [&](const DeviceTensor& buffer) {
    return TensorView::contiguous(buffer.view.data, buffer.view.dtype, {x.size(0), width}, buffer.view.device);
  };
  const TensorView gate = part(gate_), up = part(up_);
  ops_->linear(x, network.gate, gate);
  ops_->linear(x, network.up, up);
  ops_->silu_mul(gate, up);
  ops_->linear(gate, network.down, y);
}

// The host chooses the experts of each token; then each expert computes its tokens.
void Model::run_experts(const LayerWeights& w, const Activations& a) {
  const Experts& e = config_.experts;
  const int64_t tokens = a.normed.size(0);
  const DeviceTensor logits = stream_->tensor(DType::f32, {tokens, e.count});
  ops_->linear(a.normed, w.router, logits.view);
  std::vector<float> scores(size_t(tokens * e.count));
  stream_->download(scores.data(), logits.view.data, int64_t(scores.size() * sizeof(float)));
  stream_->synchronize();

  struct Share {
    std::vector<int32_t> tokens, offsets;
    std::vector<float> weights;
  };
  std::vector<Share> shares(w.experts.size());
  std::vector<int> order(w.experts.size());
  for (int64_t t = 0; t < tokens; ++t) {
    const float* const row = scores.data() + t * e.count;
    const float most = *std::max_element(row, row + e.count);
    float sum = 0;
    for (int i = 0; i < e.count; ++i) sum += std::exp(row[i] - most);
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + e.chosen, order.end(), [&](int x, int y) { return row[x] > row[y]; });
    for (int i = 0; i < e.chosen; ++i) {
      Share& share = shares[size_t(order[size_t(i)])];
      share.tokens.push_back(int32_t(t));
      share.offsets.push_back(int32_t(t * config_.hidden));
      share.weights.push_back(e.scaling * std::exp(row[order[size_t(i)]] - most) / sum);
    }
  }

  stream_->fill(a.mixed.data, 0, tokens * config_.hidden * imbrex::size_of(a.mixed.dtype));
  const TensorView flat = TensorView::contiguous(a.normed.data, a.normed.dtype, {a.normed.num_elements()}, a.normed.device);
  for (size_t i = 0; i < shares.size(); ++i) {
    Share& share = shares[i];
    if (share.tokens.empty()) continue;
    const DeviceTensor offsets = stream_->copy_of(array(share.offsets, DType::i32)),
                       rows = stream_->copy_of(array(share.tokens, DType::i32)),
                       weights = stream_->copy_of(array(share.weights, DType::f32)),
                       x = stream_->tensor(a.normed.dtype, {int64_t(share.tokens.size()), config_.hidden});
    stream_->gather(flat, offsets.view, x.view);
    run_network(w.experts[i], x.view, x.view);
    ops_->add_rows(a.mixed, rows.view, weights.view, x.view);
    stream_->synchronize();  // the tensors above end here
  }
  run_network(w.network, a.normed, a.normed);
  ops_->add(a.normed, a.mixed);
}

std::vector<float> Model::logits(std::span<const Piece> pieces, const Activations& a, bool every_token) {
  ops_->rms_norm(a.hidden, weights_.norm.view, config_.rms_norm_eps, a.normed);
  TensorView rows = a.normed;
  DeviceTensor last, offsets;
  if (!every_token) {
    std::vector<int32_t> starts;
    for (size_t i = 1; i <= pieces.size(); ++i) starts.push_back(int32_t((tables_.query_start_loc[i] - 1) * config_.hidden));
    offsets = stream_->copy_of(array(starts, DType::i32));
    last = stream_->tensor(rows.dtype, {int64_t(starts.size()), config_.hidden});
    stream_->gather(TensorView::contiguous(rows.data, rows.dtype, {rows.num_elements()}, rows.device), offsets.view, last.view);
    rows = last.view;
  }
  const DeviceTensor result = stream_->tensor(DType::f32, {rows.size(0), config_.vocab});
  ops_->linear(rows, weights_.output, result.view);
  std::vector<float> host(size_t(result.view.num_elements()));
  stream_->download(host.data(), result.view.data, int64_t(host.size() * sizeof(float)));
  stream_->synchronize();
  return host;
}

std::string Model::str() const {
  std::ostringstream text;
  text << config_.model.family << ", " << config_.layers() << " layers, cache of " << cache_.num_blocks() << " blocks, " << cache_.bytes()
       << " bytes";
  for (const Kind& kind : kinds_) text << "\n" << kind.plan().str();
  return text.str();
}

}  // namespace llama
