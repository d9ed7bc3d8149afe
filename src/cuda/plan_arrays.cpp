// See plan_arrays.h.
#include "cuda/plan_arrays.h"

#include <algorithm>
#include <cstring>

namespace imbrex::cuda {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

PlanArrays::PlanArrays(const ContextPtr& context, const ArrayLayout& layout) : context_(context), memory_(zeroed(context, layout.bytes())) {
  for (Step& step : steps_) step.sent = Event(context);
  pieces_.reserve(16);
}

void PlanArrays::begin() {
  next_ = (next_ + 1) % kSteps;
  Step& step = steps_[next_];
  if (step.busy) step.sent.synchronize();
  step.busy = false;
  used_ = 0;
  pieces_.clear();
}

char* PlanArrays::reserve(size_t offset, size_t bytes) {
  const bool joins = !pieces_.empty() && offset - (pieces_.back().to + pieces_.back().bytes) <= kGap;
  const size_t at = joins ? pieces_.back().from + offset - pieces_.back().to : used_;
  PinnedBuffer& memory = steps_[next_].memory;
  if (at + bytes > memory.bytes()) {
    PinnedBuffer larger(context_, std::max(round_up(at + bytes, kPage), 2 * memory.bytes()));
    if (used_ > 0) std::memcpy(larger.as<char>(), memory.as<char>(), used_);
    memory = std::move(larger);
  }
  if (joins) {
    pieces_.back().bytes = at + bytes - pieces_.back().from;
  } else {
    pieces_.push_back({offset, at, bytes});
  }
  used_ = round_up(at + bytes, ArrayLayout::kAlignment);
  return memory.as<char>() + at;
}

void PlanArrays::send(CUstream stream) {
  Step& step = steps_[next_];
  for (const Piece& piece : pieces_) copy_to_device(memory_.address() + piece.to, step.memory.as<char>() + piece.from, piece.bytes, stream);
  step.sent.record(stream);
  step.busy = true;
}

}  // namespace imbrex::cuda
