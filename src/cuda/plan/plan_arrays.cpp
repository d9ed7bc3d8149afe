// See plan_arrays.h.
#include "cuda/plan/plan_arrays.h"

#include <algorithm>
#include <cstring>

namespace imbrex::cuda {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

PlanArrays::PlanArrays(const ContextPtr& context, const ArrayLayout& layout) : context_(context), memory_(zeroed(context, layout.bytes())) {
  for (Step& step : steps_) {
    step.sent = Event(context);
    step.pieces.reserve(16);
  }
}

void PlanArrays::begin() {
  Step& next = step_at(1);
  if (next.busy) next.sent.synchronize();
  next.busy = false;
  next.used = 0;
  next.kept = true;
  next.pieces.clear();
}

char* PlanArrays::reserve(size_t offset, size_t bytes) {
  Step& next = step_at(1);
  auto& pieces = next.pieces;
  const bool joins = !pieces.empty() && offset - (pieces.back().to + pieces.back().bytes) <= kGap;
  const size_t at = joins ? pieces.back().from + offset - pieces.back().to : next.used;
  if (at + bytes > next.memory.bytes()) {
    PinnedBuffer larger(context_, std::max(round_up(at + bytes, kPage), 2 * next.memory.bytes()));
    if (next.used > 0) std::memcpy(larger.as<char>(), next.memory.as<char>(), next.used);
    next.memory = std::move(larger);
  }
  if (joins) {
    pieces.back().bytes = at + bytes - pieces.back().from;
  } else {
    pieces.push_back({offset, at, bytes});
  }
  next.used = round_up(at + bytes, ArrayLayout::kAlignment);
  return next.memory.as<char>() + at;
}

// The step's pinned buffer must not change until the device has read it, however much of it has been sent.
void PlanArrays::mark_busy(Step& step, CUstream stream) noexcept {
  try {
    step.sent.record(stream);
    step.busy = true;
  } catch (...) {
    step.memory = {};  // freeing it waits for the device
    step.kept = false;
  }
}

void PlanArrays::send_pieces(const Step& step, CUstream stream) {
  for (const Piece& piece : step.pieces) {
    copy_to_device(memory_.address() + piece.to, step.memory.as<char>() + piece.from, piece.bytes, stream);
    has_sent_ = true;
  }
}

void PlanArrays::send(CUstream stream) {
  Step& next = step_at(1);
  has_sent_ = false;
  try {
    send_pieces(next, stream);
    next.sent.record(stream);
  } catch (...) {
    if (has_sent_) {
      mark_busy(next, stream);
      send_again(step_at(0), content_, stream);
    }
    throw;
  }
  next.busy = true;
  now_ = (now_ + 1) % kSteps;
  content_before_ = std::exchange(content_, Content::sent);
}

void PlanArrays::take_back(CUstream stream) noexcept {
  now_ = (now_ + kSteps - 1) % kSteps;
  send_again(step_at(0), content_before_, stream);
}

void PlanArrays::send_again(Step& step, Content content, CUstream stream) noexcept {
  content_ = Content::broken;
  if (content == Content::made_there || content == Content::broken || (content == Content::sent && !step.kept)) return;
  try {
    if (content == Content::zeros) {
      fill_bytes(memory_.address(), 0, memory_.bytes(), stream);
    } else {
      send_pieces(step, stream);
    }
    content_ = content;
  } catch (...) {
    content_ = Content::broken;
  }
  if (content == Content::sent) mark_busy(step, stream);
}

}  // namespace imbrex::cuda
