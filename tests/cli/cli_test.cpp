// Tests of the program as its users run it: help, exit codes, bad input, completion, and small runs end to end. `select` is in
// select_test.cpp.
#include "cli/program.h"

#include <cstdio>
#include <nlohmann/json.hpp>

namespace imbrex::test {
namespace {

TEST_F(Cli, HelpOfEverySubcommand) {
  for (const char* sub :
       {"", "run", "select", "bench", "verify", "trace", "trace stats", "trace gen", "info", "compile", "mask", "completion"}) {
    const Ran ran = run(std::string(sub) + " --help");
    EXPECT_EQ(ran.code, 0) << sub;
    EXPECT_TRUE(contains(ran.out, "Usage:")) << sub;
    EXPECT_TRUE(std::string(sub) == "trace" || contains(ran.out, "Example")) << sub;
    EXPECT_TRUE(ran.err.empty()) << ran.err;
  }
  EXPECT_EQ(run("--version").out, "0.1.0\n");
}

// A backend from a shared object is chosen and held to the reference like any other.
TEST_F(Cli, PluginsOfTheEnvironment) {
  const std::string plugin = "IMBREX_PLUGINS=:" IMBREX_NAIVE_PLUGIN ":";
  EXPECT_TRUE(contains(run("select --heads 4/2 --head-dim 64 --q-dtype f32", plugin).out, "outside_naive"));
  const Ran verified = run("verify --backend outside_naive '" IMBREX_DATA "/cases'/*.safetensors", plugin);
  EXPECT_EQ(verified.code, 0) << verified.err;
  EXPECT_TRUE(contains(verified.out, "outside_naive")) << verified.out;
  for (const char* name : {"soft_cap_f32", "short_conv_verify_f32"}) {  // one of each family that the plug-in is for
    const Ran one = run("verify --quiet --backend outside_naive '" IMBREX_DATA "/cases/" + std::string(name) + ".safetensors'", plugin);
    EXPECT_EQ(one.code, 0) << one.err;
    EXPECT_TRUE(contains(one.out, " passed, 0 failed") && !contains(one.out, "0 passed")) << one.out;
  }
  EXPECT_TRUE(contains(run("select --model lfm2-350m", plugin).out, "short_conv.dtype: wanted f32")) << "of the plug-in";
  EXPECT_FALSE(contains(run("select --heads 4/2 --head-dim 64 --q-dtype f32").out, "outside_naive"));
  const Ran absent = run("select --heads 4/2", "IMBREX_PLUGINS=" + path("absent.so"));
  EXPECT_EQ(absent.code, 2);
  EXPECT_TRUE(contains(absent.err, "[plugin.open]")) << absent.err;
}

TEST_F(Cli, BadInputHasACodeAndGoesToStderr) {
  std::ofstream(path("bad.csv")) << "arrival,input,output\n0,10,5\n1,ten,5\n";
  std::ofstream(path("bad.json")) << "{\"model_type\": ";
  std::ofstream(path("good.csv")) << "arrival,input,output\n0,10,5\n";
  std::filesystem::create_directory(path("folder"));
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  struct Row {
    std::string arguments;
    int code;
    const char* error;
  };
  const Row rows[] = {
      {"verify " + path("folder"), 2, "folder is a folder [safetensors.open]"},
      {"verify " + path("pipe"), 2, "pipe is a pipe [safetensors.open]"},
      {"verify /dev/null", 2, "[safetensors.open]"},
      {"trace stats " + path("folder"), 2, "[trace.file.directory]"},
      {"trace stats " + path("pipe"), 2, "pipe is a pipe [trace.file.open]"},
      {"select --model " + path("folder"), 2, "[model.load.config]"},
      {"select --model " + path("pipe"), 2, "[model.load.unknown]"},
      {"", 2, "[usage]"},
      {"nonsense", 2, "\"nonsense\""},
      {"select --nonsense", 2, "[usage]"},
      {"select --heads 0/3", 2, "[cli.heads]"},
      {"select --heads 3/2", 2, "[spec."},
      {"select --head-dim x", 2, "[cli.head_dim]"},
      {"select --kv-format z", 2, "[cli.kv_format]"},
      {"select --kind z", 2, "[cli.kind]"},
      {"select --q-dtype z", 2, "[dtype.unknown]"},
      {"select --device z80", 2, "[device.unknown]"},
      {"select --model no-such-model", 2, "[model."},
      {"select --model " + path("bad.json"), 2, "[model.json"},
      {"select --backend no_such", 3, "[select.forced]"},
      {"select --backend fa3", 3, "[select.forced]"},
      {"trace stats " + path("bad.csv"), 2, "bad.csv"},
      {"trace stats " + path("missing"), 2, "[trace.file"},
      {"trace gen -n 0", 2, "[trace_gen."},
      {"verify " + path("missing"), 2, "missing"},
      {"verify " + path("good.csv") + " --backend no_such", 2, "[cli.backend]"},
      {"bench q1x", 2, "[batch_grammar.syntax]"},
      {"bench --cases '('", 2, "[cli.cases]"},
      {"bench --cases no_such_case", 2, "[cli.cases]"},
      {"bench q1 --format pdf", 2, "[usage]"},
      {"bench q1 --family rnn", 2, "[usage]"},
      {"bench q1 --dim 64", 2, "[cli.family]"},
      {"bench q1 --family short_conv --heads 4/2", 2, "[cli.family]"},
      {"bench q1 --family short_conv --zoo", 2, "[cli.family]"},
      {"bench q1 --family short_conv --v-dim 64", 2, "[cli.family]"},
      {"bench q1 --family mla --zoo", 2, "[cli.family]"},
      {"bench q1 --family mla --head-dim 64", 2, "[cli.family]"},
      {"bench q1 --family mla --v-dim 60", 2, "[mla.v_dim]"},
      {"bench q1 --family mla --kv-lora-rank 64 --device cpu", 2, "[bench.mla.dims]"},
      {"bench q1 --absorbed", 2, "[cli.family]"},
      {"bench q1 --family short_conv --width 9", 2, "[short_conv.width]"},
      {"bench q1 --family short_conv --dtype f64", 2, "[dtype.unknown]"},
      {"bench q1 --family short_conv --form round", 2, "[short_conv.form]"},
      {"bench q1 --family short_conv --activation silu", 2, "[short_conv.activation]"},
      {"bench q1 --family short_conv --backend cpu_amx", 3, "[select.forced]"},
      {"bench q1 --layer kimi-linear", 2, "[cli.family]"},
      {"bench q1 --family recurrent --dim 64", 2, "[cli.family]"},
      {"bench q1 --family recurrent --layer llama", 2, "[usage]"},
      {"bench q1 --family recurrent --state-dtype fp8_e4m3", 2, "[recurrent.state_dtype]"},
      {"bench q1 --family recurrent --layer minimax-01 --with-outputs", 2, "[bench.recurrent.outputs]"},
      {"bench q1 --zoo", 2, "[cli.zoo]"},
      {"bench --zoo --no-ceilings", 2, "[cli.zoo]"},
      {"bench --zoo --only no_such_cell", 2, "[cli.only]"},
      {"bench --zoo --only '('", 2, "[cli.only]"},
      {"completion tcsh", 2, "[usage]"},
      {"compile --arch sm_90x", 2, "[cuda.arch]"},
      {"compile --arch sm_75", 2, "[cuda.arch]"},
      {"compile --jobs -1", 2, "[usage]"},
      {"compile --model deepseek-v4-flash", 3, "[model.family.later]"},
      {"run --model llama-3.1-8b", 2, "[usage]"},
      {"run --model llama-3.1-8b --trace " + path("good.csv") + " --verify 200%", 2, "[cli.fraction]"},
      {"run --model llama-3.1-8b --trace " + path("good.csv") + " --kv-memory lots", 2, "[cli.size]"},
      {"run --model llama-3.1-8b --trace " + path("good.csv") + " --device h200", 3, "[backend.device_absent]"},
      {"bench q1 --device h200", 3, "[backend.device_absent]"},
      {"verify " + path("missing") + " --device h200", 3, "[backend.device_absent]"},
      {"run --model deepseek-v4-flash --trace " + path("good.csv"), 3, "[model.family.later]"},
  };
  for (const Row& row : rows) {
    const Ran ran = run(row.arguments);
    EXPECT_EQ(ran.code, row.code) << row.arguments << "\n" << ran.err;
    EXPECT_TRUE(ran.out.empty()) << row.arguments << "\n" << ran.out;
    EXPECT_TRUE(ran.err.starts_with("error: ") && contains(ran.err, row.error)) << row.arguments << "\n" << ran.err;
  }
}

// Commands that know attention alone say which layers they leave out.
TEST_F(Cli, LayersOfOtherFamiliesAreLeftOutWithANote) {
  const std::string note = "note: layers 0-1, 3-4, 6-7, 9, 11, 13, 15 (short_conv d1024 w3 bf16) left out";
  const Ran bench = run("bench q4 --model lfm2-350m --no-ceilings --min-time 0 --max-time 0.01 --json");
  EXPECT_EQ(bench.code, 0) << bench.err;
  EXPECT_TRUE(bench.err.starts_with(note)) << bench.err;
  EXPECT_EQ(nlohmann::json::parse(bench.out).size(), 1u);
  const Ran zoo = run("bench --zoo --model lfm2-350m --list");
  EXPECT_EQ(zoo.code, 0) << zoo.err;
  EXPECT_TRUE(zoo.err.starts_with(note)) << zoo.err;
  EXPECT_TRUE(contains(zoo.out, "/16-8/d64/")) << zoo.out;
  std::ofstream(path("conv.json")) << R"({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
      "num_key_value_heads": 1, "full_attn_idxs": []})";
  const Ran nothing = run("bench q4 --model " + path("conv.json"));
  EXPECT_EQ(nothing.code, 2);
  EXPECT_TRUE(contains(nothing.err, "[cli.family]")) << nothing.err;
}

