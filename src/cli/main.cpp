// The `imbrex` program: one subcommand a file, errors to stderr, stable exit codes.
#include <fmt/format.h>

#include <cstdio>
#include <new>

#include "api/plugin.h"
#include "cli/cli.h"
#include "imbrex/error.h"

namespace {

using namespace imbrex::cli;

// Broken input is usage; what is understood but cannot be done here is unsupported; a failed check is its own.
int exit_code_of(std::string_view code) {
  if (code == "replay.verify" || code.starts_with("bench.check")) return kCheckFailed;
  for (const std::string_view prefix : {"select.", "backend.", "stream.memory", "model.family.", "replay.model.", "kv_cache.size", "memory",
                                        "device.absent", "cuda.driver", "cuda.nvrtc_missing", "cuda.memory"}) {
    if (code.starts_with(prefix)) return kUnsupported;
  }
  return kUsage;
}

int report_error(std::string_view message, std::string_view code) {
  fflush(stdout);
  fmt::print(stderr, "error: {} [{}]\n", message, code);
  return exit_code_of(code);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "imbrex: the attention layer of LLM serving. Picks a backend for every layer of a model, plans every step,\n"
      "owns the paged KV cache and runs the kernels.\n",
      "imbrex"};
  app.set_version_flag("--version", IMBREX_VERSION);
  app.require_subcommand(1);
  app.footer(
      "Examples:\n"
      "  imbrex select --model llama-3.1-8b                 which backend runs each kind of layer, and why\n"
      "  imbrex run --model llama-3.1-8b --trace FILE       replay a serving trace, with a report\n"
      "  imbrex bench 2q2k,32q1s1k                          time attention on a batch\n"
      "  imbrex SUBCOMMAND --help                           all options, with examples\n\n"
      "Exit codes: 0 done, 1 a check failed, 2 bad arguments or input, 3 not supported here.");
  command_line() = "imbrex";
  for (int i = 1; i < argc; ++i) command_line() += std::string(" ") + argv[i];
  Action action;
  add_run(app, action);
  add_select(app, action);
  add_bench(app, action);
  add_verify(app, action);
  add_trace(app, action);
  add_info(app, action);
  add_compile(app, action);
  add_mask(app, action);
  add_completion(app, action);
  try {
    app.parse(argc, argv);
    imbrex::load_plugins_of_environment();
    return action();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const std::string first = argc > 1 ? argv[1] : "";
    const bool unknown =
        !first.empty() && first[0] != '-' && app.get_subcommands([&](const CLI::App* sub) { return sub->get_name() == first; }).empty();
    report_error(unknown ? fmt::format("there is no subcommand \"{}\", see imbrex --help", first) : error.what(), "usage");
    return kUsage;
  } catch (const imbrex::Error& error) {
    return report_error(error.what(), error.code());
  } catch (const std::bad_alloc&) {
    return report_error("out of memory", "memory");
  } catch (const std::exception& error) {
    report_error(error.what(), "internal");
    return kCheckFailed;
  }
}
