// `imbrex verify FILE...`: runs case files through every backend that supports them.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "conformance/attention/device_mirror.h"
#include "conformance/case_file.h"
#include "conformance/recurrent/device_mirror.h"
#include "conformance/short_conv/device_mirror.h"
#include "core/check.h"
#include "imbrex/select.h"

namespace imbrex::cli {
namespace {

struct VerifyArguments {
  std::vector<std::string> files;
  std::string device = "cpu", backends, format = "table";
  bool json = false, quiet = false;
};

// The backends of a family that --backend names, for tensors in host memory. Names may be of another family.
template <class Family>
struct WantedBackends {
  std::vector<const BackendOf<Family>*> list;
  std::vector<std::string> others;
  std::vector<std::unique_ptr<BackendOf<Family>>> mirrors;

  WantedBackends(const std::vector<std::string>& names, const DeviceInfo& device) {
    if (names.empty()) list = backends<Family>();
    for (const std::string& name : names) {
      const BackendOf<Family>* const backend = find_backend<Family>(name);
      backend == nullptr ? others.push_back(name) : list.push_back(backend);
    }
    if (device.device.type == DeviceType::cpu) return;
    if constexpr (requires(const BackendOf<Family>& backend) { device_mirror(backend); })  // other families have no backend for GPUs
      for (const BackendOf<Family>*& backend : list) backend = mirrors.emplace_back(device_mirror(*backend)).get();
  }

  template <class File>
  std::vector<VerifyRow> verify(const File& file, const DeviceInfo& device) const {
    std::vector<VerifyRow> rows = verify_case(file, device, list);
    for (const std::string& name : others) rows.push_back({name, {}, "no backend of this family", {}, {}, {}});
    return rows;
  }
};

class Verifier {
 public:
  Verifier(const std::vector<std::string>& names, const DeviceInfo& device)
      : device_(device), attention_(names, device), short_conv_(names, device), mla_(names, device), recurrent_(names, device) {
    for (const std::string& name : names)
      check(find_backend(name) != nullptr || find_backend<ShortConvFamily>(name) != nullptr || find_backend<MlaFamily>(name) != nullptr ||
                find_backend<RecurrentFamily>(name) != nullptr,
            "cli.backend", "the name of a backend, got \"{}\" (imbrex info lists them)", name);
  }
  std::vector<VerifyRow> operator()(const CaseFile& file) const { return attention_.verify(file, device_); }
  std::vector<VerifyRow> operator()(const ShortConvCaseFile& file) const { return short_conv_.verify(file, device_); }
  std::vector<VerifyRow> operator()(const MlaCaseFile& file) const { return mla_.verify(file, device_); }
  std::vector<VerifyRow> operator()(const RecurrentCaseFile& file) const { return recurrent_.verify(file, device_); }

 private:
  DeviceInfo device_;
  WantedBackends<AttentionFamily> attention_;
  WantedBackends<ShortConvFamily> short_conv_;
  WantedBackends<MlaFamily> mla_;
  WantedBackends<RecurrentFamily> recurrent_;
};

int run_verify(const VerifyArguments& o) {
  const DeviceInfo device = describe_device(o.device);
  check(device.present, "backend.device_absent", "--device: expected a device of this machine, got {}", device.str());
  const Verifier verifier(split(o.backends, ","), device);
  serve::Table table{{"case", "backend", "variant", ">max error", ">bound", ">mean error", ">bound", "result"}, {}};
  nlohmann::ordered_json j = nlohmann::ordered_json::array();
  int failed = 0, passed = 0;
  for (const std::string& path : o.files) {
    for (const VerifyRow& row : std::visit(verifier, load_any_case(path))) {
      const bool ran = row.refused.empty();
      if (ran) ++(row.pass() ? passed : failed);
      const auto number = [&](double value) { return ran ? fmt::format("{:.2e}", value) : std::string(); };
      table.rows.push_back({path, row.backend, row.variant, number(row.error.max), number(row.bound.max), number(row.error.mean),
                            number(row.bound.mean),
                            !ran         ? "refused: " + row.refused
                            : row.pass() ? "pass"
                                         : "FAIL: " + row.failure});
      nlohmann::ordered_json entry{{"case", path}, {"backend", row.backend}, {"variant", row.variant}};
      if (ran) {
        entry.update({{"max_error", row.error.max},
                      {"max_bound", row.bound.max},
                      {"mean_error", row.error.mean},
                      {"mean_bound", row.bound.mean},
                      {"pass", row.pass()},
                      {"failure", row.failure}});
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
