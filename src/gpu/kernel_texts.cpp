// See kernel_texts.h.
#include "gpu/kernel_texts.h"

#include <algorithm>
#include <fstream>
#include <system_error>

#include "core/check.h"
#include "core/env.h"

namespace imbrex::gpu {

namespace fs = std::filesystem;

namespace {

// The name in `#include "name"`; empty for any other line.
std::string_view included_name(std::string_view line) {
  const auto skip = [&](std::string_view word) {
    if (!line.starts_with(word)) return false;
    line.remove_prefix(word.size());
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    return true;
  };
  if (!skip("#") || !skip("include") || !skip("\"")) return {};
  return line.substr(0, line.find('"'));
}

}  // namespace

KernelTexts::KernelTexts(std::span<const EmbeddedText> texts, std::string_view config, std::string_view suffix)
    : texts_(texts), config_(config), suffix_(suffix) {
  for (const EmbeddedText& source : texts_)
    if (source.path != config_) hash_.add(source.path).add(source.text);
}

std::string_view KernelTexts::text_of(const KernelKey& key) const {
  for (const EmbeddedText& source : texts_)
    if (source.path == key.path) return source.text;
  std::vector<std::string_view> names;
  for (const EmbeddedText& source : texts_)
    if (source.path.ends_with(suffix_)) names.push_back(source.path);
  fail("cuda.source", "expected one of {}, got a kernel file \"{}\"", fmt::join(names, ", "), key.path);
}

std::string KernelTexts::file_name(const KernelKey& key, std::string_view config, std::span<const std::string> options) const {
  Hash128 hash = hash_;
  hash.add(key.path).add(config);
  for (const std::string& option : options) hash.add(option);
  return fmt::format("{}-{}-{}", fs::path(key.path).stem().string(), key.arch, hash.hex());
}

std::string KernelTexts::content_hash(const KernelKey& key, std::string_view config, std::span<const std::string> options,
                                      std::string_view compiler) const {
  Hash128 hash;
  hash.add(key.path).add(config).add(compiler);
  for (const std::string& option : options) hash.add(option);
  std::vector<std::string_view> reached{key.path};
  for (size_t i = 0; i < reached.size(); ++i) {
    const auto source = std::find_if(texts_.begin(), texts_.end(), [&](const EmbeddedText& text) { return text.path == reached[i]; });
    check(source != texts_.end(), "cuda.source", "{} includes \"{}\", which is not among the texts", key.path, reached[i]);
    hash.add(source->path);
    for (std::string_view rest = source->text; !rest.empty();) {
      std::string_view line = rest.substr(0, rest.find('\n'));
      rest.remove_prefix(std::min(line.size() + 1, rest.size()));
      line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
      if (line.empty() || (line.starts_with("//") && !line.ends_with('\\'))) continue;
      hash.add(line);
      const std::string_view name = included_name(line);
      if (!name.empty() && name != config_ && std::find(reached.begin(), reached.end(), name) == reached.end()) reached.push_back(name);
    }
  }
  return hash.hex();
}

KernelTexts::Headers KernelTexts::headers(const std::string& config) const {
  Headers headers;
  for (const EmbeddedText& source : texts_) {
    headers.texts.push_back(source.path == config_ ? config.c_str() : source.text.data());
    headers.names.push_back(source.path.data());
  }
  return headers;
}

fs::path KernelTexts::write_to(const fs::path& folder, const KernelKey& key, std::string_view text, std::string_view config) const {
  const auto write = [&](const fs::path& path, std::string_view content) {
    std::error_code ignored;
    fs::create_directories(path.parent_path(), ignored);
    std::ofstream file(path, std::ios::binary);
    file.write(content.data(), std::streamsize(content.size()));
    file.close();
    check(bool(file), "cuda.dump", "cannot write {} ({} is set)", path.string(), env::kCudaDump);
  };
  for (const EmbeddedText& source : texts_) write(folder / source.path, source.path == config_ ? config : source.text);
  write(folder / key.path, text);
  return folder / key.path;
}

}  // namespace imbrex::gpu
