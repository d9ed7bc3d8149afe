// `imbrex trace stats|gen`: looks at a serving trace, or makes one.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "serve/trace_gen.h"
#include "serve/trace_stats.h"

namespace imbrex::cli {
namespace {

using serve::Percentiles;

nlohmann::ordered_json to_json(const Percentiles& p) {
  return {{"min", p.min}, {"mean", p.mean}, {"p25", p.p25}, {"p50", p.p50}, {"p75", p.p75},
          {"p90", p.p90}, {"p95", p.p95},   {"p99", p.p99}, {"max", p.max}};
}

int run_stats(const std::vector<std::string>& files, bool json) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  std::string text;
  for (const std::string& path : files) {
    const serve::Trace trace = serve::read_trace(path);
    const serve::TraceStats s = serve::trace_stats(trace);
    all.push_back({{"file", path},
                   {"format", trace.format},
                   {"requests", s.requests},
                   {"input_tokens", s.input_tokens},
                   {"output_tokens", s.output_tokens},
                   {"span_s", s.span_s},
                   {"requests_per_s", s.rate},
                   {"input", to_json(s.input)},
                   {"output", to_json(s.output)},
                   {"gap_s", to_json(s.gap)},
                   {"prefix_blocks", s.prefix_blocks},
                   {"distinct_prefix_blocks", s.distinct_prefix_blocks},
                   {"prefix_hit_rate", s.hit_rate()}});
    text += fmt::format("{}{} ({})\n", text.empty() ? "" : "\n", path, trace.format);
    text +=
        fmt::format("{} requests in {}, {:.2f} a second; {} input tokens, {} output tokens\n", s.requests, serve::format_seconds(s.span_s),
                    s.rate, serve::format_count(double(s.input_tokens)), serve::format_count(double(s.output_tokens)));
    if (s.prefix_blocks > 0) {
      text += fmt::format("{} prefix blocks of {} tokens, {} distinct: {:.1f} % hits with a cache that never forgets\n", s.prefix_blocks,
                          trace.prefix_block, s.distinct_prefix_blocks, 100 * s.hit_rate());
    }
    serve::Table table{{"", ">min", ">mean", ">p50", ">p90", ">p99", ">max"}, {}};
    const auto row = [&](const char* name, const Percentiles& p, int digits) {
      std::vector<std::string> cells{name};
      for (const double value : {p.min, p.mean, p.p50, p.p90, p.p99, p.max}) cells.push_back(fmt::format("{:.{}f}", value, digits));
      table.rows.push_back(cells);
    };
    row("input tokens", s.input, 0);
    row("output tokens", s.output, 0);
    row("gap in seconds", s.gap, 3);
    text += table.text();
  }
  fmt::print("{}", json ? all.dump(2) + "\n" : text);
  return kOk;
}

int run_gen(const serve::TraceGenOptions& options, const std::string& path) {
  const std::string text = serve::to_mooncake_jsonl(serve::generate_trace(options));
  if (path.empty()) {
    fmt::print("{}", text);
  } else {
    write_file(path, text);
  }
  return kOk;
}

}  // namespace

void add_trace(CLI::App& app, Action& action) {
  CLI::App* trace = app.add_subcommand("trace", "Look at a serving trace (stats) or make one (gen)");
  trace->require_subcommand(1);

  struct StatsOptions {
    std::vector<std::string> files;
    bool json = false;
  };
  auto stats = std::make_shared<StatsOptions>();
  CLI::App* stats_sub = trace->add_subcommand("stats", "Lengths, arrivals, and how much of the prompts is shared");
  stats_sub->add_option("FILE", stats->files, "Mooncake JSONL, Azure CSV, or plain CSV/JSONL of arrival, input, output")->required();
  stats_sub->add_flag("--json", stats->json, "Print JSON");
  stats_sub->footer("Example:\n  imbrex trace stats conversation.jsonl azure.csv");
  stats_sub->callback([stats, &action] { action = [stats] { return run_stats(stats->files, stats->json); }; });

  struct GenOptions {
    serve::TraceGenOptions trace;
    std::string out;
  };
  auto gen = std::make_shared<GenOptions>();
  serve::TraceGenOptions& t = gen->trace;
  CLI::App* gen_sub = trace->add_subcommand("gen", "Make a Mooncake-format trace of conversations that share system prompts");
  gen_sub->add_option("-o,--out", gen->out, "File to write; default: standard output");
  gen_sub->add_option("-n,--num-requests", t.num_requests, "Requests")->capture_default_str();
  gen_sub->add_option("--seed", t.seed, "The same seed gives the same trace")->capture_default_str();
  gen_sub->add_option("--rate", t.rate, "Requests a second, about")->capture_default_str();
  gen_sub->add_option("--system-prompts", t.num_system_prompts, "Shared system prompts")->capture_default_str();
  gen_sub->add_option("--system-length", t.system_length, "Tokens of a system prompt, about")->capture_default_str();
  gen_sub->add_option("--turns", t.mean_turns, "Mean turns of a conversation")->capture_default_str();
  gen_sub->add_option("--think-seconds", t.think_s, "Mean seconds between two turns")->capture_default_str();
  gen_sub->add_option("--message-median", t.message_median, "Tokens of a user message, median")->capture_default_str();
  gen_sub->add_option("--message-sigma", t.message_sigma, "Spread of it (sigma of the logarithm)")->capture_default_str();
  gen_sub->add_option("--output-median", t.output_median, "Tokens of an answer, median")->capture_default_str();
  gen_sub->add_option("--output-sigma", t.output_sigma, "Spread of it (sigma of the logarithm)")->capture_default_str();
  gen_sub->add_option("--max-input", t.max_input, "Prompts are cut to this")->capture_default_str();
  gen_sub->add_option("--max-output", t.max_output, "Answers are cut to this")->capture_default_str();
  gen_sub->footer("Example:\n  imbrex trace gen --num-requests 200 --rate 4 --seed 7 --out trace.jsonl");
  gen_sub->callback([gen, &action] { action = [gen] { return run_gen(gen->trace, gen->out); }; });
}

}  // namespace imbrex::cli