TEST_F(Cli, InfoListsWhatIsHere) {
  const auto j = nlohmann::json::parse(run("info --json").out);
  EXPECT_EQ(j["version"], "0.1.0");
  EXPECT_EQ(j["devices"][0]["device"], "cpu");
  EXPECT_EQ(j["backends"][0]["family"], "attention");
  EXPECT_EQ(j["backends"].back()["family"], "recurrent");
  EXPECT_EQ(j["backends"].back()["name"], "reference");
  EXPECT_TRUE(contains(run("info").out, "IMBREX_CPU_ISA"));
}

TEST_F(Cli, AMachineWithoutADriverSaysWhy) {
  const std::string none = "IMBREX_CUDA_DRIVER=" + path("no_such_library");
  std::ofstream(path("t.csv")) << "arrival,input,output\n0,10,5\n";
  const std::string replay = "run --model llama-3.1-8b --device cuda:0 --trace " + path("t.csv");
  for (const std::string& arguments : {std::string("select --device cuda:0"), std::string("select --device cuda"),
                                       std::string("bench q1 --device cuda:0"), std::string("verify x --device cuda:0"), replay}) {
    const Ran ran = run(arguments, none);
    EXPECT_EQ(ran.code, 3) << arguments;
    EXPECT_TRUE(contains(ran.err, "no NVIDIA driver") && contains(ran.err, "no_such_library") && contains(ran.err, "[device.absent]"))
        << arguments << "\n"
        << ran.err;
  }
  EXPECT_EQ(run("select --device cuda:x", none).code, 2);
  const Ran info = run("info", none);
  EXPECT_EQ(info.code, 0);
  EXPECT_TRUE(contains(info.out, "cuda no NVIDIA driver: ")) << info.out;
  const auto j = nlohmann::json::parse(run("info --json", none).out);
  EXPECT_EQ(j["devices"].size(), 1u);
  EXPECT_TRUE(contains(j["cuda"]["no_device"], "no NVIDIA driver"));
}

