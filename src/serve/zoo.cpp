// Layers of models in the steps that engines run: reads bench/zoo.json, which is part of the program.
#include "serve/zoo.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>

#include "core/check.h"
#include "serve/batch_grammar.h"

namespace imbrex {

extern const std::string_view zoo_table;  // bench/zoo.json

namespace serve {
namespace {

using nlohmann::json;

constexpr std::string_view kRagged = "ragged";

const json& table() {
  static const json parsed = json::parse(zoo_table);
  return parsed;
}

std::vector<BenchRequest> requests_of(std::string_view batch) {
  std::vector<BenchRequest> requests;
  if (batch == kRagged) {
    for (const int seq_len : table()[kRagged]) requests.push_back({1, seq_len});
    return requests;
  }
  for (const BatchItem& item : parse_batch(batch)) requests.insert(requests.end(), size_t(item.count), {item.q_len, item.seq_len});
  return requests;
}

std::string batch_text(const std::vector<BenchRequest>& requests) {
  std::vector<BatchItem> items;
  for (const BenchRequest& r : requests) {
    if (items.empty() || items.back().q_len != r.q_len || items.back().seq_len != r.seq_len) items.push_back({0, r.q_len, r.seq_len});
    ++items.back().count;
  }
  return items.size() > 2 ? fmt::format("{}{}", requests.size(), kRagged) : to_string(items);
}

// How engines launch a step: steps with many tokens of a request one by one, all others from a graph.
BenchLaunch usual_launch(std::string_view kind) {
  return kind == "prefill" || kind == "chunk" || kind == "mixed" ? BenchLaunch::eager : BenchLaunch::graph;
}

std::string layer_text(const AttentionSpec& spec) {
  std::string text = fmt::format("{}-{}/d{}", spec.num_q_heads, spec.num_kv_heads, spec.head_dim_qk);
  if (spec.head_dim_v != spec.head_dim_qk) text += fmt::format("_{}", spec.head_dim_v);
  if (spec.mask.window_left >= 0) text += fmt::format("/window{}", spec.mask.window_left + 1);
  if (spec.mask.chunk > 0) text += fmt::format("/chunk{}", spec.mask.chunk);
  if (spec.mask.chunk_lookback > 0) text += fmt::format("/lookback{}", spec.mask.chunk_lookback);
  if (spec.score.soft_cap > 0) text += fmt::format("/soft_cap{:g}", spec.score.soft_cap);
  if (spec.score.alibi) text += spec.score.alibi_sqrt ? "/alibi_sqrt" : "/alibi";
  if (spec.score.relative_buckets > 0) text += "/relative";
  if (spec.score.sinks) text += "/sinks";
  return text;
}

// "decode 16q1s4k", and what may follow it: p16, bf16, fp8_e4m3_queries, eager or graph.
ZooCell cell_of(AttentionSpec spec, const std::string& text) {
  std::istringstream words(text);
  std::string kind, batch, word;
  words >> kind >> batch;
  ZooCell cell{.kind = kind, .requests = requests_of(batch), .launch = usual_launch(kind)};
  while (words >> word) {
    if (word == "eager" || word == "graph") {
      cell.launch = word == "eager" ? BenchLaunch::eager : BenchLaunch::graph;
    } else if (word == "fp8_e4m3_queries") {
      spec.q_dtype = DType::fp8_e4m3;
    } else if (word.starts_with('p')) {
      spec.block_size = std::stoi(word.substr(1));
    } else {
      spec.kv_dtype = parse_dtype(word);
    }
  }
  cell.layer = layer_text(spec);
  cell.spec = spec;
  return cell;
}

// The layer as a GPU of `ranks` has it, with kv heads repeated where there are too few; false when its heads cannot be shared out so.
bool share_out(AttentionSpec& spec, int ranks) {
  if (spec.num_q_heads % ranks != 0) return false;
  if (spec.num_kv_heads % ranks != 0 && ranks % spec.num_kv_heads != 0) return false;
  spec.num_q_heads /= ranks;
  spec.num_kv_heads = std::max(spec.num_kv_heads / ranks, 1);
  return spec.num_q_heads % spec.num_kv_heads == 0;
}

}  // namespace

std::string ZooCell::name() const {
  std::string text = fmt::format("{}/{}/{}/p{}/{}", kind, layer, to_string(spec.kv_dtype), spec.block_size, batch_text(requests));
  if (spec.q_dtype == DType::fp8_e4m3) text += "/fp8_e4m3_queries";
  if (launch != usual_launch(kind)) text += launch == BenchLaunch::eager ? "/eager" : "/graph";
  return text;
}

std::string ZooCell::group() const {
  const std::string_view queries = spec.q_dtype == DType::fp8_e4m3 ? " and queries" : "";
  return fmt::format("{} {}{}", kind, to_string(spec.kv_dtype), queries);
}

std::vector<ZooCell> published_cells() {
  std::vector<ZooCell> cells;
  for (const json& shape : table()["shapes"]) {
    AttentionSpec spec;
    spec.num_q_heads = shape["heads"][0];
    spec.num_kv_heads = shape["heads"][1];
    spec.head_dim_qk = spec.head_dim_v = shape["head_dim"];
    spec.mask.window_left = shape.value("window", 0) - 1;
    spec.score.soft_cap = shape.value("soft_cap", 0.f);
    spec.score.sinks = shape.value("sinks", false);
    for (const std::string text : shape["cells"]) cells.push_back(cell_of(spec, text));
  }
  return cells;
}

std::vector<ZooCell> cells_of(std::span<const AttentionSpec> layers, const ZooAxes& axes) {
  check(!axes.pages.empty(), "zoo.pages", "at least one page size, got none");
  std::vector<ZooCell> cells;
  std::map<std::string, int> seen;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
      AttentionSpec spec = layers[layer];
      if (!share_out(spec, ranks)) continue;
      const bool cached = spec.kind == AttentionKind::decoder || spec.kind == AttentionKind::encoder_decoder;
      size_t step = layer + size_t(ranks);  // so that a step meets another page size in the next shape
      for (const std::string text : table()["steps"]) {
        ZooCell cell = cell_of(spec, text);
        if (!cached && cell.kind != "prefill") continue;
        cell.spec.block_size = cached ? axes.pages[step % axes.pages.size()] : 0;
        if (!axes.kv_dtypes.empty()) {
          cell.spec.kv_dtype = axes.kv_dtypes[step % axes.kv_dtypes.size()];
        } else if (cached && step % 3 == 2) {
          cell.spec.kv_dtype = DType::fp8_e4m3;
        }
        ++step;
        if (seen[cell.name()]++ == 0) cells.push_back(std::move(cell));
      }
    }
  }
  return cells;
}

