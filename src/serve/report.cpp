// The report of a replay, from its result alone: terminal tables, JSON, and the HTML page that draws that JSON.
#include "serve/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "serve/table.h"

namespace imbrex {
extern const std::string_view report_template;  // src/serve/report.html
}

namespace imbrex::serve {
namespace {

using nlohmann::ordered_json;

ordered_json percentiles_json(const Percentiles& p) {
  return {{"count", p.count}, {"min", p.min}, {"mean", p.mean}, {"p25", p.p25}, {"p50", p.p50},
          {"p75", p.p75},     {"p90", p.p90}, {"p95", p.p95},   {"p99", p.p99}, {"max", p.max}};
}

ordered_json work_json(const ReplayWork& w) {
  return {{"steps", w.steps},
          {"tokens", w.tokens},
          {"run_s", w.run_s},
          {"flops", w.flops},
          {"bytes", w.bytes},
          {"flop_per_s", w.flop_per_s()},
          {"bytes_per_s", w.bytes_per_s()}};
}

// The highest of the layers' ceilings.
double flop_ceiling_of(const ReplayResult& r, const Ceilings& c) {
  double ceiling = 0;
  for (const ReplayKind& kind : r.kinds) ceiling = std::max(ceiling, c.flops_for(kind.backend, r.q_dtype));
  return ceiling;
}

constexpr double kTera = 1e13;  // FLOP/s from which tables count in TFLOP/s and TB/s

double rate(double count, double seconds) { return seconds > 0 ? count / seconds : 0; }
double share(double part, double whole) { return whole > 0 ? part / whole : 0; }
std::string percent(double fraction) { return fmt::format("{:.1f} %", 100 * fraction); }
std::string of_ceiling(double value, double ceiling) { return ceiling > 0 ? percent(value / ceiling) : "-"; }

ordered_json series_json(const ReplayResult& r) {
  ordered_json j = ordered_json::object();
  for (const char* name : {"clock_s", "steps", "step_s", "attention_s", "prefill_tokens", "decode_tokens", "running", "waiting"}) {
    j[name] = ordered_json::array();
  }
  j["occupancy"] = ordered_json::array();
  for (size_t g = 0; g < r.groups.size(); ++g) j["occupancy"].push_back(ordered_json::array());
  for (const ReplayPoint& p : r.series) {
    j["clock_s"].push_back(p.clock_s);
    j["steps"].push_back(p.steps);
    j["step_s"].push_back(p.step_s);
    j["attention_s"].push_back(p.attention_s);
    j["prefill_tokens"].push_back(p.prefill_tokens);
    j["decode_tokens"].push_back(p.decode_tokens);
    j["running"].push_back(p.running);
    j["waiting"].push_back(p.waiting);
    for (size_t g = 0; g < r.groups.size() && g < p.occupancy.size(); ++g) j["occupancy"][g].push_back(p.occupancy[g]);
  }
  return j;
}

ordered_json to_json(const ReplayResult& r, const ReportContext& context) {
  ordered_json j;
  j["imbrex"] = context.version;
  j["date"] = context.date;
  j["command"] = context.command;
  j["model"] = {{"name", r.model}, {"family", r.family}, {"layers", r.model_layers}, {"layers_run", r.num_layers}};
  j["trace"] = {{"source", r.trace}, {"format", r.trace_format}};
  j["device"] = r.device;
  j["options"] = {{"seed", r.seed},
                  {"threads", r.num_threads},
                  {"max_num_batched_tokens", r.max_num_batched_tokens},
                  {"max_num_seqs", r.max_num_seqs},
                  {"block_size", r.block_size},
                  {"q_dtype", r.q_dtype},
                  {"kv_dtype", r.kv_dtype},
                  {"kv_format", r.kv_format},
                  {"kv_bytes", r.kv_bytes},
                  {"pacing", r.pacing},
                  {"rate_scale", r.rate_scale},
                  {"prefix_sharing", r.prefix_sharing}};
  j["notes"] = r.notes;
  j["complete"] = r.complete;
  j["stopped"] = r.stopped;
  j["requests"] = {
      {"total", r.requests}, {"finished", r.finished_requests}, {"skipped", r.skipped_requests}, {"preemptions", r.preemptions}};
  j["tokens"] = {{"prompt", r.prompt_tokens}, {"prefix_hit", r.prefix_hit_tokens}, {"prefill", r.prefill_tokens},
                 {"decode", r.decode_tokens}, {"recomputed", r.recomputed_tokens}, {"output", r.output_tokens}};
  j["kept_states"] = r.kept_states;
  j["drafts"] = {{"made", r.drafts}, {"kept", r.kept_drafts}};
  j["steps"] = r.steps;
  j["prefix_hit_rate"] = r.prefix_hit_rate();
  j["wall_s"] = r.wall_s;
  j["clock_s"] = r.clock_s;
  j["idle_s"] = r.idle_s;
  j["throughput"] = {{"output_tokens_per_s", rate(double(r.output_tokens), r.busy_s())},
                     {"prefill_tokens_per_s", rate(double(r.prefill_tokens), r.busy_s())},
                     {"requests_per_s", rate(double(r.finished_requests), r.busy_s())}};
  const ReplayTimes& t = r.times;
  j["times_s"] = {{"schedule", t.schedule_s}, {"plan", t.plan_s},   {"kv_write", t.kv_write_s}, {"attention", t.attention_s},
                  {"states", t.state_s},      {"step", t.step_s()}, {"synthesis", t.synth_s},   {"verify", t.verify_s}};
  j["latency_s"] = {{"ttft", percentiles_json(r.ttft)},
                    {"tpot", percentiles_json(r.tpot)},
                    {"e2e", percentiles_json(r.e2e)},
                    {"queue", percentiles_json(r.queue)},
                    {"step", percentiles_json(r.step)}};
  j["requests_per_step"] = percentiles_json(r.batch);
  j["decode_steps"] = work_json(r.decode_steps);
  j["prefill_steps"] = work_json(r.prefill_steps);
  j["state_layers"] = work_json(r.state_layers);
  j["kv_written_bytes"] = r.kv_written_bytes;
  const Ceilings& c = context.ceilings;
  j["ceilings"] = {{"threads", c.num_threads},           {"dram_read_bytes_per_s", c.dram_read},
                   {"l3_read_bytes_per_s", c.l3_read},   {"fma_flop_per_s", c.fma},
                   {"bf16_pairs_flop_per_s", c.pairs},   {"amx_flop_per_s", c.amx},
                   {"flop_per_s", flop_ceiling_of(r, c)}};
  j["kinds"] = ordered_json::array();
  for (const ReplayKind& k : r.kinds) {
    j["kinds"].push_back({{"spec", k.spec},
                          {"family", k.family},
                          {"group", k.group},
                          {"layers", k.layers},
                          {"backend", k.backend},
                          {"rule", k.rule},
                          {"selection", k.selection},
                          {"plan", k.plan},
                          {"run_s", k.run_s},
                          {"kv_write_s", k.kv_write_s},
                          {"plan_s", k.plan_s},
                          {"flops", k.flops},
                          {"bytes", k.bytes}});
  }
  j["groups"] = ordered_json::array();
  for (const ReplayGroup& g : r.groups) {
    j["groups"].push_back({{"name", g.name},
                           {"layers", g.num_layers},
                           {"blocks", g.num_blocks},
                           {"slots", g.num_slots},
                           {"bytes", g.bytes},
                           {"mean_occupancy", g.mean_occupancy},
                           {"peak_occupancy", g.peak_occupancy},
                           {"evictions", g.evictions}});
  }
  j["waste"] = {
      {"padding_bytes", r.padding_bytes}, {"rest_bytes", r.rest_bytes}, {"share", r.wasted_share()}, {"unfilled_share", r.unfilled_share}};
  j["verify"] = {{"fraction", r.verify_fraction}, {"outputs", r.verified_outputs},   {"values", r.verified_values},
                 {"states", r.verified_states},   {"max_error", r.verify_max_error}, {"max_ratio", r.verify_max_ratio}};
  j["digest"] = {{"outputs", fmt::format("{:016x}", r.digest)}, {"decode", fmt::format("{:016x}", r.decode_digest)}};
  j["series"] = series_json(r);
  return j;
}

// How the memory is split.
std::string memory_line(const ReplayResult& r) {
  int64_t of_states = 0, slots = 0;
  for (const ReplayGroup& g : r.groups) {
    if (g.num_slots == 0) continue;
    of_states += g.bytes;
    slots = g.num_slots;
  }
  const std::string kept = r.kept_states > 0 ? fmt::format("; {} states were kept behind prefixes", r.kept_states) : "";
  return fmt::format("{} of cache: {} in {} state slots, one a running request; {} in pages{}\n", format_bytes(double(r.kv_bytes)),
                     format_bytes(double(of_states)), slots, format_bytes(double(r.kv_bytes - of_states)), kept);
}

std::string waste_line(const ReplayResult& r) {
  const auto fine = [](double fraction) { return fmt::format("{:.2f} %", 100 * fraction); };
  return fmt::format(
      "lost: {} to padding, {} to a rest that no block fits ({} of all); {} of what requests held was behind their last tokens\n",
      format_bytes(double(r.padding_bytes)), format_bytes(double(r.rest_bytes)), fine(r.wasted_share()), fine(r.unfilled_share));
}

std::string verification_line(const ReplayResult& r) {
  if (r.verified_outputs == 0) return "nothing was verified (--verify 1% recomputes a sample with the reference backend)";
  return fmt::format("{} outputs{} recomputed by the reference, all within the bound: largest error {:.2g}, {:.0f} % of what is allowed",
                     r.verified_outputs, r.verified_states > 0 ? fmt::format(" and {} states", r.verified_states) : "", r.verify_max_error,
                     100 * r.verify_max_ratio);
}

}  // namespace

std::string report_json(const ReplayResult& r, const ReportContext& context) { return to_json(r, context).dump(1) + "\n"; }

std::string report_html(const ReplayResult& r, const ReportContext& context) {
  std::string data = to_json(r, context).dump(-1, ' ', true);
  for (size_t at = 0; (at = data.find('<', at)) != std::string::npos; at += 6) data.replace(at, 1, "\\u003c");  // no tag can begin in it
  constexpr std::string_view kPlace = "/*REPORT*/null";
  std::string page(report_template);
  return page.replace(page.find(kPlace), kPlace.size(), data);
}

std::string report_text(const ReplayResult& r, const ReportContext& context) {
  std::string out =
      fmt::format("\n{}: {} of {} layers on {}, {} threads\n", r.model, r.num_layers, r.model_layers, r.device, r.num_threads);
  out +=
      fmt::format("{} ({}): {} of {} requests in {} steps; replay clock {} ({} idle), wall time {}\n", r.trace, r.trace_format,
                  r.finished_requests, r.requests, r.steps, format_seconds(r.clock_s), format_seconds(r.idle_s), format_seconds(r.wall_s));
  if (!r.complete) out += fmt::format("stopped early: {}\n", r.stopped);
  for (const std::string& note : r.notes) out += fmt::format("note: {}\n", note);

  const double busy = r.busy_s();
  Table table{{"throughput", ">value"}, {}};
  table.rows = {{"output tokens/s", fmt::format("{:.1f}", rate(double(r.output_tokens), busy))},
                {"prefill tokens/s", fmt::format("{:.1f}", rate(double(r.prefill_tokens), busy))},
                {"prompt tokens found in the cache", percent(r.prefix_hit_rate())},
                {"preemptions", fmt::format("{}", r.preemptions)},
                {"recomputed tokens", format_count(double(r.recomputed_tokens))}};
  if (r.drafts > 0)
    table.rows.push_back(
        {"drafts that were kept", fmt::format("{} of {}", format_count(double(r.kept_drafts)), format_count(double(r.drafts)))});
  if (r.skipped_requests > 0) table.rows.push_back({"requests skipped (too long)", fmt::format("{}", r.skipped_requests)});
  out += "\n" + table.text();

  table = {{"latency", ">p50", ">p90", ">p99", ">max"}, {}};
  const auto latency = [&](const char* name, const Percentiles& p) {
    if (p.count == 0) return;
    table.rows.push_back({name, format_seconds(p.p50), format_seconds(p.p90), format_seconds(p.p99), format_seconds(p.max)});
  };
  latency("time to first token", r.ttft);
  latency("time per output token", r.tpot);
  latency("arrival to last token", r.e2e);
  latency("waiting for the first step", r.queue);
  latency("step", r.step);
  out += "\n" + table.text();

  const ReplayTimes& t = r.times;
  table = {{"step time", ">total", ">share"}, {}};
  const bool states = r.state_layers.steps > 0;
  std::vector<std::pair<const char*, double>> parts{
      {"attention", t.attention_s}, {"KV writes", t.kv_write_s}, {"planning", t.plan_s}, {"scheduling", t.schedule_s}};
  if (states) parts.insert(parts.begin() + 1, {"layers with states", t.state_s});
  for (const auto& [name, seconds] : parts) table.rows.push_back({name, format_seconds(seconds), percent(share(seconds, t.step_s()))});
  out += "\n" + table.text();

  const Ceilings& c = context.ceilings;
  const double flop_ceiling = flop_ceiling_of(r, c);
  const bool tera = std::max(r.prefill_steps.flop_per_s(), flop_ceiling) >= kTera;
  const double unit = tera ? 1e12 : 1e9;
  const char* const rate_of_bytes = states ? (tera ? ">TB/s" : ">GB/s") : tera ? ">KV TB/s" : ">KV GB/s";
  table = {{states ? "layers" : "attention", ">steps", ">tokens", rate_of_bytes, ">of DRAM", tera ? ">TFLOP/s" : ">GFLOP/s", ">of peak"},
           {}};
  const auto work = [&](const char* name, const ReplayWork& w) {
    table.rows.push_back({name, format_count(double(w.steps)), format_count(double(w.tokens)),
                          fmt::format("{:.2f}", w.bytes_per_s() / unit), of_ceiling(w.bytes_per_s(), c.dram_read),
                          fmt::format("{:.1f}", w.flop_per_s() / unit), of_ceiling(w.flop_per_s(), flop_ceiling)});
  };
  work(states ? "attention, steps with prefill" : "steps with prefill", r.prefill_steps);
  work(states ? "attention, decode-only steps" : "decode-only steps", r.decode_steps);
  if (states) work("with states, all steps", r.state_layers);
  if (c.dram_read > 0) {
    table.rows.push_back({c.num_threads > 0 ? "measured ceiling" : "data sheet", "", "", fmt::format("{:.2f}", c.dram_read / unit), "",
                          fmt::format("{:.1f}", flop_ceiling / unit), ""});
  }
  out += "\n" + table.text();

  table = {{states ? "cache" : "KV cache", ">layers", states ? ">blocks or slots" : ">blocks", ">memory", ">mean use", ">peak use",
            ">evictions"},
           {}};
  for (const ReplayGroup& g : r.groups) {
    table.rows.push_back({g.name, fmt::format("{}", g.num_layers), fmt::format("{}", g.num_slots > 0 ? g.num_slots : g.num_blocks),
                          format_bytes(double(g.bytes)), percent(g.mean_occupancy), percent(g.peak_occupancy),
                          g.num_slots > 0 ? "-" : fmt::format("{}", g.evictions)});
  }
  out += "\n" + table.text();
  if (states) out += memory_line(r);
  out += waste_line(r);

  table = {{">layers", "kind", "backend", "why", states ? ">of layers" : ">of attention"}, {}};
  for (const ReplayKind& k : r.kinds) {
    table.rows.push_back(
        {fmt::format("{}", k.layers.size()), k.spec, k.backend, k.rule, percent(share(k.run_s, t.attention_s + t.state_s))});
  }
  out += "\n" + table.text();
  const bool by_steps = std::ranges::any_of(r.kinds, &ReplayKind::bits_follow_steps);
  out += fmt::format("\nverification: {}\ndigest {:016x} (same seed{}, same bits: whatever the {}number of threads)\n",
                     verification_line(r), r.digest, by_steps ? " and steps" : "", by_steps ? "" : "batch size and the ");
  return out;
}

}  // namespace imbrex::serve