TEST_F(Cli, CompileWithoutTheCompilerSaysWhatToDo) {
  const std::string none = "IMBREX_CUDA_NVRTC=" + path("no_such_library");
  const Ran ran = run("compile --arch sm_90a --model llama-3.1-8b --out " + path("kernels"), none);
  EXPECT_EQ(ran.code, 3);
  for (const char* part : {"[cuda.nvrtc_missing]", "no_such_library", "CUDA_HOME"}) EXPECT_TRUE(contains(ran.err, part)) << ran.err;
  EXPECT_TRUE(contains(run("info", none).out, "NVRTC is not found"));
}

// Those of layers of every family that the model has, and of no other: whoever has filled a folder needs no compiler. Of a model that has
// few: attention's are counted by a test of shipped_kernels(), and .ci/run compiles them.
TEST_F(Cli, CompileFillsAFolderThatNeedsNoCompiler) {
  if (nlohmann::json::parse(run("info --json").out)["cuda"]["compiler"] == "") GTEST_SKIP() << "no NVRTC here";
  std::ofstream(path("conv.json")) << R"({"model_type": "lfm2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
      "num_key_value_heads": 1, "full_attn_idxs": []})";
  const std::string arguments = "compile --arch sm_80 --strict --jobs 0 --model " + path("conv.json") + " --out " + path("kernels");
  const Ran ran = run(arguments);
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.err, "");
  EXPECT_TRUE(contains(ran.out, "2 kernel files in ") && contains(ran.out, "0 failed")) << ran.out;
  EXPECT_EQ(std::distance(fs::directory_iterator(path("kernels")), fs::directory_iterator()), 2);
  const Ran again = run(arguments + " --json", "IMBREX_CUDA_NVRTC=" + path("no_such_library"));
  ASSERT_EQ(again.code, 0) << again.err;
  const auto j = nlohmann::json::parse(again.out);
  ASSERT_EQ(j.size(), 2u);
  EXPECT_EQ(j[0]["family"], "short_conv");
  EXPECT_EQ(j[0]["arch"], "sm_80");
  EXPECT_EQ(j[0]["file"], "short_conv.cu");
  EXPECT_EQ(j[0]["constants"].get<std::string>().find("kType 2, kWidth 3"), 0u) << j[0]["constants"];
  EXPECT_EQ(j[0]["compile_ms"], 0);
  ASSERT_GT(j[0]["entries"].size(), 0u);
  EXPECT_GT(j[0]["entries"][0]["registers"], 0);
  EXPECT_EQ(j[0]["problems"].size(), 0u);
  EXPECT_EQ(j[1]["file"], "plan_state_batch.cu");
  EXPECT_EQ(run("compile --arch sm_80 --model " + path("conv.json") + " --out " + path("out") + "/x").code, 2);  // below a file
}

