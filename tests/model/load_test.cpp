// load_model(): presets, files, folders and what is none of them.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "expect_error.h"
#include "imbrex/model.h"
#include "model/config_reader.h"

namespace imbrex {
namespace {

namespace fs = std::filesystem;

class Load : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    folder_ = fs::temp_directory_path() /
              (std::string("imbrex_load_") + test->name() + std::to_string(::testing::UnitTest::GetInstance()->random_seed()));
    fs::remove_all(folder_);
    fs::create_directories(folder_ / "my-model");
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, std::string_view text) {
    const fs::path path = folder_ / name;
    std::ofstream(path, std::ios::binary) << text;
    return path.string();
  }

  fs::path folder_;
};

constexpr std::string_view kConfig =
    R"({"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8, "torch_dtype": "float16"})";

TEST_F(Load, ByNameOrId) {
  EXPECT_EQ(load_model("qwen3-8b").layers.size(), 36u);
  EXPECT_EQ(load_model("Qwen/Qwen3-8B").name, "qwen3-8b");
}

TEST_F(Load, FileAndFolderAreNamedAfterThemselves) {
  EXPECT_EQ(load_model(write("my-model/config.json", kConfig)).name, "my-model");
  EXPECT_EQ(load_model((folder_ / "my-model").string()).name, "my-model");
  EXPECT_EQ(load_model((folder_ / "my-model").string() + "/").layers.size(), 1u);
  EXPECT_EQ(load_model(write("tiny.json", kConfig)).name, "tiny");
}

TEST_F(Load, Refusals) {
  EXPECT_EQ(test::error_code([&] { load_model((folder_ / "my-model").string()); }), "model.load.config");
  EXPECT_EQ(test::error_code([&] { load_model((folder_ / "absent").string()); }), "model.load.unknown");
  EXPECT_EQ(test::error_code([&] { load_model(""); }), "model.load.unknown");
  EXPECT_EQ(test::error_code([&] { load_model(write("big.json", std::string(kMaxConfigBytes + 1, ' '))); }), "model.json.size");
  EXPECT_EQ(test::error_code([&] { load_model(write("empty.json", "")); }), "model.json.empty");
}

TEST_F(Load, UnknownNamesGetSimilarOnes) {
  try {
    load_model("llama-3-8b");
    FAIL() << "nothing thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), "model.load.unknown");
    EXPECT_NE(std::string(error.what()).find("similar: llama-3.1-405b, llama-3.1-8b"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace imbrex
