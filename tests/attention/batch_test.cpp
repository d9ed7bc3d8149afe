// validate(Batch): good batches pass, and a table of more than a hundred bad ones, each refused with its own code.
#include "imbrex/batch.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "imbrex/spec.h"

namespace imbrex {
namespace {

using test::error_code;

constexpr int kBlockSize = 16, kNumBlocks = 64, kColumns = 4;

// A batch with the memory behind it. Requests: a chunk of 5 after 30 keys, a decode at 16 keys, a padded one, a prefill of 7.
struct Step {
  AttentionSpec spec{
      .num_q_heads = 4, .num_kv_heads = 2, .head_dim_qk = 64, .head_dim_v = 64, .block_size = kBlockSize, .mask = {}, .score = {}};
  PlanLimits limits{.max_num_reqs = 8, .max_num_tokens = 64, .max_seq_len = 64};
  int64_t num_blocks = kNumBlocks;
  std::vector<int32_t> starts = {0, 5, 6, 6, 13};
  std::vector<int32_t> seq_lens = {35, 16, 0, 7};
  std::vector<int32_t> table = {1, 2, 3, -1, 4, -1, -1, -1, -1, -1, -1, -1, 63, -1, -1, -1};  // unused entries are not read
  std::vector<int32_t> indptr = {0, 3, 4, 4, 5}, indices = {1, 2, 3, 4, 63}, last_page = {3, 16, 0, 7};
  std::vector<int32_t> kv_starts = {0, 35, 51, 51, 58};
  std::vector<int64_t> slots = {30, 31, 32, 33, -1, 79, 1008, 1009, 1010, 1011, 1012, 1013, 1014};
  std::vector<uint8_t> mask = std::vector<uint8_t>(5 * 35 + 16 + 49, 1);
  Batch batch;

  Step() = default;
  Step(const Step&) = delete;

