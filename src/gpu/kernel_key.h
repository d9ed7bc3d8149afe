#pragma once
// What names a kernel before a vendor's compiler sees it: its text, the architecture, and the constants that the text is specialised by.
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace imbrex::gpu {

// A constant of a kernel's config file: `constexpr int kHeadDim = 128;` for {"kHeadDim", 128}.
struct Constant {
  std::string name;  // k, then a capital letter, then letters and digits
  std::variant<bool, int, float> value;
  friend bool operator==(const Constant&, const Constant&) = default;
};

// One specialisation of one kernel file. Every constant that the file uses must be there: a missing one is an error of the compiler.
struct KernelKey {
  std::string path;  // the name of its file: "write_kv.cu"
  std::string arch;  // "sm_80", "sm_90a"
  std::vector<Constant> config;
  std::string functions = {};     // text behind the constants, which the file may call; empty: none
  std::string constants() const;  // "kFrom 2, kTo 3"
  std::string str() const;        // "write_kv.cu for sm_90a (kFrom 2, kTo 3)"
  friend bool operator==(const KernelKey&, const KernelKey&) = default;
};

// The constants as text for the compiler, under a line that names the kernel. Error cuda.config.* for what is no constant.
std::string config_text(std::string_view path, std::span<const Constant>);

}  // namespace imbrex::gpu