TEST_F(Cli, TraceIsTheSameForTheSameSeed) {
  ASSERT_EQ(run("trace gen -n 50 --seed 3 --out " + path("a.jsonl")).code, 0);
  EXPECT_EQ(run("trace gen -n 50 --seed 3").out, read(path("a.jsonl")));
  const auto j = nlohmann::json::parse(run("trace stats --json " + path("a.jsonl")).out);
  EXPECT_EQ(j[0]["requests"], 50);
  EXPECT_EQ(j[0]["format"], "mooncake");
}

TEST_F(Cli, CompletionScriptsKnowTheOptions) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const Ran ran = run(std::string("completion ") + shell);
    ASSERT_EQ(ran.code, 0);
    for (const char* word : {"max-num-batched-tokens", "llama-3.1-8b", "trace", "gen", "fp8_e4m3"})
      EXPECT_TRUE(contains(ran.out, word)) << shell << " " << word;
    std::ofstream(path(shell)) << ran.out;
  }
  if (std::system("command -v bash >/dev/null") == 0) {
    const std::string ask = "bash -c 'source " + path("bash") +
                            "; COMP_WORDS=(imbrex trace g); COMP_CWORD=2; _imbrex; echo \"${COMPREPLY[@]}\"' >" + path("reply");
    ASSERT_EQ(std::system(ask.c_str()), 0);
    EXPECT_EQ(read(path("reply")), "gen\n");
  }
}

