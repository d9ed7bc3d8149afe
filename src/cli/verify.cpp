// `imbrex verify FILE...`: runs case files through every backend that supports them.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "conformance/case_file.h"
#include "conformance/device_mirror.h"
#include "core/check.h"
#include "imbrex/select.h"

namespace imbrex::cli {
namespace {

struct VerifyArguments {
  std::vector<std::string> files;
  std::string device = "cpu", backends, format = "table";
  bool json = false, quiet = false;
};

std::vector<const Backend*> wanted_backends(const std::string& text) {
  if (text.empty()) return backends();
  std::vector<const Backend*> list;
  for (const std::string& name : split(text, ",")) {
    list.push_back(find_backend(name));
    check(list.back() != nullptr, "cli.backend", "the name of a backend, got \"{}\" (imbrex info lists them)", name);
  }
  return list;
}

int run_verify(const VerifyArguments& o) {
  const DeviceInfo device = describe_device(o.device);
  check(device.present, "backend.device_absent", "--device: expected a device of this machine, got {}", device.str());
  auto list = wanted_backends(o.backends);
  std::vector<std::unique_ptr<Backend>> mirrors;
  for (const Backend*& backend : list) {
    if (device.device.type != DeviceType::cpu) backend = mirrors.emplace_back(device_mirror(*backend)).get();
  }
  serve::Table table{{"case", "backend", "variant", ">max error", ">bound", ">mean error", ">bound", "result"}, {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  int failed = 0, passed = 0;
  for (const std::string& path : o.files) {
    for (const VerifyRow& row : verify_case(load_case(path), device, list)) {
      const bool ran = row.refused.empty();
      if (ran) ++(row.pass() ? passed : failed);
      const auto number = [&](double value) { return ran ? fmt::format("{:.2e}", value) : std::string(); };
      table.rows.push_back({path, row.backend, row.variant, number(row.judgement.out.max), number(row.bounds.max),
                            number(row.judgement.out.mean), number(row.bounds.mean),
                            !ran         ? "refused: " + row.refused
                            : row.pass() ? "pass"
                                         : "FAIL: " + row.judgement.failure});
      nlohmann::ordered_json entry{{"case", path}, {"backend", row.backend}, {"variant", row.variant}};
      if (ran) {
        entry.update({{"max_error", row.judgement.out.max},
                      {"max_bound", row.bounds.max},
                      {"mean_error", row.judgement.out.mean},
                      {"mean_bound", row.bounds.mean},
                      {"pass", row.pass()},
                      {"failure", row.judgement.failure}});
      } else {
        entry["refused"] = row.refused;
      }
      j.push_back(entry);
    }
  }
  if (o.json || o.format == "json") {
    fmt::print("{}\n", j.dump(2));
  } else if (!o.quiet) {
    fmt::print("{}", print_as(table, o.format));
  }
  if (!o.json && o.format == "table") fmt::print("{}{} passed, {} failed\n", o.quiet ? "" : "\n", passed, failed);
  return failed > 0 ? kCheckFailed : passed > 0 ? kOk : kUnsupported;
}

}  // namespace

void add_verify(CLI::App& app, Action& action) {
  auto o = std::make_shared<VerifyArguments>();
  CLI::App* sub = app.add_subcommand("verify", "Run case files (.safetensors) through every backend that supports them");
  sub->add_option("FILE", o->files, "Case files, see docs/case-files.md")->required();
  sub->add_option("--device", o->device, "Where to run: cpu, cuda:0")->capture_default_str();
  sub->add_option("--backend", o->backends, "Only these, separated by commas");
  sub->add_option("--format", o->format, "table, markdown, csv, json")
      ->check(CLI::IsMember({"table", "markdown", "csv", "json"}))
      ->capture_default_str();
  sub->add_flag("--json", o->json, "Like --format json");
  sub->add_flag("--quiet", o->quiet, "Only the last line");
  sub->footer(
      "Examples:\n  imbrex verify cases/*.safetensors --backend cpu_generic\n  imbrex verify cases/*.safetensors --device cuda:0\n\nExit "
      "code 1 when a result is out of bounds, 3 when nothing "
      "ran.");
  sub->callback([o, &action] { action = [o] { return run_verify(*o); }; });
}

}  // namespace imbrex::cli
