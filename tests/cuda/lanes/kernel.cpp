// One kernel text with the constants of one variant, as a library that runs it on the host; opened by library.h.
#include LANES_TEXT

extern "C" void run_kernel(const void* params, int blocks, bool late_copies, unsigned chance) {
  using namespace imbrex::cuda;
  imbrex::lanes::block.late_copies = late_copies;
  imbrex::lanes::block.chance = chance;
  gridDim.x = unsigned(blocks);
  std::memset(memory, 0xff, sizeof memory);  // NaN in every type
  for (int i = 0; i < blocks; ++i) {
    blockIdx.x = unsigned(i);
    imbrex::lanes::run_block(LANES_THREADS, [params] { LANES_ENTRY(*static_cast<const LANES_PARAMS*>(params)); });
  }
}
extern "C" unsigned kernel_smem_bytes() { return imbrex::cuda::smem_bytes; }
