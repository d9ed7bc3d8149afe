#pragma once
// The options by which select and bench are told what to compute: a model, or one layer described by flags.
#include <string>
#include <vector>

#include "cli/cli.h"
#include "imbrex/model.h"

namespace imbrex::cli {

struct SpecOptions {
  std::string model;  // preset, config.json or a folder with one; empty: the flags
  std::string kind = "decoder", heads = "32/8", head_dim = "128";
  std::string q_dtype = "bf16", kv_dtype, kv_format = "strided";  // kv_dtype empty: q_dtype
  int block_size = 16, window = 0, chunk = 0;
  float soft_cap = 0, scale = 0;
  bool sinks = false, alibi = false, bidirectional = false, custom_mask = false;
};

// A kind of layer to look at.
struct NamedSpec {
  std::string name;  // "layers 0-31"; empty for flags
  std::vector<int> layers;
  AttentionSpec spec;
};

void add_spec_options(CLI::App&, SpecOptions&);
// Model kinds (with dtypes and cache format of the options), or the one spec of the flags. Error cli.*, spec.*, model.*.
std::vector<NamedSpec> specs_of(const SpecOptions&);
KvFormat parse_kv_format(const std::string&);  // Error cli.kv_format

}  // namespace imbrex::cli
