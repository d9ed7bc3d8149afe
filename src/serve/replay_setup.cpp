// See replay_setup.h.
#include "serve/replay_setup.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kv_codec.h"
#include "attention/mask.h"
#include "core/check.h"
#include "imbrex/select.h"
#include "model/groups.h"

namespace imbrex::serve {

namespace {

KvFormat parse_format(const std::string& text) {
  const std::optional<KvFormat> format = find_kv_format(text);
  check(format.has_value(), "replay.kv_format", "kv_format must be auto, {}, is \"{}\"", kv_format_names(), text);
  check(!codec_of(*format).scales_inside, "replay.kv_format", "kv_format must be one that keeps elements as they are, is \"{}\"", text);
  return *format;
}

// Whether a backend other than the reference runs every kind of attention layer.
bool runs_well(const ModelSpec& model, const ReplayOptions& options, const DeviceInfo& device) {
  for (const ModelSpec::Kind& kind : model.kinds()) {
    const auto* spec = std::get_if<AttentionSpec>(&kind.spec);
    if (spec == nullptr) continue;
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      SelectOptions select_options = options.select;
      select_options.phase = phase;
      try {
        const Selection selection = select(*spec, device, select_options);
        if (selection.backend == nullptr || selection.backend->name() == "reference") return false;
      } catch (const Error&) {
        return false;  // the forced backend does not run it
      }
    }
  }
  return true;
}

// Whether every layer of attention can have the format.
bool can_have(const ModelSpec& model, const ReplayOptions& options, KvFormat format) {
  return std::all_of(model.layers.begin(), model.layers.end(), [&](const ModelLayer& layer) {
    const auto* of_layer = std::get_if<AttentionSpec>(&layer.spec);
    if (of_layer == nullptr) return true;
    AttentionSpec spec = *of_layer;
    spec.q_dtype = options.q_dtype, spec.kv_dtype = options.kv_dtype;
    return fits(spec, format, options.block_size);
  });
}

}  // namespace

const char* to_string(Pacing pacing) {
  switch (pacing) {
    case Pacing::arrival: return "arrival";
    case Pacing::saturate: return "saturate";
  }
  return "?";
}

void check_options(const ReplayOptions& o) {
  check(o.num_layers >= 0, "replay.num_layers", "num_layers must be >= 0, is {}", o.num_layers);
  check(o.layers_of_kind >= 0, "replay.num_layers", "layers_of_kind must be >= 0, is {}", o.layers_of_kind);
  check(o.max_num_batched_tokens >= 1 && o.max_num_batched_tokens <= 1 << 20, "replay.max_num_batched_tokens",
        "max_num_batched_tokens must be in [1, {}], is {}", 1 << 20, o.max_num_batched_tokens);
  check(o.max_num_seqs >= 1 && o.max_num_seqs <= 1 << 16, "replay.max_num_seqs", "max_num_seqs must be in [1, {}], is {}", 1 << 16,
        o.max_num_seqs);
  check(o.drafts.tokens >= 0 && o.drafts.tokens <= kMostDrafts, "replay.drafts", "drafts.tokens must be in [0, {}], is {}", kMostDrafts,
        o.drafts.tokens);
  check(o.drafts.acceptance >= 0 && o.drafts.acceptance <= 1, "replay.drafts", "drafts.acceptance must be in [0, 1], is {}",
        o.drafts.acceptance);
  check(!o.drafts.tree || o.drafts.tokens > 0, "replay.drafts", "expected drafts for trees of them, got {}", o.drafts.tokens);
  check(std::isfinite(o.rate_scale) && o.rate_scale > 0, "replay.rate_scale", "rate_scale must be positive, is {}", o.rate_scale);
  check(std::isfinite(o.fixed_step_s) && o.fixed_step_s >= 0, "replay.fixed_step_s", "fixed_step_s must be >= 0, is {}", o.fixed_step_s);
  check(o.kv_bytes >= 0, "replay.kv_bytes", "kv_bytes must be >= 0, is {}", o.kv_bytes);
  check(o.num_blocks >= 0 && o.num_blocks <= std::numeric_limits<int32_t>::max(), "replay.num_blocks",
        "num_blocks must be in [0, {}], is {}", std::numeric_limits<int32_t>::max(), o.num_blocks);
  check(o.block_size >= 1 && o.block_size <= 65536, "replay.block_size", "block_size must be in [1, 65536], is {}", o.block_size);
  check(o.q_dtype == DType::bf16, "replay.q_dtype", "q_dtype must be bf16, is {}", to_string(o.q_dtype));
  check(o.kv_dtype == DType::f32 || o.kv_dtype == DType::bf16 || o.kv_dtype == DType::f16 || o.kv_dtype == DType::fp8_e4m3 ||
            o.kv_dtype == DType::fp8_e5m2,
        "replay.kv_dtype", "kv_dtype must be f32, bf16, f16, fp8_e4m3 or fp8_e5m2, is {}", to_string(o.kv_dtype));
  check(o.num_threads >= 0, "replay.num_threads", "num_threads must be >= 0, is {}", o.num_threads);
  check(o.verify_fraction >= 0 && o.verify_fraction <= 1, "replay.verify_fraction", "verify_fraction must be in [0, 1], is {}",
        o.verify_fraction);
  check(o.verify_last >= 0 && o.verify_last <= 1, "replay.verify_fraction", "verify_last must be in [0, 1], is {}", o.verify_last);
  check(std::isfinite(o.time_limit_s) && o.time_limit_s >= 0, "replay.time_limit_s", "time_limit_s must be >= 0, is {}", o.time_limit_s);
  check(o.max_series_points >= 2, "replay.max_series_points", "max_series_points must be >= 2, is {}", o.max_series_points);
}

