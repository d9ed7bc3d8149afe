// load_model(): a preset's name, a config.json, or a folder with one; what the program's --model option accepts.
#include <filesystem>

#include "core/check.h"
#include "core/read_file.h"
#include "imbrex/model.h"
#include "model/config_reader.h"

namespace imbrex {

namespace {

namespace fs = std::filesystem;

// Presets that begin like `name`, for the message: those that share its longest prefix.
std::string similar_presets(std::string_view name) {
  size_t longest = 3;  // shorter prefixes say nothing
  std::string list;
  for (const ModelPreset& preset : model_presets()) {
    size_t same = 0;
    while (same < name.size() && same < preset.name.size() && name[same] == preset.name[same]) ++same;
    if (same < longest) continue;
    if (same > longest) list.clear();
    longest = same;
    list += fmt::format("{}{}", list.empty() ? "; similar: " : ", ", preset.name);
  }
  return list;
}

}  // namespace

ModelSpec load_model(std::string_view preset_or_path) {
  for (const ModelPreset& preset : model_presets())
    if (preset_or_path == preset.name || preset_or_path == preset.hf_id) return parse_model_config(preset.config, preset.name);

  std::error_code error;
  const fs::path given(preset_or_path);
  const bool folder = fs::is_directory(given, error);
  const fs::path path = folder ? given / "config.json" : given;
  if (!fs::is_regular_file(path, error)) {
    check(!folder, "model.load.config", "the folder {:.200} has no config.json", given.string());
    fail("model.load.unknown", "\"{:.200}\" is none of the {} presets and no file or folder{}", preset_or_path, model_presets().size(),
         similar_presets(preset_or_path));
  }
  const fs::path named = fs::absolute(path, error).lexically_normal();
  const bool standard = named.filename() == "config.json";
  const std::string text = read_file(path.string(), kMaxConfigBytes, {"model.load.read", "model.load.read", "model.json.size"});
  return parse_model_config(text, standard ? named.parent_path().filename().string() : named.stem().string());
}

}  // namespace imbrex
