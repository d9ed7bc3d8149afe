// A small real transformer over imbrex: token ids in, greedy token ids and logits out. `imbrex_llama MODEL_DIR --prompt 1,2,3 --generate
// 16`
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "check.h"
#include "model.h"
#include "npy.h"

namespace llama {
namespace {

struct Options {
  std::string folder, device = "cpu", dtype = "auto", logits;
  std::vector<std::string> prompts;
  int generate = 16, step_tokens = 512, threads = 0;
};

// "1,2,3"
std::vector<int32_t> token_ids(const std::string& text) {
  std::vector<int32_t> tokens;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const std::string one = text.substr(at, comma - at);
    check(!one.empty() && one.size() <= 9 && one.find_first_not_of("0123456789") == std::string::npos,
          "--prompt: expected token ids separated by commas, got \"", shortened(text), "\"");
    tokens.push_back(std::stoi(one));
    at = comma + 1;
  }
  return tokens;
}

// Of one prompt: the request, and the logits of its tokens where these are wanted.
struct Answer {
  Request request;
  size_t prompt = 0;
  std::vector<float> logits;
};

// Prompts first come, first served, as many tokens a step as fit; a request whose prompt is computed decodes one token a step.
void answer(Model& model, std::vector<Answer>& answers, const Options& options) {
  const int64_t vocab = model.config().vocab;
  for (;;) {
    std::vector<Piece> pieces;
    std::vector<Answer*> owners;
    int room = options.step_tokens;
    for (Answer& a : answers) {
      const int count = std::min(a.request.pending(), room);
      if (count == 0) continue;
      pieces.push_back({&a.request, count});
      owners.push_back(&a);
      room -= count;
    }
    if (pieces.empty()) return;
    const bool every_token = !options.logits.empty();
    const std::vector<float> logits = model.step(pieces, every_token);
    const float* row = logits.data();
    for (size_t i = 0; i < pieces.size(); ++i) {
      Answer& a = *owners[i];
      const int64_t rows = every_token ? pieces[i].count : 1;
      if (every_token) a.logits.insert(a.logits.end(), row, row + rows * vocab);
      row += rows * vocab;
      if (a.request.pending() > 0) continue;  // of a part of a prompt, nothing is asked
      if (a.request.tokens.size() < a.prompt + size_t(options.generate))
        a.request.tokens.push_back(int32_t(std::max_element(row - vocab, row) - (row - vocab)));
      if (a.request.tokens.size() == a.prompt + size_t(options.generate)) {
        model.release(a.request);
        a.request.computed = int(a.request.tokens.size());  // nobody asks what comes after the last one
      }
    }
  }
}

int run(const Options& options) {
  std::vector<Answer> answers;
  int longest = 0, blocks = 0;
  for (const std::string& prompt : options.prompts) {
    Answer& a = answers.emplace_back();
    a.request.tokens = token_ids(prompt);
    a.prompt = a.request.tokens.size();
    const int tokens = int(a.prompt) + options.generate;
    longest = std::max(longest, tokens);
    blocks += (tokens + kBlockSize - 1) / kBlockSize;
  }
  const imbrex::DType dtype = options.dtype == "auto" ? natural_dtype(options.folder) : imbrex::parse_dtype(options.dtype);
  imbrex::ThreadPool pool(options.threads);
  const Limits limits{.requests = int(answers.size()), .tokens = options.step_tokens, .seq_len = longest, .blocks = blocks};
  Model model(options.folder, imbrex::describe_device(options.device), dtype, limits, pool.parallel_for());
  for (const std::string& note : model.config().model.notes) std::fprintf(stderr, "note: %s\n", note.c_str());

  const auto start = std::chrono::steady_clock::now();
  answer(model, answers, options);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

  std::vector<float> logits;
  size_t tokens = 0;
  for (const Answer& a : answers) {
    for (size_t i = a.prompt; i < a.request.tokens.size(); ++i) std::printf("%s%d", i == a.prompt ? "" : ",", a.request.tokens[i]);
    std::printf("\n");
    logits.insert(logits.end(), a.logits.begin(), a.logits.end());
    tokens += a.request.tokens.size();
  }
  if (!options.logits.empty()) write_npy(options.logits, logits, model.config().vocab);
  std::fprintf(stderr, "%s, %s\n%s\n%zu tokens in %.3f s\n", options.device.c_str(), imbrex::to_string(dtype), model.str().c_str(), tokens,
               seconds.count());
  return 0;
}

}  // namespace
}  // namespace llama

int main(int argc, char** argv) {
  llama::Options options;
  CLI::App app{
      "Runs a Llama, Mistral, Qwen2, Qwen3 or DeepSeek-V2-Lite checkpoint with the attention of imbrex; prints a line of token ids for "
      "each prompt"};
  app.add_option("model", options.folder, "folder with config.json and model.safetensors, or its shards and their index")->required();
  app.add_option("--prompt", options.prompts, "token ids: 1,2,3; again for another request of the same batch")
      ->required()
      ->allow_extra_args(false);
  app.add_option("--generate", options.generate, "tokens of each answer; the end of a text is not looked for")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--logits", options.logits,
                 "write f32 [tokens, vocabulary] of all computed tokens, request after request, to this .npy file");
  app.add_option("--device", options.device, "cpu or cuda:0");
  app.add_option("--dtype", options.dtype, "of weights, activations and cache; auto: bf16 for a bf16 checkpoint, else f32")
      ->check(CLI::IsMember({"auto", "f32", "bf16"}));
  app.add_option("--step-tokens", options.step_tokens, "tokens a step computes at most; longer prompts take several")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--threads", options.threads, "of the CPU; 0: one for each core")->check(CLI::Range(0, 4096));
  CLI11_PARSE(app, argc, argv);
  try {
    return llama::run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "imbrex_llama: %s\n", error.what());
    return 2;
  }
}
