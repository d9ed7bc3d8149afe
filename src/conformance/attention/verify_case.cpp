// verify_case: a case file through every backend, in every layout that must not matter.
#include <fmt/format.h>

#include "attention/kv_codec.h"
#include "conformance/attention/case_file.h"

namespace imbrex {
namespace {

std::vector<RunOptions> variants_of(const CaseInputs& in) {
  std::vector<RunOptions> all;
  const auto add = [&](int block_size, const char* order, bool csr, KvFormat format) {
    RunOptions o;
    o.block_size = block_size;
    o.order = order;
    o.csr = csr;
    o.kv_format = format;
    o.page_seed = all.size() + 1;
    o.out_dtype = in.spec.out_dtypes()[all.size() % in.spec.out_dtypes().size()];
    all.push_back(o);
  };
  if (holds(KvFormat::strided, in.spec)) add(0, "lbhtd", false, KvFormat::strided);
  if (in.spec.block_size == 0) return all;  // encoders have no cache
  if (holds(KvFormat::strided, in.spec)) {
    add(1, "lbthd", true, KvFormat::strided);
    add(16, "lbhtd", false, KvFormat::strided);
    add(16, "lbthd", true, KvFormat::strided);
    add(64, "blhtd", false, KvFormat::strided);
    add(128, "hlbtd", true, KvFormat::strided);
  }
  for (const KvFormat format : kv_formats()) {
    for (int block_size : {16, 64, 128})
      if (format != KvFormat::strided && holds(format, in.spec) && fits(in.spec, format, block_size))
        add(block_size, "lbhtd", block_size == 64, format);
  }
  return all;
}

std::string name_of(const RunOptions& o) {
  if (o.block_size == 0) return "ragged";
  return fmt::format("page {} {} {}", o.block_size, o.csr ? "csr" : "dense",
                     o.kv_format == KvFormat::strided ? o.order : to_string(o.kv_format));
}

}  // namespace

std::vector<VerifyRow> verify_case(const CaseFile& file, const DeviceInfo& device,
                                   std::span<const BackendOf<AttentionFamily>* const> backends) {
  const Expected expected = expect(file.inputs, file.out, file.lse);
  std::vector<VerifyRow> rows;
  for (const BackendOf<AttentionFamily>* backend : backends) {
    std::string refused;
    bool ran = false;
    for (RunOptions options : variants_of(file.inputs)) {
      const auto reasons = backend->unsupported(run_spec(file.inputs, options), device);
      if (!reasons.empty()) {
        if (refused.empty()) refused = joined(reasons);
        continue;
      }
      ran = true;
      options.poison = Poison::nan;
      const RunResult result = run_case(*backend, device, file.inputs, options);
      Judgement judgement = judge(expected, result);
      VerifyRow row{.backend = std::string(backend->name()),
                    .variant = name_of(options),
                    .refused = {},
                    .error = judgement.out,
                    .bound = {expected.bounds.max, expected.bounds.mean},
                    .failure = std::move(judgement.failure)};
      options.poison = Poison::ones;
      const RunResult again = run_case(*backend, device, file.inputs, options);
      if (row.pass() && !(bit_identical(result.out, again.out) && bit_identical(result.lse, again.lse)))
        row.failure = "bytes that no request owns change the result";
      rows.push_back(std::move(row));
    }
    if (!ran) rows.push_back({std::string(backend->name()), {}, refused, {}, {}, {}});
  }
  return rows;
}

}  // namespace imbrex
