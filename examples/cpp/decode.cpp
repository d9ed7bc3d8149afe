// Three requests from their prompts on, a token a step, through the C++ API: select, plan, pages, prefill, decode. `decode [--device
// cuda:0]` Keys and values are made up, such that the right answer is known; it ends with 1 where an output is wrong.
#include <cmath>
#include <cstdio>
#include <string_view>
#include <vector>

#include "imbrex/imbrex.hpp"
using namespace imbrex;

int main(int argc, char** argv) {
  const DeviceInfo device = describe_device(argc == 3 && std::string_view(argv[1]) == "--device" ? argv[2] : "cpu");
  const int num_layers = 2, num_steps = 30, max_tokens = 64;
  const AttentionSpec spec{
      .num_q_heads = 8, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .q_dtype = DType::f32, .kv_dtype = DType::f32};
  const Selection chosen = select(spec, device);
  std::puts(chosen.str().c_str());  // every backend, and why it was passed over
  if (chosen.backend == nullptr) return 1;

  ThreadPool threads(0);
  const auto stream = open_stream(device);  // on a CPU: the host's own memory and copies
  const auto plan = chosen.backend->plan(spec, device, {.limits = {.max_num_tokens = max_tokens}, .threads = threads.parallel_for()});
  const KvAllocation cache(spec, num_layers, /*num_blocks=*/32, "lbhtd", stream.get());
  BlockPool pool(32);
  const DeviceTensor q = stream->tensor(DType::f32, {max_tokens, 8, 64}), out = stream->tensor(DType::f32, {max_tokens, 8, 64});
  const DeviceTensor k = stream->tensor(DType::f32, {max_tokens, 2, 64}), v = stream->tensor(DType::f32, {max_tokens, 2, 64});

  const std::vector<int> prompts{20, 7, 33};
  std::vector<int32_t> seq_lens(3, 0), query_start_loc(4, 0), kv_indptr(4, 0), kv_indices;
  std::vector<std::vector<int32_t>> blocks(3);
  std::vector<int64_t> slots;
  float worst = 0;
  for (int step = 0; step <= num_steps; ++step) {
    // The batch: all prompts in the first step, then a token of each request. Equal keys weigh alike, so that an output is the mean of the
    // values of its request so far: of 100 r + 0, 1, 2, ...
    std::vector<float> values;
    slots.clear(), kv_indices.clear();
    for (size_t r = 0; r < 3; ++r) {
      const int begin = seq_lens[r], end = seq_lens[r] += step == 0 ? prompts[r] : 1;
      if (!pool.allocate((end + spec.block_size - 1) / spec.block_size - int(blocks[r].size()), blocks[r])) return 1;
      append_slots(blocks[r], spec.block_size, begin, end, slots);
      query_start_loc[r + 1] = query_start_loc[r] + end - begin;
      kv_indices.insert(kv_indices.end(), blocks[r].begin(), blocks[r].end());
      kv_indptr[r + 1] = int32_t(kv_indices.size());
      for (int position = begin; position < end; ++position) values.insert(values.end(), 2 * 64, float(100 * r + position));
    }
    const int tokens = query_start_loc[3];
    plan->update({.query_start_loc = query_start_loc,
                  .seq_lens = seq_lens,
                  .kv_indptr = TensorView::contiguous(kv_indptr.data(), DType::i32, {4}),
                  .kv_indices = TensorView::contiguous(kv_indices.data(), DType::i32, {int64_t(kv_indices.size())}),
                  .slot_mapping = TensorView::contiguous(slots.data(), DType::i64, {tokens})},
                 stream->get());

    std::vector<float> ones(tokens * 8 * 64, 1.f), result(ones.size());
    for (int layer = 0; layer < num_layers; ++layer) {
      stream->upload(q.view.data, ones.data(), tokens * 8 * 64 * 4);
      stream->upload(k.view.data, ones.data(), tokens * 2 * 64 * 4);
      stream->upload(v.view.data, values.data(), tokens * 2 * 64 * 4);
      plan->write_kv(cache.layer(layer), k.view.slice(0, 0, tokens), v.view.slice(0, 0, tokens), stream->get());
      plan->run({.q = q.view.slice(0, 0, tokens), .kv = cache.layer(layer)}, {.out = out.view.slice(0, 0, tokens)}, stream->get());
      stream->download(result.data(), out.view.data, tokens * 8 * 64 * 4);
      stream->synchronize();
      for (size_t r = 0; r < 3; ++r)
        for (int row = query_start_loc[r]; row < query_start_loc[r + 1]; ++row)
          worst =
              std::fmax(worst, std::fabs(result[row * 8 * 64] - float(100 * r) - float(seq_lens[r] - query_start_loc[r + 1] + row) / 2));
    }
  }
  std::printf("%s\n%d steps, %d blocks in use, largest error %.1e\n", plan->str().c_str(), num_steps + 1,
              pool.num_blocks() - pool.num_free(), worst);
  return worst < 1e-3f ? 0 : 1;
}
