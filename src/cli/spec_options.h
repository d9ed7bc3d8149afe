#pragma once
// The options by which select, bench and compile are told what to compute: a model, or one layer described by flags.
#include <optional>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "imbrex/model.h"

namespace imbrex::cli {

struct SpecOptions {
  std::string model;                                       // preset, config.json or a folder with one; empty: the flags
  AttentionSpec spec;                                      // fields with an option of their own (attention/spec_fields.inl); the others:
  std::string heads = "32/8", head_dim = "128", kv_dtype;  // kv_dtype empty: spec.q_dtype
  int window = 0;
  bool bidirectional = false;
};

// A kind of layer to look at.
template <class Spec>
struct Named {
  std::string name;         // "layers 0-31"; empty for flags
  std::vector<int> layers;  // as the model counts them
  Spec spec;
};

void add_spec_options(CLI::App&, SpecOptions&);
// Model kinds (with dtypes, cache format and trees of the options, and in attention their expressions), or the one spec of the flags. Error
// cli.*, spec.*, model.*.
std::vector<Named<LayerSpec>> specs_of(const SpecOptions&);
std::optional<ModelSpec> model_of(const SpecOptions&);  // with these dtypes and this format; nullopt: the flags describe one layer
// Those of attention, for commands that know no other family; a line on stderr tells of layers that are left out. Error cli.family when
// nothing is left.
std::vector<Named<AttentionSpec>> attention_specs_of(const SpecOptions&);
// The same for latent attention: model kinds of that family, or a spec with the dimensions of `dims` and all else of the flags;
// `heads_given`: also the number of heads.
std::vector<Named<MlaSpec>> mla_specs_of(const SpecOptions&, const MlaSpec& dims, bool heads_given);
KvFormat parse_kv_format(const std::string&);  // Error cli.kv_format
// Adds the option of each field of a spec that has one of its own in the table of its family. `before`: the first words of each help.
template <class Spec>
void add_field_options(CLI::App&, Spec&, const std::string& before);
// An option that names a type.
void add_dtype_option(CLI::App&, const char* flag, DType&, const std::string& help);

}  // namespace imbrex::cli