  void refresh_host() {
    batch.query_start_loc = starts;
    batch.seq_lens = seq_lens;
  }
  static TensorView vector_view(void* data, DType dtype, size_t size) { return TensorView::contiguous(data, dtype, {int64_t(size)}); }
  void use_dense() {
    refresh_host();
    batch.block_table = TensorView::contiguous(table.data(), DType::i32, {int64_t(table.size()) / kColumns, kColumns});
    batch.slot_mapping = vector_view(slots.data(), DType::i64, slots.size());
  }
  void use_csr() {
    refresh_host();
    batch.kv_indptr = vector_view(indptr.data(), DType::i32, indptr.size());
    batch.kv_indices = vector_view(indices.data(), DType::i32, indices.size());
    batch.kv_last_page_len = vector_view(last_page.data(), DType::i32, last_page.size());
  }
  void use_ragged() {
    refresh_host();
    spec.block_size = 0;
    num_blocks = -1;
    batch.kv_start_loc = vector_view(kv_starts.data(), DType::i32, kv_starts.size());
  }
  void use_mask() {
    spec.mask.custom = true;
    batch.custom_mask = vector_view(mask.data(), DType::u8, mask.size());
  }
  std::vector<uint8_t> bits = std::vector<uint8_t>(22 + 2 + 7, 0xff);  // of 175, 16, none and 49 pairs
  std::vector<int32_t> mask_indptr = {0, 22, 24, 24, 31};
  void use_packed_mask() {
    spec.mask.custom = true;
    batch.packed_mask = vector_view(bits.data(), DType::u8, bits.size());
  }
  std::vector<int32_t> positions = std::vector<int32_t>(13, kMostPosition);
  void use_positions() {
    spec.mask.positions = true;
    batch.positions = positions;
  }
  std::string code() const {
    return error_code([&] { validate(batch, spec, limits, num_blocks); });
  }
};

constexpr const char* kFine = "nothing thrown";

TEST(Batch, GoodBatchesPass) {
  Step dense, csr, ragged, masked, unknown_size, shared_row;
  dense.use_dense();
  EXPECT_EQ(dense.code(), kFine);
  csr.use_csr();
  EXPECT_EQ(csr.code(), kFine);
  csr.batch.kv_last_page_len = {};
  EXPECT_EQ(csr.code(), kFine);
  ragged.use_ragged();
  EXPECT_EQ(ragged.code(), kFine);
  masked.use_dense();
  masked.use_mask();
  EXPECT_EQ(masked.code(), kFine);
  unknown_size.use_dense();
  unknown_size.num_blocks = -1;
  EXPECT_EQ(unknown_size.code(), kFine);
  shared_row.use_dense();
  shared_row.table = {1, 2, 3, 4};
  shared_row.batch.block_table.data = shared_row.table.data();
  shared_row.batch.block_table.strides[0] = 0;  // all requests share their blocks
  EXPECT_EQ(shared_row.code(), kFine);
}

TEST(Batch, EmptyStepsPass) {
  Step step;
  EXPECT_EQ(step.code(), kFine);  // no arrays at all
  step.starts = {0};
  step.seq_lens.clear();
  step.refresh_host();
  EXPECT_EQ(step.code(), kFine);
  step.starts = {0, 0, 0};
  step.seq_lens = {0, 0};
  step.refresh_host();
  EXPECT_EQ(step.code(), kFine);  // padded requests need no keys
}

TEST(Batch, ConvenienceMaxima) {
  Step step;
  EXPECT_EQ(step.batch.max_seq_len(), 0);
  EXPECT_EQ(step.batch.max_query_len(), 0);
  step.use_dense();
  EXPECT_EQ(step.batch.max_seq_len(), 35);
  EXPECT_EQ(step.batch.max_query_len(), 7);
  EXPECT_EQ(step.batch.context_len(0), 30);
}

TEST(Batch, CrossAttentionMayHaveFewerKeysThanQueries) {
  Step step;
  step.use_dense();
  step.seq_lens[3] = 2;
  EXPECT_EQ(step.code(), "batch.seq_len.shorter_than_query");
  step.spec.kind = AttentionKind::encoder_decoder;
  EXPECT_EQ(step.code(), kFine);
}

// Arrays of callers of other languages may begin anywhere.
TEST(Batch, LengthsLieAtAddressesOfNumbers) {
  for (const bool of_starts : {true, false}) {
    Step step;
    step.use_dense();
    std::span<const int32_t>& lengths = of_starts ? step.batch.query_start_loc : step.batch.seq_lens;
    std::vector<char> bytes(lengths.size_bytes() + 1);
    std::memcpy(bytes.data() + 1, lengths.data(), lengths.size_bytes());
    lengths = {reinterpret_cast<const int32_t*>(bytes.data() + 1), lengths.size()};
    EXPECT_EQ(step.code(), "tensor.alignment");
  }
}

TEST(Batch, DeviceArraysAreCheckedByShapeOnly) {
  Step step;
  step.use_dense();
  step.table[0] = -5;
  step.slots[0] = -5;
  step.batch.block_table.device = step.batch.slot_mapping.device = {DeviceType::cuda, 0};
  EXPECT_EQ(step.code(), kFine);
  step.batch.block_table.sizes[1] = 2;
  EXPECT_EQ(step.code(), "batch.block_table.columns");
}

enum class Form { dense, csr, ragged, masked };

struct BadBatch {
  const char* code;
  Form form;
  void (*spoil)(Step&);
};

// Spoils a host array or a view; the views of `Step` already point at the vectors.
const std::vector<BadBatch>& bad_batches() {
  using S = Step&;
  static const std::vector<BadBatch> all = {
      // Lengths and limits
      {"batch.query_start_loc.size", Form::dense, [](S s) { s.batch.query_start_loc = s.batch.query_start_loc.first(4); }},
      {"batch.query_start_loc.size", Form::dense, [](S s) { s.batch.query_start_loc = {}; }},
      {"batch.query_start_loc.size", Form::dense, [](S s) { s.batch.seq_lens = s.batch.seq_lens.first(3); }},
      {"batch.query_start_loc.size", Form::dense, [](S s) { s.batch.seq_lens = {}; }},
      {"batch.query_start_loc.start", Form::dense, [](S s) { s.starts[0] = 1; }},
      {"batch.query_start_loc.start", Form::dense, [](S s) { s.starts[0] = -1; }},
      {"batch.query_start_loc.start", Form::dense, [](S s) { s.starts[0] = INT32_MIN; }},
      {"batch.query_start_loc.monotone", Form::dense, [](S s) { s.starts[2] = 4; }},
      {"batch.query_start_loc.monotone", Form::dense, [](S s) { s.starts[4] = -1; }},
      {"batch.query_start_loc.monotone", Form::dense, [](S s) { s.starts[4] = INT32_MIN; }},
      {"batch.query_start_loc.monotone", Form::dense, [](S s) { s.starts[1] = -3; }},
      {"batch.num_reqs.limit", Form::dense, [](S s) { s.limits.max_num_reqs = 3; }},
      {"batch.num_reqs.limit", Form::dense, [](S s) { s.limits.max_num_reqs = -1; }},
      {"batch.num_tokens.limit", Form::dense, [](S s) { s.limits.max_num_tokens = 12; }},
      {"batch.num_tokens.limit", Form::dense, [](S s) { s.limits.max_num_tokens = -1; }},
      {"batch.query_len.limit", Form::dense, [](S s) { s.limits.max_query_len = 4; }},
      {"batch.query_len.limit", Form::dense, [](S s) { s.limits.min_query_len = 6; }},
      {"batch.seq_len.negative", Form::dense, [](S s) { s.seq_lens[2] = -1; }},
      {"batch.seq_len.negative", Form::dense, [](S s) { s.seq_lens[0] = INT32_MIN; }},
      {"batch.seq_len.negative", Form::ragged, [](S s) { s.seq_lens[3] = -7; }},
      {"batch.seq_len.limit", Form::dense, [](S s) { s.seq_lens[0] = 65; }},
      {"batch.seq_len.limit", Form::dense, [](S s) { s.seq_lens[0] = INT32_MAX; }},
      {"batch.seq_len.limit", Form::csr, [](S s) { s.limits.max_seq_len = 34; }},
      {"batch.seq_len.limit", Form::csr, [](S s) { s.limits.max_seq_len = -1; }},
      {"batch.seq_len.shorter_than_query", Form::dense, [](S s) { s.seq_lens[0] = 4; }},
      {"batch.seq_len.shorter_than_query", Form::dense, [](S s) { s.seq_lens[1] = 0; }},
      {"batch.seq_len.shorter_than_query", Form::dense, [](S s) { s.starts[4] = INT32_MAX; }},
      {"batch.seq_len.shorter_than_query", Form::dense, [](S s) { s.spec.kind = AttentionKind::encoder, s.seq_lens[3] = 6; }},
      // Which form of keys
      {"batch.keys.missing", Form::dense, [](S s) { s.batch.block_table = {}; }},
      {"batch.keys.missing", Form::ragged, [](S s) { s.batch.kv_start_loc = {}; }},
      {"batch.keys.ambiguous", Form::dense, [](S s) { s.use_csr(); }},
      {"batch.keys.ambiguous", Form::dense, [](S s) { s.batch.kv_indices = Step::vector_view(s.indices.data(), DType::i32, 5); }},
      {"batch.keys.ambiguous", Form::dense, [](S s) { s.batch.kv_last_page_len = Step::vector_view(s.last_page.data(), DType::i32, 4); }},
      {"batch.keys.ragged_for_paged", Form::dense,
       [](S s) { s.batch.kv_start_loc = Step::vector_view(s.kv_starts.data(), DType::i32, 5); }},
      {"batch.keys.ragged_for_paged", Form::ragged, [](S s) { s.spec.block_size = 16; }},
      {"batch.keys.dense_for_ragged", Form::dense, [](S s) { s.spec.block_size = 0; }},
      {"batch.keys.dense_for_ragged", Form::ragged,
       [](S s) {
         s.batch.block_table = TensorView::contiguous(s.table.data(), DType::i32, {4, 4});
       }},
      {"batch.keys.csr_for_ragged", Form::csr, [](S s) { s.spec.block_size = 0; }},
      {"batch.keys.csr_for_ragged", Form::ragged, [](S s) { s.batch.kv_indices = Step::vector_view(s.indices.data(), DType::i32, 5); }},
      // Devices
      {"batch.device", Form::dense,
       [](S s) {
         s.batch.block_table.device = {DeviceType::cuda, 0};
       }},
      {"batch.device", Form::dense,
       [](S s) {
         s.batch.slot_mapping.device = {DeviceType::cuda, 0};
       }},
      {"batch.device", Form::dense,
       [](S s) {
         s.batch.block_table.device = {DeviceType::cuda, 0}, s.batch.slot_mapping.device = {DeviceType::cuda, 1};
       }},
      {"batch.device", Form::csr,
       [](S s) {
         s.batch.kv_indices.device = {DeviceType::cuda, 0};
       }},
      {"batch.device", Form::masked,
       [](S s) {
         s.batch.custom_mask.device = {DeviceType::cuda, 0};
       }},
      // Dense block table
      {"batch.block_table.dtype", Form::dense, [](S s) { s.batch.block_table.dtype = DType::i64; }},
      {"batch.block_table.dtype", Form::dense, [](S s) { s.batch.block_table.dtype = DType::f32; }},
      {"batch.block_table.rank", Form::dense, [](S s) { s.batch.block_table.rank = 1; }},
      {"batch.block_table.rank", Form::dense, [](S s) { s.batch.block_table.rank = 0; }},
      {"batch.block_table.rank", Form::dense, [](S s) { s.batch.block_table.rank = 3; }},
      {"batch.block_table.stride", Form::dense, [](S s) { s.batch.block_table.strides[1] = 4; }},
      {"batch.block_table.stride", Form::dense, [](S s) { s.batch.block_table.strides[1] = 0; }},
      {"batch.block_table.stride", Form::dense, [](S s) { s.batch.block_table.strides[1] = -1; }},
      {"batch.block_table.stride", Form::dense, [](S s) { s.batch.block_table.strides[0] = -4; }},
      {"batch.block_table.rows", Form::dense, [](S s) { s.batch.block_table.sizes[0] = 3; }},
      {"batch.block_table.rows", Form::dense, [](S s) { s.batch.block_table.sizes[0] = -1; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.batch.block_table.sizes[1] = 2; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.batch.block_table.sizes[1] = 0; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.batch.block_table.sizes[1] = -1; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.spec.block_size = 8; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.spec.block_size = 1; }},
      {"batch.block_table.columns", Form::dense, [](S s) { s.limits.max_seq_len = INT32_MAX, s.seq_lens[0] = INT32_MAX; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.table[0] = kNumBlocks; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.table[2] = -1; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.table[4] = INT32_MAX; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.table[12] = INT32_MIN; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.seq_lens[0] = 49; }},  // one key into an unset block
      {"batch.block_table.id", Form::dense, [](S s) { s.num_blocks = 63; }},
      {"batch.block_table.id", Form::dense, [](S s) { s.num_blocks = -1, s.table[1] = -1; }},
      {"batch.block_table.no_blocks", Form::dense, [](S s) { s.num_blocks = 0; }},
      // CSR
      {"batch.kv_indptr.missing", Form::csr, [](S s) { s.batch.kv_indptr = {}; }},
      {"batch.kv_indptr.missing", Form::csr, [](S s) { s.batch.kv_indptr = s.batch.kv_indices = {}; }},
      {"batch.kv_indptr.dtype", Form::csr, [](S s) { s.batch.kv_indptr.dtype = DType::i64; }},
      {"batch.kv_indptr.rank", Form::csr, [](S s) { s.batch.kv_indptr.rank = 2; }},
      {"batch.kv_indptr.stride", Form::csr, [](S s) { s.batch.kv_indptr.strides[0] = 2; }},
      {"batch.kv_indptr.size", Form::csr, [](S s) { s.batch.kv_indptr.sizes[0] = 4; }},
      {"batch.kv_indptr.size", Form::csr, [](S s) { s.batch.kv_indptr.sizes[0] = 6; }},
      {"batch.kv_indptr.start", Form::csr, [](S s) { s.indptr[0] = 1; }},
      {"batch.kv_indptr.start", Form::csr, [](S s) { s.indptr[0] = -1; }},
      {"batch.kv_indptr.monotone", Form::csr, [](S s) { s.indptr[2] = 2; }},
      {"batch.kv_indptr.monotone", Form::csr, [](S s) { s.indptr[4] = -1; }},
      {"batch.kv_indptr.monotone", Form::csr, [](S s) { s.indptr[1] = INT32_MIN; }},
      {"batch.kv_indptr.too_few", Form::csr, [](S s) { s.indptr[1] = 2; }},
      {"batch.kv_indptr.too_few", Form::csr, [](S s) { s.indptr[4] = 4; }},
      {"batch.kv_indptr.too_few", Form::csr, [](S s) { s.spec.block_size = 8; }},
      {"batch.kv_indices.missing", Form::csr, [](S s) { s.batch.kv_indices = {}; }},
      {"batch.kv_indices.dtype", Form::csr, [](S s) { s.batch.kv_indices.dtype = DType::i64; }},
      {"batch.kv_indices.rank", Form::csr, [](S s) { s.batch.kv_indices.rank = 2; }},
      {"batch.kv_indices.stride", Form::csr, [](S s) { s.batch.kv_indices.strides[0] = -1; }},
      {"batch.kv_indices.size", Form::csr, [](S s) { s.batch.kv_indices.sizes[0] = 4; }},
      {"batch.kv_indices.size", Form::csr, [](S s) { s.indptr[4] = INT32_MAX; }},
      {"batch.kv_indices.id", Form::csr, [](S s) { s.indices[4] = kNumBlocks; }},
      {"batch.kv_indices.id", Form::csr, [](S s) { s.indices[0] = -1; }},
      {"batch.kv_indices.id", Form::csr, [](S s) { s.indices[3] = INT32_MAX; }},
      {"batch.kv_indices.no_blocks", Form::csr, [](S s) { s.num_blocks = 0; }},
      {"batch.kv_last_page_len.dtype", Form::csr, [](S s) { s.batch.kv_last_page_len.dtype = DType::u8; }},
      {"batch.kv_last_page_len.rank", Form::csr, [](S s) { s.batch.kv_last_page_len.rank = 2; }},
      {"batch.kv_last_page_len.stride", Form::csr, [](S s) { s.batch.kv_last_page_len.strides[0] = 0; }},
      {"batch.kv_last_page_len.size", Form::csr, [](S s) { s.batch.kv_last_page_len.sizes[0] = 3; }},
      {"batch.kv_last_page_len.range", Form::csr, [](S s) { s.last_page[0] = 0; }},
      {"batch.kv_last_page_len.range", Form::csr, [](S s) { s.last_page[1] = 17; }},
      {"batch.kv_last_page_len.range", Form::csr, [](S s) { s.last_page[3] = -1; }},
      {"batch.kv_last_page_len.mismatch", Form::csr, [](S s) { s.last_page[0] = 4; }},
      {"batch.kv_last_page_len.mismatch", Form::csr, [](S s) { s.seq_lens[3] = 8; }},
      // Ragged
      {"batch.kv_start_loc.dtype", Form::ragged, [](S s) { s.batch.kv_start_loc.dtype = DType::i64; }},
      {"batch.kv_start_loc.rank", Form::ragged, [](S s) { s.batch.kv_start_loc.rank = 2; }},
      {"batch.kv_start_loc.stride", Form::ragged, [](S s) { s.batch.kv_start_loc.strides[0] = 2; }},
      {"batch.kv_start_loc.size", Form::ragged, [](S s) { s.batch.kv_start_loc.sizes[0] = 4; }},
      {"batch.kv_start_loc.negative", Form::ragged, [](S s) { s.kv_starts[0] = -1; }},
      {"batch.kv_start_loc.monotone", Form::ragged, [](S s) { s.kv_starts[2] = 34; }},
      {"batch.kv_start_loc.monotone", Form::ragged, [](S s) { s.kv_starts[1] = INT32_MIN; }},
      {"batch.kv_start_loc.length", Form::ragged, [](S s) { s.kv_starts[4] = 59; }},
      {"batch.kv_start_loc.length", Form::ragged, [](S s) { s.seq_lens[3] = 8; }},
      {"batch.kv_start_loc.length", Form::ragged, [](S s) { s.kv_starts[4] = INT32_MAX; }},
      // Slots
      {"batch.slot_mapping.ragged", Form::ragged, [](S s) { s.batch.slot_mapping = Step::vector_view(s.slots.data(), DType::i64, 13); }},
      {"batch.slot_mapping.dtype", Form::dense, [](S s) { s.batch.slot_mapping.dtype = DType::i32; }},
      {"batch.slot_mapping.rank", Form::dense, [](S s) { s.batch.slot_mapping.rank = 2; }},
      {"batch.slot_mapping.stride", Form::dense, [](S s) { s.batch.slot_mapping.strides[0] = 2; }},
      {"batch.slot_mapping.size", Form::dense, [](S s) { s.batch.slot_mapping.sizes[0] = 12; }},
      {"batch.slot_mapping.range", Form::dense, [](S s) { s.slots[0] = kNumBlocks * kBlockSize; }},
      {"batch.slot_mapping.range", Form::dense, [](S s) { s.slots[12] = -2; }},
      {"batch.slot_mapping.range", Form::dense, [](S s) { s.slots[5] = INT64_MAX; }},
      {"batch.slot_mapping.range", Form::dense, [](S s) { s.slots[5] = INT64_MIN; }},
      {"batch.slot_mapping.range", Form::dense, [](S s) { s.num_blocks = -1, s.slots[5] = int64_t(1) << 40; }},
      {"batch.slot_mapping.duplicate", Form::dense, [](S s) { s.slots[1] = s.slots[0]; }},
      {"batch.slot_mapping.duplicate", Form::dense, [](S s) { s.slots[12] = s.slots[0]; }},
      {"batch.slot_mapping.duplicate", Form::dense, [](S s) { s.slots[12] = s.slots[0] = 0; }},
      // Custom mask
      {"batch.custom_mask.unexpected", Form::masked, [](S s) { s.spec.mask.custom = false; }},
      {"batch.custom_mask.missing", Form::masked, [](S s) { s.batch.custom_mask = {}; }},
      {"batch.custom_mask.dtype", Form::masked, [](S s) { s.batch.custom_mask.dtype = DType::i32; }},
      {"batch.custom_mask.rank", Form::masked, [](S s) { s.batch.custom_mask.rank = 2; }},
      {"batch.custom_mask.stride", Form::masked, [](S s) { s.batch.custom_mask.strides[0] = 2; }},
      {"batch.custom_mask.size", Form::masked, [](S s) { s.batch.custom_mask.sizes[0] -= 1; }},
      {"batch.custom_mask.size", Form::masked, [](S s) { s.batch.custom_mask.sizes[0] += 1; }},
      {"batch.custom_mask.size", Form::masked, [](S s) { s.seq_lens[0] = 36; }},
      {"batch.packed_mask.unexpected", Form::dense, [](S s) { s.use_packed_mask(), s.spec.mask.custom = false; }},
      {"batch.packed_mask.unexpected", Form::dense, [](S s) { s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.packed_mask.ambiguous", Form::masked, [](S s) { s.use_packed_mask(); }},
      {"batch.packed_mask.dtype", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.dtype = DType::i32; }},
      {"batch.packed_mask.stride", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.rank = 2; }},
      {"batch.packed_mask.stride", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.strides[0] = 2; }},
      {"batch.packed_mask.size", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.sizes[0] = 30; }},
      {"batch.packed_mask.size", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.sizes[0] = 32; }},
      {"batch.packed_mask.size", Form::dense,
       [](S s) { s.use_packed_mask(), s.batch.mask_indptr = s.mask_indptr, s.batch.packed_mask.sizes[0] = 30; }},
      {"batch.mask_indptr.unexpected", Form::masked, [](S s) { s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.mask_indptr.size", Form::dense, [](S s) { s.use_packed_mask(), s.batch.mask_indptr = std::span(s.mask_indptr).first(4); }},
      {"batch.mask_indptr.start", Form::dense,
       [](S s) { s.use_packed_mask(), s.mask_indptr[0] = -1, s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.mask_indptr.room", Form::dense, [](S s) { s.use_packed_mask(), s.mask_indptr[1] = 21, s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.mask_indptr.room", Form::dense, [](S s) { s.use_packed_mask(), s.mask_indptr[2] = 25, s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.mask_indptr.room", Form::dense,
       [](S s) { s.use_packed_mask(), s.mask_indptr[4] = INT32_MIN, s.batch.mask_indptr = s.mask_indptr; }},
      {"batch.device", Form::dense, [](S s) { s.use_packed_mask(), s.batch.packed_mask.device = {DeviceType::cuda, 0}; }},
      // Positions
      {"batch.positions.unexpected", Form::dense, [](S s) { s.batch.positions = s.seq_lens; }},
      {"batch.positions.size", Form::dense, [](S s) { s.spec.mask.positions = true; }},
      {"batch.positions.size", Form::dense, [](S s) { s.use_positions(), s.batch.positions = s.batch.positions.first(12); }},
      {"batch.positions.range", Form::dense, [](S s) { s.use_positions(), s.positions[12] = -1; }},
      {"batch.positions.range", Form::dense, [](S s) { s.use_positions(), s.positions[0] = kMostPosition + 1; }},
  };
  return all;
}

TEST(Batch, EveryBadBatchIsRefusedWithItsCodeAndNothingChanges) {
  std::set<std::string> codes;
  for (size_t i = 0; i < bad_batches().size(); ++i) {
    const BadBatch& bad = bad_batches()[i];
    Step step;
    if (bad.form == Form::csr)
      step.use_csr();
    else if (bad.form == Form::ragged)
      step.use_ragged();
    else
      step.use_dense();
    if (bad.form == Form::masked) step.use_mask();
    ASSERT_EQ(step.code(), kFine) << "case " << i << " before it is spoiled";
    bad.spoil(step);
    const auto starts = step.starts, seq_lens = step.seq_lens, table = step.table, indices = step.indices, indptr = step.indptr;
    const auto slots = step.slots;
    const auto mask = step.mask;
    EXPECT_EQ(step.code(), bad.code) << "case " << i;
    EXPECT_TRUE(starts == step.starts && seq_lens == step.seq_lens && table == step.table && indices == step.indices &&
                indptr == step.indptr && slots == step.slots && mask == step.mask)
        << "case " << i;
    codes.insert(bad.code);
  }
  EXPECT_GE(bad_batches().size(), 100u);
  EXPECT_EQ(codes.size(), 75u);  // every code of batch.cpp is in the table
}

TEST(Batch, DuplicateSlotsAreFoundInLargeBatches) {
  Step step;
  constexpr int kTokens = 5000;
  step.limits = {.max_num_reqs = 1, .max_num_tokens = kTokens, .max_seq_len = kTokens};
  step.num_blocks = 1000;
  step.starts = {0, kTokens};
  step.seq_lens = {kTokens};
  step.table.assign((kTokens + 15) / 16, 0);
  step.slots.resize(kTokens);
  for (int i = 0; i < kTokens; ++i) step.slots[size_t(i)] = (i * 7919) % 16000;
  step.refresh_host();
  step.batch.block_table = TensorView::contiguous(step.table.data(), DType::i32, {1, int64_t(step.table.size())});
  step.batch.slot_mapping = Step::vector_view(step.slots.data(), DType::i64, step.slots.size());
  EXPECT_EQ(step.code(), kFine);
  for (int at : {1, 2500, kTokens - 1}) {
    const int64_t kept = std::exchange(step.slots[size_t(at)], step.slots[0]);
    EXPECT_EQ(step.code(), "batch.slot_mapping.duplicate") << at;
    step.slots[size_t(at)] = kept;
  }
  EXPECT_EQ(step.code(), kFine);
}

TEST(Batch, MessagesShowTheValues) {
  Step step;
  step.use_dense();
  step.table[2] = 77;
  try {
    validate(step.batch, step.spec, step.limits, step.num_blocks);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "block 2 of request 0 is 77, expected 0 to 63");
  }
}

}  // namespace
}  // namespace imbrex