ModelSpec deploy_model(const ModelSpec& model, bool images, const ReplayOptions& options, const DeviceInfo& device, std::string& note) {
  check(!model.layers.empty(), "replay.model.layers", "{} has no layers", model.name);
  for (const ModelLayer& layer : model.layers) {
    const std::optional<AttentionSpec> spec = paged_attention(layer.spec);
    if (!spec) continue;
    check(spec->kind != AttentionKind::encoder_decoder && spec->kind != AttentionKind::encoder, "replay.model.encoder_decoder",
          "{} has {} layers ({}); a replay drives decoder-only models", model.name, to_string(spec->kind), layer.name);
    check(spec->kind == AttentionKind::decoder, "replay.model.encoder_only",
          "{} has {} layers ({}) and makes no tokens; a replay drives decoder-only models", model.name, to_string(spec->kind), layer.name);
    check(spec->mask.causal && !spec->mask.custom, "replay.model.mask", "layer {} must be causal without a custom mask, is {}", layer.name,
          spec->mask.str());
  }
  check(options.num_layers <= model.num_layers, "replay.num_layers.model", "{} has {} layers, {} were asked for", model.name,
        model.num_layers, options.num_layers);
  ModelSpec part = model;
  if (options.num_layers > 0) {
    std::erase_if(part.layers, [&](const ModelLayer& layer) { return layer.number >= options.num_layers; });
    part.num_layers = options.num_layers;
    check(!part.layers.empty(), "replay.num_layers.model", "the first {} layers of {} have neither a cache nor a state", part.num_layers,
          model.name);
  }
  if (options.layers_of_kind > 0) {
    std::vector<int> kept;
    for (const ModelSpec::Kind& kind : part.kinds())
      kept.insert(kept.end(), kind.layers.begin(),
                  kind.layers.begin() + std::min<int64_t>(options.layers_of_kind, std::ssize(kind.layers)));
    std::ranges::sort(kept);
    std::vector<ModelLayer> layers;
    layers.reserve(kept.size());
    for (const int i : kept) layers.push_back(part.layers[size_t(i)]);
    part.num_layers = int(part.numbers_of(kept).size());
    part.layers = std::move(layers);
  }

  for (ModelLayer& layer : part.layers) {
    if (options.drafts.tree) {
      check(!paged_attention(layer.spec) || options.drafts.tokens < kMostTreeTokens, "replay.drafts.tree",
            "{}: expected at most {} drafts, which are a tree with the token in front of them in {}, got {}", part.name,
            kMostTreeTokens - 1, layer.name, options.drafts.tokens);
    }
    check(!images || !options.drafts.tree, "replay.drafts.tree", "expected chains of drafts for requests with images, got trees");
    const auto set_mask = [&](auto& spec) { spec.mask.tree = options.drafts.tree, spec.mask.positions = images; };
    if (auto* const attention = std::get_if<AttentionSpec>(&layer.spec)) set_mask(*attention);
    if (auto* const latent = std::get_if<MlaSpec>(&layer.spec)) set_mask(*latent);
    const auto set = [&](auto& spec) { spec.num_drafts = options.drafts.tokens, spec.tree_drafts = options.drafts.tree; };
    if (auto* const recurrent = std::get_if<RecurrentSpec>(&layer.spec)) set(*recurrent);
    if (auto* const conv = std::get_if<ShortConvSpec>(&layer.spec)) set(*conv);
  }

  const auto attends = [](const ModelLayer& layer) { return std::holds_alternative<AttentionSpec>(layer.spec); };
  const auto deployed = [&](KvFormat format) { return part.with_kv(options.q_dtype, options.kv_dtype, format, options.block_size); };
  if (options.kv_format != "auto") return deployed(parse_format(options.kv_format));
  if (std::none_of(part.layers.begin(), part.layers.end(), attends)) return deployed(KvFormat::strided);
  std::string passed_over;
  for (const KvFormat format : kv_formats()) {
    const KvCodec& codec = codec_of(format);
    if (codec.preferred == nullptr) continue;
    passed_over += fmt::format("{}{}", passed_over.empty() ? "" : " or ", codec.name);
    if (!can_have(part, options, format)) continue;
    ModelSpec preferred = deployed(format);
    if (!runs_well(preferred, options, device)) continue;
    note = fmt::format("kv_format {}: {}", codec.name, codec.preferred);
    return preferred;
  }
  note = fmt::format("kv_format strided: nothing but the reference runs {} here", passed_over);
  return deployed(KvFormat::strided);
}

