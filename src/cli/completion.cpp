// `imbrex completion bash|zsh|fish`: a completion script, made from the subcommands and options that the program has.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "attention/kv_codec.h"
#include "cli/cli.h"
#include "imbrex/model.h"
#include "imbrex/select.h"

namespace imbrex::cli {
namespace {

struct OptionInfo {
  std::vector<std::string> names;  // "--model", "-o"
  std::string description;
  bool takes_value;
  std::vector<std::string> values;  // known ones; empty: files
};

// "select", "trace gen"
struct CommandInfo {
  std::string path, description;
  std::vector<std::string> subcommands;
  std::vector<OptionInfo> options;
};

std::vector<std::string> known_values(const std::string& option) {
  std::vector<std::string> values;
  if (option == "--model") {
    for (const auto& preset : model_presets()) values.emplace_back(preset.name);
  } else if (option == "--backend" || option == "--prefill-backend" || option == "--decode-backend") {
    for (const BackendOf<AttentionFamily>* backend : backends()) values.emplace_back(backend->name());
  } else if (option == "--device") {
    values = {"cpu", "cuda:0", "h200", "b200", "h100", "a100", "rtx5090", "l40s"};
  } else if (option == "--q-dtype") {
    values = {"f32", "bf16", "f16"};
  } else if (option == "--kv-dtype") {
    values = {"f32", "bf16", "f16", "fp8_e4m3", "fp8_e5m2"};
  } else if (option == "--kv-format") {
    for (const KvFormat format : kv_formats()) values.emplace_back(to_string(format));
  } else if (option == "--form") {
    values = {"gated", "plain"};
  } else if (option == "--activation") {
    values = {"none", "silu"};
  } else if (option == "--arch") {
    values = {"sm_80", "sm_90a", "sm_100a", "sm_120"};
  } else if (option == "--phase") {
    values = {"any", "prefill", "decode"};
  } else if (option == "--format") {
    values = {"table", "markdown", "csv", "json"};
  }
  return values;
}

// Single quotes in a shell word of single quotes.
std::string shell_quoted(const std::string& text) {
  std::string result;
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return "'" + result + "'";
}

void collect(const CLI::App& app, const std::string& path, std::vector<CommandInfo>& commands) {
  CommandInfo info{path, app.get_description(), {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    OptionInfo o{{}, option->get_description(), option->get_items_expected_max() > 0, {}};
    for (const auto& name : option->get_snames()) o.names.push_back("-" + name);
    for (const auto& name : option->get_lnames()) o.names.push_back("--" + name);
    if (o.names.empty()) continue;
    o.values = known_values(o.names.back());
    info.options.push_back(o);
  }
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) info.subcommands.push_back(sub->get_name());
  commands.push_back(info);
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    collect(*sub, path.empty() ? sub->get_name() : path + " " + sub->get_name(), commands);
  }
}

std::vector<std::string> words_of(const CommandInfo& command) {
  std::vector<std::string> words = command.subcommands;
  for (const OptionInfo& option : command.options) words.insert(words.end(), option.names.begin(), option.names.end());
  return words;
}

// The subcommand words before the cursor, joined; options and their values are passed over.
std::string bash_script(const std::vector<CommandInfo>& commands) {
  std::string out =
      "# bash completion for imbrex; source it, or save it as ~/.local/share/bash-completion/completions/imbrex\n"
      "_imbrex() {\n  local cur=\"${COMP_WORDS[COMP_CWORD]}\" prev=\"${COMP_WORDS[COMP_CWORD-1]}\" path=\"\" word i\n  COMPREPLY=()\n"
      "  for ((i = 1; i < COMP_CWORD; i++)); do\n    word=\"${COMP_WORDS[i]}\"\n    case \"${path:+$path }$word\" in\n";
  for (const CommandInfo& command : commands) {
    if (!command.path.empty()) out += fmt::format("      '{}') path=\"${{path:+$path }}$word\" ;;\n", command.path);
  }
  out += "    esac\n  done\n  case \"$path $prev\" in\n";
  for (const CommandInfo& command : commands) {
    for (const OptionInfo& option : command.options) {
      if (!option.takes_value) continue;
      for (const std::string& name : option.names) {
        const std::string reply =
            option.values.empty() ? "compgen -f -- \"$cur\"" : fmt::format("compgen -W \"{}\" -- \"$cur\"", fmt::join(option.values, " "));
        out += fmt::format("    '{} {}') COMPREPLY=($({})); return ;;\n", command.path, name, reply);
      }
    }
  }
  out += "  esac\n  case \"$path\" in\n";
  for (const CommandInfo& command : commands) {
    out += fmt::format("    '{}') COMPREPLY=($(compgen -W \"{}\" -- \"$cur\")) ;;\n", command.path, fmt::join(words_of(command), " "));
  }
  out +=
      "  esac\n  [[ ${#COMPREPLY[@]} -eq 0 && \"$cur\" != -* ]] && COMPREPLY=($(compgen -f -- \"$cur\"))\n}\ncomplete -o filenames -F "
      "_imbrex imbrex\n";
  return out;
}

std::string zsh_script(const std::vector<CommandInfo>& commands) {
  std::string out =
      "#compdef imbrex\n# zsh completion for imbrex; save it as _imbrex in a folder of $fpath\n"
      "_imbrex() {\n  local command_path=\"\" word i\n  local -a items\n"
      "  for ((i = 2; i < CURRENT; i++)); do\n    word=\"${words[i]}\"\n    case \"${command_path:+$command_path }$word\" in\n";
  for (const CommandInfo& command : commands) {
    if (!command.path.empty()) out += fmt::format("      '{}') command_path=\"${{command_path:+$command_path }}$word\" ;;\n", command.path);
  }
  out += "    esac\n  done\n  case \"$command_path ${words[CURRENT-1]}\" in\n";
  for (const CommandInfo& command : commands) {
    for (const OptionInfo& option : command.options) {
      if (!option.takes_value) continue;
      for (const std::string& name : option.names) {
        const std::string reply = option.values.empty() ? "_files" : fmt::format("compadd -- {}", fmt::join(option.values, " "));
        out += fmt::format("    '{} {}') {}; return ;;\n", command.path, name, reply);
      }
    }
  }
  const auto escaped = [](std::string text) {
    for (size_t at = 0; (at = text.find(':', at)) != std::string::npos; at += 2) text.replace(at, 1, "\\:");
    return text;
  };
  out += "  esac\n  case \"$command_path\" in\n";
  for (const CommandInfo& command : commands) {
    out += fmt::format("    '{}') items=(", command.path);
    for (const std::string& name : command.subcommands) {
      const std::string path = command.path.empty() ? name : command.path + " " + name;
      for (const CommandInfo& sub : commands) {
        if (sub.path == path) out += " " + shell_quoted(name + ":" + escaped(sub.description));
      }
    }
    for (const OptionInfo& option : command.options) {
      for (const std::string& name : option.names) out += " " + shell_quoted(name + ":" + escaped(option.description));
    }
    out += " ) ;;\n";
  }
  out += "  esac\n  _describe 'imbrex' items || _files\n}\ncompdef _imbrex imbrex\n";
  return out;
}

std::string fish_script(const std::vector<CommandInfo>& commands) {
  std::string out = "# fish completion for imbrex; save it as ~/.config/fish/completions/imbrex.fish\n";
  for (const CommandInfo& command : commands) {
    // After all words of the path, and none of its own subcommands.
    std::string condition;
    for (const std::string& word : split(command.path, " ")) condition += fmt::format("__fish_seen_subcommand_from {}; and ", word);
    if (!command.subcommands.empty()) {
      condition += fmt::format("not __fish_seen_subcommand_from {}", fmt::join(command.subcommands, " "));
    } else {
      condition.resize(condition.size() - 6);
    }
    for (const std::string& name : command.subcommands) {
      const std::string path = command.path.empty() ? name : command.path + " " + name;
      for (const CommandInfo& sub : commands) {
        if (sub.path == path)
          out += fmt::format("complete -c imbrex -f -n {} -a {} -d {}\n", shell_quoted(condition), name, shell_quoted(sub.description));
      }
    }
    for (const OptionInfo& option : command.options) {
      out += fmt::format("complete -c imbrex -n {}", shell_quoted(condition));
      for (const std::string& name : option.names) out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (option.takes_value)
        out += option.values.empty() ? " -r" : fmt::format(" -x -a {}", shell_quoted(fmt::format("{}", fmt::join(option.values, " "))));
      out += fmt::format(" -d {}\n", shell_quoted(option.description));
    }
  }
  return out;
}

}  // namespace

void add_completion(CLI::App& app, Action& action) {
  auto shell = std::make_shared<std::string>();
  CLI::App* sub = app.add_subcommand("completion", "Print a completion script for a shell");
  sub->add_option("SHELL", *shell, "bash, zsh or fish")->required()->check(CLI::IsMember({"bash", "zsh", "fish"}));
  sub->footer("Examples:\n  source <(imbrex completion bash)\n  imbrex completion fish > ~/.config/fish/completions/imbrex.fish");
  sub->callback([shell, &app, &action] {
    action = [shell, &app] {
      std::vector<CommandInfo> commands;
      collect(app, "", commands);
      fmt::print("{}", *shell == "bash" ? bash_script(commands) : *shell == "zsh" ? zsh_script(commands) : fish_script(commands));
      return kOk;
    };
  });
}

}  // namespace imbrex::cli
