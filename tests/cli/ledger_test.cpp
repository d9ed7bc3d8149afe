// `imbrex compile --ledger`: what has a record is not compiled, what has none is, and a record that is wrong is found.
#include "cli/program.h"

namespace imbrex::test {
namespace {

class Ledger : public Cli {
 protected:
  void SetUp() override {
    Cli::SetUp();
    if (contains(run("info").out, "NVRTC is not found")) GTEST_SKIP() << "no NVRTC here";
    std::ofstream(path("conv.json")) << R"({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
      "num_key_value_heads": 1, "full_attn_idxs": []})";
    if (lines_.empty()) record();
    write(lines_);
  }
  // The two kernels of a model with short convolutions alone. That of lines_[0] takes little time to compile.
  Ran compile(const std::string& more) {
    fs::remove_all(path("kernels"));
    return run("compile --strict --arch sm_80 --model " + path("conv.json") + " --out " + path("kernels") + " --ledger " + path("ledger") +
               " " + more);
  }
  bool is_compiled() const { return fs::exists(path("kernels")); }
  void write(const std::vector<std::string>& lines) const {
    std::ofstream file(path("ledger"));
    for (const std::string& line : lines) file << line << "\n";
  }
  // The number for --recheck that a line's kernel has.
  static std::string share_of(const std::string& line) {
    return std::to_string(std::stoull(line.substr(line.find(".cu ") + 4, 15), nullptr, 16) % 20);
  }
  static inline std::vector<std::string> lines_;  // of the ledger of all tests

 private:
  void record() {
    const Ran first = compile("--renew");
    ASSERT_EQ(first.code, 0) << first.err;
    ASSERT_TRUE(contains(first.out, ": 0 of them recorded, 0 of these compiled again, 0 not as recorded; 2 without a record")) << first.out;
    std::istringstream text(read(path("ledger")));
    for (std::string line; std::getline(text, line);)
      if (!line.starts_with('#')) lines_.push_back(line);
    ASSERT_EQ(lines_.size(), 2u);
    ASSERT_TRUE(lines_[0].starts_with("sm_80 plan_state_batch.cu ") && lines_[1].starts_with("sm_80 short_conv.cu ")) << lines_[0];
  }
};

TEST_F(Ledger, KernelsWithARecordAreNotCompiled) {
  Ran ran = compile("");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, ": 2 of them recorded, 0 of these compiled again, 0 not as recorded; 0 without a record")) << ran.out;
  EXPECT_FALSE(is_compiled());
  // As two branches leave it that were merged line by line.
  write({lines_[1], "# a note", lines_[0], lines_[1]});
  EXPECT_TRUE(contains(compile("").out, ": 2 of them recorded"));
  write({lines_[1]});
  ran = compile("");
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(contains(ran.out, "; 1 without a record")) << ran.out;
  EXPECT_TRUE(is_compiled());
}

TEST_F(Ledger, ARecordThatIsWrongIsFoundWhenItsTurnComes) {
  std::string wrong = lines_[0];
  const size_t registers = wrong.find(':') + 1;
  wrong[registers] = wrong[registers] == '9' ? '1' : char(wrong[registers] + 1);
  write({wrong, lines_[1]});
  EXPECT_EQ(compile("").code, 0);
  const Ran ran = compile("--recheck " + share_of(wrong));
  EXPECT_EQ(ran.code, 1) << ran.out;
  EXPECT_TRUE(contains(ran.out, ", 1 not as recorded")) << ran.out;
  EXPECT_TRUE(contains(ran.err, "plan_state_batch.cu for sm_80 (") && contains(ran.err, "): expected, as ")) << ran.err;
  write(lines_);
  EXPECT_EQ(compile("--recheck " + std::to_string(std::stoi(share_of(wrong)) + 20)).code, 0) << "the number counts modulo 20";
  EXPECT_TRUE(is_compiled());
}

TEST_F(Ledger, RenewingForgetsWhatIsNoMoreAndKeepsOtherArchitectures) {
  const std::string hash(32, '0');
  write({"sm_80 gone.cu " + hash + " gone:16:0", "sm_90a other.cu 1" + hash.substr(1) + " other:16:0", lines_[1]});
  ASSERT_EQ(compile("--renew").code, 0);
  const std::string text = read(path("ledger"));
  EXPECT_FALSE(contains(text, "gone")) << text;
  EXPECT_TRUE(contains(text, lines_[0] + "\n" + lines_[1] + "\nsm_90a other.cu ")) << text;
}

TEST_F(Ledger, ALineThatIsNoRecordIsRefused) {
  for (const char* line : {"<<<<<<< ours", "sm_80 a.cu 0123", "sm_80 a.cu 0123456789abcdef0123456789abcdef a:1",
                           "sm_80 a.cu 0123456789abcdef0123456789abcdef a:-1:0", "sm_80 a.cu 0123456789abcdef0123456789abcdef a:1:x"}) {
    write({lines_[0], line});
    const Ran ran = compile("");
    EXPECT_EQ(ran.code, 2) << line;
    EXPECT_TRUE(contains(ran.err, "[kernel_ledger]") && contains(ran.err, line)) << ran.err;
  }
  EXPECT_EQ(run("compile --arch sm_80 --renew").code, 2);
  EXPECT_EQ(run("compile --arch sm_80 --recheck 1").code, 2);
}

}  // namespace
}  // namespace imbrex::test