TEST_F(Cli, BenchChecksAndTimes) {
  const Ran ran = run("bench 2q1s40,q8s24 --heads 4/2 --head-dim 32 --no-ceilings --min-time 0 --max-time 0.01 --json");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto j = nlohmann::json::parse(ran.out);
  ASSERT_EQ(j.size(), 1u);
  EXPECT_GT(j[0]["median_s"].get<double>(), 0);
  EXPECT_GT(j[0]["check_allowed"].get<double>(), 0);
  EXPECT_LE(j[0]["check_error"].get<double>(), j[0]["check_allowed"].get<double>());
  // 2 x 40 + 24 keys, two kv heads, k and v of 32 bf16; pairs: 2 x 40 + (17 + ... + 24)
  EXPECT_EQ(j[0]["kv_bytes"].get<double>(), 104.0 * 2 * 64 * 2);
  EXPECT_EQ(j[0]["flops"].get<double>(), (80.0 + 164) * 4 * 2 * 64);
  const Ran cases =
      run("bench --cases ^mask_window --heads 4/2 --no-ceilings --min-time 0 --max-time 0.001 --format csv --backend cpu_generic");
  EXPECT_EQ(cases.code, 0) << cases.err;
  EXPECT_TRUE(cases.out.starts_with("case,backend,")) << cases.out;
}

TEST_F(Cli, BenchOfLatentAttentionChecksAndTimesEveryBackend) {
  const std::string quick = " --no-ceilings --min-time 0 --max-time 0.01 --json";
  const Ran ran = run(
      "bench 2q1s40,q8 --family mla --heads 4 --kv-lora-rank 64 --nope-dim 32 --rope-dim 16 --v-dim 24 --kv-copies 3 --sinks --block-size "
      "8" +
      quick);
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto j = nlohmann::json::parse(ran.out);
  ASSERT_GE(j.size(), 1u);
  for (const auto& row : j) {
    EXPECT_NE(row["backend"], "reference");
    EXPECT_EQ(row["spec"], "mla q4 latent64 nope32 rope16 v24 bf16 block8 causal sinks");
    EXPECT_GT(row["median_s"].get<double>(), 0);
    EXPECT_GT(row["check_allowed"].get<double>(), 0);
    EXPECT_LE(row["check_error"].get<double>(), row["check_allowed"].get<double>());
    EXPECT_EQ(row["copies"], 3);
    EXPECT_EQ(row["kv_bytes"].get<double>(), 88 * 160) << "keys of 80 bf16, each once";
    EXPECT_EQ(row["weight_bytes"].get<double>(), 4 * 56 * 64 * 2);
    // In latent space: 4 heads, for each query and key it sees 2 * (80 + 64), and for each query 2 * 64 * 56. That is less for the queries
    // behind 39 keys; the 8 that see 36 pairs are as cheap with expanded keys, for which each key has those products, as there are as many.
    EXPECT_EQ(row["flops"].get<double>(), 4 * (2 * 40 * 288 + 2 * 7168) + 4 * (36 * 2 * (48 + 24) + 8 * 7168));
  }
  for (const char* more : {"--kv-dtype fp8_e4m3", "--kv-format latent_rope", "--tree", "--tree --window 9 --absorbed",
                           "--absorbed --bidirectional", "--q-dtype f32 --rope-dim 0"}) {
    const Ran other = run("bench 2q3s70 --family mla --heads 2 --kv-lora-rank 128 --threads 1 " + std::string(more) + quick);
    EXPECT_EQ(other.code, 0) << more << "\n" << other.err;
  }
  EXPECT_EQ(run("bench q1s70 --family mla --heads 2 --kv-format fp8_ds_mla --kv-dtype fp8_e4m3" + quick).code, 0);
  const Ran model = run("bench q1s33 --family mla --model deepseek-v2-lite --backend cpu_generic --format csv --min-time 0 --max-time 0");
  EXPECT_TRUE(contains(model.out, "q1s33, layers 0-26")) << model.out << model.err;
  EXPECT_TRUE(contains(run("bench 2q5s33 --family mla --model deepseek-v2-lite --tree --backend cpu_generic" + quick).out, "causal tree"));
}

