#pragma once
// The short convolution with states that nobody reads at once.
#include <chrono>
#include <cstring>

#include "conformance/short_conv/runner.h"
#include "slow_reads.h"

namespace imbrex::test {

// Runs a case with five threads; the first one to read a page of the states waits until another one has written to it, or the time is over.
// `waited` is how many did. One request at a time: a state of another one in the same page would end the waiting.
inline ShortConvRunResult run_with_slow_state(const BackendOf<ShortConvFamily>& backend, const DeviceInfo& device,
                                              const ShortConvCaseInputs& in, std::chrono::milliseconds wait, int& waited) {
  ThreadPool pool(5);
  ShortConvRunOptions options;
  options.threads = pool.parallel_for();
  options.run = [&](const ShortConvPlan& plan, const ShortConvInputs& inputs, const ShortConvOutputs& outputs) {
    const TensorView& state = inputs.state;
    const size_t bytes = size_t(state.size(0) * state.stride(0) * size_of(state.dtype));
    SlowReads slow(bytes, wait);
    std::memcpy(slow.data(), state.data, bytes);
    ShortConvInputs moved = inputs;
    moved.state.data = slow.data();
    slow.arm();
    plan.run(moved, outputs);
    slow.disarm();
    waited = SlowReads::waited();
    std::memcpy(state.data, slow.data(), bytes);
  };
  return run_case(backend, device, in, options);
}

}  // namespace imbrex::test
