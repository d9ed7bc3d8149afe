// See records.h.
#include "cuda/lanes/records.h"

#include <fmt/format.h>

#include <filesystem>
#include <sstream>

#include "attention/spec_fields.h"
#include "conformance/attention/case_inputs.h"
#include "conformance/case_fields.h"
#include "core/check.h"
#include "core/read_file.h"

namespace imbrex::test {

namespace fs = std::filesystem;

namespace {

// The test, what runs a text, and the host's code for lists, inputs, caches and the verdict; with each, the headers that it includes.
constexpr const char* kHostSources[] = {"cuda/lanes/lanes_test.cpp",
                                        "cuda/lanes/kernel.cpp",
                                        "cuda/lanes/machine.cpp",
                                        "attention/balance.cpp",
                                        "attention/key_source.cpp",
                                        "attention/kv_codec.cpp",
                                        "attention/kv_codec_ds_mla.cpp",
                                        "attention/kv_codec_strided.cpp",
                                        "attention/position_bias.cpp",
                                        "attention/reference.cpp",
                                        "attention/schedule.cpp",
                                        "attention/shared_keys.cpp",
                                        "attention/shared_runs.cpp",
                                        "conformance/attention/case_inputs.cpp",
                                        "conformance/attention/case_runner.cpp",
                                        "conformance/attention/judge.cpp",
                                        "conformance/error_stats.cpp",
                                        "conformance/host_tensor.cpp",
                                        "conformance/poison.cpp"};
// A text that includes them.
constexpr const char* kHost = "host_sources";
// What differs there between two variants is in their hashes: an added one leaves the others as they are.
constexpr const char* kVariants[] = {"cuda/lanes/variants.h", "cuda/lanes/latent_variants.h"};

std::string read_text(const fs::path& path) { return read_file(path.string(), 16 << 20, {"lanes", "lanes", "lanes"}); }

}  // namespace

LanesRecords::LanesRecords(const std::string& built, const std::string& root) {
  for (const char* folder : {"tests", "src", "include"}) {
    const fs::path from = fs::path(root) / folder;
    for (const fs::directory_entry& file : fs::recursive_directory_iterator(from))
      if (const fs::path suffix = file.path().extension(); suffix == ".h" || suffix == ".cpp" || suffix == ".inl")
        texts_[file.path().lexically_relative(from).string()] = read_text(file.path());
  }
  for (const char* file : kVariants) texts_[file].clear();
  for (const char* source : kHostSources) texts_[kHost] += fmt::format("#include \"{}\"\n", source);
  for (const fs::directory_entry& file : fs::directory_iterator(fs::path(built) / "texts"))
    texts_[file.path().filename().string()] = read_text(file.path());
  std::istringstream list(read_text(fs::path(built) / "libraries.txt"));
  std::getline(list, compiler_);
  for (std::string line; std::getline(list, line);) {
    LanesLibrary library{.name = {}, .variant = {}, .text = {}, .description = line};
    std::istringstream words(line);
    check(bool(words >> library.name >> library.variant >> library.text), "lanes",
          "expected a line \"LIBRARY VARIANT TEXT ENTRY PARAMETERS THREADS BLOCKS\", got \"{}\"", line);
    libraries_.push_back(std::move(library));
  }
}

std::vector<std::string> LanesRecords::libraries_of(const Variant& v) const {
  std::vector<std::string> names;
  for (const LanesLibrary& library : libraries_)
    if (library.variant == v.name) names.push_back(library.name);
  return names;
}

std::string LanesRecords::own_content(const Variant& v) const {
  std::vector<EmbeddedText> views;
  for (const auto& [path, text] : texts_) views.push_back({path, text});
  const gpu::KernelTexts texts(views, "config.cuh", ".cu");
  gpu::Hash128 hash;
  const std::string constants = cuda::config_text(v.key());
  hash.add(texts.content_hash({kHost, "host", {}}, "", {}, compiler_));
  for (const LanesLibrary& library : libraries_)
    if (library.variant == v.name)
      hash.add(library.description).add(texts.content_hash({library.text, "host", {}}, constants, {}, compiler_));

  const Case& c = v.c;
  hash.add(fmt::format("{} {} {} {} {} {} {} {} {}", v.name, v.arch, int(v.regime), v.rows, int(v.text), c.seed, c.csr, c.order,
                       c.padding_tokens))
      .add(to_string(c.out_dtype));
  for_each_field(c.spec, [&](const SpecField& field, const auto& value) { hash.add(field.name).add(json_of(value).dump()); });
  for (const CaseRequest& r : c.requests) hash.add(fmt::format("{} {} {}", r.q_len, r.seq_len, r.id));
  const CaseInputs in = make_inputs(c);
  for (const HostTensor* tensor : {&in.q, &in.k, &in.v, &in.sinks, &in.alibi_slopes, &in.head_scales, &in.relative_bias, &in.custom_mask,
                                   &in.positions, &in.q_scale, &in.k_scale, &in.v_scale, &in.k_rope_scale})
    hash.add({tensor->bytes.data(), tensor->bytes.size()});
  return hash.hex();
}

std::string LanesRecords::content(const Variant& v) const {
  gpu::Hash128 hash;
  hash.add(own_content(v));
  for (const Variant& other : variants())
    if (companions_of(v).contains(other.name)) hash.add(own_content(other));
  return hash.hex();
}

}  // namespace imbrex::test
