// docs/errors.md and the sources name the same codes.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace {

namespace fs = std::filesystem;

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::set<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> found;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) found.insert((*it)[1]);
  return found;
}

std::string without_comments(const std::string& text) {
  std::string kept;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) kept += line.substr(0, line.find("//")) + '\n';
  return kept;
}

bool is_file_name(const std::string& text) {
  static const std::set<std::string> endings = {"json", "jsonl", "csv", "md", "txt", "safetensors", "cpp", "h", "cu", "cuh", "cubin", "so"};
  if (text.find(".so.") != std::string::npos) return true;
  const size_t dot = text.find('.');
  return dot == text.rfind('.') && endings.count(text.substr(dot + 1)) > 0;
}

const fs::path kRoot = fs::path(IMBREX_TEST_DATA).parent_path().parent_path();

// Every literal of the sources that looks like a code, with the file it is in.
std::map<std::string, std::string> codes_in_sources() {
  const std::regex literal("\"([a-z][a-z_0-9]*(?:\\.[a-z_0-9]+)+)\"");
  std::map<std::string, std::string> codes;
  for (const fs::path folder : {"src", "python/src"}) {
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      if (entry.path().extension() != ".cpp" && entry.path().extension() != ".h") continue;
      for (const std::string& code : matches(without_comments(read(entry.path())), literal))
        if (!is_file_name(code)) codes.emplace(code, fs::relative(entry.path(), kRoot).string());
    }
  }
  for (const auto& entry : fs::recursive_directory_iterator(kRoot / "python" / "imbrex")) {
    if (entry.path().extension() != ".py") continue;
    for (const std::string& code : matches(read(entry.path()), std::regex("\"(python\\.[a-z_0-9]+)\"")))
      codes.emplace(code, fs::relative(entry.path(), kRoot).string());
  }
  return codes;
}

std::set<std::string> codes_in_docs() {
  std::set<std::string> codes = matches(read(kRoot / "docs" / "errors.md"), std::regex("`([a-z][a-z_0-9]*(?:\\.[a-z_0-9]+)+)`"));
  std::erase_if(codes, is_file_name);
  return codes;
}

TEST(ErrorCatalogue, EveryCodeOfTheSourcesIsDocumented) {
  const std::set<std::string> documented = codes_in_docs();
  const auto codes = codes_in_sources();
  EXPECT_GT(codes.size(), 100u);
  for (const auto& [code, file] : codes) {
    // A literal may also be the first words of codes, to sort them by.
    const auto next = documented.lower_bound(code);
    const bool known = next != documented.end() && (*next == code || next->rfind(code + '.', 0) == 0);
    EXPECT_TRUE(known) << file << " has the code " << code << ": add a row to docs/errors.md";
  }
}

TEST(ErrorCatalogue, EveryDocumentedCodeExists) {
  const auto codes = codes_in_sources();
  for (const std::string& code : codes_in_docs()) EXPECT_TRUE(codes.count(code)) << code << " is in docs/errors.md, but no source has it";
}

}  // namespace
