// One kernel text with the constants of one variant, as a library that runs it on the host; opened by library.h.
#include LANES_TEXT

#include <type_traits>

#include "cuda/lanes/launch.h"

// `maps`: of a kernel that takes them.
template <class Kernel, class Params>
void call(Kernel kernel, const Params& p, [[maybe_unused]] const imbrex::test::TensorMap* maps) {
  using Map = imbrex::test::TensorMap;
  if constexpr (std::is_invocable_v<Kernel, const Params&>) {
    kernel(p);
  } else if constexpr (std::is_invocable_v<Kernel, const Params&, const Map&, const Map&, const Map&>) {
    kernel(p, maps[0], maps[1], maps[2]);
  } else {
    kernel(p, maps[0], maps[1], maps[2], maps[3]);
  }
}

extern "C" [[gnu::visibility("default")]] void run_kernel(const void* params, const imbrex::test::TensorMap* maps,
                                                          const imbrex::test::Launch& launch) {
  using namespace imbrex::cuda;
  imbrex::lanes::block.late_copies = launch.late_copies;
  imbrex::lanes::block.chance = launch.chance;
  imbrex::lanes::block.starved = launch.starved;
  gridDim.x = unsigned(launch.blocks * LANES_CLUSTER);
  std::memset(memory, 0xff, sizeof memory);  // NaN in every type
  for (first_block.x = 0; first_block.x < gridDim.x; first_block.x += LANES_CLUSTER) {
    imbrex::lanes::run_cluster(LANES_CLUSTER, LANES_THREADS, [=] { call(LANES_ENTRY, *static_cast<const LANES_PARAMS*>(params), maps); });
  }
}
// Of texts that have more than one entry, or no shared memory, nobody asks.
namespace imbrex::cuda {
namespace none {
constexpr unsigned smem_bytes = 0;
}
using namespace none;
}  // namespace imbrex::cuda
extern "C" [[gnu::visibility("default")]] unsigned kernel_smem_bytes() { return imbrex::cuda::smem_bytes; }