TEST_F(Cli, BenchOfTheShortConvolutionChecksAndTimesEveryBackend) {
  const Ran ran = run(
      "bench 2q3s40,q8 --family short_conv --dim 48 --width 4 --bias --drafts 2 --kv-copies 3 --no-ceilings --min-time 0 --max-time 0.01 "
      "--json");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto j = nlohmann::json::parse(ran.out);
  ASSERT_GE(j.size(), 1u);
  for (const auto& row : j) {
    EXPECT_NE(row["backend"], "reference");
    EXPECT_EQ(row["spec"], "short_conv d48 w4 bf16 bias drafts2");
    EXPECT_GT(row["median_s"].get<double>(), 0);
    EXPECT_GT(row["check_allowed"].get<double>(), 0);
    EXPECT_LE(row["check_error"].get<double>(), row["check_allowed"].get<double>());
    EXPECT_EQ(row["copies"], 3);
    // Rows of 48 bf16. Read: B, C and x of 14 tokens, three of the past of two requests, weights and bias. Written: 14 outputs, three rows
    // of each state, and two drafts of each request that has a past.
    EXPECT_EQ(row["read_bytes"].get<double>(), (3.0 * 14 + 2 * 3 + 5) * 96);
    EXPECT_EQ(row["written_bytes"].get<double>(), (14.0 + 3 * 3 + 2 * 2) * 96);
    EXPECT_EQ(row["flops"].get<double>(), 14.0 * 48 * 10);
  }
  const Ran table =
      run("bench q4 --family short_conv --form plain --dtype f32 --dim 7 --backend reference --min-time 0 --max-time 0.01 --threads 1");
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_TRUE(contains(table.out, "written GB/s")) << table.out;
  EXPECT_TRUE(contains(table.out, "% L3") || contains(table.out, "% DRAM")) << table.out;
}

TEST_F(Cli, BenchOfRecurrentLayersChecksAndTimesEveryBackend) {
  const Ran ran =
      run("bench 2q1s40,q3 --family recurrent --layer qwen3-next --state-dtype bf16 --kv-copies 2 --no-ceilings --min-time 0 --max-time "
          "0.01 --json");
  ASSERT_EQ(ran.code, 0) << ran.err;
  const auto j = nlohmann::json::parse(ran.out);
  ASSERT_GE(j.size(), 1u);
  for (const auto& row : j) {
    EXPECT_NE(row["backend"], "reference");
    EXPECT_EQ(row["spec"], "recurrent q16 v32 k128 v128 softplus delta sigmoid_beta qk_norm bf16 state bf16 v_first");
    EXPECT_GT(row["check_allowed"].get<double>(), 0);
    EXPECT_EQ(row["copies"], 2);
    // States of 32 heads: two read and three written. Rows of 16 and 32 heads of 128 bf16, and two floats for each value head.
    EXPECT_EQ(row["state_bytes"].get<double>(), 5 * 32 * 128 * 128 * 2.0);
    EXPECT_EQ(row["token_bytes"].get<double>(), 5 * (2 * 16 * 128 * 2 + 2 * 32 * 128 * 2 + 2 * 32 * 4.0));
    EXPECT_EQ(row["flops"].get<double>(), 5 * 32 * 128 * 128 * 7.0);
  }
  for (const char* layer : {"kimi-linear --state-layout k_first --with-outputs", "minimax-01", "nemotron-3-nano", "falcon-mamba-7b"}) {
    const Ran table = run(std::string("bench q2 q1s9 --family recurrent --no-ceilings --min-time 0 --max-time 0.01 --layer ") + layer);
    EXPECT_EQ(table.code, 0) << table.err;
    EXPECT_TRUE(contains(table.out, "state GB/s")) << table.out;
  }
}

TEST_F(Cli, VerifyTakesCasesOfEveryFamily) {
  const std::string files = "'" IMBREX_DATA "/cases'/short_conv_verify_f32.safetensors '" IMBREX_DATA "/cases'/soft_cap_f32.safetensors";
  const Ran ran = run("verify --json " + files);
  ASSERT_EQ(ran.code, 0) << ran.err;
  int short_conv = 0, attention = 0;
  for (const auto& row : nlohmann::json::parse(ran.out)) {
    if (row.contains("refused")) continue;
    EXPECT_TRUE(row["pass"].get<bool>()) << row.dump();
    ++(contains(row["case"], "short_conv") ? short_conv : attention);
  }
  EXPECT_GE(short_conv, 6);  // the reference and cpu_generic at least, each in three ways
  EXPECT_GE(attention, 10);
  // A name that only one family has is no mistake.
  const Ran amx = run("verify --backend cpu_amx,reference " + files);
  EXPECT_EQ(amx.code, 0) << amx.err;
  EXPECT_TRUE(contains(amx.out, "refused: no backend of this family")) << amx.out;
}

