// See plan_arrays.h.
#include "gpu/plan_arrays.h"

#include <algorithm>
#include <cstring>

namespace imbrex::gpu {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

PlanArrays::PlanArrays(OpenDevicePtr device, const ArrayLayout& layout)
    : device_(std::move(device)), bytes_(layout.bytes()), memory_(device_->allocate(int64_t(bytes_))) {
  const std::shared_ptr<void> stream = device_->make_stream();
  device_->fill(memory_.get(), 0, int64_t(bytes_), stream.get());
  device_->synchronize(stream.get());
  for (Step& step : steps_) {
    step.sent = device_->make_event(false);
    step.pieces.reserve(16);
  }
}

PlanArrays::~PlanArrays() {
  for (const Step& step : steps_) {
    if (!step.busy) continue;
    try {
      device_->synchronize_event(step.sent.get());
    } catch (...) {  // the device is gone, and reads nothing more
    }
  }
}

void PlanArrays::begin() {
  Step& next = step_at(1);
  if (next.busy) device_->synchronize_event(next.sent.get());
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
  if (at + bytes > next.room) {
    const size_t room = std::max(round_up(at + bytes, kPage), 2 * next.room);
    std::shared_ptr<void> larger = device_->allocate_host(int64_t(room));
    if (next.used > 0) std::memcpy(larger.get(), next.memory.get(), next.used);
    next.memory = std::move(larger), next.room = room;
  }
  if (joins) {
    pieces.back().bytes = at + bytes - pieces.back().from;
  } else {
    pieces.push_back({offset, at, bytes});
  }
  next.used = round_up(at + bytes, ArrayLayout::kAlignment);
  return static_cast<char*>(next.memory.get()) + at;
}

// The step's buffer must not change until the device has read it, however much of it has been sent.
void PlanArrays::mark_busy(Step& step, Stream stream) noexcept {
  try {
    device_->record(step.sent.get(), stream);
    step.busy = true;
  } catch (...) {
    step.kept = false;
    try {
      device_->synchronize(stream);
    } catch (...) {  // nobody knows when it is read: it stays as it is, and there will be another
      lost_.push_back(std::move(step.memory));
      step.room = 0;
    }
  }
}

void PlanArrays::send_pieces(const Step& step, Stream stream) {
  for (const Piece& piece : step.pieces) {
    device_->upload(static_cast<char*>(memory_.get()) + piece.to, static_cast<char*>(step.memory.get()) + piece.from, int64_t(piece.bytes),
                    stream);
    has_sent_ = true;
  }
}

void PlanArrays::send(Stream stream) {
  Step& next = step_at(1);
  has_sent_ = false;
  try {
    send_pieces(next, stream);
    device_->record(next.sent.get(), stream);
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

void PlanArrays::take_back(Stream stream) noexcept {
  now_ = (now_ + kSteps - 1) % kSteps;
  send_again(step_at(0), content_before_, stream);
}

void PlanArrays::send_again(Step& step, Content content, Stream stream) noexcept {
  content_ = Content::broken;
  if (content == Content::made_there || content == Content::broken || (content == Content::sent && !step.kept)) return;
  try {
    if (content == Content::zeros) {
      device_->fill(memory_.get(), 0, int64_t(bytes_), stream);
    } else {
      send_pieces(step, stream);
    }
    content_ = content;
  } catch (...) {
    content_ = Content::broken;
  }
  if (content == Content::sent) mark_busy(step, stream);
}

}  // namespace imbrex::gpu