ZooCell fitted(ZooCell cell, double max_bytes, double max_flops) {
  constexpr int kShortest = 16;
  for (;;) {
    const Work work = work_of(cell.spec, cell.requests);
    if (work.kv_bytes <= max_bytes && work.flops <= max_flops) return cell;
    std::vector<BenchRequest>& requests = cell.requests;
    if (requests.size() > 1) {  // every second one, the first among them, which differs from the others in mixed steps
      for (size_t i = 0; 2 * i < requests.size(); ++i) requests[i] = requests[2 * i];
      requests.resize((requests.size() + 1) / 2);
      continue;
    }
    BenchRequest& request = requests[0];
    if (request.seq_len <= kShortest) return cell;
    request.seq_len /= 2;
    request.q_len = cell.kind == "prefill" ? request.seq_len : std::min(request.q_len, request.seq_len);
  }
}

std::vector<const ZooResult*> judge_zoo(std::span<ZooResult> results) {
  std::map<std::string, std::vector<double>> shares;
  for (const ZooResult& r : results) {
    if (r.problem.empty()) shares[r.group].push_back(r.share.of_ceiling);
  }
  for (auto& [group, values] : shares) std::sort(values.begin(), values.end());
  std::vector<const ZooResult*> cliffs;
  for (ZooResult& r : results) {
    if (!r.problem.empty()) continue;
    const std::vector<double>& values = shares[r.group];
    const double median = (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
    r.beside = median > 0 ? r.share.of_ceiling / median : 1;
    if (r.beside < kCliff) cliffs.push_back(&r);
  }
  std::sort(cliffs.begin(), cliffs.end(), [](const ZooResult* a, const ZooResult* b) { return a->beside < b->beside; });
  return cliffs;
}

}  // namespace serve
}  // namespace imbrex
