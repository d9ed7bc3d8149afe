#pragma once
// What the ledger of clean kernels has of the variants of variants.h: those whose tests passed, each with a hash of all that these tests
// read. Where CI finds the same hash again, it leaves the variant out.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "conformance/kernel_ledger.h"
#include "cuda/lanes/variants.h"
#include "gpu/kernel_texts.h"

namespace imbrex::test {

struct LanesLibrary {
  std::string name, variant, text;
  std::string description;  // with its entry, its parameters, its threads and its thread blocks
};

class LanesRecords {
 public:
  // `built`: the folder with libraries.txt, the list of them that CMake writes, and with the texts that they are made of. `root`: of the
  // sources.
  LanesRecords(const std::string& built, const std::string& root);

  // A header or a source, by the name that files include it by.
  std::string& text(const std::string& name) { return texts_.at(name); }

  // Of the variant's libraries: their texts and the headers that these include, the constants, how they are compiled; of the machine that
  // runs them; of the test, and of the host's code that makes its lists and runs its cases; of the case: spec, layout and numbers.
  std::string content(const Variant&) const;

  std::vector<std::string> libraries_of(const Variant&) const;

 private:
  std::string own_content(const Variant&) const;

  std::string compiler_;
  std::vector<LanesLibrary> libraries_;
  std::map<std::string, std::string> texts_;
};

// Other variants that tests compare this one with, and that are left out only where it is.
inline std::set<std::string> companions_of(const Variant& v) {
  using Names = std::set<std::string>;
  for (Names group : {Names{"latent", "latent_stored"}, Names{"latent_tiles", "spread_tiles", "spread_fewest"},
                      Names{"nodes_latent_tiles", "nodes_spread"}, Names{"few_wide", "few_wide_spread", "few_wide_fewest"},
                      Names{"pair_tiles", "spread_paired"}, Names{"few_latents", "few_spread"}, Names{"shared_heads", "heads"},
                      Names{"tma_shared_heads", "tma_heads"}})
    if (group.erase(v.name) > 0) return group;
  return {};
}

}  // namespace imbrex::test
