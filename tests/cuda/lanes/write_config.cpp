// Writes config.cuh of each variant, and its threads, below a folder: `write_config FOLDER`. Runs when the tests are built.
#include <fstream>
#include <iostream>

#include "cuda/lanes/variants.h"

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "expected one folder, got " << argc - 1 << " arguments\n", 2;
  for (const imbrex::test::Variant& v : imbrex::test::variants()) {
    std::ofstream file(std::string(argv[1]) + "/" + v.name + "/config.cuh");
    file << imbrex::cuda::config_text(v.key());
    if (!file.flush()) return std::cerr << "cannot write the constants of " << v.name << "\n", 1;
  }
}