TEST_F(Cli, TheZooFindsWhatItRuns) {
  const Ran list = run("bench --zoo --model llama-3.2-1b --list");
  EXPECT_EQ(list.code, 0) << list.err;
  EXPECT_TRUE(contains(list.out, "/32-8/d64/")) << list.out;
  EXPECT_TRUE(contains(list.out, "/4-1/d64/")) << list.out;
  const Ran ran = run("bench --zoo --only ^decode/1-1/d64/ --min-time 0 --max-time 0.01 --format json");
  ASSERT_TRUE(ran.code == 0 || ran.code == 1) << ran.err;  // 1: a cliff, which a busy machine may show
  const auto j = nlohmann::json::parse(ran.out);
  EXPECT_EQ(j["failed"], 0);
  ASSERT_FALSE(j["cells"].empty());
  for (const auto& cell : j["cells"]) {
    EXPECT_GT(cell["median_s"].get<double>(), 0);
    EXPECT_GT(cell["share_of_ceiling"].get<double>(), 0);
    EXPECT_GT(cell["beside"].get<double>(), 0);
  }
  const Ran table = run("bench --zoo --only ^decode/1-1/d64/ --min-time 0 --max-time 0.01 --seconds 1e-9");
  EXPECT_EQ(table.code, 3) << table.out;  // nothing ran
  EXPECT_TRUE(contains(table.out, "not run")) << table.out;
}

TEST_F(Cli, RunReplaysATraceAndReports) {
  ASSERT_EQ(
      run("trace gen -n 5 --rate 50 --system-length 300 --message-median 30 --output-median 4 --max-output 8 --out " + path("t.jsonl"))
          .code,
      0);
  const std::string common = "run --model llama-3.2-1b --layers 1 --trace " + path("t.jsonl") + " --no-ceilings --verify 5% ";
  const Ran ran = run(common + "--report " + path("r.html") + " --json " + path("r.json"));
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_TRUE(ran.err.empty()) << "no progress bar without a terminal: " << ran.err;
  EXPECT_TRUE(contains(ran.out, "5 of 5 requests")) << ran.out;
  EXPECT_TRUE(contains(read(path("r.html")), "llama-3.2-1b"));
  const auto a = nlohmann::json::parse(read(path("r.json")));
  EXPECT_TRUE(a["complete"].get<bool>());
  EXPECT_GT(a["verify"]["outputs"].get<int>(), 0);
  ASSERT_EQ(run(common + "--quiet --threads 1 --max-num-batched-tokens 64 --json " + path("s.json")).code, 0);
  EXPECT_EQ(nlohmann::json::parse(read(path("s.json")))["digest"]["outputs"], a["digest"]["outputs"]);
}

TEST_F(Cli, RunReplaysStatesBesidePages) {
  const std::string common =
      "run --model lfm2-350m --layers 3 --num-requests 3 --trace '" IMBREX_DATA "/sample_trace.jsonl' --no-ceilings --verify 2% ";
  const Ran ran = run(common + "--report " + path("r.html") + " --json " + path("r.json"));
  ASSERT_EQ(ran.code, 0) << ran.err;
  for (const char* part : {"3 of 3 requests", "6 state slots", "short_conv d1024 w3 bf16", "layers with states"})
    EXPECT_TRUE(contains(ran.out, part)) << part << "\n" << ran.out;
  const auto a = nlohmann::json::parse(read(path("r.json")));
  EXPECT_EQ(a["kinds"][0]["family"], "short_conv");
  EXPECT_EQ(a["groups"][0]["slots"], 6);
  EXPECT_GT(a["state_layers"]["bytes"].get<double>(), 0);
  EXPECT_GT(a["verify"]["outputs"].get<int>(), 0);
  ASSERT_EQ(run(common + "--quiet --threads 1 --max-num-batched-tokens 333 --json " + path("s.json")).code, 0);
  EXPECT_EQ(nlohmann::json::parse(read(path("s.json")))["digest"]["outputs"], a["digest"]["outputs"]);
}