int64_t longest_request(const Trace& trace) {
  int64_t longest = 0;
  for (const TraceRequest& r : trace.requests) longest = std::max(longest, int64_t(r.input_length) + r.output_length);
  return longest;
}

bool keeps_states(const Trace& trace, const ReplayOptions& options) {
  const bool alike = std::ranges::any_of(trace.requests, [](const TraceRequest& r) { return r.system_tokens > 0; });
  return options.prefix_sharing && (trace.prefix_block > 0 || alike);
}

CacheSizes cache_sizes(const ModelSpec& model, const Trace& trace, const ReplayOptions& options, int64_t memory) {
  const size_t num_groups = model.cache_groups.size();
  const int64_t budget = options.kv_bytes > 0 ? options.kv_bytes : memory;
  const int64_t block_size = options.block_size;
  CacheSizes sizes;
  int64_t slot_bytes = 0;
  for (const CacheGroup& group : model.cache_groups) slot_bytes += group.bytes_per_slot;
  if (slot_bytes > 0) {
    const int64_t running = std::min<int64_t>(options.max_num_seqs, int64_t(trace.requests.size()));
    const int64_t useful = keeps_states(trace, options) ? 2 * running : running;
    sizes.num_slots = int(options.num_blocks > 0 ? useful : std::clamp<int64_t>(budget / 2 / slot_bytes, 1, useful));
  }
  if (options.num_blocks > 0) {
    for (const CacheGroup& group : model.cache_groups) sizes.num_blocks.push_back(group.holds_states() ? 0 : int(options.num_blocks));
    return sizes;
  }

  // The blocks of every group of pages, where groups without a window have `blocks`.
  const auto blocks_for = [&](int64_t blocks) {
    std::vector<int> result;
    for (const CacheGroup& group : model.cache_groups) {
      if (group.holds_states()) {
        result.push_back(0);
        continue;
      }
      const Mask mask = paged_attention(model.layers[size_t(group.layers.front())].spec)->mask;
      int64_t count = blocks;
      if (forgets(mask)) {
        const int64_t reach = most_earlier_keys(mask);
        const int64_t enough = options.max_num_seqs * (reach / block_size + 3) + (reach + options.max_num_batched_tokens) / block_size + 3;
        count = std::min(count, 2 * enough);
      }
      result.push_back(int(count));
    }
    return result;
  };
  const auto bytes_for = [&](int64_t blocks) {
    const std::vector<int> counts = blocks_for(blocks);
    double bytes = double(sizes.num_slots) * double(slot_bytes);  // as a double, because it is only compared
    for (size_t g = 0; g < num_groups; ++g) bytes += double(counts[g]) * double(model.cache_groups[g].bytes_per_token) * double(block_size);
    return bytes;
  };
  int64_t most = 0;  // that the whole trace can use at once
  for (const TraceRequest& r : trace.requests) most += (int64_t(r.input_length) + r.output_length + block_size - 1) / block_size;
  int64_t low = 0, high = std::clamp<int64_t>(most, 1, std::numeric_limits<int32_t>::max());
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (bytes_for(middle) <= double(budget)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  check(low >= 1, "replay.kv_bytes.small", "one block of {} tokens{} in every layer takes {} bytes, the cache may have {}", block_size,
        slot_bytes > 0 ? " and one state slot" : "", int64_t(bytes_for(1)), budget);
  sizes.num_blocks = blocks_for(low);
  if (low < most) sizes.rest = budget - int64_t(bytes_for(low));
  return sizes;
}

}  // namespace imbrex::serve
