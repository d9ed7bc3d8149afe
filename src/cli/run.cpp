// `imbrex run`: replays a serving trace through the layers of a model, and reports.
#include <fmt/format.h>

#include <ctime>

#include "attention/kv_codec.h"
#include "cli/cli.h"
#include "cli/progress.h"
#include "core/check.h"
#include "imbrex/model.h"
#include "serve/replay.h"
#include "serve/report.h"

namespace imbrex::cli {
namespace {

struct RunArguments {
  std::string model, trace, q_dtype = "bf16", kv_dtype = "bf16", kv_memory, verify = "0", verify_last = "0", spec_acceptance = "70%",
                            report, json, pacing = "arrival";
  int64_t num_requests = 0;
  int shrink = 1, system_prompt = 0, image_every = 0, image_tokens = 256;
  serve::ReplayOptions replay;
  bool no_prefix_sharing = false, no_ceilings = false, quiet = false;
};

void show(ProgressBar& bar, const serve::ReplayProgress& p) {
  if (!bar.on()) return;
  const double done = p.total_tokens > 0 ? double(p.finished_tokens) / double(p.total_tokens) : 0;
  constexpr double kEnough = 0.01;  // of the tokens, for an estimate from them
  const std::string left = done < kEnough ? "" : fmt::format(", about {:.0f} s left", p.wall_s * (1 - done) / done);
  bar.show(done, fmt::format("{}/{} requests  {} running, {} waiting  {}{}", p.finished_requests, p.total_requests, p.running, p.waiting,
                             serve::format_seconds(p.wall_s), left));
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", std::gmtime(&now));
  return text;
}

int run_trace(RunArguments& o) {
  serve::ReplayOptions& r = o.replay;
  const DeviceInfo device = describe_device(r.device);
  check(device.present, "backend.device_absent", "--device: expected a device of this machine, got {}", device.str());
  r.q_dtype = parse_dtype(o.q_dtype);
  r.kv_dtype = parse_dtype(o.kv_dtype);
  r.prefix_sharing = !o.no_prefix_sharing;
  r.verify_fraction = parse_fraction(o.verify);
  r.verify_last = parse_fraction(o.verify_last);
  r.drafts.acceptance = parse_fraction(o.spec_acceptance);
  r.pacing = o.pacing == "saturate" ? serve::Pacing::saturate : serve::Pacing::arrival;
  if (!o.kv_memory.empty()) r.kv_bytes = parse_size(o.kv_memory);
  const ModelSpec model = load_model(o.model);
  serve::Trace trace = serve::read_trace(o.trace);
  if (o.num_requests > 0 && o.num_requests < int64_t(trace.requests.size())) trace.requests.resize(size_t(o.num_requests));
  serve::shrink(trace, o.shrink);
  serve::add_system_prompt(trace, o.system_prompt);
  if (o.image_every > 0) serve::add_images(trace, o.image_every, o.image_tokens);

  serve::ReportContext context{IMBREX_VERSION, command_line(), utc_now(), {}};
  if (!o.no_ceilings) context.ceilings = serve::ceilings_of(device, r.num_threads, 1.5);
  serve::ReplayResult result;
  {
    ProgressBar bar(!o.quiet, true);
    r.progress = [&](const serve::ReplayProgress& progress) {
      show(bar, progress);
      return true;
    };
    result = serve::replay(model, trace, r);
  }
  if (!o.quiet) fmt::print("{}", serve::report_text(result, context));
  if (!o.json.empty()) write_file(o.json, serve::report_json(result, context));
  if (!o.report.empty()) write_file(o.report, serve::report_html(result, context));
  if (!o.quiet && !o.report.empty()) fmt::print("report: {}\n", o.report);
  return kOk;
}

}  // namespace

void add_run(CLI::App& app, Action& action) {
  auto o = std::make_shared<RunArguments>();
  serve::ReplayOptions& r = o->replay;
  CLI::App* sub = app.add_subcommand("run", "Replay a serving trace through a model's layers, and report");
  sub->add_option("--model", o->model, "Preset name, config.json, or a folder with one")->required();
  sub->add_option("--trace", o->trace, "Mooncake JSONL, Azure CSV, or plain CSV/JSONL of arrival, input, output")->required();
  sub->add_option("--num-requests", o->num_requests, "Only the first N requests (0: all)")->check(CLI::NonNegativeNumber);
  sub->add_option("--shrink", o->shrink, "Divide all lengths of the trace, and its blocks of prefixes, by N")->capture_default_str();
  sub->add_option("--shared-system-prompt", o->system_prompt, "Every request begins with the same N tokens, in front of its prompt")
      ->check(CLI::NonNegativeNumber);
  sub->add_option("--image-every", o->image_every, "Every N tokens of a prompt end with an image, whose tokens see each other (0: none)")
      ->check(CLI::NonNegativeNumber);
  sub->add_option("--image-tokens", o->image_tokens, "Tokens of an image")->check(CLI::PositiveNumber)->capture_default_str();
  sub->add_option("--device", r.device, "Where to run: cpu, cuda:0, or a device of a plug-in")->capture_default_str();
  sub->add_option("--layers", r.num_layers, "Only the model's first N layers (0: all)")->check(CLI::NonNegativeNumber);
  sub->add_option("--layers-of-kind", r.layers_of_kind, "Of these, the first N of each kind (0: all)")->check(CLI::NonNegativeNumber);
  sub->add_option("--max-num-batched-tokens", r.max_num_batched_tokens, "Query tokens of a step at most")->capture_default_str();
  sub->add_option("--max-num-seqs", r.max_num_seqs, "Requests of a step at most")->capture_default_str();
  sub->add_option("--block-size", r.block_size, "Tokens in a cache block (page)")->capture_default_str();
  sub->add_option("--q-dtype", o->q_dtype, "Activations: bf16")->capture_default_str();
  sub->add_option("--kv-dtype", o->kv_dtype, "Cache: f32, bf16, f16, fp8_e4m3, fp8_e5m2")->capture_default_str();
  sub->add_option("--kv-format", r.kv_format, kv_format_names() + ", or auto: what a fast backend prefers")->capture_default_str();
  sub->add_option("--kv-memory", o->kv_memory,
                  "Memory of pages and states, such as 2GiB (default: a quarter of the machine's, or 90 % of what a GPU has left)");
  sub->add_option("--backend", r.select.forced,
                  "Force a backend, by its name or one that vLLM or SGLang users know, for the families of layers that have it");
  sub->add_option("--prefill-backend", r.select.forced_prefill, "The same for prefill only");
  sub->add_option("--decode-backend", r.select.forced_decode, "The same for decode only");
  sub->add_option("--threads", r.num_threads, "Threads (0: one for each core)")->check(CLI::NonNegativeNumber);
  sub->add_option("--pacing", o->pacing, "arrival: as the trace says; saturate: all requests at once")
      ->check(CLI::IsMember({"arrival", "saturate"}))
      ->capture_default_str();
  sub->add_option("--rate-scale", r.rate_scale, "2: requests come twice as fast")->check(CLI::PositiveNumber)->capture_default_str();
  sub->add_option("--spec-tokens", r.drafts.tokens, "Speculative decoding: N drafts behind each token (0: none)")
      ->check(CLI::Range(0, serve::kMostDrafts));
  sub->add_flag("--spec-tree", r.drafts.tree, "Drafts are a tree instead of a chain");
  sub->add_option("--spec-acceptance", o->spec_acceptance, "Chance of a draft to be kept behind one that is")->capture_default_str();
  sub->add_flag("--no-prefix-sharing", o->no_prefix_sharing, "Do not look for shared prefixes, and keep no states behind them");
  sub->add_flag("--skip-too-long", r.skip_too_long, "Leave out requests that the cache could never hold, instead of an error");
  sub->add_option("--time-limit", r.time_limit_s, "Stop after so many seconds (0: never)")->check(CLI::NonNegativeNumber);
  sub->add_option("--verify", o->verify, "Share of outputs that the reference backend recomputes, such as 1%");
  sub->add_option("--verify-last", o->verify_last, "Share of requests whose last output and final state are recomputed in each layer");
  sub->add_option(
         "--seed", r.seed,
         "Same seed, same bits: whatever the batch size (but for layers of MLA, and a GPU's recurrent ones) and the number of threads")
      ->capture_default_str();
  sub->add_option("--report", o->report, "Write the report as one HTML page");
  sub->add_option("--json", o->json, "Write the report as JSON");
  sub->add_flag("--no-ceilings", o->no_ceilings,
                "Do not compare with what the device can do at best, which takes a CPU two seconds to measure");
  sub->add_flag("--quiet", o->quiet, "No progress bar and no report on the terminal");
  sub->footer(
      "Examples:\n"
      "  imbrex run --model llama-3.1-8b --trace trace.jsonl --layers 2 --verify 1% --report out.html\n"
      "  imbrex run --model gpt-oss-20b --trace azure.csv --num-requests 1000 --kv-dtype fp8_e4m3 --kv-memory 2GiB\n"
      "  imbrex run --model llama-3.1-8b --trace azure.csv --device cuda:0 --pacing saturate --verify 0.1% --report out.html\n"
      "  imbrex run --model gemma-2-9b --trace trace.jsonl --pacing saturate --backend cpu_avx512 --json out.json\n"
      "  imbrex run --model gemma-3-4b --trace azure.csv --layers 6 --image-every 1024 --image-tokens 256 --verify 0.1%\n"
      "  imbrex run --model lfm2-1.2b --trace trace.jsonl --verify 1%\n"
      "  imbrex run --model qwen3-next-80b-a3b --trace trace.jsonl --layers 4 --verify 0.1%\n"
      "  imbrex run --model nemotron-3-nano-30b-a3b --trace mooncake.jsonl --num-requests 200 --shrink 16 --layers-of-kind 2\n"
      "  imbrex run --model qwen3-next-80b-a3b --trace trace.jsonl --layers-of-kind 1 --spec-tokens 6 --spec-tree --verify 0.1%\n"
      "  imbrex run --model falcon-mamba-7b --trace trace.jsonl --layers 2 --spec-tokens 6 --spec-tree --verify 0.1%\n\n"
      "Exit code 1 when a verified output differs from the reference.");
  sub->callback([o, &action] { action = [o] { return run_trace(*o); }; });
}

}  // namespace imbrex::cli
