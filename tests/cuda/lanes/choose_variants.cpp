// Chooses the variants that CI builds and runs: `choose_variants LEDGER NUMBER` prints the libraries of all that the ledger does not have,
// and of a twentieth of the others, that of the number. The others' names go to recorded.txt beside the libraries. `choose_variants LEDGER
// renew` writes to the ledger that all variants have passed.
#include <algorithm>
#include <charconv>
#include <fstream>
#include <iostream>

#include "cuda/lanes/records.h"

namespace {

using namespace imbrex;

int write_to(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  return file.flush() ? 0 : (std::cerr << "cannot write " << path << "\n", 2);
}

int renew(const std::string& path, const test::LanesRecords& records) {
  std::vector<PrecompiledKernel> passed;
  for (const test::Variant& v : test::variants()) passed.push_back({.file = v.name, .arch = kHostArch, .content = records.content(v)});
  KernelLedger ledger(path);
  ledger.renew(std::vector<std::string>{kHostArch}, passed);
  return write_to(path, ledger.str());
}

int choose(const std::string& path, const test::LanesRecords& records, int number) {
  const KernelLedger ledger(path);
  std::map<std::string, test::Variant> left_out;
  for (const test::Variant& v : test::variants()) {
    const std::string content = records.content(v);
    if (ledger.find(content) != nullptr && KernelLedger::share(content) != number % KernelLedger::kShares) left_out.emplace(v.name, v);
  }
  std::string names;
  for (const test::Variant& v : test::variants()) {
    const auto is_left_out = [&](const std::string& name) { return left_out.contains(name); };
    if (is_left_out(v.name) && std::ranges::all_of(test::companions_of(v), is_left_out))
      names += std::string(v.name) + "\n";
    else
      for (const std::string& library : records.libraries_of(v)) std::cout << library << "\n";
  }
  return write_to(IMBREX_LANES "/recorded.txt", names);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string_view what = argc == 3 ? argv[2] : "";
  int number = 0;
  const auto [end, error] = std::from_chars(what.data(), what.data() + what.size(), number);
  const bool is_number = error == std::errc() && end == what.data() + what.size() && number >= 0;
  if (what != "renew" && !is_number) return std::cerr << "expected a ledger, and a number or renew\n", 2;
  const test::LanesRecords records(IMBREX_LANES, IMBREX_ROOT);
  return is_number ? choose(argv[1], records, number) : renew(argv[1], records);
} catch (const std::exception& e) {
  return std::cerr << e.what() << "\n", 2;
}
