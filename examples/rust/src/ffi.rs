//! The part of imbrex.h that the example calls, by hand: opaque handles, structs that begin with their size, and a status that becomes a
//! `Result` with the library's text.
#![allow(non_camel_case_types)]
use std::ffi::{c_char, c_void, CStr};
use std::ptr;

pub enum Device {}
pub enum Spec {}
pub enum Selection {}
pub enum Threads {}
pub enum Plan {}
pub enum Pool {}
pub enum Allocation {}

pub const F32: i32 = 0; // IMBREX_F32

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct DlDevice {
    pub kind: i32,
    pub index: i32,
}
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct DlType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}
/// DLPack's DLTensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Tensor {
    pub data: *mut c_void,
    pub device: DlDevice,
    pub ndim: i32,
    pub dtype: DlType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// Element types that Rust has too.
pub trait Element {
    const TYPE: DlType;
}
impl Element for f32 {
    const TYPE: DlType = DlType { code: 2, bits: 32, lanes: 1 };
}
impl Element for i32 {
    const TYPE: DlType = DlType { code: 0, bits: 32, lanes: 1 };
}
impl Element for i64 {
    const TYPE: DlType = DlType { code: 0, bits: 64, lanes: 1 };
}

/// Contiguous, in host memory. The slices must outlive it.
pub fn tensor<T: Element>(data: &mut [T], shape: &mut [i64]) -> Tensor {
    assert!(data.len() as i64 >= shape.iter().product());
    Tensor {
        data: data.as_mut_ptr().cast(),
        device: DlDevice { kind: 1, index: 0 },
        ndim: shape.len() as i32,
        dtype: T::TYPE,
        shape: shape.as_mut_ptr(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct SpecFields {
    pub struct_size: usize,
    pub kind: i32,
    pub num_q_heads: i32,
    pub num_kv_heads: i32,
    pub head_dim_qk: i32,
    pub head_dim_v: i32,
    pub q_dtype: i32,
    pub kv_dtype: i32,
    pub kv_format: i32,
    pub block_size: i32,
    pub causal: i32,
    pub window_left: i32,
    pub window_right: i32,
    pub chunk: i32,
    pub custom_mask: i32,
    pub scale: f32,
    pub soft_cap: f32,
    pub head_scales: i32,
    pub alibi: i32,
    pub sinks: i32,
    pub relative_buckets: i32,
    pub relative_max_distance: i32,
    pub relative_bidirectional: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct KvCache {
    pub struct_size: usize,
    pub k: *const Tensor,
    pub v: *const Tensor,
    pub k_scale: *const Tensor,
    pub v_scale: *const Tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct PlanOptions {
    pub struct_size: usize,
    pub max_num_reqs: i32,
    pub max_num_tokens: i32,
    pub max_seq_len: i32,
    pub max_query_len: i32,
    pub threads: *mut Threads,
    pub parallel_for: *const c_void,
    pub parallel_for_context: *mut c_void,
    pub num_workers: i32,
    pub balanced: i32,
    pub validate: i32,
    pub load_on_demand: i32,
    pub on_device: i32,
    pub out_dtype: *const i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Batch {
    pub struct_size: usize,
    pub num_reqs: i32,
    pub query_start_loc: *const i32,
    pub seq_lens: *const i32,
    pub block_table: *const Tensor,
    pub kv_indptr: *const Tensor,
    pub kv_indices: *const Tensor,
    pub kv_last_page_len: *const Tensor,
    pub kv_start_loc: *const Tensor,
    pub slot_mapping: *const Tensor,
    pub custom_mask: *const Tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Inputs {
    pub struct_size: usize,
    pub q: *const Tensor,
    pub q_scale: *const Tensor,
    pub kv: *const KvCache,
    pub sinks: *const Tensor,
    pub alibi_slopes: *const Tensor,
    pub head_scales: *const Tensor,
    pub relative_bias: *const Tensor,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Outputs {
    pub struct_size: usize,
    pub out: *const Tensor,
    pub lse: *const Tensor,
}

extern "C" {
    pub fn imbrex_abi_version() -> u32;
    fn imbrex_last_error() -> *const c_char;
    fn imbrex_last_error_code() -> *const c_char;
    pub fn imbrex_device_create(text: *const c_char, out: *mut *mut Device) -> i32;
    pub fn imbrex_device_free(device: *mut Device);
    pub fn imbrex_spec_fields_init(fields: *mut SpecFields, struct_size: usize);
    pub fn imbrex_spec_create(fields: *const SpecFields, out: *mut *mut Spec) -> i32;
    pub fn imbrex_spec_free(spec: *mut Spec);
    pub fn imbrex_select(spec: *const Spec, device: *const Device, options: *const c_void, out: *mut *mut Selection) -> i32;
    pub fn imbrex_selection_free(selection: *mut Selection);
    pub fn imbrex_selection_explain(selection: *const Selection) -> *const c_char;
    pub fn imbrex_threads_create(count: i32, out: *mut *mut Threads) -> i32;
    pub fn imbrex_threads_free(threads: *mut Threads);
    pub fn imbrex_plan_options_init(options: *mut PlanOptions, struct_size: usize);
    pub fn imbrex_plan_create(selection: *const Selection, options: *const PlanOptions, out: *mut *mut Plan) -> i32;
    pub fn imbrex_plan_free(plan: *mut Plan);
    pub fn imbrex_plan_str(plan: *mut Plan) -> *const c_char;
    pub fn imbrex_plan_update(plan: *mut Plan, batch: *const Batch, stream: *mut c_void) -> i32;
    pub fn imbrex_plan_write_kv(plan: *mut Plan, kv: *const KvCache, k: *const Tensor, v: *const Tensor, stream: *mut c_void) -> i32;
    pub fn imbrex_plan_run(plan: *mut Plan, inputs: *const Inputs, outputs: *const Outputs, stream: *mut c_void) -> i32;
    pub fn imbrex_batch_init(batch: *mut Batch, struct_size: usize);
    pub fn imbrex_inputs_init(inputs: *mut Inputs, struct_size: usize);
    pub fn imbrex_outputs_init(outputs: *mut Outputs, struct_size: usize);
    pub fn imbrex_kv_cache_init(kv: *mut KvCache, struct_size: usize);
    pub fn imbrex_kv_allocation_create(
        spec: *const Spec,
        device: *const Device,
        num_layers: i32,
        num_blocks: i64,
        order: *const c_char,
        out: *mut *mut Allocation,
    ) -> i32;
    pub fn imbrex_kv_allocation_free(allocation: *mut Allocation);
    pub fn imbrex_kv_allocation_layer(allocation: *const Allocation, layer: i32, out: *mut KvCache) -> i32;
    pub fn imbrex_block_pool_create(num_blocks: i32, out: *mut *mut Pool) -> i32;
    pub fn imbrex_block_pool_free(pool: *mut Pool);
    pub fn imbrex_block_pool_allocate(pool: *mut Pool, count: i32, blocks: *mut i32) -> i32;
    pub fn imbrex_block_pool_release(pool: *mut Pool, blocks: *const i32, count: i32) -> i32;
}

/// A string of the library, copied.
pub fn text(s: *const c_char) -> String {
    unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned()
}

pub fn must(status: i32) -> Result<(), String> {
    match status {
        0 => Ok(()),
        _ => Err(unsafe { format!("{}: {}", text(imbrex_last_error_code()), text(imbrex_last_error())) }),
    }
}

/// What a function of the library makes.
pub fn create<T>(make: impl FnOnce(*mut *mut T) -> i32) -> Result<*mut T, String> {
    let mut handle = ptr::null_mut();
    must(make(&mut handle)).map(|()| handle)
}

/// A struct as its init function leaves it.
pub fn init<T>(function: unsafe extern "C" fn(*mut T, usize)) -> T {
    unsafe {
        let mut value = std::mem::MaybeUninit::<T>::zeroed();
        function(value.as_mut_ptr(), std::mem::size_of::<T>());
        value.assume_init()
    }
}
