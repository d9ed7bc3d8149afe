/* A prompt of 20 tokens, then decode, a token at a time: through the C ABI, on the CPU. Keys and values are made up; they are such that the
 * right answer is known. Build: cc decode.c -limbrex */
#include <imbrex/imbrex.h>
#include <stdio.h>
#include <stdlib.h>

enum { kQHeads = 8, kKvHeads = 2, kDim = 64, kBlockSize = 16, kMaxBlocks = 4, kPrompt = 20, kSteps = 30 };

static void must(imbrex_status status, const char* what) {
  if (status == IMBREX_OK) return;
  fprintf(stderr, "%s: %s: %s\n", what, imbrex_last_error_code(), imbrex_last_error());
  exit(1);
}

/* A contiguous tensor of the host; `shape` stays the caller's. */
static imbrex_tensor tensor(void* data, uint8_t code, uint8_t bits, int ndim, int64_t* shape) {
  imbrex_tensor t = {0};
  t.data = data;
  t.device.type = 1;
  t.ndim = ndim;
  t.dtype.code = code, t.dtype.bits = bits, t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

int main(void) {
  imbrex_device* device;
  must(imbrex_device_create("cpu", &device), "device");

  imbrex_spec_fields fields;
  imbrex_spec_fields_init(&fields, sizeof fields);
  fields.num_q_heads = kQHeads, fields.num_kv_heads = kKvHeads;
  fields.head_dim_qk = fields.head_dim_v = kDim;
  fields.q_dtype = fields.kv_dtype = IMBREX_F32;
  fields.block_size = kBlockSize;
  imbrex_spec* spec;
  must(imbrex_spec_create(&fields, &spec), "spec");

  imbrex_selection* selection;
  must(imbrex_select(spec, device, NULL, &selection), "select");
  printf("%s", imbrex_selection_explain(selection)); /* every backend, and why it was passed over */

  imbrex_threads* threads;
  must(imbrex_threads_create(0, &threads), "threads");
  imbrex_plan_options options;
  imbrex_plan_options_init(&options, sizeof options);
  options.max_num_reqs = 1, options.max_num_tokens = kPrompt, options.max_seq_len = kMaxBlocks * kBlockSize;
  options.threads = threads;
  imbrex_plan* plan;
  must(imbrex_plan_create(selection, &options, &plan), "plan");

  imbrex_block_pool* pool;
  must(imbrex_block_pool_create(16, &pool), "pool");
  imbrex_kv_allocation* memory;
  must(imbrex_kv_allocation_create(spec, device, 1, 16, NULL, &memory), "cache");
  imbrex_kv_cache cache;
  imbrex_kv_cache_init(&cache, sizeof cache);
  must(imbrex_kv_allocation_layer(memory, 0, &cache), "layer");

  static float q[kPrompt * kQHeads * kDim], k[kPrompt * kKvHeads * kDim], v[kPrompt * kKvHeads * kDim], out[kPrompt * kQHeads * kDim];
  int32_t blocks[kMaxBlocks], num_blocks = 0, seq_len = 0;
  for (int step = 0; step <= kSteps; ++step) {
    const int32_t num_tokens = step == 0 ? kPrompt : 1;
    const int32_t needed = (seq_len + num_tokens + kBlockSize - 1) / kBlockSize - num_blocks;
    must(imbrex_block_pool_allocate(pool, needed, blocks + num_blocks), "blocks");
    num_blocks += needed;

    /* Equal keys weigh alike, so that a query's output is the mean of the values it sees: of 0, 1, 2, ... */
    int64_t slots[kPrompt];
    for (int t = 0; t < num_tokens; ++t) {
      const int position = seq_len + t;
      slots[t] = (int64_t)blocks[position / kBlockSize] * kBlockSize + position % kBlockSize;
      for (int i = 0; i < kQHeads * kDim; ++i) q[t * kQHeads * kDim + i] = 0.5f;
      for (int i = 0; i < kKvHeads * kDim; ++i) k[t * kKvHeads * kDim + i] = 1.f, v[t * kKvHeads * kDim + i] = (float)position;
    }
    seq_len += num_tokens;

    int32_t query_start_loc[2] = {0, num_tokens};
    int64_t table_shape[2] = {1, num_blocks}, slots_shape[1] = {num_tokens};
    const imbrex_tensor table = tensor(blocks, 0, 32, 2, table_shape), slot_mapping = tensor(slots, 0, 64, 1, slots_shape);
    imbrex_batch batch;
    imbrex_batch_init(&batch, sizeof batch);
    batch.num_reqs = 1, batch.query_start_loc = query_start_loc, batch.seq_lens = &seq_len;
    batch.block_table = &table, batch.slot_mapping = &slot_mapping;
    must(imbrex_plan_update(plan, &batch, NULL), "update");

    /* Of a model, each layer has these two calls. */
    int64_t q_shape[3] = {num_tokens, kQHeads, kDim}, kv_shape[3] = {num_tokens, kKvHeads, kDim};
    const imbrex_tensor new_k = tensor(k, 2, 32, 3, kv_shape), new_v = tensor(v, 2, 32, 3, kv_shape);
    must(imbrex_plan_write_kv(plan, &cache, &new_k, &new_v, NULL), "write_kv");
    const imbrex_tensor queries = tensor(q, 2, 32, 3, q_shape), result = tensor(out, 2, 32, 3, q_shape);
    imbrex_inputs inputs;
    imbrex_inputs_init(&inputs, sizeof inputs);
    inputs.q = &queries, inputs.kv = &cache;
    imbrex_outputs outputs;
    imbrex_outputs_init(&outputs, sizeof outputs);
    outputs.out = &result;
    must(imbrex_plan_run(plan, &inputs, &outputs, NULL), "run");

    const float last = out[(num_tokens - 1) * kQHeads * kDim], expected = (float)(seq_len - 1) / 2.f;
    if (last < expected - 1e-4f * expected || last > expected + 1e-4f * expected) {
      fprintf(stderr, "step %d: expected %g, got %g\n", step, expected, last);
      return 1;
    }
  }
  printf("%s\n%d tokens in %d blocks; the last query's output is %g\n", imbrex_plan_str(plan), seq_len, num_blocks, (double)out[0]);

  must(imbrex_block_pool_release(pool, blocks, num_blocks), "release");
  imbrex_plan_free(plan);
  imbrex_threads_free(threads);
  imbrex_kv_allocation_free(memory);
  imbrex_block_pool_free(pool);
  imbrex_selection_free(selection);
  imbrex_spec_free(spec);
  imbrex_device_free(device);
  return 0;
}
