// One kernel text with the constants of one variant, as a library that runs it on the host; opened by library.h.
#include LANES_TEXT

#include <type_traits>

#include "cuda/lanes/tensor_map.h"

// `maps`: of a kernel that takes them.
template <class Kernel, class Params>
void call(Kernel kernel, const Params& p, [[maybe_unused]] const imbrex::test::TensorMap* maps) {
  if constexpr (std::is_invocable_v<Kernel, const Params&>) {
    kernel(p);
  } else {
    kernel(p, maps[0], maps[1], maps[2]);
  }
}

extern "C" void run_kernel(const void* params, const imbrex::test::TensorMap* maps, int blocks, bool late_copies, unsigned chance) {
  using namespace imbrex::cuda;
  imbrex::lanes::block.late_copies = late_copies;
  imbrex::lanes::block.chance = chance;
  gridDim.x = unsigned(blocks);
  std::memset(memory, 0xff, sizeof memory);  // NaN in every type
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = unsigned(i);
    imbrex::lanes::run_block(LANES_THREADS, [=] { call(LANES_ENTRY, *static_cast<const LANES_PARAMS*>(params), maps); });
  }
}
extern "C" unsigned kernel_smem_bytes() { return imbrex::cuda::smem_bytes; }
