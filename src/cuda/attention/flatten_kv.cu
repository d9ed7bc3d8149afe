// Keys and values of requests from the cache into rows without pages, widened where they are bytes of which the kernel behind it makes
// 16-bit numbers (those that it takes as bytes are copied as if they were such numbers); launched by cuda/attention/flat_kv.cpp in front
// of prefill.
//
// Memory: every element is read and written once: 8192 keys of 8 heads of 128 + 128 from bf16 are 67 MB, 16 us at 4.2 TB/s; from e4m3 50
// MB. Each thread has pieces of 8 elements of several rows under way.
#include "async.cuh"
#include "eight.cuh"
#include "key_place.cuh"

namespace imbrex::cuda {

static_assert(kDimK % 8 == 0 && kDimV % 8 == 0);
// Weights of attention over bytes are f16, and so are values.
constexpr int kValuesTo = element_bytes(kFrom) == 1 ? int(kF16) : kTo;

template <int to>
DEVICE Eight<to> widened(const Eight<kFrom>& e) {
  if constexpr (to == kFrom) {
    return e;
  } else {
    float x[8];
    to_floats<kFrom>(e, x);
    return from_floats<to>(x);
  }
}

struct Keys {
  int first, end;  // of a request, that are read
};

struct Task {       // kFlatRows rows of keys or values of a head
  int head, begin;  // begin: the key that the first of them is
  Keys keys;
  long first_block;  // of the request's
  long row;          // of all heads, where the first one goes
};

template <int to, int dim>
DEVICE void flatten(const FlattenKvParams& p, const KvSide& side, char* rows, const Task& task) {
  constexpr int kPieces = dim / 8, kAll = kFlatRows * kPieces, kAtOnce = 4;
  const int heads = p.num_heads, begin = task.begin;
  const char* const from = side.data + (p.first_kv_head + task.head) * side.head_stride;
  rows += task.head * dim * element_bytes(to);
  for (int first = int(threadIdx.x); first < kAll; first += kAtOnce * kFlattenThreads) {
    Eight<kFrom> e[kAtOnce];
    const auto each = [&](const auto& use) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kFlattenThreads, row = at / kPieces, piece = at % kPieces;
        if (at < kAll && begin + row >= task.keys.first && begin + row < task.keys.end) use(i, row, piece);
      }
    };
    each([&](int i, int row, int piece) {
      const u32 key = u32(begin + row);
      long offset;
      if constexpr (kBlockSize > 0) {
        offset = offset_in_block(side, __ldg(block_id_of(p, task.first_block, key)), key);
      } else {
        offset = ragged_offset(side, task.first_block, key);
      }
      e[i] = load_eight<kFrom, true>(from + offset + piece * 8 * element_bytes(kFrom), 0);
    });
    each([&](int i, int row, int piece) {
      store_eight<to, true>(rows + (long(row) * heads * dim + piece * 8) * element_bytes(to), 0, widened<to>(e[i]));
    });
  }
}

extern "C" __global__ void __launch_bounds__(kFlattenThreads) flatten_kv(const __grid_constant__ FlattenKvParams p) {
  if (!p.lists_are_there) griddep_wait();
  const int blocks = p.num_blocks_now != nullptr ? *p.num_blocks_now : p.num_blocks, tasks = blocks * p.num_heads, all = 2 * tasks;
  const auto task_of = [&](int i) {
    const int of_side = i < tasks ? i : i - tasks, block = of_side % blocks, request = p.requests[block];
    return Task{.head = of_side / blocks,
                .begin = int(long(block) * kFlatRows - p.flat_start[request]),
                .keys = {p.first_keys[request], p.seq_lens[request]},
                .first_block = p.block_start[request],
                .row = long(block) * kFlatRows * p.num_heads};
  };
  int i = int(blockIdx.x);
  Task task{};
  if (i < all) task = task_of(i);
  if (p.lists_are_there && (i < all || blockIdx.x == 0)) griddep_wait();  // as is_idle() in attention_item.cuh has it
  while (i < all) {
    if (i < tasks) {
      flatten<kTo, kDimK>(p, p.k, p.to_k + task.row * kDimK * element_bytes(kTo), task);
    } else {
      flatten<kValuesTo, kDimV>(p, p.v, p.to_v + task.row * kDimV * element_bytes(kValuesTo), task);
    }
    i += int(gridDim.x);
    if (i < all) task = task_of(i);
  }
  griddep_launch();
}

}  // namespace imbrex::cuda
