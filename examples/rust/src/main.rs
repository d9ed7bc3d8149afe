//! A prompt of 20 tokens, then decode, a token at a time, on the CPU: what examples/c/decode.c does, from Rust. Keys and values are made up
//! such that the right answer is known.
mod ffi;
use ffi::*;
use std::ptr::{null, null_mut};

const Q_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const BLOCK_SIZE: usize = 16;
const MAX_BLOCKS: usize = 4;
const PROMPT: usize = 20;
const STEPS: usize = 30;

fn main() -> Result<(), String> {
    // The part of the header that the library has not grown out of.
    assert_eq!(unsafe { imbrex_abi_version() }, 1);
    unsafe { run() }
}

unsafe fn run() -> Result<(), String> {
    let device = create(|out| imbrex_device_create(b"cpu\0".as_ptr().cast(), out))?;
    let mut fields = init(imbrex_spec_fields_init);
    fields.num_q_heads = Q_HEADS as i32;
    fields.num_kv_heads = KV_HEADS as i32;
    fields.head_dim_qk = DIM as i32;
    fields.head_dim_v = DIM as i32;
    fields.q_dtype = F32;
    fields.kv_dtype = F32;
    fields.block_size = BLOCK_SIZE as i32;
    let spec = create(|out| imbrex_spec_create(&fields, out))?;
    let selection = create(|out| imbrex_select(spec, device, null(), out))?;
    print!("{}", text(imbrex_selection_explain(selection)));

    let threads = create(|out| imbrex_threads_create(0, out))?;
    let mut options = init(imbrex_plan_options_init);
    options.max_num_reqs = 1;
    options.max_num_tokens = PROMPT as i32;
    options.max_seq_len = (MAX_BLOCKS * BLOCK_SIZE) as i32;
    options.threads = threads;
    let plan = create(|out| imbrex_plan_create(selection, &options, out))?;

    let pool = create(|out| imbrex_block_pool_create(16, out))?;
    let memory = create(|out| imbrex_kv_allocation_create(spec, device, 1, 16, null(), out))?;
    let mut cache = init(imbrex_kv_cache_init);
    must(imbrex_kv_allocation_layer(memory, 0, &mut cache))?;

    let mut blocks: Vec<i32> = Vec::new();
    let mut seq_len = 0;
    for step in 0..=STEPS {
        let tokens = if step == 0 { PROMPT } else { 1 };
        let held = blocks.len();
        blocks.resize((seq_len + tokens + BLOCK_SIZE - 1) / BLOCK_SIZE, 0);
        must(imbrex_block_pool_allocate(pool, (blocks.len() - held) as i32, blocks[held..].as_mut_ptr()))?;

        // Equal keys weigh alike, so that a query's output is the mean of the values it sees: of 0, 1, 2, ...
        let positions = seq_len..seq_len + tokens;
        let mut slots: Vec<i64> =
            positions.clone().map(|p| i64::from(blocks[p / BLOCK_SIZE]) * BLOCK_SIZE as i64 + (p % BLOCK_SIZE) as i64).collect();
        let mut q = vec![0.5f32; tokens * Q_HEADS * DIM];
        let mut k = vec![1f32; tokens * KV_HEADS * DIM];
        let mut v: Vec<f32> = positions.flat_map(|p| [p as f32; KV_HEADS * DIM]).collect();
        let mut out = vec![0f32; q.len()];
        seq_len += tokens;

        let (query_start_loc, seq_lens) = ([0, tokens as i32], [seq_len as i32]);
        let (mut table_shape, mut slots_shape) = ([1, blocks.len() as i64], [tokens as i64]);
        let (block_table, slot_mapping) = (tensor(&mut blocks, &mut table_shape), tensor(&mut slots, &mut slots_shape));
        let mut batch = init(imbrex_batch_init);
        batch.num_reqs = 1;
        batch.query_start_loc = query_start_loc.as_ptr();
        batch.seq_lens = seq_lens.as_ptr();
        batch.block_table = &block_table;
        batch.slot_mapping = &slot_mapping;
        must(imbrex_plan_update(plan, &batch, null_mut()))?;

        // Of a model, each layer has these two calls.
        let mut q_shape = [tokens as i64, Q_HEADS as i64, DIM as i64];
        let mut kv_shape = [tokens as i64, KV_HEADS as i64, DIM as i64];
        let (mut v_shape, mut out_shape) = (kv_shape, q_shape);
        let (new_k, new_v) = (tensor(&mut k, &mut kv_shape), tensor(&mut v, &mut v_shape));
        must(imbrex_plan_write_kv(plan, &cache, &new_k, &new_v, null_mut()))?;
        let (queries, result) = (tensor(&mut q, &mut q_shape), tensor(&mut out, &mut out_shape));
        let mut inputs = init(imbrex_inputs_init);
        inputs.q = &queries;
        inputs.kv = &cache;
        let mut outputs = init(imbrex_outputs_init);
        outputs.out = &result;
        must(imbrex_plan_run(plan, &inputs, &outputs, null_mut()))?;

        let (last, expected) = (out[(tokens - 1) * Q_HEADS * DIM], (seq_len - 1) as f32 / 2.0);
        if (last - expected).abs() > 1e-4 * expected {
            return Err(format!("step {step}: expected {expected}, got {last}"));
        }
        if step == STEPS {
            println!("{}\n{} tokens in {} blocks; the last query's output is {}", text(imbrex_plan_str(plan)), seq_len, blocks.len(), last);
        }
    }

    must(imbrex_block_pool_release(pool, blocks.as_ptr(), blocks.len() as i32))?;
    imbrex_plan_free(plan);
    imbrex_threads_free(threads);
    imbrex_kv_allocation_free(memory);
    imbrex_block_pool_free(pool);
    imbrex_selection_free(selection);
    imbrex_spec_free(spec);
    imbrex_device_free(device);
    Ok(())
}