// On a device that a plug-in brings everything works as on others; what its reference computes there has the digest of the host's.
TEST_F(Cli, DevicesOfPlugins) {
  const std::string toy = "IMBREX_PLUGINS=" IMBREX_TOY_PLUGIN;
  const std::string common = "run --model llama-3.2-1b --layers 2 --trace " + path("t.csv") +
                             " --no-ceilings --verify 5% --max-num-batched-tokens 64 --kv-memory 32MiB --quiet ";
  std::ofstream(path("t.csv")) << "arrival,input,output\n0,90,6\n0,25,9\n1,40,3\n";
  EXPECT_TRUE(contains(run("info", toy).out, "toy:1  Toy accelerator, the other one"));
  EXPECT_EQ(nlohmann::json::parse(run("info --json", toy).out)["devices"].back()["device"], "toy:1");
  EXPECT_TRUE(contains(run("select --heads 4/2 --head-dim 64 --device toy:0", toy).out, "toy (")) << read(path("out"));
  const Ran verified = run("verify --device toy:1 '" IMBREX_DATA "/cases/gqa_mixed_bf16.safetensors'", toy);
  EXPECT_EQ(verified.code, 0) << verified.out << verified.err;
  EXPECT_TRUE(contains(verified.out, "toy")) << verified.out;
  const Ran timed = run("bench 2q1s40 --heads 4/2 --head-dim 64 --device toy:0 --min-time 0.01 --max-time 0.02 --json", toy);
  ASSERT_EQ(timed.code, 0) << timed.err;
  EXPECT_TRUE(contains(timed.out, "\"backend\": \"toy\"") && contains(timed.out, "\"captured\": true")) << timed.out;
  const Ran there = run(common + "--device toy:0 --json " + path("toy.json"), toy);
  ASSERT_EQ(there.code, 0) << there.err << there.out;
  ASSERT_EQ(run(common + "--backend reference --json " + path("cpu.json")).code, 0) << read(path("err"));
  const auto a = nlohmann::json::parse(read(path("toy.json"))), b = nlohmann::json::parse(read(path("cpu.json")));
  EXPECT_GT(a["verify"]["outputs"].get<int>(), 0);
  EXPECT_EQ(a["digest"]["outputs"], b["digest"]["outputs"]);
  // Layers with states, in a model beside those with pages.
  const Ran conv = run("verify --device toy:1 '" IMBREX_DATA "/cases'/short_conv_*.safetensors", toy);
  EXPECT_EQ(conv.code, 0) << conv.out << conv.err;
  EXPECT_TRUE(contains(conv.out, "toy          token by token") && contains(conv.out, " passed, 0 failed")) << conv.out;
  const std::string hybrid = "run --model lfm2-350m --layers 3 --trace " + path("t.csv") +
                             " --no-ceilings --verify 5% --max-num-batched-tokens 64 --kv-memory 32MiB --quiet ";
  const Ran hybrid_there = run(hybrid + "--device toy:0 --json " + path("toy.json"), toy);
  ASSERT_EQ(hybrid_there.code, 0) << hybrid_there.err << hybrid_there.out;
  ASSERT_EQ(run(hybrid + "--backend reference --json " + path("cpu.json")).code, 0) << read(path("err"));
  const auto c = nlohmann::json::parse(read(path("toy.json"))), d = nlohmann::json::parse(read(path("cpu.json")));
  EXPECT_EQ(c["kinds"][0]["family"], "short_conv");
  EXPECT_EQ(c["digest"]["outputs"], d["digest"]["outputs"]);
  const Ran absent = run(common + "--device toy:0");
  EXPECT_EQ(absent.code, 2);
  EXPECT_TRUE(contains(absent.err, "[device.unknown]")) << absent.err;
}

}  // namespace
}  // namespace imbrex::test
