// `imbrex bench`: times backends on batches written in vLLM's notation, or on cases of the conformance table.
#include "cli/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "cli/cli.h"
#include "cli/kernel_choices.h"
#include "conformance/attention/cases.h"
#include "core/check.h"
#include "imbrex/select.h"
#include "serve/ceilings.h"
#include "serve/recurrent_bench.h"

namespace imbrex::cli {
namespace {

using nlohmann::ordered_json;

std::vector<AttentionJob> jobs_of(const BenchArguments& o) {
  std::vector<AttentionJob> jobs;
  if (!o.cases.empty()) {
    check(o.bench.kv_order.empty(), "bench.kv_order", "cases have orders of their own, got \"{}\"", o.bench.kv_order);
    std::regex pattern;
    try {
      pattern.assign(o.cases);
    } catch (const std::regex_error& error) {
      fail("cli.cases", "a regular expression, got \"{}\" ({})", o.cases, error.what());
    }
    for (const Case& c : cases()) {
      if (!std::regex_search(c.name, pattern)) continue;
      AttentionJob job{c.name, c.spec, {}};
      for (const CaseRequest& r : c.requests) job.requests.push_back({r.q_len, r.seq_len});
      jobs.push_back(std::move(job));
    }
    check(!jobs.empty(), "cli.cases", "a pattern that some of the {} cases match, got \"{}\"", cases().size(), o.cases);
    return jobs;
  }
  for (const Named<AttentionSpec>& named : attention_specs_of(o.spec)) {
    for (const std::string& text : batches_of(o)) {
      const auto items = serve::parse_batch(text);
      jobs.push_back({named.name.empty() ? serve::to_string(items) : fmt::format("{}, {}", serve::to_string(items), named.name), named.spec,
                      requests_of(items)});
    }
  }
  return jobs;
}

DeviceInfo device_of(const BenchArguments& o) {
  DeviceInfo device = describe_device(o.device);
  check(device.present, "backend.device_absent", "--device: expected a device of this machine, got {}", device.str());
  return device;
}

void set_options(BenchArguments& o, ThreadPool& pool) {
  o.bench.threads = pool.parallel_for();
  o.bench.min_seconds = o.min_time;
  o.bench.max_seconds = std::max(o.max_time, o.min_time);
  o.bench.target_noise = o.noise / 100;
  o.bench.check = !o.no_check;
}

int run_bench(BenchArguments& o) {
  const DeviceInfo device = device_of(o);
  const bool gpu = device.device.type == DeviceType::cuda;
  const double unit = gpu ? 1e12 : 1e9;
  ThreadPool pool(o.threads);
  set_options(o, pool);
  if (o.family == "short_conv") return run_short_conv_bench(o, device, pool.parallel_for());
  if (o.family == "recurrent") return run_recurrent_bench(o, device, pool.parallel_for());
  if (o.family == "mla") return run_mla_bench(o, device, pool.parallel_for());
  if (o.zoo) return run_zoo(o, device);
  const std::vector<AttentionJob> jobs = jobs_of(o);
  if (o.halves) return run_halves(o, device, pool.num_threads(), jobs);
  serve::Ceilings ceilings;
  if (!o.no_ceilings) ceilings = serve::ceilings_of(device, o.threads);

  serve::Table table{{"case", "backend", ">µs", ">best µs", ">noise %", gpu ? ">KV TB/s" : ">KV GB/s", gpu ? ">TFLOP/s" : ">GFLOP/s",
                      ">of ceiling", ">plan µs"},
                     {}};
  ordered_json j = ordered_json::array();
  std::string notes;
  for (const AttentionJob& job : jobs) {
    const auto list = backends_for(job, device, o);
    if (list.empty()) fmt::print(stderr, "{}: no backend runs {}\n", job.name, job.spec.str());
    for (const BackendOf<AttentionFamily>* backend : list) {
      const serve::BenchResult r = serve::bench(*backend, job.spec, device, job.requests, o.bench);
      const serve::Share share = share_of(r, *backend, job.spec, ceilings, device);
      const std::vector<KernelChoice> kernels = backend->kernel_choices(job.spec, device);
      const BenchOf of{job.name, job.spec.str(), backend->name(), device, pool.num_threads()};
      const OwnFigures own{{fmt::format("{:.2f}", r.kv_bytes / r.median_s / unit), fmt::format("{:.1f}", r.flops / r.median_s / unit)},
                           {{"kv_bytes", r.kv_bytes},
                            {"flops", r.flops},
                            {"kv_bytes_per_s", r.kv_bytes / r.median_s},
                            {"flop_per_s", r.flops / r.median_s},
                            {"cache_bytes", r.cache_bytes},
                            {"kv_copies", r.kv_copies}}};
      table.rows.push_back(bench_row(of, r, share, own));
      j.push_back(bench_entry(of, r, share, own, kernels));
      if (o.verbose) notes += fmt::format("{}, {}\n{}", job.name, backend->name(), lines_of(kernels));
    }
  }
  return print_bench(o, device, pool.num_threads(), table, j, notes);
}

// Options that `add` gives to a subcommand.
std::vector<CLI::Option*> added_options(CLI::App& sub, const std::function<void()>& add) {
  const size_t before = sub.get_options().size();
  add();
  const std::vector<CLI::Option*> all = sub.get_options();
  return {all.begin() + long(before), all.end()};
}

// Those of attention's options that latent attention has too.
bool is_for_mla(const CLI::Option* option) {
  static const std::set<std::string> kNames{
      "--model",  "--heads",        "--q-dtype", "--kv-dtype",       "--kv-format",     "--block-size", "--scale",       "--sinks",
      "--window", "--window-right", "--chunk",   "--chunk-lookback", "--bidirectional", "--tree",       "--common-keys", "--balanced"};
  return kNames.count(option->get_name()) > 0;
}

void check_family(const std::string& family, const std::vector<CLI::Option*>& of_others) {
  for (const CLI::Option* option : of_others)
    check(option->count() == 0, "cli.family", "--family {}: expected options of that family, got {}", family, option->get_name());
}

}  // namespace

std::vector<const BackendOf<AttentionFamily>*> backends_for(const AttentionJob& job, const DeviceInfo& device, const BenchArguments& o) {
  std::vector<const BackendOf<AttentionFamily>*> list;
  SelectOptions options;
  auto names = split(o.backends, ",");
  if (names.empty()) names.emplace_back();
  for (const std::string& name : names) {
    options.forced = name;
    const Selection selection = select(job.spec, device, options);
    if (selection.backend) list.push_back(selection.backend);
  }
  return list;
}

std::vector<std::string> batches_of(const BenchArguments& o) {
  static const std::vector<std::string> kDefault{"q2k", "q512s4k", "q1s8k", "32q1s1k", "q1k,16q1s1k"};
  return o.batches.empty() ? kDefault : o.batches;
}

std::vector<serve::BenchRequest> requests_of(const std::vector<serve::BatchItem>& items) {
  std::vector<serve::BenchRequest> requests;
  for (const serve::BatchItem& item : items) requests.insert(requests.end(), size_t(item.count), {item.q_len, item.seq_len});
  return requests;
}

int print_bench(const BenchArguments& o, const DeviceInfo& device, int num_threads, const serve::Table& table, const ordered_json& j,
                std::string_view notes) {
  if (o.json || o.format == "json") {
    fmt::print("{}\n", j.dump(2));
  } else {
    const bool gpu = device.device.type != DeviceType::cpu;
    if (o.format == "table")
      fmt::print("{}, {}{}\n\n", device.name, gpu ? device.device.str() : fmt::format("{} threads", num_threads),
                 o.no_check ? "" : "; every row checked against the reference first");
    fmt::print("{}", print_as(table, o.format));
    if (!notes.empty()) fmt::print(o.format == "table" ? stdout : stderr, "\n{}", notes);
  }
  return j.empty() ? kUnsupported : kOk;
}

void add_bench(CLI::App& app, Action& action) {
  auto o = std::make_shared<BenchArguments>();
  CLI::App* sub = app.add_subcommand("bench", "Time layers on batches, with a check against the reference first");
  sub->add_option("BATCH", o->batches,
                  "vLLM's notation: items [count]q<queries>[k][s<keys>[k]] joined by ',' or '_', k is 1024 (default: five typical ones)");
  sub->add_option("--family", o->family, "Of layers: attention, mla, short_conv or recurrent")
      ->check(CLI::IsMember({"attention", "mla", "short_conv", "recurrent"}))
      ->capture_default_str();
  const auto of_short_conv = added_options(*sub, [&] {
    sub->add_option("--dim", o->short_conv.dim, "short_conv: channels")->capture_default_str();
    add_field_options(*sub, o->short_conv, "short_conv: ");
  });
  const auto of_recurrent = added_options(*sub, [&] {
    sub->add_option("--layer", o->recurrent_layer, "recurrent: the layer of a published model")
        ->check(CLI::IsMember(serve::recurrent_layer_names()))
        ->capture_default_str();
    sub->add_option("--k-heads", o->k_heads, "recurrent: key heads, such as a GPU of several has (0: the layer's)")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    sub->add_option("--v-heads", o->v_heads, "recurrent: value heads, likewise")->check(CLI::NonNegativeNumber)->capture_default_str();
    add_dtype_option(*sub, "--state-dtype", o->state_dtype, "recurrent: f32, bf16, f16");
    sub->add_option("--state-layout", o->state_layout, "recurrent: k_first, v_first")
        ->check(CLI::IsMember({to_string(StateLayout::k_first), to_string(StateLayout::v_first)}))
        ->capture_default_str();
    sub->add_flag("--with-outputs", o->with_outputs, "recurrent: with the layer's norm and gate of outputs, where a norm is over a head");
  });
  const auto of_mla = added_options(*sub, [&] {
    MlaSpec& mla = o->mla;
    sub->add_option("--kv-lora-rank", mla.kv_lora_rank, "mla: elements of a latent")->capture_default_str();
    sub->add_option("--nope-dim", mla.qk_nope_dim, "mla: of queries and keys, without a position")->capture_default_str();
    sub->add_option("--rope-dim", mla.qk_rope_dim, "mla: of queries and keys, with a position; 0: none")->capture_default_str();
    sub->add_option("--v-dim", mla.v_dim, "mla: of values")->capture_default_str();
    sub->add_flag("--absorbed", mla.absorbed, "mla: queries and outputs are in latent space");
  });
  auto of_attention = added_options(*sub, [&] { add_spec_options(*sub, o->spec); });
  const auto add_of_attention = [&](CLI::Option* option) {
    of_attention.push_back(option);
    return option;
  };
  add_of_attention(
      sub->add_option("--cases", o->cases, "Time the cases of the conformance table whose name matches this regular expression instead"));
  add_of_attention(sub->add_flag(
      "--zoo", o->zoo,
      "Look for cliffs: layers of published models (or of --model), whole and shared out over GPUs, in many steps, page sizes and "
      "cache types"));
  add_of_attention(sub->add_option("--only", o->only, "With --zoo: cells whose names this regular expression matches"));
  add_of_attention(sub->add_flag("--list", o->list, "With --zoo: print the names of the cells and leave"));
  add_of_attention(sub->add_option("--seconds", o->seconds, "With --zoo: begin no cell after so many (0: run all)"))
      ->check(CLI::NonNegativeNumber);
  add_of_attention(sub->add_flag("--halves", o->halves,
                                 "Cut batches in two, at the end of a request or through the only one, and time the halves on two streams "
                                 "(on a CPU with half of the threads each) beside the whole"));
  add_of_attention(sub->add_option("--cut", o->cut, "With --halves: the query token that the second half begins with (0: in the middle)"))
      ->check(CLI::NonNegativeNumber);
  sub->get_option("--halves")->excludes(sub->get_option("--zoo"));
  sub->add_option("--backend", o->backends,
                  "Backends or aliases, separated by commas (default: the one that select takes; of other families all but the reference)");
  sub->add_option("--device", o->device, "Where to run: cpu, cuda:0, or a device of a plug-in")->capture_default_str();
  sub->add_option("--threads", o->threads, "Threads (0: one for each core)")->check(CLI::NonNegativeNumber);
  sub->add_option("--kv-copies", o->bench.kv_copies,
                  "Rotate over so many caches, or sets of tensors, as the layers of a model do: they then come from DRAM (0: one, or on a "
                  "GPU as many "
                  "as that takes)")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  add_of_attention(sub->add_option("--common-keys", o->bench.common_keys,
                                   "Keys of a prompt that all requests have in the same blocks; the bytes of each request are counted"))
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  add_of_attention(sub->add_flag("--packed-mask", o->bench.packed_mask,
                                 "With --custom-mask, or cases that have one: a bit for each query and key instead of a byte"))
      ->excludes(sub->get_option("--zoo"));
  add_of_attention(sub->add_flag("--balanced", o->bench.balanced, "Lists that follow the load: results then depend on the batch"))
      ->excludes(sub->get_option("--zoo"))
      ->excludes(sub->get_option("--halves"));
  add_of_attention(
      sub->add_option("--kv-order", o->bench.kv_order,
                      "Of l(ayer), b(lock), h(ead), t(oken), d(im), outermost first: lbhtd (default), or lbthd for heads within a token"));
  sub->add_option("--min-time", o->min_time, "CPU: seconds to repeat at least")->check(CLI::NonNegativeNumber)->capture_default_str();
  sub->add_option("--max-time", o->max_time, "CPU: seconds to repeat at most")->check(CLI::NonNegativeNumber)->capture_default_str();
  sub->add_option("--min-samples", o->bench.min_samples, "CPU: samples at least")->check(CLI::Range(1, 1000000))->capture_default_str();
  sub->add_option("--noise", o->noise, "CPU: stop when the median is known to so many per cent")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  sub->add_option("--seed", o->bench.seed, "Of the data and of the order of pages")->capture_default_str();
  sub->add_flag("--no-check", o->no_check, "Do not compare with the reference first");
  sub->add_flag("--no-ceilings", o->no_ceilings, "Do not compare with what the device can do at best");
  sub->add_option("--format", o->format, "table, markdown, csv, json")
      ->check(CLI::IsMember({"table", "markdown", "csv", "json"}))
      ->capture_default_str();
  sub->add_flag("-v,--verbose", o->verbose, "Also the kernels of each backend, and the sizes of their tiles (json always has them)");
  sub->add_flag("--json", o->json, "Like --format json");
  sub->footer(
      "Examples:\n"
      "  imbrex bench q2k 32q1s1k \"q512s4k,16q1s2k\"\n"
      "  imbrex bench 32q1s4k --kv-dtype fp8_e4m3 --kv-copies 8 --backend cpu_avx512,cpu_generic\n"
      "  imbrex bench q16k 64q1s4k 4q4s8k --device cuda:0 --block-size 64\n"
      "  imbrex bench q2k --model gpt-oss-20b --format markdown\n"
      "  imbrex bench 64q8s4k --tree                (drafts: two behind each)\n"
      "  imbrex bench 64q8s4k --custom-mask --packed-mask\n"
      "  imbrex bench 64q1s4k q4k --halves --device cuda:0\n"
      "  imbrex bench 64q1s8292 --common-keys 8192 --device cuda:0\n"
      "  imbrex bench --cases '^shape_.*decode' --backend cpu_generic\n"
      "  imbrex bench --family mla --heads 16 64q1s4k q4k 16q2s8k\n"
      "  imbrex bench --family mla --absorbed --heads 16 64q1s8292 --common-keys 8192 --balanced --device cuda:0\n"
      "  imbrex bench --family short_conv --dim 2048 q8k 8q1s16 32q5s1k\n"
      "  imbrex bench --family short_conv --form plain --activation silu --dim 8192 --width 4 q8k 64q1s4k   (Qwen3-Next)\n"
      "  imbrex bench --family recurrent --layer kimi-linear q2k 64q1s4k\n"
      "  imbrex bench --zoo --device cuda:0 --model gemma-2-9b\n\n"
      "Columns: median and best time of one run; noise is the half-width of the median's 95 % interval; GB/s of keys and values read;\n"
      "useful FLOP/s; share of the nearer ceiling (flop, L3 or DRAM: measured, or of the GPU's data sheet); best time of planning on the\n"
      "host. On a GPU calls of up to 16 queries a request are timed inside of a graph, others back to back. Exit code 1: a check failed.\n"
      "--family mla: options of attention that latent attention has too, and its own; FLOP/s are of the cheaper way of each request.\n"
      "--family short_conv: GB/s read and written; of the ceiling is their sum as a share of what can be read.\n"
      "--family recurrent: GB/s of states read and written; of the ceiling is all that is moved as a share of what can be read.\n"
      "--zoo: cells that would take long run with fewer or shorter requests; beside is the share of the ceiling by the median share of "
      "the\n"
      "same kind of step and cache; cells below half of it are measured up to twice more. Exit code 1: an output is wrong, or such a cell "
      "is left.");
  sub->callback([o, sub, of_attention, of_mla, of_short_conv, of_recurrent, &action] {
    std::vector<CLI::Option*> not_for_mla = of_attention;
    std::erase_if(not_for_mla, is_for_mla);
    if (o->family != "short_conv") check_family(o->family, of_short_conv);
    if (o->family != "recurrent") check_family(o->family, of_recurrent);
    if (o->family != "mla") check_family(o->family, of_mla);
    if (o->family != "attention") check_family(o->family, o->family == "mla" ? not_for_mla : of_attention);
    o->heads_given = sub->count("--heads") > 0;
    o->page_given = sub->count("--block-size") > 0;
    o->kv_dtype_given = sub->count("--kv-dtype") > 0;
    o->time_given = sub->count("--min-time") + sub->count("--max-time") + sub->count("--noise") > 0;
    action = [o] { return run_bench(*o); };
  });
}

}  // namespace imbrex::cli
